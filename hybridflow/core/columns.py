"""The kinds of column that a batch has: dense arrays, ragged rows, objects, and columns that live elsewhere.

``Array`` and ``Ragged`` hold values. ``Lazy`` stands for rows of columns that other processes hold, maybe not computed yet:
it is cut and joined without them, and whoever reads it waits and pulls the rows that it wants. ``Traced`` (in
``core.traced``) has no values at all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Rows
from hybridflow.core.traced import Traced

__all__ = [
    "Array",
    "Column",
    "Held",
    "Lazy",
    "Loaded",
    "Places",
    "Ragged",
    "Source",
    "assemble",
    "join",
    "num_bytes",
    "objects",
    "take",
]

Array = NDArray[Any]
LONG = 192
"""entries of a row, from which on copying rows one by one is cheaper than an index of all entries"""


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, packed: ``values`` [sum(lengths), ...] and ``lengths`` [B] (int64)."""

    values: Array
    lengths: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.values) != int(self.lengths.sum()):
            raise ContractError(f"ragged column: {len(self.values)} values, but lengths sum to {int(self.lengths.sum())}")

    @staticmethod
    def from_rows(rows: Iterable[ArrayLike], dtype: Any = None) -> Ragged:
        """Pack a sequence of arrays; without rows, ``dtype`` is the type of the empty values (float64 if None)."""
        arrays = [np.asarray(row, dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
        return Ragged(values, np.array([len(array) for array in arrays], np.int64))

    @staticmethod
    def from_padded(padded: Array, lengths: ArrayLike) -> Ragged:
        """Pack ``padded`` [B, T, ...], of which the first ``lengths[i]`` entries of row i count."""
        lengths = np.asarray(lengths, np.int64)
        return Ragged(padded[np.arange(padded.shape[1]) < lengths[:, None]], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Array:
        start = int(self.lengths[:row].sum())
        return self.values[start : start + int(self.lengths[row])]

    def __iter__(self) -> Iterator[Array]:
        return iter(np.split(self.values, self.offsets[1:-1])) if len(self) else iter(())

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[B + 1]: row i is ``values[offsets[i]:offsets[i + 1]]``."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @property
    def row_index(self) -> NDArray[np.int64]:
        """[sum(lengths)]: the row of every value."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def rows(self, index: ArrayLike) -> Ragged:
        """The rows at ``index`` [K], in that order, repeats allowed."""
        index = np.asarray(index, np.int64)
        lengths = self.lengths[index]
        starts = (self.lengths.cumsum() - self.lengths)[index]
        ends = lengths.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        if total > LONG * len(index):
            return Ragged(np.concatenate(_spans(self.values, starts, lengths)), lengths)
        return Ragged(self.values[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)], lengths)

    def padded(self, fill: Any = 0) -> Array:
        """[B, T, ...] with ``fill`` behind each row's end; T is the longest row."""
        width = int(self.lengths.max(initial=0))
        out = np.full((len(self), width, *self.values.shape[1:]), fill, self.values.dtype)
        out[np.arange(width) < self.lengths[:, None]] = self.values
        return out

    def like(self, values: Array) -> Ragged:
        """Other ``values`` on the same axis."""
        return Ragged(values, self.lengths)


def _spans(values: Array, starts: Rows, lengths: Rows) -> list[Array]:
    return [values[start:end] for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]


Loaded = Array | Ragged


class Source(Protocol):
    """Where rows of lazy columns come from, such as the output of a call. Every method but ``known_rows`` may wait.

    ``rows``: None for all of them, in order.
    """

    @property
    def known_rows(self) -> int | None: ...
    @property
    def num_rows(self) -> int: ...
    def lengths(self, name: str, rows: Rows | None, /) -> NDArray[np.int64]: ...
    def load(self, name: str, rows: Rows | None, /) -> Loaded: ...


class Held:
    """A column of this process as a source."""

    def __init__(self, column: Loaded) -> None:
        self.column, self.known_rows, self.num_rows = column, len(column), len(column)

    def lengths(self, name: str, rows: Rows | None, /) -> NDArray[np.int64]:
        """Entries of each row."""
        if not isinstance(self.column, Ragged):
            return np.ones(self.num_rows if rows is None else len(rows), np.int64)
        return self.column.lengths if rows is None else self.column.lengths[rows]

    def load(self, name: str, rows: Rows | None, /) -> Loaded:
        return self.column if rows is None else take(self.column, rows)


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of a lazy column stand: row i is row ``row[i]`` of part ``part[i]``."""

    part: NDArray[np.int32]
    row: Rows

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: Rows) -> Places:
        return Places(self.part[index], self.row[index])


@dataclass(frozen=True, eq=False)
class Lazy:
    """Rows of columns of sources. ``parts``: (source, the column's name there); ``places`` None: all rows of the only part.

    Columns of one batch share their ``places``, so that cutting them costs and ships one index.
    """

    parts: tuple[tuple[Source, str], ...]
    places: Places | None = None

    @property
    def known_rows(self) -> int | None:
        return self.parts[0][0].known_rows if self.places is None else len(self.places)

    def __len__(self) -> int:
        return self.parts[0][0].num_rows if self.places is None else len(self.places)

    def located(self) -> Places:
        """``places``, spelt out where they are all rows."""
        return self.places or Places(np.zeros(len(self), np.int32), np.arange(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B]: entries of each row of a time or prompt column, without its values."""
        if self.places is None:
            source, name = self.parts[0]
            return source.lengths(name, None)
        out = np.zeros(len(self), np.int64)
        for number, (source, name) in enumerate(self.parts):
            at = np.flatnonzero(self.places.part == number)
            out[at] = source.lengths(name, self.places.row[at]) if len(at) else 0
        return out

    def load(self) -> Loaded:
        """The values: waits for them, and pulls these rows."""
        if self.places is None:
            source, name = self.parts[0]
            return source.load(name, None)
        return assemble(self.places, lambda part, rows: self.parts[part][0].load(self.parts[part][1], rows))

    @staticmethod
    def concat(columns: Sequence[Loaded | Lazy]) -> Lazy:
        """One below the other."""
        lazies = [column if isinstance(column, Lazy) else Lazy(((Held(column), ""),)) for column in columns]
        located = [lazy.located() for lazy in lazies]
        before = np.cumsum([0, *(len(lazy.parts) for lazy in lazies)])
        part = np.concatenate([places.part + np.int32(first) for places, first in zip(located, before, strict=False)])
        row = np.concatenate([places.row for places in located])
        return Lazy(tuple(part for lazy in lazies for part in lazy.parts), Places(part, row))


Column = Array | Ragged | Lazy | Traced


def assemble(places: Places, load: Callable[[int, Rows], Loaded]) -> Loaded:
    """The rows at ``places``, loaded part by part with ``load(part, rows)``, in their order."""
    parts = np.unique(places.part)
    if len(parts) <= 1:
        return load(int(parts[0]) if len(parts) else 0, places.row)
    at = [np.flatnonzero(places.part == part) for part in parts]
    loaded = [load(int(part), places.row[here]) for part, here in zip(parts, at, strict=True)]
    ragged = [column for column in loaded if isinstance(column, Ragged)]
    if ragged:
        order = np.empty(len(places), np.int64)
        order[np.concatenate(at)] = np.arange(len(places))
        return _merge(ragged, order)
    first = loaded[0]
    out = np.empty((len(places), *first.shape[1:]), first.dtype)  # type: ignore[union-attr]
    for here, column in zip(at, loaded, strict=True):
        out[here] = column
    return out


def _merge(columns: Sequence[Ragged], order: Rows) -> Loaded:
    """The rows at ``order`` of the columns one below the other; long ones are copied once."""
    lengths = np.concatenate([column.lengths for column in columns])
    if lengths.sum() <= LONG * len(order):
        return take(join(columns), order)
    rows = [row for column in columns for row in _spans(column.values, column.offsets[:-1], column.lengths)]
    return Ragged(np.concatenate([rows[row] for row in order.tolist()]), lengths[order])


def take(column: Loaded, index: Rows) -> Loaded:
    """Rows of a column; the column itself if they are all of it, in order."""
    if len(index) == len(column) and np.array_equal(index, np.arange(len(index))):
        return column
    return column.rows(index) if isinstance(column, Ragged) else column[index]


def num_bytes(column: Loaded) -> int:
    """Bytes of the values; of text and other objects an estimate."""
    array = column.values if isinstance(column, Ragged) else column
    if array.dtype != object:
        return array.nbytes
    return len(array) * len(pickle.dumps(array[:8].tolist())) // max(1, min(8, len(array)))


def join(columns: Sequence[Loaded]) -> Loaded:
    """Columns one below the other."""
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if ragged:
        return Ragged(np.concatenate([c.values for c in ragged]), np.concatenate([c.lengths for c in ragged]))
    return np.concatenate(columns)  # type: ignore[arg-type]


def objects(values: Iterable[Any]) -> Array:
    """An object column: one Python object a row."""
    items = list(values)
    column = np.empty(len(items), object)
    column[:] = items
    return column
