"""What minibatches are made of: rows, groups of rows or single steps.

``Units`` are known by index, from the masks (and groups) alone, so every rank can deal the units of a whole batch;
``Pulled`` and ``PulledSteps`` are those whose values it has pulled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.fields import FIELDS
from hybridflow.workers.microbatch import plan_microbatches

__all__ = ["Columns", "Pulled", "PulledSteps", "Units", "action_columns"]

Columns = dict[str, Tensor]
Ints = NDArray[np.int64]
Kind = Literal["row", "step", "group"]
DEALT_BY = ("sample_id", "response_mask")


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
        if self.kind == "step":  # one row and one place each
            ones = self.weights[: len(index)]
            rows, places = self.rows.values[index], self.places.values[index]
            return Units(self.kind, Ragged(rows, ones), Ragged(places, ones), ones)
        return Units(self.kind, self.rows.rows(index), self.places.rows(index), self.weights[index])

    def part(self, start: int, stop: int) -> Units:
        """The steps from ``start`` up to ``stop``."""
        ones = self.weights[start:stop]
        rows, places = self.rows.values[start:stop], self.places.values[start:stop]
        return Units(self.kind, Ragged(rows, ones), Ragged(places, ones), ones)

    def load(self, batch: Batch, index: Ints, device: torch.device) -> Pulled | PulledSteps:
        """The units at ``index`` (ascending), with their values, of steps on that ``device``. These have to be all units
        of ``batch``; no other rows of it are pulled."""
        everything = len(index) == len(self)
        units = self if everything else self.take(index)
        each = everything and self.kind != "group" and self.num_rows == len(batch)
        rows = units.rows.values if each else np.unique(units.rows.values)
        values = (batch if len(rows) == len(batch) else batch.rows(rows)).load()
        if self.kind == "step" and len(index) == len(self):
            return PulledSteps.of(units, values, index, device)
        if self.kind == "step":
            if len(rows) < len(batch):
                index = np.searchsorted(np.flatnonzero(np.isin(self.rows.values, rows)), index)
            return PulledSteps.of(units, values, index, device)
        return Pulled(units, values, units.rows.like(np.searchsorted(rows, units.rows.values)))


@dataclass(frozen=True)
class Pulled:
    """Units and their values, for models on rows: ``index`` [U] are the rows of each in ``values``, which may have others
    too."""

    units: Units
    values: Batch
    index: Ragged

    def take(self, index: Ints) -> Pulled:
        """The units at ``index``."""
        return Pulled(self.units.take(index), self.values, self.index.rows(index))

    def split(self, sizes: Sequence[int]) -> list[Pulled]:
        """So many units after another."""
        return [self.take(index) for index in np.split(np.arange(len(self.units)), np.cumsum(sizes)[:-1])]

    def microbatches(self, token_budget: int) -> list[Pulled]:
        """What goes through a model together."""
        return [self.take(index) for index in plan_microbatches(self.units.weights, token_budget)]

    def batch(self) -> Batch:
        """The rows of each unit side by side."""
        return self.values.rows(self.index.values)

    def seen(self, model: Any) -> Batch | Columns:
        """What the model reads: a batch, or what a loss sees of it for networks on single steps."""
        return self.batch() if model.unit == "row" else action_columns(self.batch(), model.device)


@dataclass(frozen=True)
class PulledSteps:
    """Single steps and their values as a loss sees them, without their mask: each step is a row. Parts of them copy
    nothing."""

    units: Units
    columns: Columns

    @staticmethod
    def of(units: Units, values: Batch, index: Ints, device: torch.device) -> PulledSteps:
        """``index`` [U]: the place of each among the action steps of ``values``."""
        columns = action_columns(values.steps(), device)
        every = PulledSteps(units, {name: column for name, column in columns.items() if name not in DEALT_BY})
        return every if len(index) == len(every.columns["row_index"]) else every._taken(units, index)

    def _taken(self, units: Units, index: Ints) -> PulledSteps:
        places = torch.from_numpy(index).to(self.columns["row_index"].device)
        taken = {name: column.index_select(0, places) for name, column in self.columns.items() if name != "row_index"}
        return PulledSteps(units, taken | {"row_index": self.columns["row_index"][: len(index)]})

    def take(self, index: Ints) -> PulledSteps:
        """The steps at ``index``."""
        return self._taken(self.units.take(index), index)

    def split(self, sizes: Sequence[int]) -> list[PulledSteps]:
        """So many steps after another."""
        names, stops = [name for name in self.columns if name != "row_index"], np.cumsum(sizes).tolist()
        parts = zip(*(self.columns[name].split_with_sizes(sizes) for name in names), strict=True)
        places = self.columns["row_index"]
        taken = (dict(zip(names, part, strict=True)) for part in parts)
        return [
            PulledSteps(self.units.part(stop - size, stop), columns | {"row_index": places[:size]})
            for size, stop, columns in zip(sizes, stops, taken, strict=True)
        ]

    def microbatches(self, token_budget: int) -> list[PulledSteps]:
        """What goes through a model together."""
        if len(self.units) <= token_budget:
            return [self]
        full, rest = divmod(len(self.units), token_budget)
        return self.split([token_budget] * full + [rest] * (rest > 0))

    def seen(self, model: Any) -> Columns:
        """What networks on single steps read."""
        return self.columns


def action_columns(batch: Batch, device: torch.device) -> Columns:
    """What a loss sees: time columns packed over the action steps [N], row fields [R], and ``row_index`` [N]."""
    mask = batch.ragged("response_mask")
    chosen = slice(None) if mask.values.all() else mask.values
    columns = {"row_index": torch.tensor(mask.row_index[chosen], device=device)}
    for name in batch.columns:
        column = batch[name]
        if FIELDS[name].axis == "time" and isinstance(column, Ragged):
            columns[name] = torch.tensor(column.values[chosen], device=device)
        elif FIELDS[name].axis == "row" and not isinstance(column, Ragged) and column.dtype.kind in "biuf":
            columns[name] = torch.tensor(column, device=device)
    return columns


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
