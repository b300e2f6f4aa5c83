"""A sum tree: draws places in proportion to their priorities, many at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["SumTree"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SumTree:
    """Priorities of ``capacity`` places, 0 at first. Node i is the sum of nodes 2i and 2i + 1; node 1 that of all."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._depth = capacity, max(1, (capacity - 1).bit_length())
        self._first = 1 << self._depth
        self._nodes = np.zeros(2 * self._first)

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    @property
    def priorities(self) -> Floats:
        """[capacity], a view."""
        return self._nodes[self._first : self._first + self.capacity]

    def set(self, places: Ints, priorities: Floats | float) -> None:
        """Give ``places`` these priorities; of one that is named twice the last counts."""
        self._nodes[self._first + places] = priorities
        nodes = self._first + places
        for _ in range(self._depth):
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: Floats) -> Ints:
        """The places in which the running sum of priorities passes each of ``sums``, which are in [0, total)."""
        nodes, left_over = np.ones(len(sums), np.int64), sums.copy()
        for _ in range(self._depth):
            left, right = self._nodes[2 * nodes], self._nodes[2 * nodes + 1]
            # Rounding may leave more than there is; a place of priority 0 must never be found.
            goes_right = (left_over >= left) & (right > 0)
            left_over -= np.where(goes_right, left, 0.0)
            nodes = 2 * nodes + goes_right
        return nodes - self._first
