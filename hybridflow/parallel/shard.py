"""Which slice of a tensor a rank of a line holds. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Piece", "Shard", "cuts", "deal_heads", "lengths", "run_of", "whole"]


def cuts(n: int, parts: int) -> list[range]:
    """``n`` things in ``parts``: part i is i n // parts up to (i + 1) n // parts, so that nothing has to divide."""
    return [range(a, b) for a, b in pairwise(i * n // parts for i in range(parts + 1))]


def lengths(n: int, parts: int) -> list[int]:
    """How many things each of ``cuts`` has."""
    return [len(part) for part in cuts(n, parts)]


def deal_heads(heads: int, kv_heads: int, ranks: int) -> list[tuple[range, range, bool]]:
    """(query heads, the key-value heads that they read, whether it owns the latter) of each of at most ``heads`` ranks.

    Key-value heads are cut; with fewer of them than ranks, the ranks are dealt to the key-value heads instead, and those of
    one head keep a copy of it each and share its query heads.
    """
    group = heads // kv_heads
    if ranks <= kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv, True) for kv in cuts(kv_heads, ranks)]
    dealt = []
    for head, sharing in enumerate(cuts(ranks, kv_heads)):
        for number, share in enumerate(cuts(group, len(sharing))):
            queries = range(head * group + share.start, head * group + share.stop)
            dealt.append((queries, range(head, head + 1), number == 0))
    return dealt


@dataclass(frozen=True)
class Shard:
    """The slice of one parameter that a rank of a line holds, and what the other ranks have of it.

    ``ranges`` are cuts of the full parameter along ``dim``, stored one behind the other; of those with ``owned`` every
    number has one owner among the ranks, the others hold a copy. Of the rows in ``summed`` every holder has but its share
    of the gradient: the gradient is the sum over the line. For instance rank 1 of 2 holds of a fused qkv weight with 4
    query and 2 key-value heads of size 8
    ``Shard((64, 32), 0, (range(16, 32), range(40, 48), range(56, 64)), (True, True, True))``.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[range, ...]
    owned: tuple[bool, ...]
    summed: range = range(0)

    @property
    def whole(self) -> bool:
        """Whether it is the full parameter, in its order."""
        ends = [0, *(cut.stop for cut in self.ranges)]
        return ends[-1] == self.shape[self.dim] and ends[:-1] == [cut.start for cut in self.ranges]

    @property
    def places(self) -> list[tuple[range, range, bool]]:
        """(cut of the full parameter, where it lies in the slice, whether this rank owns it)."""
        ends = [0]
        for cut in self.ranges:
            ends.append(ends[-1] + len(cut))
        return [(cut, range(a, b), own) for cut, (a, b), own in zip(self.ranges, pairwise(ends), self.owned, strict=True)]


def whole(shape: Sequence[int]) -> Shard:
    """A parameter that isn't cut."""
    return Shard(tuple(shape), 0, (range(shape[0]),), (True,))


def run_of(shard: Shard, run: range) -> Shard:
    """A ``run`` of the numbers of a slice, counted row by row, as a vector: a slice of the flattened full parameter."""
    if all(shard.owned) and not shard.summed:
        return Shard((len(run),), 0, (range(len(run)),), (True,))
    assert shard.dim == 0, "what is cut along columns has one owner"
    width = prod(shard.shape[1:])
    ranges, owned = [], []
    for cut, place, own in shard.places:
        start, stop = max(place.start * width, run.start), min(place.stop * width, run.stop)
        if start < stop:
            offset = (cut.start - place.start) * width
            ranges.append(range(start + offset, stop + offset))
            owned.append(own)
    summed = range(shard.summed.start * width, shard.summed.stop * width)
    return Shard((prod(shard.shape),), 0, tuple(ranges), tuple(owned), summed)


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor as everyone else knows it: by its own name, where ours may be one of several that are
    fused to a ``parameter``, in natural order.

    ``cut`` of the tensor of ``shape`` along ``dim`` lies at ``place`` of the rank's slice of the parameter.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    dim: int
    cut: range
    place: range
    owned: bool

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], owned: bool) -> Piece:
        """All of a parameter."""
        rows = range(shape[0] if shape else 1)
        return Piece(name, name, shape, 0, rows, rows, owned)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(self.cut) if dim == self.dim else size for dim, size in enumerate(self.shape))

    def of(self, parameter: Tensor) -> Tensor:
        """A view of it in the rank's slice of the parameter."""
        return parameter.narrow(self.dim, self.place.start, len(self.place)) if self.shape else parameter
