"""Which slot of the key-value cache holds which request, and how large the cache may be. No torch.

Active slots are always 0 .. num_active - 1, so that every matrix product of a decode step runs on exactly the active rows.
"""

from collections.abc import Sequence

import numpy as np

from hybridflow.generation.request import IntArray
from hybridflow.models.spec import DecoderSpec

__all__ = ["Room", "SlotTable", "position_bytes", "round_up", "shortage"]

_ROUND = 16  # lengths are multiples of this, so that views and room last for a few steps


def round_up(length: int) -> int:
    """The next multiple of 16: what a row of this many positions takes."""
    return -(-length // _ROUND) * _ROUND


def position_bytes(spec: DecoderSpec, itemsize: int) -> int:
    """Bytes of the keys and values of one token; itemsize: of one number."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def shortage(position_bytes: int, kv_cache_gb: float, prompt: int, limit: int) -> str:
    """What is wrong if a prompt of this many tokens doesn't fit with a response of ``limit``; "" if it does."""
    need, most = round_up(prompt + limit) * position_bytes, int(kv_cache_gb * 1e9)
    if need <= most:
        return ""
    return (
        f"{prompt} prompt tokens and max_new_tokens {limit} need {need / 1e9:.3g} GB of keys and values, "
        f"over kv_cache_gb {kv_cache_gb:.3g}; raise kv_cache_gb or lower max_new_tokens"
    )


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


class Room:
    """The cache is a rectangle, rows of ``length`` positions, beside ``kept`` positions of one kept prompt.

    ``budget`` positions hold both, so the longer the rows, the fewer there are; None: as many as asked for.
    """

    def __init__(self, max_rows: int, budget: int | None) -> None:
        self.max_rows, self.budget = max_rows, budget
        self.length = self.kept = 0

    def rows(self, length: int) -> int:
        """Rows that fit when the longest needs ``length`` positions."""
        if self.budget is None:
            return self.max_rows
        return min(self.max_rows, (self.budget - self.kept) // max(self.length, round_up(length), 1))

    def can_keep(self, length: int, rows: int) -> bool:
        """Whether a prompt of ``length`` fits beside ``rows`` rows."""
        return self.budget is None or rows * max(self.length, round_up(length + 1)) + length <= self.budget

    def lengthen(self, length: int, longest: int, rows: int) -> None:
        """Rows of ``length`` positions, more than now: longer by half, so that growing costs little over a whole run, but
        not beyond ``longest``, and not at the price of any of ``rows`` rows."""
        generous = min(round_up(longest), round_up(self.length * 3 // 2))
        if self.budget is not None:
            generous = min(generous, (self.budget - self.kept) // max(rows, 1) // _ROUND * _ROUND)
        self.length = max(round_up(length), generous)

    def shorten(self, length: int) -> None:
        """The long rows have left: less than half of the length is used, so that more rows fit."""
        if self.budget is not None and 2 * length <= self.length:
            self.length = round_up(length)
