"""``hybridflow train --restarts N``: a process that starts the training, and starts it again when it dies.

What it starts is the same command without ``--restarts``; after a death with ``--resume auto``, from the newest checkpoint
that is whole. It imports nothing of the training, so what kills that (a lack of memory, a driver) leaves it alone.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from types import FrameType

__all__ = ["supervise"]

PREEMPTED = 128 + signal.SIGTERM


def supervise(command: Sequence[str], again: Sequence[str], restarts: int, tell: Callable[[str], None]) -> int:
    """Run ``command``, and ``again`` each time it dies, at most ``restarts`` times; the last exit code (128 and the number
    of a signal that killed it).

    A death is a signal, or exit code 1: a worker process or the machine failed. A user's mistake (2) and a run that ends as
    it was asked to aren't. SIGINT and SIGTERM are passed on, and the last thing that is.
    """
    child = _Child()
    before = {number: signal.signal(number, child.pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.run(command)
        for attempt in range(1, restarts + 1):
            if child.asked or (code >= 0 and code not in (1, PREEMPTED)):
                break
            tell(f"the training {_cause(code)}: restart {attempt} of {restarts}")
            code = child.run(again)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


class _Child:
    """One at a time; in a process group of its own, so that Ctrl-C in a terminal comes to it once, from here."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        if self.asked:
            return 128 + self.asked[-1]
        known = len(self.asked)
        self._process = subprocess.Popen(command, process_group=0)
        for number in self.asked[known:]:  # while it was started
            self._process.send_signal(number)
        code = self._process.wait()
        self._process = None
        return code

    def pass_on(self, number: int, _: FrameType | None) -> None:
        self.asked.append(number)
        if self._process is not None:
            self._process.send_signal(number)


def _cause(code: int) -> str:
    if code == 1:
        return "failed (exit code 1)"
    number = code - 128 if code > 0 else -code
    return f"{'was told to end' if code > 0 else 'was killed'} by {signal.Signals(number).name}"
