"""What a worker tells of its output, and how readers find their rows in the outputs of several workers.

A call leaves one *manifest* for each rank whose output counts: which rows it has, how long they are, who holds them. The
columns themselves stay where they were made. A reader puts the manifests together (``Output``), works out with the verb's
``distribute`` which rows it is to have, and fetches those of the columns that it reads, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.batch import Batch
from hybridflow.core.columns import Array, Lazy, Loaded, Places, Ragged, assemble
from hybridflow.core.errors import ContractError
from hybridflow.core.fields import FIELDS, Axis
from hybridflow.core.placement import Rows

__all__ = ["Fetch", "Manifest", "Output", "describe", "weights"]

Fetch = Callable[[int, str, Rows], Loaded]
"""(piece, column, rows of the piece) -> the values"""


@dataclass(frozen=True)
class Manifest:
    """One rank's part of a call's output: ``num_rows`` rows.

    ``rows``: which of the ``call_rows`` rows of the call's batch they are, None for rows of its own, which ``key`` orders.
    ``lengths``: of the columns on each ragged axis. ``node`` and ``worker`` (pool, rank): who holds the columns.
    """

    num_rows: int
    rows: Rows | None
    call_rows: int
    key: Array | None
    lengths: Mapping[Axis, NDArray[np.int64]]
    node: str
    worker: tuple[str, int]


def describe(batch: Batch, rows: Rows | None, call_rows: int, node: str, worker: tuple[str, int]) -> Manifest:
    """The manifest of an output; without ``rows`` it is ordered by its ``sample_id``."""
    lengths = {FIELDS[name].axis: c.lengths for name, c in batch.columns.items() if isinstance(c, Ragged)}
    return Manifest(len(batch), rows, call_rows, batch["sample_id"] if rows is None else None, lengths, node, worker)


class Output:
    """The output of a call as a source of columns: its pieces, one for each manifest, are put in order here."""

    def __init__(self, manifests: Sequence[Manifest], fetch: Fetch, writer: str) -> None:
        self.manifests, self.fetch, self.writer = manifests, fetch, writer

    @property
    def known_rows(self) -> int:
        return self.num_rows

    @cached_property
    def num_rows(self) -> int:
        return sum(manifest.num_rows for manifest in self.manifests)

    @cached_property
    def _places(self) -> Places:
        """(piece, row of it) of every row of the output."""
        counts = [manifest.num_rows for manifest in self.manifests]
        piece = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        row = np.concatenate([np.arange(count) for count in counts])
        rows = [manifest.rows for manifest in self.manifests if manifest.rows is not None]
        if rows:
            order = np.argsort(np.concatenate(rows), kind="stable")
            if not np.array_equal(np.concatenate(rows)[order], np.arange(self.manifests[0].call_rows)):
                raise ContractError(f"the protocol of {self.writer} doesn't give every row to exactly one collected rank")
        else:
            order = np.argsort(np.concatenate([m.key for m in self.manifests if m.key is not None]), kind="stable")
        return Places(piece[order], row[order])

    def lengths(self, name: str, rows: Rows | None, /) -> NDArray[np.int64]:
        axis, places = FIELDS[name].axis, self._places if rows is None else self._places.take(rows)
        if axis not in ("time", "prompt"):
            return np.ones(len(places), np.int64)
        before = np.cumsum([0, *(manifest.num_rows for manifest in self.manifests[:-1])])
        lengths: NDArray[np.int64] = np.concatenate([manifest.lengths[axis] for manifest in self.manifests])
        return lengths[before[places.part] + places.row]

    def load(self, name: str, rows: Rows | None, /) -> Loaded:
        if name == "sample_id" and self.manifests[0].key is not None:  # known, and nothing to pull
            ids = np.sort(np.concatenate([manifest.key for manifest in self.manifests if manifest.key is not None]))
            return ids if rows is None else ids[rows]
        places = self._places if rows is None else self._places.take(rows)
        return assemble(places, lambda piece, of_piece: self.fetch(piece, name, of_piece))


def weights(batch: Batch) -> NDArray[np.int64]:
    """[B] what rows weigh when they are dealt to ranks: their tokens on the time axis, or of their prompts and of the
    responses that are expected, or one each."""
    for axis in ("time", "prompt"):
        for name, column in batch.columns.items():
            if FIELDS[name].axis == axis and isinstance(column, (Ragged, Lazy)):
                expected = axis == "prompt" and "expected_length" in batch
                return column.lengths + batch["expected_length"] if expected else column.lengths
    return np.ones(len(batch), np.int64)
