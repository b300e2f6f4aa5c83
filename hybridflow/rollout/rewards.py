"""Reward functions: ordinary Python functions, called in processes of their own.

    def exact(response: str, answer: str) -> float: ...           # rewards.py; answer is a field of the data set

    with RewardPool([RewardSpec("rewards.py:exact")]) as pool:
        pool.check({"answer"})                                    # before anything runs
        results = pool.score(prompts, responses, fields)          # RewardResult(score=1.0, failure=None, metrics={})

A function is called with those of ``prompt``, ``response`` and the row's fields that its signature names (all of them if it
takes ``**fields``). It returns a finite number, or a dict with "score" whose other numbers become metrics. Everything else
is a *failure* of that row, with a reason, and never a zero: another type, NaN, an exception, a call over ``timeout_s`` (its
process is killed and replaced) and a process that died.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from hybridflow.core.config import Config
from hybridflow.core.errors import RewardError
from hybridflow.rollout.reward_process import Signature

__all__ = ["RewardConfig", "RewardPool", "RewardResult", "RewardSpec", "ScorerConfig"]

_LOAD_TIMEOUT_S = 300.0  # a function's module may import a model
_CHUNK = 32  # calls on their way to one process: enough to hide the round trip, few enough to share the work evenly


@dataclass(frozen=True)
class RewardSpec:
    """A function, as ``package.module:function`` or ``path/file.py:function``, and its weight in the sum."""

    function: str
    weight: float = 1.0


@dataclass(frozen=True)
class RewardResult:
    """What a row got: ``score`` (the weighted sum), or None with the reason in ``failure``.

    ``metrics``: numbers beside "score" that the functions returned. With several functions each one's own score is among
    them, under its name, and its other metrics are called ``name/metric``.
    """

    score: float | None
    failure: str | None
    metrics: Mapping[str, float]


class ScorerConfig(Config):
    """Keys of ``[cost]``, and the first of ``[reward]``: functions, or a reward model."""

    functions: tuple[str, ...] = ()
    """reward functions, "package.module:function" or "path/file.py:function"; the score is their weighted sum"""
    weights: tuple[float, ...] | None = None
    """one weight for each function; all 1 if not given"""
    model: str | None = None
    """instead of functions: a reward model with the actor's tokenizer, a Hugging Face folder such as runs/reward/model"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model is not None and self.functions:
            raise ValueError("has both model and functions; give one")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} weights for {len(self.functions)} functions; give one weight for each")
        if len(set(self.functions)) < len(self.functions):
            raise ValueError("a function is given twice; use weights instead")
        return self

    def specs(self) -> tuple[RewardSpec, ...]:
        """The functions with their weights."""
        weights = self.weights or (1.0,) * len(self.functions)
        return tuple(RewardSpec(function, weight) for function, weight in zip(self.functions, weights, strict=True))


class RewardConfig(ScorerConfig):
    """The reward, and what happens when one of its functions, or one of the cost's, fails."""

    timeout_s: float = Field(10.0, gt=0)
    """a call that takes longer is killed and counts as failed"""
    workers: int | None = Field(None, ge=1)
    """processes that call the functions; as many as there are processors, at most 4, if not given"""
    retries: int = Field(0, ge=0)
    """how often a failed call is tried again"""
    on_failure: Literal["raise", "drop_group"] = "drop_group"
    """what a failed row does: stop the run, or leave its prompt's group out of the update"""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """a step in which a greater part of the rows fails stops the run"""


class RewardPool:
    """Runs reward functions in ``workers`` processes. RewardError if one can't be found or loaded.

    Functions are loaded in the processes: their imports and global state live there, and what they print goes to standard
    error. Calls are dealt to whichever process is free, so a function must not depend on the calls before.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], timeout_s: float = 10.0, workers: int | None = None, retries: int = 0
    ) -> None:
        if not specs:
            raise RewardError("no reward function is given; set reward.functions")
        self.specs = tuple(specs)
        self.timeout_s, self.retries = timeout_s, retries
        self._names = _names([spec.function for spec in specs])
        self._folder = Path.cwd()
        self._selector = selectors.DefaultSelector()
        self._processes = [self._start() for _ in range(workers or min(4, os.cpu_count() or 1))]
        try:
            *_, self._signatures = [process.load() for process in self._processes]
        except BaseException:
            for process in self._processes:
                process.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check(self, fields: Collection[str]) -> None:
        """RewardError if a function requires a parameter that is neither ``prompt``, ``response`` nor one of ``fields``."""
        there = {"prompt", "response", *fields}
        for spec, signature in zip(self.specs, self._signatures, strict=True):
            for name in signature.required:
                if name not in there:
                    hint = "rename the parameter, give it a default, or add the field to the data set"
                    found = f"requires a parameter {name!r}, but there are {', '.join(sorted(there))}"
                    raise RewardError(f"reward {spec.function!r}: {found}; {hint}")

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        fields: Sequence[Mapping[str, Any]],
        max_failures: int | None = None,
    ) -> list[RewardResult]:
        """One result a row, in order.

        RewardError, before anything runs, if a row lacks a field that a function requires; and as soon as more than
        ``max_failures`` rows have failed, with the reason of the first of them.
        """
        for names in {frozenset(row) for row in fields}:
            self.check(names)
        calls: list[_Call] = []
        for prompt, response, row in zip(prompts, responses, fields, strict=True):
            given = {**row, "prompt": prompt, "response": response}
            calls += [(i, signature.pick(given)) for i, signature in enumerate(self._signatures)]
        work = _Work(calls, len(self.specs), self.retries)
        self._run(work, len(prompts) if max_failures is None else max_failures)
        return [self._result(work, i) for i in range(len(prompts))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()
        self._selector.close()

    def _start(self) -> _Process:
        process = _Process([spec.function for spec in self.specs], self._folder, self.timeout_s)
        self._selector.register(process.reports, selectors.EVENT_READ, process)
        return process

    def _replace(self, process: _Process) -> None:
        self._selector.unregister(process.reports)
        process.kill()
        self._processes[self._processes.index(process)] = self._start()

    def _run(self, work: _Work, max_failures: int) -> None:
        """Deal the calls and gather their outcomes. Whatever goes wrong, no process keeps calls of this batch."""
        try:
            while work.open:
                for process in self._processes:
                    if not process.running and work.waiting:
                        process.send(work.take(len(self._processes)), work.calls)
                self._receive(work)
                if len(work.failed) > max_failures:
                    share = f"{len(work.failed)} of {work.num_rows} rows failed, {max_failures} may"
                    raise RewardError(f"{share}; the first: {self._reason(work, min(work.failed))}")
        finally:
            for process in [process for process in self._processes if process.running]:
                self._replace(process)

    def _receive(self, work: _Work) -> None:
        """Wait for reports or the next deadline. A process that hangs or died fails the call that it was at."""
        wait_s = min(process.deadline for process in self._processes if process.running) - time.monotonic()
        ready = [key.data for key, _ in self._selector.select(max(0.0, wait_s))]
        for process in ready:
            for number, outcome in process.receive():
                work.settle(number, outcome)
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
            work.settle(process.running.popleft(), _outcome(reason))
            work.waiting.extendleft(reversed(process.running))
            process.running.clear()
        self._replace(process)

    def _reason(self, work: _Work, row: int) -> str:
        number = work.failed[row]
        return f"reward {self.specs[number % len(self.specs)].function!r}: {work.outcomes[number].failure}"

    def _result(self, work: _Work, row: int) -> RewardResult:
        if row in work.failed:
            return RewardResult(None, self._reason(work, row), {})
        outcomes = work.row(row)
        total = math.fsum(spec.weight * outcome.score for spec, outcome in zip(self.specs, outcomes, strict=True))
        if len(outcomes) == 1:
            return RewardResult(total, None, outcomes[0].metrics)
        metrics: dict[str, float] = {}
        for name, outcome in zip(self._names, outcomes, strict=True):
            metrics[name] = outcome.score
            metrics |= {f"{name}/{key}": value for key, value in outcome.metrics.items()}
        return RewardResult(total, None, metrics)


_Call = tuple[int, dict[str, Any]]  # (index of the function, its keyword arguments)


class _Outcome(NamedTuple):
    """Of one call; ``score`` means nothing where there is a failure."""

    score: float
    metrics: dict[str, float]
    failure: str | None


class _Work:
    """The calls of a batch, row by row and function by function, and what became of them."""

    def __init__(self, calls: Sequence[_Call], num_functions: int, retries: int) -> None:
        self.calls, self._num_functions = calls, num_functions
        self.waiting = deque(range(len(calls)))
        self.outcomes: dict[int, _Outcome] = {}
        self.failed: dict[int, int] = {}  # row -> its first failed call
        self._retries_left = dict.fromkeys(range(len(calls)), retries) if retries else {}

    @property
    def open(self) -> bool:
        return len(self.outcomes) < len(self.calls)

    @property
    def num_rows(self) -> int:
        return len(self.calls) // self._num_functions

    def row(self, row: int) -> list[_Outcome]:
        return [self.outcomes[row * self._num_functions + i] for i in range(self._num_functions)]

    def take(self, num_processes: int) -> list[int]:
        """The next calls for one process: fewer towards the end, so that all finish together."""
        count = max(1, min(_CHUNK, len(self.waiting) // (2 * num_processes)))
        return [self.waiting.popleft() for _ in range(count)]

    def settle(self, number: int, outcome: _Outcome) -> None:
        """Record an outcome, or put a failed call back while it may be retried."""
        if outcome.failure is not None and self._retries_left.get(number, 0):
            self._retries_left[number] -= 1
            self.waiting.append(number)
            return
        self.outcomes[number] = outcome
        if outcome.failure is not None:
            row = number // self._num_functions
            self.failed[row] = min(number, self.failed.get(row, number))


class _Process:
    """The parent's side of one process of ``rollout.reward_process``."""

    def __init__(self, functions: Sequence[str], folder: Path, timeout_s: float) -> None:
        self.running: deque[int] = deque()  # calls sent and not reported yet, in order: the process is at the first
        self.signatures: list[Signature] | None = None
        self.ended, self.error = False, ""
        self.deadline = time.monotonic() + _LOAD_TIMEOUT_S
        self._timeout_s, self._rest = timeout_s, b""
        path = [*([] if "" in sys.path else [str(folder)]), *sys.path]
        program = f"import sys; sys.path[:] = {path!r}; from hybridflow.rollout.reward_process import main; main()"
        # A session of its own: Ctrl-C is the parent's to handle, and what a function starts can be killed with it.
        self._popen = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._calls, self.reports = self._popen.stdin, self._popen.stdout
        self._write(list(functions))

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

    def receive(self) -> list[tuple[int, _Outcome]]:
        """Reports that came in; each moves the deadline to ``timeout_s`` from now."""
        data = os.read(self.reports.fileno(), 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        outcomes = []
        for message in map(json.loads, lines):
            if isinstance(message, dict):
                self.error = message.get("error", "")
                self.signatures = [Signature(*signature) for signature in message.get("signatures", ())] or None
            else:
                outcomes.append((self.running.popleft(), _outcome(*message)))
        if lines:
            self.deadline = time.monotonic() + self._timeout_s
        return outcomes

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


def _outcome(score: float | str, metrics: dict[str, float] | None = None) -> _Outcome:
    return _Outcome(math.nan, {}, score) if isinstance(score, str) else _Outcome(score, metrics or {}, None)


def _names(functions: Sequence[str]) -> list[str]:
    """The functions' own names, or their whole specs where those are not unique."""
    names = [function.rpartition(":")[2] for function in functions]
    return names if len(set(names)) == len(names) else list(functions)
