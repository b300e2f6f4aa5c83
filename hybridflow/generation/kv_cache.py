"""Who lies where in the key-value cache, and how large it is. No torch.

The cache is two rectangles: *rows*, one for each request that decodes, and *prompts*, one for each prompt that several
requests share or that is prefilled in chunks. A request's own row begins where its shared prompt ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridflow.generation.request import IntArray
from hybridflow.models.spec import DecoderSpec

__all__ = ["Copy", "Place", "Shape", "SlotTable", "position_bytes", "round_up", "shortage"]

_ROUND = 16  # lengths are multiples of this, so that views and room last for a few steps
_FIRST = 64  # positions of a row to begin with: growing costs more than this little memory


def round_up(length: int) -> int:
    """The next multiple of 16: what a row of this many positions takes."""
    return -(-length // _ROUND) * _ROUND


def position_bytes(spec: DecoderSpec, itemsize: int) -> int:
    """Bytes of the keys and values of one token; itemsize: of one number."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def shortage(position_bytes: int, kv_cache_gb: float, prompt: int, limit: int) -> str:
    """What is wrong if a prompt of this many tokens doesn't fit with a response of ``limit``; "" if it does."""
    need, most = (round_up(prompt) + round_up(limit) + _ROUND) * position_bytes, int(kv_cache_gb * 1e9)
    if need <= most:
        return ""
    return (
        f"{prompt} prompt tokens and max_new_tokens {limit} need {need / 1e9:.3g} GB of keys and values, "
        f"over kv_cache_gb {kv_cache_gb:.3g}; raise kv_cache_gb or lower max_new_tokens"
    )


class Place(NamedTuple):
    """A row of one of the two rectangles."""

    shared: bool
    """of the prompts, not of the rows"""
    row: int


class Copy(NamedTuple):
    """The first ``length`` positions of one place, to another."""

    source: Place
    target: Place
    length: int


@dataclass(frozen=True)
class Shape:
    """``rows`` x ``length`` positions of requests beside ``prompts`` x ``prompt_length`` of prompts."""

    rows: int = 0
    length: int = 0
    prompts: int = 0
    prompt_length: int = 0

    @property
    def size(self) -> int:
        """Positions in all."""
        return self.rows * self.length + self.prompts * self.prompt_length

    @property
    def rounded(self) -> "Shape":
        """With lengths that are multiples of 16."""
        return Shape(self.rows, round_up(self.length), self.prompts, round_up(self.prompt_length))

    def holds(self, need: "Shape") -> bool:
        """Whether ``need`` fits into every dimension."""
        pairs = zip(self._dimensions, need._dimensions, strict=True)
        return all(mine >= theirs for mine, theirs in pairs)

    def grown(self, need: "Shape", most: "Shape", budget: int | None) -> "Shape":
        """A shape that holds ``need``: at once the ``most`` that it may have to hold, but for the length of rows.

        That grows by half, since many a response is short. Under a ``budget`` that this would exceed, the shape is exactly
        what is needed, and rows as far as they go.
        """
        need, most = need.rounded, most.rounded
        length = max(need.length, min(most.length, max(_FIRST, round_up(self.length * 3 // 2))))
        rows, prompts = max(need.rows, most.rows), max(need.prompts, most.prompts)
        generous = Shape(rows, length, prompts, max(need.prompt_length, most.prompt_length) if prompts else 0)
        if budget is None or generous.size <= budget:
            return generous
        left = (budget - need.prompts * need.prompt_length) // max(need.length, 1)
        return Shape(max(need.rows, min(rows, left)), need.length, need.prompts, need.prompt_length)

    @property
    def _dimensions(self) -> tuple[int, int, int, int]:
        return self.rows, self.length, self.prompts, self.prompt_length


class SlotTable:
    """``requests[slot]`` is the request in the slot, -1 in a free one.

    Active slots are always 0 .. num_active - 1, so that every matrix product of a decode step runs on exactly the active
    rows.
    """

    def __init__(self, num_slots: int) -> None:
        self.requests: IntArray = np.full(num_slots, -1, dtype=np.int64)
        self.num_active = 0

    @property
    def num_free(self) -> int:
        return len(self.requests) - self.num_active

    @property
    def active(self) -> IntArray:
        """[num_active]: the requests in the active slots, as a copy."""
        return self.requests[: self.num_active].copy()

    def slot_of(self, request: int) -> int:
        """The slot of an active request."""
        return int(np.flatnonzero(self.requests[: self.num_active] == request)[0])

    def take(self, requests: Sequence[int]) -> None:
        """Put the requests into the slots that follow the active ones, in order."""
        assert len(requests) <= self.num_free, f"{len(requests)} requests for {self.num_free} free slots"
        end = self.num_active + len(requests)
        self.requests[self.num_active : end] = requests
        self.num_active = end

    def release(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Free the slots; the last active rows move into the holes.

        Returns (sources, targets), equally long: the cache row sources[i] has to be copied to targets[i]. Sources and
        targets are disjoint, so the copies may run in any order or at once.
        """
        free = np.zeros(self.num_active, dtype=bool)
        free[slots] = True
        remaining = self.num_active - int(free.sum())
        targets = np.flatnonzero(free[:remaining])
        sources = remaining + np.flatnonzero(~free[remaining:])
        self.requests[targets] = self.requests[sources]
        self.requests[remaining : self.num_active] = -1
        self.num_active = remaining
        return sources, targets
