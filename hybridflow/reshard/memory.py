"""Where training and generation slices of weights lie in memory, so that what both have is there once.

    Arena         on CPUs: every slice has its addresses for life. A training slice lies inside its generation slice, whose
                  other pages exist only while generating
    Reallocated   on other devices: a generation slice is allocated, the training slice copied into it and read there,
                  weight by weight; for training it is copied out again

Both hold flat tensors by the parameter's name.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from typing import IO, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from hybridflow.core.errors import ContractError, ResourceError

__all__ = ["Arena", "Memory", "Reallocated", "Slot"]

ALIGNED = 64  # bytes: whole registers


class Slot(NamedTuple):
    """A parameter on this rank: ``own`` numbers while training, ``block`` numbers while generating, None where it has none.
    ``place``: where in the block its own numbers begin, None if they are not a part of it."""

    name: str
    own: int | None
    block: int | None
    place: int | None


class Memory(Protocol):
    """``own`` is what a rank trains, ``open`` makes room for what it generates with, ``close`` frees that.

    ``peak``: the most bytes that weights took so far.
    """

    peak: int

    def own(self, name: str) -> Tensor: ...

    def open(self, name: str) -> Tensor: ...

    def close(self) -> None: ...


class Arena:
    """One private anonymous mapping. Pages of it that nobody has written to, or that were dropped, take no memory.

    It can't be resized as torch's own storages are: to free it for other roles there are ``put_away`` and ``take_back``.
    """

    def __init__(self, slots: Iterable[Slot], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device) -> None:
        """dtypes: of training and of generation."""
        own, block = (dtype.itemsize for dtype in dtypes)
        starts, blocks, kept, end = dict[str, int](), dict[str, int](), list[range](), 0
        slots = list(slots)
        for slot in slots:
            if slot.block is not None:
                blocks[slot.name] = end
                if slot.place is not None:
                    starts[slot.name] = end + slot.place * block
                end = _aligned(end + slot.block * block)
            if slot.own is not None:
                if slot.place is None:
                    starts[slot.name], end = end, _aligned(end + slot.own * own)
                kept.append(range(starts[slot.name], starts[slot.name] + slot.own * own))
        # Python's default would be a shared mapping, whose dropped pages the system keeps.
        self._memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._own = {slot.name: self._at(starts[slot.name], slot.own, dtypes[0]) for slot in slots if slot.own is not None}
        self._block = {
            slot.name: self._at(blocks[slot.name], slot.block, dtypes[1]) for slot in slots if slot.block is not None
        }
        self._kept, self._foreign = kept, _pages_between(kept, len(self._memory))
        self._open, self._file = False, cast(IO[bytes] | None, None)
        self._size = sum(x.nbytes for x in self._block.values())
        self._size += sum(self._own[slot.name].nbytes for slot in slots if slot.own is not None and slot.place is None)
        self.peak = sum(map(len, kept))

    def _at(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor whose storage is nothing but its numbers, so that saving it saves no more."""
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)

    def own(self, name: str) -> Tensor:
        return self._own[name]

    def open(self, name: str) -> Tensor:
        self._open, self.peak = True, self._size
        return self._block[name]

    def close(self) -> None:
        for pages in self._foreign:
            self._memory.madvise(mmap.MADV_DONTNEED, pages.start, len(pages))
        self._open = False

    def put_away(self) -> int:
        """Free the memory of training slices, which go into a file; the bytes that moved, 0 if they are away.

        Raises ContractError while generating, and ResourceError, with everything as it was, if the disk is full.
        """
        if self._open:
            raise ContractError("offload: weights that generate can't leave memory; let them train first")
        if self._file is not None:
            return 0
        self._file = self._written()
        self._memory.madvise(mmap.MADV_DONTNEED)
        return sum(map(len, self._kept))

    def take_back(self) -> int:
        """Fill the training slices again, bit for bit; the bytes that moved, 0 if they are here."""
        if self._file is None:
            return 0
        with self._file as file, memoryview(self._memory) as bytes_:
            for kept in self._kept:
                file.readinto(bytes_[kept.start : kept.stop])  # type: ignore[attr-defined]
        self._file = None
        return sum(map(len, self._kept))

    def _written(self) -> IO[bytes]:
        """In a file without a name, which is gone when the process is, however it ends."""
        file = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with memoryview(self._memory) as bytes_:
                for kept in self._kept:
                    file.write(bytes_[kept.start : kept.stop])
            file.seek(0)  # and writes what is left to be written
        except OSError as error:
            file.close()
            raise ResourceError(
                f"placement.offload: can't write weights to {tempfile.gettempdir()} ({error.strerror}); "
                "free space, set TMPDIR to a folder with room, or offload fewer roles"
            ) from error
        return file


class Reallocated:
    """Tensors of torch's own, one for each slice."""

    def __init__(self, slots: Iterable[Slot], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device) -> None:
        """dtypes: of training and of generation."""
        self._slots, self._dtype, self._device = {slot.name: slot for slot in slots}, dtypes[1], device
        numbers = {slot.name: slot.own for slot in self._slots.values() if slot.own is not None}
        self._own = {name: torch.empty(count, dtype=dtypes[0], device=device) for name, count in numbers.items()}
        self._block: dict[str, Tensor] = {}
        self._held = self.peak = sum(x.nbytes for x in self._own.values())

    def own(self, name: str) -> Tensor:
        return self._own[name]

    def open(self, name: str) -> Tensor:
        if name not in self._block:
            slot = self._slots[name]
            assert slot.block is not None, "what isn't generated with isn't opened"
            self._block[name] = self._new(slot.block)
            if slot.place is not None:
                own = self._own[name]
                self._own[name] = self._block[name][slot.place : slot.place + len(own)].copy_(own)
                self._held -= own.nbytes
        return self._block[name]

    def close(self) -> None:
        for name in [*self._block]:
            if self._slots[name].place is not None:
                own = self._own[name]
                self._own[name] = self._new(len(own)).copy_(own)
            self._held -= self._block.pop(name).nbytes

    def _new(self, numbers: int) -> Tensor:
        found = torch.empty(numbers, dtype=self._dtype, device=self._device)
        self._held += found.nbytes
        self.peak = max(self.peak, self._held)
        return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _pages_between(kept: Iterable[range], end: int) -> list[range]:
    """Whole pages that nothing ``kept`` touches."""
    bounds = [0, *(bound for run in sorted(kept, key=lambda run: run.start) for bound in (run.start, run.stop)), end]
    page = mmap.PAGESIZE
    gaps = (range(-(-start // page) * page, stop // page * page) for start, stop in list(pairwise(bounds))[::2])
    return [gap for gap in gaps if gap]
