"""The play command: watch a policy in a terminal, a video or a window.

It plays the episodes that evaluations play, by the same actions, so the returns are those of ``hybridflow eval``.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.color import Color
from rich.console import Console
from rich.live import Live
from rich.style import Style
from rich.text import Text

from hybridflow.core.batch import Array
from hybridflow.core.errors import DataError, UserError
from hybridflow.data.agents import make_parallel
from hybridflow.data.envs import make_environment
from hybridflow.policy import Policy

__all__ = ["block_picture", "play"]

DEFAULT_FPS = 30
Frame = Any  # an image [H, W, 3] of bytes, a text, or nothing where a window shows it


def play(run: Path, overrides: Sequence[str], episodes: range, video: Path | None, window: bool) -> None:
    """Play ``episodes`` of the evaluations of what ``run`` has trained: into a file ``video``, in a ``window``, or else in
    the terminal. One line for each episode."""
    if video is not None:
        _check_video(video)
    if window:
        _check_display()
    else:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # environments draw in memory
    show = _Show(Policy.load(run, overrides), episodes)
    if video is not None:
        _film(show, video)
    elif window:
        for _ in show.frames(show.mode("human")):
            pass
    else:
        _in_terminal(show)
    for number, (total, num_steps) in zip(episodes, show.played, strict=True):
        print(f"episode {number}: return {total:.6g}, {num_steps} steps")
    if video is not None:
        print(f"video: {video}")


class _Show:
    """Episodes that are played while their frames are asked for; ``played``: return and length of those that ended."""

    def __init__(self, policy: Policy, episodes: range) -> None:
        self.policy, self.episodes = policy, episodes
        self.played: list[tuple[float, int]] = []
        environment = (make_parallel if policy.environment.shared else make_environment)(policy.environment)
        self.metadata: Mapping[str, Any] = environment.metadata
        environment.close()

    @property
    def fps(self) -> float:
        """Frames a second, as the environment tells it."""
        return float(self.metadata.get("render_fps") or DEFAULT_FPS)

    def mode(self, *wanted: str) -> str:
        """The first of the render modes that the environment has. DataError: it has none of them."""
        known = self.metadata.get("render_modes") or []
        for mode in wanted:
            if mode in known:
                return mode
        has = f"its render modes are {', '.join(known)}" if known else "it has no render modes"
        raise DataError(f"environment {self.policy.environment.id!r} can't be shown as {' or '.join(wanted)}: {has}")

    def frames(self, mode: str) -> Iterator[Frame]:
        """What every moment looks like."""
        for number in self.episodes:
            for moment in self.policy.episode(number, {"render_mode": mode}):
                # In a window an environment shows itself, in every step.
                yield None if mode == "human" else self._rendered(moment.environment)
            self.played.append((moment.episode_return, moment.num_steps))

    def _rendered(self, environment: Any) -> Frame:
        import gymnasium

        try:
            return environment.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise DataError(f"environment {self.policy.environment.id!r} can't be shown: {error}") from error


def _check_video(file: Path) -> None:
    needs = {".mp4": "imageio_ffmpeg", ".gif": "PIL"}
    if file.suffix not in needs:
        raise UserError(f"--video {file}: expected a name that ends in .mp4 or .gif")
    if importlib.util.find_spec(needs[file.suffix]) is None:
        other = next(suffix for suffix in needs if suffix != file.suffix)
        instead = f", or give a {other} file" if importlib.util.find_spec(needs[other]) else ""
        raise UserError(f'--video {file}: {needs[file.suffix]} is missing; pip install "hybridflow[video]"{instead}')


def _check_display() -> None:
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        raise UserError("--window: there is no display here (DISPLAY isn't set); use --video FILE.mp4 or the terminal")


def _film(show: _Show, file: Path) -> None:
    """Write a video, whole or not at all."""
    frames = show.frames(show.mode("rgb_array"))
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".partial-{file.name}")
    try:
        (_write_gif if file.suffix == ".gif" else _write_mp4)(frames, partial, show.fps)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _write_mp4(frames: Iterator[Array], file: Path, fps: float) -> None:
    import imageio_ffmpeg

    first = next(frames)
    height, width = first.shape[:2]
    given = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps}", "-i", "-")
    even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # which the format needs
    wanted = ("-vf", even, "-c:v", "libx264", "-pix_fmt", "yuv420p", str(file))
    command = (imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *given, *wanted)
    with suppress(BrokenPipeError), subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        for frame in itertools.chain([first], frames):
            process.stdin.write(frame.tobytes())
    if process.returncode:
        raise UserError(f"--video: ffmpeg ended with exit code {process.returncode}; try a .gif file")


def _write_gif(frames: Iterator[Array], file: Path, fps: float) -> None:
    from PIL import Image

    # Quantised at once: whole colours of many frames would fill the memory.
    images = (Image.fromarray(frame).quantize(method=Image.Quantize.FASTOCTREE) for frame in frames)
    first = next(images)
    first.save(file, save_all=True, append_images=images, duration=round(1000 / fps), loop=0)


def _in_terminal(show: _Show) -> None:
    """Text as the environment writes it (the last one alone where there's no terminal), else pictures of blocks."""
    mode, console = show.mode("ansi", "rgb_array"), Console()
    if mode == "rgb_array" and not console.is_terminal:
        raise UserError("play: pictures need a terminal, and standard output is none; give --video FILE.mp4")
    shown = time.perf_counter()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for frame in show.frames(mode):
            text = mode == "ansi"
            live.update(Text.from_ansi(frame) if text else block_picture(frame, console.width, console.height - 2))
            if console.is_terminal:
                time.sleep(max(0.0, shown + 1 / show.fps - time.perf_counter()))
                live.refresh()
            shown = time.perf_counter()


def block_picture(image: Array, width: int, height: int) -> Text:
    """An image [H, W, 3] of bytes as text of at most ``width`` columns and ``height`` lines, each character two pixels one
    above the other."""
    scale = max(image.shape[1] / width, image.shape[0] / (2 * height), 1.0)
    columns, rows = max(1, int(image.shape[1] / scale)), max(2, int(image.shape[0] / scale) // 2 * 2)
    small = _averaged(_averaged(image, rows, 0), columns, 1).round().astype(int)
    text = Text(no_wrap=True)
    for line, (upper, lower) in enumerate(zip(small[::2].tolist(), small[1::2].tolist(), strict=True)):
        text.append("\n" if line else "")
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
    return text


def _averaged(image: Array, count: int, axis: int) -> Array:
    """Means of ``count`` stripes of nearly equal width."""
    edges = np.linspace(0, image.shape[axis], count + 1).astype(int)
    sums = np.add.reduceat(image.astype(np.float64), edges[:-1], axis)
    widths = np.diff(edges).reshape([-1 if dimension == axis else 1 for dimension in range(image.ndim)])
    means: Array = sums / widths
    return means
