"""A training that dies is started again; one that is asked to end, or can't begin, is not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridflow.supervise import supervise


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"]


def dying(folder: Path, *codes: str) -> list[str]:
    """A program that does another of ``codes`` each time it is started."""
    counter = folder / "starts"
    return python(f"f = open({str(counter)!r}, 'a'); f.write('x'); f.flush(); exec({codes!r}[f.tell() - 1])")


KILLED, FAILED, PREEMPTED = "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(1)", "sys.exit(143)"


def test_deaths_are_told_and_followed_by_another_start(tmp_path: Path) -> None:
    told: list[str] = []
    program = dying(tmp_path, KILLED, FAILED, PREEMPTED, "sys.exit(0)")
    assert supervise(program, program, 3, told.append) == 0
    assert told == [
        "the training was killed by SIGKILL: restart 1 of 3",
        "the training failed (exit code 1): restart 2 of 3",
        "the training was told to end by SIGTERM: restart 3 of 3",
    ]
    assert (tmp_path / "starts").read_text() == "xxxx"


@pytest.mark.parametrize(("codes", "code", "starts"), [((KILLED,) * 3, 137, 3), (("sys.exit(2)",), 2, 1), (("",), 0, 1)])
def test_the_last_exit_code_is_passed_on(codes: tuple[str, ...], code: int, starts: int, tmp_path: Path) -> None:
    program = dying(tmp_path, *codes)
    assert supervise(program, program, 2, lambda line: None) == code
    assert len((tmp_path / "starts").read_text()) == starts


def test_a_restart_is_another_command(tmp_path: Path) -> None:
    assert supervise(python(KILLED), python("sys.exit(5)"), 1, lambda line: None) == 5


def test_a_signal_goes_to_the_training_and_ends_both(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = python(
        "def end(*_): sys.exit(143)\n"
        f"signal.signal(signal.SIGTERM, end); open({str(ready)!r}, 'a').write('x'); time.sleep(60)"
    )

    def ask() -> None:
        while not ready.exists() or not ready.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    before = signal.getsignal(signal.SIGTERM)
    assert supervise(program, program, 3, lambda line: None) == 143
    assert ready.read_text() == "x", "it isn't started again"
    assert signal.getsignal(signal.SIGTERM) is before
