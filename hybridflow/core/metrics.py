"""Metrics as (sum, weight), so that means over any split of the data are the mean over the whole."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Metrics", "Span"]


@dataclass(frozen=True)
class Span:
    """Something that ran: a verb of a role, or another activity; seconds of the process's monotonic clock."""

    name: str
    kind: str
    start_s: float
    duration_s: float


class Metrics:
    """Sums and weights by name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add ``total``, the sum over ``weight`` entries."""
        old_total, old_weight = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + float(total), old_weight + float(weight))

    def merge(self, other: Metrics, prefix: str = "") -> None:
        """Add all of ``other``, every name behind ``prefix``."""
        for name, (total, weight) in other._sums.items():
            self.add(prefix + name, total, weight)

    def means(self) -> dict[str, float]:
        """Mean of every name that has weight."""
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight > 0}

    def clear(self) -> None:
        self._sums.clear()
