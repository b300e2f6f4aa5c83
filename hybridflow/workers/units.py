"""What minibatches are made of: rows, groups of rows or single steps.

``Units`` are known by index, from the masks (and groups) alone, so every rank can deal the units of a whole batch;
``Pulled`` are those whose values it has pulled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.batch import Batch, Ragged

__all__ = ["Pulled", "Units"]

Ints = NDArray[np.int64]
Kind = Literal["row", "step", "group"]


@dataclass(frozen=True)
class Units:
    """U units of a batch.

    ``rows`` [U]: the rows of each, in the order of the batch. ``places`` [U]: where its action steps stand on the packed
    time axis of the batch. ``weights`` [U]: what it takes in a microbatch, its rows times the longest of them. Rows without
    an action step are in no unit, nor is a group that has such a row.
    """

    kind: Kind
    rows: Ragged
    places: Ragged
    weights: Ints

    @staticmethod
    def of(batch: Batch, kind: Kind) -> Units:
        """All units of ``batch``, of which ``response_mask`` is read, and ``group_id`` for groups."""
        mask = batch.ragged("response_mask")
        owners, steps = mask.row_index[mask.values], np.flatnonzero(mask.values)
        places = Ragged(steps, np.bincount(owners, minlength=len(batch)))
        if kind == "step":
            ones = np.ones(len(steps), np.int64)
            return Units(kind, Ragged(owners, ones), Ragged(steps, ones), ones)
        has_steps = places.lengths > 0
        kept, sizes = _groups(batch["group_id"], has_steps) if kind == "group" else _rows(has_steps)
        if not len(kept):
            return Units(kind, Ragged(kept, sizes), Ragged(kept, sizes), sizes)
        starts, taken = np.cumsum(sizes) - sizes, places.rows(kept)
        per_unit = Ragged(taken.values, np.add.reduceat(taken.lengths, starts))
        return Units(kind, Ragged(kept, sizes), per_unit, sizes * np.maximum.reduceat(mask.lengths[kept], starts))

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def num_rows(self) -> int:
        return len(self.rows.values)

    @property
    def num_actions(self) -> int:
        return len(self.places.values)

    def take(self, index: Ints) -> Units:
        """The units at ``index``."""
        return Units(self.kind, self.rows.rows(index), self.places.rows(index), self.weights[index])

    def load(self, batch: Batch, index: Ints) -> Pulled:
        """The units at ``index`` (ascending), with their values. These have to be all units of ``batch``; no other rows of
        it are pulled."""
        units = self.take(index)
        rows = np.unique(units.rows.values)
        values = (batch if len(rows) == len(batch) else batch.rows(rows)).load()
        if self.kind != "step":
            return Pulled(units, values, units.rows.like(np.searchsorted(rows, units.rows.values)))
        pulled = np.flatnonzero(np.isin(self.rows.values, rows))
        return Pulled(units, values.steps(), units.rows.like(np.searchsorted(pulled, index)))


@dataclass(frozen=True)
class Pulled:
    """Units and their values: ``index`` [U] are the rows (or steps) of each in ``values``, which may have others too."""

    units: Units
    values: Batch
    index: Ragged

    def take(self, index: Ints) -> Pulled:
        """The units at ``index``."""
        return Pulled(self.units.take(index), self.values, self.index.rows(index))

    def batch(self) -> Batch:
        """The rows (or steps) of each unit side by side."""
        return self.values.rows(self.index.values)


def _rows(has_steps: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """(rows, rows of each unit): every row by itself."""
    kept = np.flatnonzero(has_steps)
    return kept, np.ones(len(kept), np.int64)


def _groups(group_ids: NDArray[np.generic], has_steps: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """(rows, rows of each unit): rows of equal ``group_id`` side by side."""
    _, group, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    whole = np.bincount(group, weights=has_steps, minlength=len(sizes)) == sizes
    rows = np.argsort(group, kind="stable")
    return rows[whole[group[rows]]], sizes[whole].astype(np.int64)
