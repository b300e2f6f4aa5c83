"""Which rows go through the model together: a plan as plain data."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["plan_microbatches"]


def plan_microbatches(lengths: ArrayLike, token_budget: int) -> Iterator[NDArray[np.int64]]:
    """Row indices of each microbatch: rows of like length together, ``rows x longest <= token_budget``.

    Longest first, so that memory peaks at once and not in the middle of a run. A single row longer than the budget gets
    a microbatch of its own.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, token_budget // max(1, int(lengths[order[start]])))
        yield order[start : start + count]
        start += count
