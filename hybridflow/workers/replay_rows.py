"""The rows of a replay buffer, or a rank's share of them: rings of arrays, in memory or in files that are mapped.

A rank keeps the places of the ring that ``rollout.replay_layout`` deals it. What it is given to insert it pulls from who
made it, and what is drawn is pulled from here: neither passes through the driver.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from hybridflow.controller.protocols import ONE_TO_ALL, SHARES
from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.errors import CheckpointError, ContractError, ResourceError
from hybridflow.core.files import Written, check_file, explain_full_disk
from hybridflow.core.roles import WorkerContext, control, remote
from hybridflow.core.tensor_file import Kind, write_tensors
from hybridflow.rollout.replay_layout import Cut, Ring, cut
from hybridflow.workers.checkpoint import FULL, check_seen

__all__ = ["ReplayWorker", "unit_bytes"]

TIME = ("observations", "actions")
"""what has an entry for each step of a unit; ``final_observations`` and ``memory`` have one for each unit"""
READ_BYTES = 1 << 26
Ints = NDArray[np.int64]
Types = Mapping[str, np.dtype[Any]]


def unit_bytes(types: Types, sequence: int) -> int:
    """Bytes of one transition, or one sequence."""
    return sum(dtype.itemsize * (sequence if name in TIME else 1) for name, dtype in types.items())


def _remembered(args: Mapping[str, Any]) -> tuple[str, ...]:
    return ("memory",) if "memory" in args["types"] else ()


class ReplayWorker:
    """``capacity`` units of ``sequence`` steps, shared out over the ranks. ``types``: of an entry of ``observations``,
    ``actions``, ``final_observations`` and, of policies that have one, ``memory``.
    ``spill``: the folder whose disk has room for the rows, None for memory.

    ResourceError: that disk is too small.
    """

    def __init__(
        self, context: WorkerContext, *, capacity: int, types: Types, sequence: int = 1, spill: str | None = None
    ) -> None:
        self.context, self.ring, self.sequence = context, Ring(capacity, context.mesh.size), sequence
        size, self._unit_bytes = self.ring.size(context.rank), unit_bytes(types, sequence)
        shapes = {name: (size * (sequence if name in TIME else 1), *types[name].shape) for name in types}
        if spill is None:
            self.rows: dict[str, Array] = {name: np.zeros(shape, types[name].base) for name, shape in shapes.items()}
        else:
            folder = Path(spill)
            _check_room(folder, size * self._unit_bytes)
            self.rows = {name: _mapped(folder, shape, types[name].base) for name, shape in shapes.items()}
        self.num_added = 0
        self._written: list[Written] = []

    @remote(
        SHARES,
        reads=lambda args: ("response_mask", *TIME, "final_observations", *_remembered(args)),
        writes=("sample_id",),
        rows="new",
        kind="compute",
    )
    def insert(self, batch: Batch, first: int, /) -> Batch:
        """Keep this rank's share of the units of a batch, which are numbered from ``first``; the oldest make room. No row
        comes back."""
        units = cut(batch.ragged("response_mask"), self.sequence)
        self.num_added = first + len(units)
        kept = np.arange(max(0, len(units) - self.ring.capacity), len(units))
        own, local = self._mine((first + kept) % self.ring.capacity)
        if len(own):
            self._keep(*_pulled(batch, units, kept[own], self.sequence), local)
        return Batch({"sample_id": np.zeros(0, np.int64)})

    def _keep(self, batch: Batch, units: Cut, places: Ints) -> None:
        unit, within, positions = units.steps()
        for name in TIME:
            _copy(self.rows[name], places[unit] * self.sequence + within, batch.ragged(name).values, positions)
        observations, last, finals = batch.ragged("observations"), units.last, self.rows["final_observations"]
        followed = len(last) - int(last[-1] + 1 == len(observations.values))
        _copy(finals, places[:followed], observations.values, last[:followed] + 1)
        at_end = last == observations.offsets[units.rows + 1] - 1  # another piece is what follows there
        finals[places[at_end]] = batch["final_observations"][units.rows[at_end]]
        if "memory" in self.rows:
            if (batch.ragged("response_mask").lengths > self.sequence).any():
                raise ContractError(f"a piece has more than {self.sequence} steps, and a memory of its beginning alone")
            self.rows["memory"][places] = batch["memory"][units.rows]

    @remote(SHARES, writes=lambda args: ("sample_id", *TIME, *_remembered(args)), rows="new", kind="compute")
    def steps(self, batch: Batch, places: Ints, lengths: Ints, /) -> Batch:
        """``observations``, ``actions`` and ``memory``, if there is one, of the units at those of these ``places`` of the
        ring [B] that this rank has; ``sample_id``: which of them they are."""
        mine, local = self._mine(places)
        memory = {"memory": self.rows["memory"].take(local, axis=0)} if "memory" in self.rows else {}
        lengths = lengths if len(mine) == len(places) else lengths[mine]
        if self.sequence > 1:
            before = np.repeat(np.cumsum(lengths) - lengths, lengths)
            local = np.repeat(local * self.sequence, lengths) + np.arange(len(before)) - before
        steps = {name: Ragged(self.rows[name].take(local, axis=0), lengths) for name in TIME}
        return Batch({"sample_id": mine, **steps, **memory})

    @remote(SHARES, writes=("sample_id", "final_observations"), rows="new", kind="compute")
    def finals(self, batch: Batch, places: Ints, /) -> Batch:
        """As ``steps``, what followed them."""
        mine, local = self._mine(places)
        return Batch({"sample_id": mine, "final_observations": self.rows["final_observations"].take(local, axis=0)})

    def _mine(self, places: Ints) -> tuple[Ints, Ints]:
        """Which of ``places`` are here, and where."""
        if self.ring.ranks == 1:
            return np.arange(len(places)), places
        mine = np.flatnonzero(self.ring.rank(places) == self.context.rank)
        return mine, self.ring.local(places[mine])

    @control
    def save(self, folder: Path) -> dict[str, Any]:
        """Write what this rank holds to ``folder``, array by array and without a copy; it is done when this returns."""
        held = self._held()
        arrays = {"numbers": held, **{name: self._of_units(name)[: len(held)] for name in self.rows}}
        raw = {name: _raw(array) for name, array in arrays.items()}
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.context.rank}.safetensors"
        kinds = {name: Kind(torch.uint8, array.shape) for name, array in raw.items()}
        with explain_full_disk(path.parents[1], FULL):
            written = write_tensors(path, kinds, (torch.from_numpy(array) for array in raw.values()))
        self._written = [written._replace(name=f"{folder.name}/{path.name}")]
        return {"num_added": self.num_added}

    @control(ONE_TO_ALL)
    def saved(self, wait: bool) -> list[list[Written] | None]:
        """Of every rank the files that it has written."""
        return [self._written]

    @control
    def sees(self, file: Path) -> None:
        """CheckpointError if a file of the driver isn't there for this rank."""
        check_seen(file, self.context.rank)

    @control
    def load(self, folder: Path, state: Mapping[str, Any], files: Sequence[Written]) -> None:
        """Go on from ``save`` of however many ranks; every rank takes what is now its own from all ``files``.

        CheckpointError: one is damaged, or rows are missing.
        """
        self.num_added, found = state["num_added"], 0
        for number, file in enumerate(files):
            check_file(folder.parent, file, content=number % self.context.mesh.size == self.context.rank)
            try:
                found += self._load(folder.parent / file.name)
            except (SafetensorError, ValueError, IndexError) as error:
                raise CheckpointError(f"{folder.parent / file.name}: can't be read ({error})") from error
        if found != len(self._held()):
            raise CheckpointError(f"{folder}: {found} of {len(self._held())} replayed rows are there")

    def _load(self, path: Path) -> int:
        """This rank's rows of a file; how many they are."""
        found = 0
        with safe_open(path, framework="np") as saved:
            numbers = saved.get_tensor("numbers").view(np.int64)[:, 0]
            for part in _parts(len(numbers), self._unit_bytes):
                mine, local = self._mine(numbers[part] % self.ring.capacity)
                found += len(mine)
                for name in self.rows if len(mine) else ():
                    _raw(self._of_units(name))[local] = saved.get_slice(name)[part][mine]
        return found

    def _held(self) -> Ints:
        """The numbers of the units here, by their place."""
        filled = min(self.num_added, self.ring.capacity)
        places = np.arange(filled)
        places = places[self.ring.rank(places) == self.context.rank]
        numbers: Ints = self.num_added - 1 - (self.num_added - 1 - places) % self.ring.capacity
        return numbers

    def _of_units(self, name: str) -> Array:
        """A ring with one entry for each unit."""
        rows = self.rows[name]
        return rows.reshape(-1, self.sequence, *rows.shape[1:]) if name in TIME else rows


def _pulled(batch: Batch, units: Cut, wanted: Ints, sequence: int) -> tuple[Batch, Cut]:
    """The rows of a batch that the ``wanted`` of its units are of, and these units in them."""
    if len(wanted) == len(units):
        return batch.load(), units
    rows = np.unique(units.rows[wanted])
    there = np.flatnonzero(np.isin(units.rows, rows))
    pulled = batch.rows(rows).load()
    return pulled, cut(pulled.ragged("response_mask"), sequence).take(np.searchsorted(there, wanted))


def _copy(target: Array, places: Ints, source: Array, positions: Ints) -> None:
    """``target[places] = source[positions]``, in slices where both go on one by one. Neither names a place twice, and
    places go round the ring at most once."""
    if not len(places):
        return
    if places[-1] - places[0] == positions[-1] - positions[0] == len(places) - 1:
        target[places[0] : places[-1] + 1] = source[positions[0] : positions[-1] + 1]
        return
    breaks = np.flatnonzero((places[1:] - places[:-1] != 1) | (positions[1:] - positions[:-1] != 1)) + 1
    if 4 * len(breaks) > len(places):
        target[places] = source[positions]
        return
    bounds = [0, *breaks.tolist(), len(places)]
    for start, stop in pairwise(bounds):
        to, of = int(places[start]), int(positions[start])
        target[to : to + stop - start] = source[of : of + stop - start]


def _check_room(folder: Path, needed: int) -> None:
    if not folder.is_dir():
        raise ResourceError(f"replay.spill = {str(folder)!r}: no such folder on {os.uname().nodename}; make it first")
    free = shutil.disk_usage(folder).free
    if needed > free:
        found = f"the rows take {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free there"
        raise ResourceError(f"replay.spill = {str(folder)!r}: {found}; lower replay.capacity or name another folder")


def _mapped(folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros in a file without a name, which is gone with the process. It has its room on the disk from the start, so that
    no write can find the disk full."""
    size = max(1, prod(shape) * dtype.itemsize)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _check_room(folder, size)
            raise ResourceError(f"replay.spill = {str(folder)!r}: the disk is full; lower replay.capacity") from error
        mapped = mmap.mmap(file.fileno(), size)
    mapped.madvise(mmap.MADV_RANDOM)  # rows are drawn here and there, so reading ahead would be for nothing
    return np.ndarray(shape, dtype, mapped)


def _raw(array: Array) -> NDArray[np.uint8]:
    """[n, bytes] the same memory."""
    width = prod(array.shape[1:])
    if not len(array):
        return np.zeros((0, width * array.itemsize), np.uint8)
    return array.reshape(-1, width).view(np.uint8)


def _parts(count: int, row_bytes: int) -> Iterator[slice]:
    """Slices of ``count`` rows that are of moderate size."""
    step = max(1, READ_BYTES // row_bytes)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
