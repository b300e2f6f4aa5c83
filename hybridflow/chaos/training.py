"""The user's own program, ``hybridflow train``, as a child process that is watched from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Line", "Training", "newest_step"]

TAIL_BYTES = 1 << 16
REST_S = 1.0


class Line(NamedTuple):
    """What a training printed, and when (``time.monotonic``)."""

    at_s: float
    text: str


class Training:
    """A command that is started, with what it prints. ``log``: a file that gets all of that, too."""

    def __init__(self, arguments: Sequence[str], enter: Sequence[str], log: Path) -> None:
        self.log, self.lines = log, list[Line]()
        command = [*enter, sys.executable, "-m", "hybridflow.cli", "train", *arguments]
        # A session of its own: Ctrl-C is for chaos, which ends all of it.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        options = {"text": True, "errors": "replace", "start_new_session": True}
        self._popen = subprocess.Popen(command, **pipes, **options)  # type: ignore[call-overload]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        pid: int = self._popen.pid
        return pid

    @property
    def code(self) -> int | None:
        """Its exit code when it has ended; then ``lines`` are complete, unless what it has started goes on printing."""
        code: int | None = self._popen.poll()
        if code is not None:
            self._reader.join(REST_S)
        return code

    def _read(self) -> None:
        with self.log.open("a", encoding="utf-8") as log, self._popen.stdout as lines:
            for text in lines:
                self.lines.append(Line(time.monotonic(), text.rstrip("\n")))
                log.write(text)
                log.flush()


def newest_step(metrics: Path) -> int:
    """The last step that a run has written down, 0 if there is none yet."""
    try:
        with metrics.open("rb") as file:
            file.seek(-min(TAIL_BYTES, file.seek(0, 2)), 2)
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:  # a line that is being written
            continue
    return 0
