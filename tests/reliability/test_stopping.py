"""SIGTERM: the step is finished and saved if that fits into the deadline."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.stopping import Stopping


class Console:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, style: str = "") -> None:
        self.notes.append(text)


def stopping(folder: Path, deadline_s: float = 60) -> tuple[Stopping, Any, Console]:
    trainer, console = SimpleNamespace(step=6, stop_requested=False), Console()
    made: Any = Stopping(trainer, console, deadline_s, folder)  # type: ignore[arg-type]
    return made, trainer, console


def test_the_first_signal_asks_for_an_end_after_the_step(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, word in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "preempted")):
        asked, trainer, console = stopping(tmp_path)
        with asked:
            os.kill(os.getpid(), number)
            assert trainer.stop_requested and "finishing the step, then saving" in console.notes[0]
        assert (asked.code, asked.word) == (128 + number, word)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert stopping(tmp_path)[0].code == 0


def test_a_second_one_ends_at_once(tmp_path: Path) -> None:
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        asked, _, _ = stopping(tmp_path)
        with pytest.raises(error), asked:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            time.sleep(10)


def test_a_preemption_after_an_interruption_has_a_deadline_too(tmp_path: Path) -> None:
    asked, _, console = stopping(tmp_path)
    with asked:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert console.notes[1].endswith("in at most 60 s") and asked.code == 143


@pytest.mark.parametrize(
    ("folders", "newest"), [((), "there is no checkpoint"), (("step-00000004",), "the newest checkpoint is step-00000004")]
)
def test_a_step_that_is_longer_than_the_deadline_is_not_waited_for(
    folders: tuple[str, ...], newest: str, tmp_path: Path
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    asked, _, console = stopping(tmp_path, 0.1)
    start = time.monotonic()
    with pytest.raises(SystemExit) as ended, asked:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert ended.value.code == 143 and time.monotonic() - start < 15
    assert console.notes[-1].startswith("after step 6: ") and console.notes[-1].endswith(newest)
