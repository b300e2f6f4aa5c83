"""Predictions of a task from samples of it: few physical terms with coefficients that are not negative.

    seconds = call + a row + a token (+ a decode step)       once as if one thread did it, once divided by the threads: what
                                                             Amdahl's law says of each; and what workers side by side cost

Errors count by their share of what is predicted, and large ones no more than small ones (Huber 1964). What the samples
don't tell apart is drawn to equal shares, with a spread that says so. The spread comes from predicting every size that was
measured without its own samples, so it has what the terms can't express, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Measurement", "Prediction", "TaskFit"]

Array = NDArray[np.float64]

NOISE = 0.02
"""of seconds, as a share, at least"""
PRIOR = 0.5
"""how much of a task's time a term may well be"""
HUBER = 1.5
"""deviations, above which an error pulls no harder"""
ROUNDS = 10
SECOND, BYTES = 1e-7, 1e5
FAR = math.log(20.0)
"""of a spread, at most"""


class Measurement(Protocol):
    """A sample, see ``profile_base``."""

    @property
    def kind(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def rows(self) -> float: ...
    @property
    def tokens(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def cpu_s(self) -> float: ...
    @property
    def memory_bytes(self) -> float: ...
    @property
    def size(self) -> str: ...


@dataclass(frozen=True)
class Prediction:
    """``seconds`` of a call, of the workers that share it; ``cpu_seconds`` of all of them together, with their child
    processes; ``memory_bytes`` of each, above what a process has before there are models. ``spread``: nine of ten calls
    take between seconds / spread and seconds x spread. ``samples``: that it was made from."""

    seconds: float
    cpu_seconds: float
    memory_bytes: float
    spread: float
    samples: int

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which nine of ten calls are."""
        return self.seconds / self.spread, self.seconds * self.spread


@dataclass(frozen=True)
class _Case:
    """Of one worker: its rows and tokens."""

    rows: float
    tokens: float
    threads: int
    workers: int


class TaskFit:
    """Of one task. ``cores``: of the machine, which threads of workers share."""

    def __init__(self, samples: Sequence[Measurement], cores: int) -> None:
        self.samples, self.cores = samples, cores
        self.draws = samples[0].kind == "generate"
        self._seconds = _Law(np.stack([*map(self._terms, samples)]), [one.seconds for one in samples], SECOND)
        self._cpu = _Law(np.stack([*map(self._cpu_terms, samples)]), [one.cpu_s for one in samples], SECOND)
        most: dict[str, Measurement] = {}
        for one in samples:
            if one.size not in most or most[one.size].memory_bytes < one.memory_bytes:
                most[one.size] = one
        peaks = [one.memory_bytes for one in most.values()]
        self._memory = _Law(np.stack([_sizes(one)[:3] for one in most.values()]), peaks, BYTES)

    def predict(self, rows: float, tokens: float, threads: int, workers: int) -> Prediction:
        case = _Case(rows / workers, tokens / workers, threads, workers)
        terms = self._terms(case)
        deviation = math.hypot(self.error, self._seconds.uncertainty(terms))
        return Prediction(
            self._seconds.at(terms),
            workers * self._cpu.at(self._cpu_terms(case)),
            self._memory.at(_sizes(case)[:3]),
            math.exp(min(FAR, self._quantile * deviation)),
            len(self.samples),
        )

    @property
    def coefficients(self) -> dict[str, float]:
        """Seconds of each term that takes any, by its name."""
        return {name: value for name, value in zip(TERMS, self._seconds.values, strict=True) if value > 0}

    def _terms(self, one: Measurement | _Case) -> Array:
        """As in ``TERMS``. Workers that want more cores than there are have a part of one each."""
        sizes, own = _sizes(one), self.cores / one.workers
        sizes[3] *= self.draws
        beside = (1 - 1 / one.workers) * np.array([1.0, one.tokens or one.rows])
        return np.concatenate([sizes * max(1.0, 1 / own), sizes[1:] / min(one.threads, own), beside])

    def _cpu_terms(self, one: Measurement | _Case) -> Array:
        """Threads that wait for each other take processor time, too."""
        sizes = _sizes(one)
        sizes[3] *= self.draws
        return np.concatenate([sizes, sizes * (one.threads - 1)])

    @cached_property
    def errors(self) -> Array:
        """[sizes]: log(predicted / measured) of the median of each size and number of threads and workers, by the others'
        samples. Empty if there is one alone."""
        cells: dict[object, list[int]] = defaultdict(list)
        for index, one in enumerate(self.samples):
            cells[one.size, one.threads, one.workers].append(index)
        if len(cells) == 1:
            return np.zeros(0)
        seconds = np.array([one.seconds for one in self.samples])
        terms, found = np.stack([self._terms(one) for one in self.samples]), []
        for own in cells.values():
            others = np.setdiff1d(np.arange(len(seconds)), own)
            law = _Law(terms[others], seconds[others], SECOND)
            found.append(math.log(law.at(np.median(terms[own], axis=0)) / np.median(seconds[own])))
        return np.array(found)

    @property
    def error(self) -> float:
        """Deviation of log(measured / predicted), of calls around their law and of sizes that were left out."""
        return math.hypot(
            self._seconds.deviation, float(np.median(np.abs(self.errors))) * 1.48 if len(self.errors) else 0.0
        )

    @property
    def _quantile(self) -> float:
        """Of Student's distribution: as many deviations as have 90 % between them, within 7 %."""
        freedom = max(1, len(self.samples) - int((self._seconds.values > 0).sum()))
        return 1.645 + 1.5 / freedom + 3 / freedom**2


TERMS = (
    "call",
    "row",
    "token",
    "decode step",
    "row / threads",
    "token / threads",
    "decode step / threads",
    "call beside others",
    "token beside others",
)


def _sizes(one: Measurement | _Case) -> Array:
    """One call, its rows, its tokens, and the steps in which it draws them."""
    return np.array([1.0, one.rows, one.tokens, one.tokens / one.rows if one.rows else 0.0])


class _Law:
    """``terms`` [N, K] times ``values`` [K], none below 0, come near to ``measured`` [N], of which less than ``least`` is
    as good as nothing."""

    def __init__(self, terms: Array, measured: Sequence[float] | Array, least: float) -> None:
        self._least, wanted = least, np.maximum(np.asarray(measured, float), least)
        shares = terms / wanted[:, None]
        self._seen = shares.any(axis=0)
        self._scale = np.array([np.median(column[column > 0]) if column.any() else 1.0 for column in shares.T])
        self.deviation, pulls, about = NOISE, np.ones(len(wanted)), wanted
        for _ in range(ROUNDS):
            # Shares of what was predicted last: of what was measured, calls that were too fast would outweigh all others.
            shares = terms / self._scale / about[:, None]
            pulled = (shares * pulls[:, None]).T
            gram = pulled @ shares + np.eye(len(self._scale)) * (self.deviation / PRIOR) ** 2
            found = _not_negative(gram, pulled @ (wanted / about))
            about = np.maximum(shares @ found * about, least)
            off = np.abs(np.log(about / wanted))
            self.deviation = max(NOISE, 1.48 * float(np.median(off)))
            pulls = np.minimum(1.0, HUBER * self.deviation / np.maximum(off, 1e-12))
        self._covariance = self.deviation**2 * np.linalg.inv(gram)
        self.values: Array = found / self._scale

    def at(self, terms: Array) -> float:
        return max(float(terms @ self.values), self._least)

    def uncertainty(self, terms: Array) -> float:
        """Deviation there, as a share, by what the samples leave open: of a term that none of them has, all of it."""
        shares = np.where(self._seen, terms / self._scale / self.at(terms), terms > 0)
        return math.sqrt(max(0.0, float(shares @ self._covariance @ shares)))


def _not_negative(gram: Array, right: Array) -> Array:
    """The x >= 0 of the least x gram x / 2 - right x (Lawson and Hanson 1974, chapter 23). ``gram``: positive definite."""
    x, free = np.zeros(len(right)), np.zeros(len(right), bool)
    for _ in range(3 * len(right)):
        slope = np.where(free, -np.inf, right - gram @ x)
        if slope.max() <= 1e-9 * np.abs(right).max():
            break
        free[slope.argmax()] = True
        while True:
            tried = np.zeros(len(x))
            tried[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
            below = free & (tried <= 0)
            if not below.any():
                break
            x = x + (x[below] / (x[below] - tried[below])).min() * (tried - x)
            free &= x > 1e-12
        x = tried
    return x
