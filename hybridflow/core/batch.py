"""Batch: named columns over rows, the one currency of the dataflow.

    batch = Batch({"sample_id": np.arange(2), "tokens": Ragged.from_rows([[1, 2, 3], [4, 5]])})
    len(batch)                       # 2
    batch["tokens"].padded()         # [[1, 2, 3], [4, 5, 0]]
    batch.rows([1, 0]).repeat(2)     # four rows: 1, 1, 0, 0

Columns are numpy: dense ``[B, ...]`` for row fields, ``Ragged`` for fields on a time or prompt axis, object arrays for the
rest (see ``core.fields``). ``Lazy`` stands for any of them that other processes hold: reading it waits for the values,
``load`` reads them all. ``Traced`` stands for one where a program is traced instead of run. A batch never changes; every
operation returns a new one and copies no more than it must.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridflow.core.columns import Array, Column, Lazy, Places, Ragged, join, objects
from hybridflow.core.errors import ContractError
from hybridflow.core.fields import FIELDS, Field
from hybridflow.core.traced import Part, Traced

__all__ = ["Array", "Batch", "Column", "Ragged", "objects"]


class Batch:
    """Named columns over the same rows. Unknown names, wrong kinds, types or lengths raise ContractError."""

    def __init__(self, columns: Mapping[str, Column], num_rows: int | None = None) -> None:
        self.columns: dict[str, Column] = dict(columns)
        if num_rows is None:
            if not self.columns:
                raise ContractError("a batch without columns needs num_rows")
            known = (_known_rows(column) for column in self.columns.values())
            num_rows = next((rows for rows in known if rows is not None), None)
        self._num_rows = num_rows
        self._check(self.columns)

    def _check(self, new: Collection[str]) -> None:
        time_axis: tuple[str, Column] | None = None
        for name, column in self.columns.items():
            if name in new:
                _check_column(name, column, self._num_rows)
            if FIELDS[name].axis == "time":
                if time_axis and not _same_lengths(time_axis[1], column):
                    raise ContractError(f"columns {time_axis[0]!r} and {name!r} have different lengths on the time axis")
                time_axis = time_axis or (name, column)

    def __len__(self) -> int:
        """Rows; waits for the call that makes them, if it makes rows of its own."""
        if self._num_rows is None:
            self._num_rows = len(next(iter(self.columns.values())))
        return self._num_rows

    @property
    def known_rows(self) -> int | None:
        """Rows, None as long as the call that makes them has not said how many."""
        return self._num_rows

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(sorted(self.columns))})"

    def __getitem__(self, name: str) -> Any:
        """The column: an array for row and object fields, a Ragged for time and prompt fields. A lazy one is loaded."""
        column = self._column(name)
        return column.load() if isinstance(column, Lazy) else column

    def ragged(self, name: str) -> Ragged:
        """A column on a time or prompt axis, typed."""
        column = self[name]
        if isinstance(column, Traced):
            column.refuse()
        if not isinstance(column, Ragged):
            raise ContractError(f"column {name!r} is not ragged")
        return column

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B]: steps of each row; ones when the batch has no time axis."""
        for name, column in self.columns.items():
            if isinstance(column, (Ragged, Lazy)) and FIELDS[name].axis == "time":
                return column.lengths
            if isinstance(column, Traced) and FIELDS[name].axis == "time":
                column.refuse()
        return np.ones(len(self), np.int64)

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        chosen = {name: self._column(name) for name in names}
        return self._like(chosen, self._num_rows if chosen else len(self))

    @staticmethod
    def _like(columns: dict[str, Column], num_rows: int | None) -> Batch:
        """A batch of columns that were those, or the same rows of those, of one batch: there is nothing to check."""
        batch = Batch.__new__(Batch)
        batch.columns, batch._num_rows = columns, num_rows
        return batch

    def _column(self, name: str) -> Column:
        if name not in self.columns:
            raise ContractError(f"no column {name!r}; the batch has {', '.join(sorted(self.columns))}")
        return self.columns[name]

    def with_columns(self, **columns: Column) -> Batch:
        """These columns added or replaced."""
        if self._num_rows is None:
            return Batch({**self.columns, **columns})
        batch = self._like({**self.columns, **columns}, self._num_rows)
        batch._check(columns)
        return batch

    def load(self) -> Batch:
        """The same batch with the values of every lazy column: waits for them, and pulls them."""
        if not any(isinstance(column, Lazy) for column in self.columns.values()):
            return self
        return Batch({name: self[name] for name in self.columns}, len(self))

    def fill(self, **values: float) -> Batch:
        """Columns of one value added: ``batch.fill(demonstrated=False, advantages=0.0)``. Time columns need a time axis."""
        return self.with_columns(**{name: self._filled(name, value) for name, value in values.items()})

    def _filled(self, name: str, value: float) -> Column:
        field = _field(name)
        if field.axis == "row":
            return np.full(len(self), value, field.dtype)
        time_axis = next((column for known, column in self.columns.items() if FIELDS[known].axis == "time"), None)
        if isinstance(time_axis, Traced):
            parts = tuple(replace(part, writer=None) for part in time_axis.parts)
            return Traced(name, np.dtype(field.dtype), parts)
        if field.axis != "time" or not isinstance(time_axis, (Ragged, Lazy)):
            raise ContractError(
                f"fill: column {name!r} is on the {field.axis} axis; expected row, or time with its lengths"
            )
        lengths = time_axis.lengths
        return Ragged(np.full(int(lengths.sum()), value, field.dtype), lengths)

    def rows(self, index: ArrayLike) -> Batch:
        """The rows at ``index`` (integers [K], or booleans [B]), in that order, repeats allowed."""
        index = np.asarray(index)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        taken: dict[str, Column] = {}
        cut: dict[int, Places] = {}
        for name, column in self.columns.items():
            if isinstance(column, Lazy):
                if id(column.places) not in cut:
                    cut[id(column.places)] = column.located().take(index)
                taken[name] = Lazy(column.parts, cut[id(column.places)])
            else:
                taken[name] = column.rows(index) if isinstance(column, (Ragged, Traced)) else column[index]
        return self._like(taken, len(index))

    def repeat(self, count: int) -> Batch:
        """Every row ``count`` times, copies side by side."""
        return self.rows(np.repeat(np.arange(len(self)), count))

    def first_of_groups(self) -> Batch:
        """The first row of every group (rows of equal ``group_id``), in their order."""
        ids, first = self["group_id"], dict[Any, int]()
        if isinstance(ids, Traced):
            return self.rows(np.arange(ids.refuse() if ids.num_groups is None else ids.num_groups))
        for row, key in enumerate(ids.tolist()):
            first.setdefault(key, row)
        return self.rows(list(first.values()))

    def join_groups(self, groups: Batch, *names: str) -> Batch:
        """Row fields ``names`` of ``groups``, which has one row for each ``group_id``, added to the rows of each group."""
        if isinstance(self["group_id"], Traced):
            place: Any = np.arange(len(self)) * len(groups) // max(len(self), 1)
        else:
            row_of = {key: row for row, key in enumerate(groups["group_id"].tolist())}
            place = [row_of[key] for key in self["group_id"].tolist()]
        return self.with_columns(**groups.select(names).rows(place).columns)

    def steps(self) -> Batch:
        """One row for each action step (where ``response_mask`` is True): time columns of length 1, row fields repeated."""
        if (loaded := self.load()) is not self:
            return loaded.steps()
        mask = self.ragged("response_mask")
        if len(mask.values) == len(self) and mask.values.all() and (mask.lengths == 1).all():
            return self
        owner, ones = mask.row_index[mask.values], np.ones(int(mask.values.sum()), np.int64)
        taken: dict[str, Column] = {}
        for name, column in self.columns.items():
            if FIELDS[name].axis == "time" and isinstance(column, Ragged):
                taken[name] = Ragged(column.values[mask.values], ones)
            else:
                taken[name] = column.rows(owner) if isinstance(column, (Ragged, Traced)) else column[owner]  # type: ignore[index]
        return Batch(taken, len(owner))

    def traced(self, writer: int) -> Batch:
        """The same rows without their values, as what call number ``writer`` of a trace wrote."""
        return Batch({name: _traced(name, column, writer) for name, column in self.columns.items()}, len(self))

    def freeze(self) -> Batch:
        """Make every array read-only, so that no worker can change what another one reads. Returns self."""
        for column in self.columns.values():
            if isinstance(column, (Traced, Lazy)):
                continue
            for array in (column.values, column.lengths) if isinstance(column, Ragged) else (column,):
                array.flags.writeable = False
        return self

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all batches, in order; all must carry the same columns."""
        first = batches[0]
        for other in batches[1:]:
            if other.columns.keys() != first.columns.keys():
                differing = ", ".join(sorted(other.columns.keys() ^ first.columns.keys()))
                raise ContractError(f"concat: the batches differ in columns {differing}")
        columns = {name: _concat(name, [batch.columns[name] for batch in batches]) for name in first.columns}
        return Batch(columns, sum(len(batch) for batch in batches))


def _concat(name: str, columns: Sequence[Column]) -> Column:
    if any(isinstance(column, Traced) for column in columns):
        return Traced.concat([_traced(name, column, None) for column in columns])
    known = [column for column in columns if not isinstance(column, Traced)]
    if any(isinstance(column, Lazy) for column in known):
        return Lazy.concat(known)
    return join([column for column in known if not isinstance(column, Lazy)])


def _known_rows(column: Column) -> int | None:
    return column.known_rows if isinstance(column, Lazy) else len(column)


def _traced(name: str, column: Column, writer: int | None) -> Traced:
    if isinstance(column, Traced):
        return column
    if isinstance(column, Lazy):
        column = column.load()
    values = column.values if isinstance(column, Ragged) else column
    part = Part(writer, len(column), len(values) / max(len(column), 1))
    num_groups = len(np.unique(values)) if name == "group_id" else None
    return Traced(name, np.dtype((values.dtype, values.shape[1:])), (part,), num_groups)


def _same_lengths(one: Column, other: Column) -> bool:
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        return one.lengths is other.lengths or np.array_equal(one.lengths, other.lengths)
    if isinstance(one, Lazy) or isinstance(other, Lazy):
        return True  # not known without waiting; the workers that make and read them check
    return isinstance(one, Traced) and isinstance(other, Traced) and math.isclose(one.entries, other.entries)


def _field(name: str) -> Field:
    if name not in FIELDS:
        raise ContractError(f"unknown column {name!r}: columns are declared in hybridflow.core.fields.FIELDS")
    return FIELDS[name]


def _check_column(name: str, column: Column, num_rows: int | None) -> None:
    field = _field(name)
    if (known := _known_rows(column)) is not None and known != num_rows:
        raise ContractError(f"column {name!r} has {known} rows, expected {num_rows}")
    if isinstance(column, Lazy):
        return
    if not isinstance(column, Traced) and isinstance(column, Ragged) != (field.axis in ("time", "prompt")):
        raise ContractError(f"column {name!r} is on the {field.axis} axis, but got {type(column).__name__}")
    dtype = column.values.dtype if isinstance(column, Ragged) else column.dtype.base
    expected = np.dtype(object) if field.axis == "object" else np.dtype(field.dtype) if field.dtype else dtype
    if dtype != expected:
        raise ContractError(f"column {name!r} has type {dtype}, expected {expected}")
