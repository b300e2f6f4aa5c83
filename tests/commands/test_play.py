"""Watching a policy: videos that can be read back, pictures in a terminal, and who can't be shown."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from conftest import CARTPOLE, Outcome, with_keys, written
from gymnasium import spaces
from PIL import Image

from hybridflow.cli import main
from hybridflow.commands.play import block_picture

Program = Callable[..., Outcome]


class Odd(gymnasium.Env[Any, Any]):
    """Four steps with pictures of odd size, red first and blue then, at 10 a second."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    metadata: ClassVar[Any] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 0.5, self.steps == 4, False, {}

    def render(self) -> Any:
        picture = np.zeros((33, 65, 3), np.uint8)
        picture[:, :, 0 if self.steps < 2 else 2] = 200
        return picture


class Textual(Odd):
    metadata: ClassVar[Any] = {"render_modes": ["ansi"]}


class Hidden(Odd):
    metadata: ClassVar[Any] = {"render_modes": []}


gymnasium.register("HybridflowOdd-v0", Odd)
gymnasium.register("HybridflowTextual-v0", Textual)
gymnasium.register("HybridflowHidden-v0", Hidden)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of runs of one step, by environment."""

    def run(id: str, **keys: Any) -> Path:
        folder = tmp_path_factory.mktemp("play")
        data = with_keys(CARTPOLE, environment__id=id, train={"steps": 1}, **keys)
        assert main(["train", str(written(folder, data))]) == 0
        return folder / "run"

    return run


@pytest.fixture(scope="session")
def odd(runs: Callable[..., Path]) -> Path:
    return runs("HybridflowOdd-v0")


@pytest.fixture(scope="session")
def lake(runs: Callable[..., Path]) -> Path:
    return runs("FrozenLake-v1")


def test_an_mp4_shows_every_step(odd: Path, hybridflow: Program, tmp_path: Path) -> None:
    file = tmp_path / "videos" / "odd.mp4"
    outcome = hybridflow("play", odd, "--video", file, "--episodes", 2)
    told = ["episode 0: return 2, 4 steps", "episode 1: return 2, 4 steps", f"video: {file}"]
    assert outcome.code == 0 and outcome.out.splitlines() == told
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", file, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    read = subprocess.run(command, capture_output=True, check=True)
    frames = np.frombuffer(read.stdout, np.uint8).reshape(-1, 34, 66, 3)
    assert b"66x34" in read.stderr and b" 10 fps" in read.stderr and len(frames) == 10
    hues = [("red", "", "blue")[int(frame.mean((0, 1)).argmax())] for frame in frames]
    assert hues == ["red", "red", "blue", "blue", "blue"] * 2
    assert list(file.parent.iterdir()) == [file]


def test_a_gif_shows_a_real_environment(cartpole_run: Path, hybridflow: Program, tmp_path: Path) -> None:
    file = tmp_path / "pole.gif"
    options = ("--evaluation.options", "{ max_episode_steps = 9 }")
    outcome = hybridflow("play", cartpole_run, "--video", file, "--first", 3, *options)
    assert outcome.out.splitlines() == ["episode 3: return 9, 9 steps", f"video: {file}"]
    with Image.open(file) as image:
        durations = []
        for number in range(image.n_frames):
            image.seek(number)
            durations.append(image.info["duration"])
        last = np.asarray(image.convert("RGB"))
        image.seek(0)
        first = np.asarray(image.convert("RGB"))
    assert sum(durations) == 10 * 20 and first.shape == (400, 600, 3) and not np.array_equal(first, last)


def test_episodes_can_be_chosen(lake: Path, hybridflow: Program) -> None:
    def returns(*options: Any) -> list[str]:
        return [line for line in hybridflow("play", lake, *options).out.splitlines() if "return" in line]

    three = returns("--episodes", 3)
    assert len({line.split(":")[1] for line in three}) > 1
    assert returns("--first", 1, "--episodes", 2) == three[1:] and returns("--seed", 7, "--episodes", 3) != three


def test_several_agents_are_shown(runs: Callable[..., Path], hybridflow: Program, tmp_path: Path) -> None:
    run, file = runs("pettingzoo:mpe2.simple_spread_v3"), tmp_path / "spread.gif"
    outcome = hybridflow("play", run, "--video", file, "--episodes", 2)
    found = re.findall(r"episode \d: return (\S+), 25 steps", outcome.out)
    record = json.loads(hybridflow("eval", run, "--episodes", 2, "--json").out)
    assert len(found) == 2 and np.isclose(np.mean([float(value) for value in found]), record["score"], rtol=1e-5)
    with Image.open(file) as image:
        assert image.n_frames > 10


def test_text_is_shown_as_it_is(lake: Path, hybridflow: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("--environment.options", "{ is_slippery = false, max_episode_steps = 2 }")
    outcome = hybridflow("play", lake, *short)
    assert outcome.code == 0 and "FFFH\nHFFG" in outcome.out and outcome.out.endswith("episode 0: return 0, 2 steps\n")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setattr("time.sleep", lambda s: None)
    shown = hybridflow("play", lake, "--terminal", *short).out
    assert shown.count("FHFH") >= 3 and "\x1b[41m" in shown  # where one stands is red


def test_pictures_become_blocks(odd: Path, hybridflow: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = hybridflow("play", odd)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "give --video FILE.mp4" in outcome.err
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": "40", "LINES": "20"}.items():
        monkeypatch.setenv(name, value)
    shown = hybridflow("play", odd).out
    assert "\x1b[38;2;200;0;0;48;2;200;0;0m▀" in shown and "\x1b[38;2;0;0;200;48;2;0;0;200m▀" in shown
    assert len(slept) == 5 and 0 < max(slept) <= 0.1 and min(slept) >= 0


def test_blocks_are_means_of_pixels() -> None:
    image = np.zeros((8, 12, 3), np.uint8)
    image[:4, :6] = 100, 50, 0
    image[4:, 6:] = 0, 0, 255
    text = block_picture(image, 2, 1)
    assert text.plain == "▀▀"
    styles = [f"{span.style}" for span in text.spans]
    assert styles == ["#643200 on #000000", "#000000 on #0000ff"]
    assert block_picture(image, 100, 100).plain == "\n".join(["▀" * 12] * 4)  # never larger than it is
    wide = block_picture(np.zeros((100, 400, 3), np.uint8), 80, 24)
    assert wide.plain == "\n".join(["▀" * 80] * 10)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--video", "x.avi"], "--video x.avi: expected a name that ends in .mp4 or .gif"),
        (["--window"], "--window: there is no display here"),
        (["--episodes", "0"], "--episodes 0"),
        (["--first", "-1"], "--first -1"),
        (["--environment.id", "HybridflowTextual-v0", "--video", "x.gif"], "as rgb_array: its render modes are ansi"),
        (["--environment.id", "HybridflowHidden-v0"], "can't be shown as ansi or rgb_array: it has no render modes"),
    ],
)
def test_who_cannot_be_shown_is_told(
    odd: Path, hybridflow: Program, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    outcome = hybridflow("play", odd, *arguments)
    assert outcome.code == 2 and told in outcome.err and outcome.err.count("\n") == 1, outcome


def test_a_missing_package_is_told(odd: Path, hybridflow: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    absent = {"imageio_ffmpeg"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in absent else real(name, *rest))
    told = hybridflow("play", odd, "--video", tmp_path / "x.mp4").err
    assert told == f"error: --video {tmp_path}/x.mp4: imageio_ffmpeg is missing; " + (
        'pip install "hybridflow[video]", or give a .gif file\n'
    )


def test_what_ffmpeg_refuses_is_told(odd: Path, hybridflow: Program, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: "false")
    outcome = hybridflow("play", odd, "--video", tmp_path / "x.mp4", "--episodes", 3)
    assert outcome.code == 2 and "ffmpeg ended with exit code 1; try a .gif" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_fails_leaves_nothing(odd: Path, hybridflow: Program, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Odd, "render", lambda self: np.zeros((3, 3, 3), np.uint8) if self.steps < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hybridflow("play", odd, "--video", tmp_path / "x.gif")
    assert list(tmp_path.iterdir()) == []
