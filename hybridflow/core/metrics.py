"""Metrics that don't depend on how the data was split: means as (sum, weight), counts, maxima and standard deviations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

__all__ = ["Effort", "Metrics", "Span"]


@dataclass(frozen=True)
class Effort:
    """What a call took of its process besides its time, and of how much.

    ``cpu_s``: processor time of all its threads and child processes; ``gpu_s``: of kernels on its GPU, and ``flops``, are
    measured on demand alone. ``memory_bytes``: the peak, above what was there before there were models. ``rows`` and
    ``tokens`` (steps of environments, 0 where rows have no time axis): those of this worker, given or, if it draws, made.
    ``workers`` shared the call's rows, with so many torch ``threads`` each; processes of reward functions are
    workers, too, of which each has its share. Bytes: of the columns that were read and written.
    """

    cpu_s: float
    memory_bytes: int
    rows: float
    tokens: float
    threads: int
    workers: int = 1
    read_bytes: int = 0
    written_bytes: int = 0
    gpu_s: float = 0.0
    flops: float | None = None


@dataclass(frozen=True)
class Span:
    """Something that ran: a verb of a role, or another activity; seconds of the driver's monotonic clock.

    ``worker``: "<pool>/<rank>" of the worker process, empty in the driver. There, a call is preceded by the spans "queue"
    (waiting for its inputs) and "transfer" (pulling them) of the same name. ``effort``: of a call that was looked at.
    """

    name: str
    kind: str
    start_s: float
    duration_s: float
    worker: str = ""
    effort: Effort | None = None


class Metrics:
    """Sums and weights, counts, maxima and moments by name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._counts: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._moments: dict[str, tuple[float, float, float]] = {}

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        """For a mean: ``total`` is the sum over ``weight`` entries."""
        old_total, old_weight = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + float(total), old_weight + float(weight))

    def count(self, name: str, number: float) -> None:
        """For a sum over all that happened."""
        self._counts[name] = self._counts.get(name, 0.0) + float(number)

    def maximum(self, name: str, value: float) -> None:
        """For the largest value."""
        self._maxima[name] = max(self._maxima.get(name, float(value)), float(value))

    def deviation(self, name: str, values: NDArray[Any]) -> None:
        """For the standard deviation (of a population) over all ``values`` [N] of all parts, around their common mean."""
        if len(values):
            mean = float(values.mean())
            self._add_moments(name, len(values), mean, float(((values - mean) ** 2).sum()))

    def _add_moments(self, name: str, count: float, mean: float, squares: float) -> None:
        """Count, mean and squared deviations of another part (Chan, Golub and LeVeque 1979)."""
        old_count, old_mean, old_squares = self._moments.get(name, (0.0, mean, 0.0))
        total, off = old_count + count, mean - old_mean
        squares += old_squares + off**2 * old_count * count / total
        self._moments[name] = (total, old_mean + off * count / total, squares)

    def merge(self, other: Metrics, prefix: str = "") -> None:
        """Add all of ``other``, every name behind ``prefix``."""
        for name, (total, weight) in other._sums.items():
            self.add(prefix + name, total, weight)
        for name, number in other._counts.items():
            self.count(prefix + name, number)
        for name, value in other._maxima.items():
            self.maximum(prefix + name, value)
        for name, moments in other._moments.items():
            self._add_moments(prefix + name, *moments)

    def values(self) -> dict[str, float]:
        """The mean of every name that has weight, the counts, the maxima and the standard deviations."""
        means = {name: total / weight for name, (total, weight) in self._sums.items() if weight > 0}
        deviations = {name: math.sqrt(squares / count) for name, (count, _, squares) in self._moments.items()}
        return {**means, **self._counts, **self._maxima, **deviations}

    def clear(self) -> None:
        for entries in (self._sums, self._counts, self._maxima, self._moments):
            entries.clear()
