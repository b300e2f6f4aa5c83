"""What a replay buffer keeps of a batch, and where: arithmetic that its index and its rows agree on without a word.

batch, whose rows are pieces of episodes ──cut──> units, numbered in the order of adding
    number ──modulo the capacity──> place in a ring ──blocks of places in turns──> (rank, place on that rank)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.columns import Ragged

__all__ = ["BLOCK", "Cut", "Ring", "cut"]

BLOCK = 64
"""places in a row that are on one rank: a piece of an episode is pulled by few ranks, and all of them fill up alike"""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ring:
    """``capacity`` places, of which ``ranks`` have blocks in turns; the unit with number n is at place n % capacity."""

    capacity: int
    ranks: int = 1

    def rank(self, places: Ints) -> Ints:
        """Who has them."""
        return places // BLOCK % self.ranks

    def local(self, places: Ints) -> Ints:
        """Where they are there; in the same order."""
        return places if self.ranks == 1 else places // (BLOCK * self.ranks) * BLOCK + places % BLOCK

    def size(self, rank: int, filled: int | None = None) -> int:
        """Places of a rank, among all or among the first ``filled``."""
        turns, rest = divmod(self.capacity if filled is None else filled, BLOCK * self.ranks)
        return turns * BLOCK + min(max(rest - rank * BLOCK, 0), BLOCK)


@dataclass(frozen=True)
class Cut:
    """U units of a batch: ``rows`` [U] that they are of, and ``lengths`` [U], how many action steps they are. ``starts``
    [U]: the first of them in ``positions`` [N], where all action steps of the batch stand on its packed time axis."""

    rows: Ints
    starts: Ints
    lengths: Ints
    positions: Ints

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Ints) -> Cut:
        """The units at ``index``."""
        return Cut(self.rows[index], self.starts[index], self.lengths[index], self.positions)

    def steps(self) -> tuple[Ints, Ints, Ints]:
        """Of every step of every unit: the unit, its place in it, and its position on the time axis."""
        if len(self.lengths) == int(self.lengths.sum()):
            return np.arange(len(self)), np.zeros(len(self), np.int64), self.last
        unit = np.repeat(np.arange(len(self)), self.lengths)
        within = np.arange(len(unit)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return unit, within, self.positions[self.starts[unit] + within]

    @property
    def last(self) -> Ints:
        """[U] the position of the last step of every unit."""
        if len(self) == len(self.positions):
            return self.positions
        last: Ints = self.positions[self.starts + self.lengths - 1]
        return last


def cut(mask: Ragged, length: int) -> Cut:
    """The units of a batch with this ``response_mask``: the action steps of every row, ``length`` at a time."""
    positions = np.flatnonzero(mask.values)
    if length == 1:
        each = np.arange(len(positions))
        return Cut(mask.row_index[positions], each, np.ones_like(each), positions)
    counts = np.bincount(mask.row_index[positions], minlength=len(mask))
    number = -(-counts // length)
    rows = np.repeat(np.arange(len(mask)), number)
    before = (np.arange(len(rows)) - np.repeat(np.cumsum(number) - number, number)) * length
    return Cut(rows, (np.cumsum(counts) - counts)[rows] + before, np.minimum(counts[rows] - before, length), positions)
