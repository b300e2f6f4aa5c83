"""What became of the calls of a batch, for the processes and the services that make them."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

from hybridflow.core.errors import RewardError

__all__ = ["Failures", "Outcome", "outcome"]


class Outcome(NamedTuple):
    """Of one function on one row; ``score`` means nothing where there is a failure."""

    score: float
    metrics: dict[str, float]
    failure: str | None


def outcome(function: str, value: tuple[float, dict[str, float]] | str) -> Outcome:
    """Of (score, metrics), or of the reason why there is none."""
    return Outcome(math.nan, {}, f"reward {function!r}: {value}") if isinstance(value, str) else Outcome(*value, None)


class Failures:
    """The rows of a batch that have failed, shared by everything that works on it, and the sign that it is over."""

    def __init__(self, num_rows: int, allowed: int) -> None:
        self.over = threading.Event()
        self._num_rows, self._allowed = num_rows, allowed
        self._reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def add(self, row: int, reason: str) -> None:
        with self._lock:
            self._reasons.setdefault(row, reason)

    def check(self) -> None:
        """RewardError if more rows than allowed have failed."""
        with self._lock:
            if len(self._reasons) > self._allowed:
                share = f"{len(self._reasons)} of {self._num_rows} rows failed, {self._allowed} may"
                raise RewardError(f"{share}; the first: {self._reasons[min(self._reasons)]}")
