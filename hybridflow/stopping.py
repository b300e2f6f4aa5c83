"""Ctrl-C and SIGTERM: a run that is asked to end does so after its step, which it saves.

    first SIGINT (Ctrl-C)    finish the step, save, end                    second: end at once
    first SIGTERM            the same, but before a deadline               second, or the deadline: end at once

Clusters send SIGTERM some seconds before they take a machine away.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

from hybridflow import checkpoint
from hybridflow.core.errors import CheckpointError
from hybridflow.telemetry.console import RunConsole
from hybridflow.train import Trainer

__all__ = ["Stopping"]


class Stopping:
    """Listens to both signals as long as the context lasts. ``code``: what the process ends with, 0 if it wasn't asked to
    end. ``deadline_s`` counts from SIGTERM; ``folder`` has the run's checkpoints."""

    def __init__(self, trainer: Trainer, console: RunConsole, deadline_s: float, folder: Path) -> None:
        self.trainer, self.console, self.deadline_s, self.folder = trainer, console, deadline_s, folder
        self.code, self._timer = 0, threading.Timer(deadline_s, _again)
        self._timer.daemon = True

    @property
    def word(self) -> str:
        """Why the run ends before its last step."""
        return {0: "stopped", 128 + signal.SIGINT: "interrupted"}.get(self.code, "preempted")

    def __enter__(self) -> Self:
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._terminate}
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, handlers[number]) for number in handlers}
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if self.code:
            raise KeyboardInterrupt
        self._ask(signal.SIGINT)
        self.console.note("interrupted: finishing the step, then saving; press Ctrl-C again to stop at once")

    def _terminate(self, _: int, frame: FrameType | None) -> None:
        if self._timer.is_alive() or self._timer.finished.is_set():
            self._end()
        self._ask(signal.SIGTERM)
        self._timer.start()
        self.console.note(f"SIGTERM: finishing the step, then saving, in at most {self.deadline_s:g} s")

    def _ask(self, number: signal.Signals) -> None:
        self.code, self.trainer.stop_requested = 128 + number, True

    def _end(self) -> None:
        try:
            newest = f"the newest checkpoint is {checkpoint.latest(self.folder).name}"
        except CheckpointError:
            newest = "there is no checkpoint"
        late = f"not done and saved within {self.deadline_s:g} s of SIGTERM, or told twice: ending at once; {newest}"
        self.console.note(f"after step {self.trainer.step}: {late}", style="yellow")
        raise SystemExit(128 + signal.SIGTERM)


def _again() -> None:
    """A signal wakes the main thread from whatever it waits for."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
