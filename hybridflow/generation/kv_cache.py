"""Which slot of the key-value cache holds which request. No torch.

Active slots are always 0 .. num_active - 1, so that every matrix product of a decode step runs on exactly the active rows.
"""

from collections.abc import Sequence

import numpy as np

from hybridflow.generation.request import IntArray

__all__ = ["SlotTable"]


class SlotTable:
    """``requests[slot]`` is the request in the slot, -1 in a free one."""

    def __init__(self, num_slots: int) -> None:
        self.requests: IntArray = np.full(num_slots, -1, dtype=np.int64)
        self.num_active = 0

    @property
    def num_slots(self) -> int:
        return len(self.requests)

    @property
    def num_free(self) -> int:
        return len(self.requests) - self.num_active

    @property
    def active(self) -> IntArray:
        """[num_active]: the requests in the active slots, as a copy."""
        return self.requests[: self.num_active].copy()

    def can_take(self, count: int) -> bool:
        return count <= self.num_free

    def take(self, requests: Sequence[int]) -> None:
        """Put the requests into the slots that follow the active ones, in order."""
        assert self.can_take(len(requests)), f"{len(requests)} requests for {self.num_free} free slots"
        end = self.num_active + len(requests)
        self.requests[self.num_active : end] = requests
        self.num_active = end

    def can_release(self, slots: IntArray) -> bool:
        return len(slots) == 0 or bool(slots.min() >= 0 and slots.max() < self.num_active)

    def release(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Free the slots; the last active rows move into the holes.

        Returns (sources, targets), equally long: the cache row sources[i] has to be copied to targets[i]. Sources and
        targets are disjoint, so the copies may run in any order or at once.
        """
        assert self.can_release(slots), f"slots {slots} of {self.num_active} active ones"
        free = np.zeros(self.num_active, dtype=bool)
        free[slots] = True
        remaining = self.num_active - int(free.sum())
        targets = np.flatnonzero(free[:remaining])
        sources = remaining + np.flatnonzero(~free[remaining:])
        self.requests[targets] = self.requests[sources]
        self.requests[remaining : self.num_active] = -1
        self.num_active = remaining
        return sources, targets
