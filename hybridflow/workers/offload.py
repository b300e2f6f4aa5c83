"""Tensors that leave memory while other roles work, and come back to where they were.

A tensor's memory belongs to its *storage*, which parameters, their views, the optimizer and the rollout engine refer to.
Only the storage is emptied and filled again, so none of them notices:

    put_away    storage ──bytes──> pinned host memory (from a GPU) or a file (from a CPU);  storage.resize_(0)
    take_back   storage.resize_(as it was);  storage <──bytes──
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor

from hybridflow.core.errors import ContractError, ResourceError
from hybridflow.core.roles import MemoryPart
from hybridflow.reshard.memory import Arena

__all__ = ["Shelf", "Shelved"]

USE_OPTIMIZER = ("update", "save", "load")


class Shelf:
    """A set of tensors, which ``tensors`` lists whenever they are put away. Tied ones, of one storage, move once.

    Memory that others know of can't be freed (a ContractError): ``Tensor.numpy`` was called on it, or it is that of a file
    read in place. Arrays of ``np.from_dlpack`` are not to be read once the tensors have been away.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        self._file: IO[bytes] | None = None

    def put_away(self) -> int:
        """Free the tensors' memory; the bytes that moved, 0 if they are away. ResourceError, with everything as it was, if
        the disk is full."""
        if self._away:
            return 0
        found = (tensor.untyped_storage() for tensor in self._tensors())
        storages = list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())
        if not all(storage.resizable() for storage in storages):
            raise ContractError("offload: a tensor doesn't own its memory; copy what numpy or a file knows of")
        hosts = [storage for storage in storages if storage.device.type == "cpu"]
        self._file = _written(hosts) if hosts else None
        self._away = [(storage, storage.nbytes(), _pinned(storage)) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        return self._num_bytes

    def take_back(self) -> int:
        """Fill the tensors' memory again, bit for bit; the bytes that moved, 0 if they are here."""
        for storage, size, copy in self._away:
            storage.resize_(size)
            if copy is not None:
                _bytes(storage).copy_(copy)
            else:
                cast(IO[bytes], self._file).readinto(_view(storage))  # type: ignore[attr-defined]
        if self._file is not None:
            self._file.close()
        moved, self._away, self._file = self._num_bytes, [], None
        return moved

    @property
    def _num_bytes(self) -> int:
        return sum(size for _, size, _ in self._away)


class Shelved:
    """A worker with ``shelves``: see ``Offloadable``, which it is."""

    shelves: Mapping[MemoryPart, Shelf | Arena]

    def offload(self, keep: Collection[MemoryPart] = ()) -> int:
        """Put away all parts but those to ``keep``; the bytes that moved."""
        return sum(shelf.put_away() for part, shelf in self.shelves.items() if part not in keep)

    def onload(self, method: str) -> int:
        """Take back what ``method`` works on: weights, and for some methods the optimizer too; the bytes that moved."""
        parts = self.shelves.keys() if method in USE_OPTIMIZER else {"weights"}
        return sum(shelf.take_back() for part, shelf in self.shelves.items() if part in parts)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as uint8, in place."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage) -> memoryview:
    """All of a CPU's storage, in place."""
    return np.from_dlpack(_bytes(storage)).data


def _pinned(storage: torch.UntypedStorage) -> Tensor | None:
    """The bytes of a GPU's storage on the host."""
    if storage.device.type == "cpu":
        return None
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).copy_(_bytes(storage))


def _written(storages: Iterable[torch.UntypedStorage]) -> IO[bytes]:
    """The bytes of these storages in a file without a name, which is gone when the process is, however it ends."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        for storage in storages:
            file.write(_view(storage))
        file.seek(0)  # and writes what is left to be written
    except OSError as error:
        file.close()
        where = tempfile.gettempdir()
        raise ResourceError(
            f"placement.offload: can't write weights and optimizer states to {where} ({error.strerror}); "
            "free space, set TMPDIR to a folder with room, or offload fewer roles"
        ) from error
    return file
