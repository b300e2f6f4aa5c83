"""Processes that call reward functions, with a deadline on every call: the parent's side of ``rollout.reward_process``."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hybridflow.core.errors import RewardError
from hybridflow.rollout.reward_outcomes import Failures, Outcome, outcome
from hybridflow.rollout.reward_process import Signature

__all__ = ["RewardWorkers", "default_workers"]

_LOAD_TIMEOUT_S = 300.0  # a function's module may import a model
_SECRET = re.compile(
    r"(^|_)(TOKENS?|KEYS?|APIKEY|SECRETS?|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|COOKIE)(_|$)"
    r"|_PWD$|_DSN$|DATABASE_URL$|^(AWS|AZURE|GOOGLE|GCP)_",
    re.IGNORECASE,
)
_CHUNK = 32  # calls on their way to one process: enough to hide the round trip, few enough to share the work evenly


def default_workers() -> int:
    """Processes that call reward functions, if nobody says how many."""
    return min(4, os.cpu_count() or 1)


class RewardWorkers:
    """Runs reward functions in ``workers`` processes. RewardError if one can't be found or loaded.

    The processes don't inherit environment variables that are called like secrets, but for those in ``given``. All of them
    together get the machine's memory, in equal shares, and a file that they write has a limit (``MAX_FILE_BYTES``).
    ``resize`` changes their number between two batches.

    Functions are loaded in the processes: their imports and global state live there, and what they print goes to standard
    error. Calls are dealt to whichever process is free, so a function must not depend on the calls before.
    """

    def __init__(
        self,
        functions: Sequence[str],
        timeout_s: float,
        workers: int | None = None,
        retries: int = 0,
        given: Collection[str] = (),
    ) -> None:
        self.functions = tuple(functions)
        self.timeout_s, self.retries = timeout_s, retries
        number = workers or default_workers()
        self._surroundings = _Surroundings(
            Path.cwd(),
            {name: value for name, value in os.environ.items() if name in given or not _SECRET.search(name)},
            _share(number),
        )
        self._selector = selectors.DefaultSelector()
        self._processes = [self._start() for _ in range(number)]
        try:
            *_, self._signatures = [process.load() for process in self._processes]
        except BaseException:
            for process in self._processes:
                process.kill()
            raise

    @property
    def required(self) -> Mapping[str, Collection[str]]:
        """The parameters that each function must get."""
        return dict(zip(self.functions, (signature.required for signature in self._signatures), strict=True))

    @property
    def num_workers(self) -> int:
        return len(self._processes)

    def score(self, rows: Sequence[dict[str, Any]], failures: Failures) -> dict[str, list[Outcome]]:
        """For each function, its outcomes on all rows, in order. RewardError as soon as too many rows have failed."""
        calls = [(i, signature.pick(row)) for row in rows for i, signature in enumerate(self._signatures)]
        work = _Work(calls, self.functions, self.retries, failures)
        self._run(work, failures)
        numbers = {name: range(i, len(calls), len(self.functions)) for i, name in enumerate(self.functions)}
        return {name: [work.outcomes[number] for number in own] for name, own in numbers.items()}

    def resize(self, workers: int) -> None:
        """Let so many processes work from the next ``score`` on. New ones load their functions while others score."""
        self._surroundings = self._surroundings._replace(max_bytes=_share(workers))
        for process in self._processes[workers:]:
            self._selector.unregister(process.reports)
            process.end()
        del self._processes[workers:]
        for process in self._processes:
            process.limit(self._surroundings.max_bytes)
        self._processes += [self._start() for _ in range(workers - len(self._processes))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()
        self._selector.close()

    def _start(self) -> _Process:
        process = _Process(self.functions, self._surroundings, self.timeout_s)
        self._selector.register(process.reports, selectors.EVENT_READ, process)
        return process

    def _replace(self, process: _Process) -> None:
        self._selector.unregister(process.reports)
        process.kill()
        self._processes[self._processes.index(process)] = self._start()

    def _run(self, work: _Work, failures: Failures) -> None:
        """Deal the calls and gather their outcomes. Whatever goes wrong, no process keeps calls of this batch."""
        try:
            while work.open:
                for process in self._processes:
                    if not process.running and work.waiting:
                        process.send(work.take(len(self._processes)), work.calls)
                self._receive(work)
                failures.check()
        finally:
            for process in [process for process in self._processes if process.running]:
                self._replace(process)

    def _receive(self, work: _Work) -> None:
        """Wait for reports or the next deadline. A process that hangs or died fails the call that it was at."""
        wait_s = min(process.deadline for process in self._processes if process.running) - time.monotonic()
        ready = [key.data for key, _ in self._selector.select(max(0.0, wait_s))]
        for process in ready:
            for number, report in process.receive():
                work.settle(number, report)
            if process.ended:
                self._lose(process, work, process.death())
        now = time.monotonic()
        for process in list(self._processes):
            if process.running and process not in ready and now >= process.deadline:
                self._lose(process, work, f"timed out after {self.timeout_s:g} s")

    def _lose(self, process: _Process, work: _Work, reason: str) -> None:
        if process.signatures is None:
            raise RewardError(f"loading the reward functions again after a failed call: {process.error or reason}")
        if process.running:
            work.settle(process.running.popleft(), reason)
            work.waiting.extendleft(reversed(process.running))
            process.running.clear()
        self._replace(process)


def _share(workers: int) -> int:
    """Bytes of memory that each of so many processes may take."""
    return int(psutil.virtual_memory().total) // workers


_Call = tuple[int, dict[str, Any]]  # (index of the function, its keyword arguments)
_Report = tuple[float, dict[str, float]] | str  # score and metrics, or the reason why there are none


class _Work:
    """The calls of a batch, row by row and function by function, and what became of them."""

    def __init__(self, calls: Sequence[_Call], functions: Sequence[str], retries: int, failures: Failures) -> None:
        self.calls, self._functions, self._failures = calls, functions, failures
        self.waiting = deque(range(len(calls)))
        self.outcomes: dict[int, Outcome] = {}
        self._retries_left = dict.fromkeys(range(len(calls)), retries) if retries else {}

    @property
    def open(self) -> bool:
        return len(self.outcomes) < len(self.calls)

    def take(self, num_processes: int) -> list[int]:
        """The next calls for one process: fewer towards the end, so that all finish together."""
        count = max(1, min(_CHUNK, len(self.waiting) // (2 * num_processes)))
        return [self.waiting.popleft() for _ in range(count)]

    def settle(self, number: int, report: _Report) -> None:
        """Record what came of a call, or put a failed one back while it may be retried."""
        if isinstance(report, str) and self._retries_left.get(number, 0):
            self._retries_left[number] -= 1
            self.waiting.append(number)
            return
        row, function = divmod(number, len(self._functions))
        self.outcomes[number] = made = outcome(self._functions[function], report)
        if made.failure is not None:
            self._failures.add(row, made.failure)


class _Surroundings(NamedTuple):
    """What processes are started with: a working directory, environment variables, and how much memory they may take."""

    folder: Path
    environment: Mapping[str, str]
    max_bytes: int


class _Process:
    """The parent's side of one process of ``rollout.reward_process``."""

    def __init__(self, functions: Sequence[str], surroundings: _Surroundings, timeout_s: float) -> None:
        self.running: deque[int] = deque()  # calls sent and not reported yet, in order: the process is at the first
        self.signatures: list[Signature] | None = None
        self.ended, self.error = False, ""
        self.deadline = time.monotonic() + _LOAD_TIMEOUT_S
        self._timeout_s, self._rest = timeout_s, b""
        path = [*([] if "" in sys.path else [str(surroundings.folder)]), *sys.path]
        program = f"import sys; sys.path[:] = {path!r}; from hybridflow.rollout.reward_process import main; main()"
        # A session of its own: Ctrl-C is the parent's to handle, and what a function starts can be killed with it.
        self._popen = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=surroundings.folder,
            env=surroundings.environment,
            start_new_session=True,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._calls, self.reports = self._popen.stdin, self._popen.stdout
        self._write((list(functions), surroundings.max_bytes))

    def load(self) -> list[Signature]:
        """Wait until the functions are loaded. RewardError if they can't be."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.reports, selectors.EVENT_READ)
            while self.signatures is None:
                if not selector.select(max(0.0, self.deadline - time.monotonic())):
                    raise RewardError(f"reward functions: loading took more than {_LOAD_TIMEOUT_S:g} s")
                self.receive()
                if self.ended:
                    raise RewardError(self.error or f"reward functions: {self.death()} while loading them")
        return self.signatures

    def send(self, numbers: Sequence[int], calls: Sequence[_Call]) -> None:
        self.running.extend(numbers)
        if self.signatures is not None:
            self.deadline = time.monotonic() + self._timeout_s
        self._write([calls[number] for number in numbers])

    def receive(self) -> list[tuple[int, _Report]]:
        """Reports that came in; each moves the deadline to ``timeout_s`` from now."""
        data = os.read(self.reports.fileno(), 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        came: list[tuple[int, _Report]] = []
        for message in map(json.loads, lines):
            if isinstance(message, dict):
                self.error = message.get("error", "")
                self.signatures = [Signature(*signature) for signature in message.get("signatures", ())] or None
            else:
                came.append((self.running.popleft(), message if isinstance(message, str) else tuple(message)))
        if lines:
            self.deadline = time.monotonic() + self._timeout_s
        return came

    def limit(self, max_bytes: int) -> None:
        """Let the process have no more memory than that, whatever it was given at its start; on Linux alone."""
        if sys.platform == "linux":
            with contextlib.suppress(ProcessLookupError):  # it died: who sends it work notices
                most = min(max_bytes, *(n for n in resource.prlimit(self._popen.pid, resource.RLIMIT_DATA) if n >= 0))
                resource.prlimit(self._popen.pid, resource.RLIMIT_DATA, (most, most))

    def death(self) -> str:
        """How the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        code: int | None = self._popen.returncode
        if code is None:
            return "the function closed its process's pipes"
        ended = f"its process ended with exit code {code}"
        return ended if code >= 0 else f"its process died of {signal.Signals(-code).name}"

    def end(self) -> None:
        """Let the process end by itself; kill it if it doesn't."""
        with contextlib.suppress(BrokenPipeError):
            self._calls.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        self.kill()

    def kill(self) -> None:
        """Kill the process and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        with contextlib.suppress(BrokenPipeError):
            self._calls.close()
        self.reports.close()

    def _write(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: the reading side notices
            pickle.dump(message, self._calls)
            self._calls.flush()
