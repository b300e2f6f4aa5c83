"""What ranks write of networks and optimizers, and read again on whatever mesh.

    <folder of the role>/0.safetensors     policy.decoder.layers.3.q.weight              the rows that rank 0 owns
                         1.safetensors     exp_avg/policy.decoder.layers.3.q.weight      of its optimizer
                         ...

Every tensor has its own name, q, k, v, gate and up too, and is whole in one file or has *pieces* in several: some rows or
columns, whose place the file's metadata tells. So a reader needs no list of who wrote what: it opens all files and copies
the ranges that it needs. No rank holds or sends the pieces of another one, except where ZeRO cuts through a parameter.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hybridflow.core.errors import CheckpointError, NonFiniteError
from hybridflow.core.files import Written, explain_full_disk
from hybridflow.core.tensor_file import kind_of, write_tensors
from hybridflow.models.policy import network_pieces
from hybridflow.parallel.shard import Piece
from hybridflow.workers.fsdp import FsdpNetwork
from hybridflow.workers.optimizer import Optimizer
from hybridflow.workers.parts import Lines

__all__ = ["FULL", "PieceReader", "PieceWriter", "check_seen", "kept", "restore"]

CUTS = "cuts"
FULL = "earlier checkpoints are untouched. Free some space or set checkpoint.keep lower, then go on with --resume"
Networks = Mapping[str, nn.Module]
Kept = tuple[str, Piece, Tensor]
"""the name in a checkpoint, where it belongs, and what is here"""


def check_seen(file: Path, rank: int) -> None:
    """CheckpointError if a file of the driver isn't there for this rank."""
    if not file.is_file():
        where = f"rank {rank}, on {socket.gethostname()}"
        raise CheckpointError(f"{file.parent}: {where}, doesn't see it; use a run_dir that all machines share")


def kept(
    networks: Networks, optimizers: Mapping[str, Optimizer], lines: Lines, fsdp: FsdpNetwork | None = None
) -> Iterator[Kept]:
    """What this rank is to write of ``networks`` and of the optimizers of those that are trained, one tensor after another.

    Every number has one owner among the ranks of a data-parallel block, and of equal blocks each writes its share. Ranks of
    a data-parallel line call this together. ``fsdp``: how the network is shared out over them; its weights are joined, one
    after another.
    """
    tables = {name: network_pieces(network) for name, network in networks.items()}
    turns = {name: spread(table, lines.dp_cp.size)[lines.dp_cp.index] for name, table in tables.items()}
    for name, network in networks.items():
        turn = _by_parameter(turns[name])
        for parameter, x in _named(network).items():
            slice_ = x.detach() if fsdp is None else fsdp.full({parameter: x})[parameter]
            own = (piece for piece in turn.get(parameter, ()) if piece.owned)
            yield from ((f"{name}.{piece.name}", piece, piece.of(slice_)) for piece in own)
    for name, optimizer in optimizers.items():
        pieces = _by_parameter(tables[name] if optimizer.sharded else turns[name])
        for key, parameter, state in optimizer.states():
            for piece in pieces.get(parameter, ()):
                if piece.owned and state.dim():
                    yield f"{key}/{name}.{piece.name}", piece, piece.of(state)
                elif piece.owned and piece.cut.start == 0:
                    yield f"{key}/{name}.{piece.name}", Piece.whole(parameter, (), True), state


def _named(network: nn.Module) -> dict[str, Tensor]:
    return dict((*network.named_parameters(), *network.named_buffers()))


def _by_parameter(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.parameter, []).append(piece)
    return found


def spread(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """``pieces`` in their order, in parts of about as many numbers each."""
    sizes = [torch.Size(piece.local_shape).numel() for piece in pieces]
    parts: list[list[Piece]] = [[] for _ in range(ranks)]
    middle, total = 0.0, max(1, sum(sizes))
    for piece, size in zip(pieces, sizes, strict=True):
        parts[min(ranks - 1, int((middle + size / 2) * ranks / total))].append(piece)
        middle += size
    return parts


class PieceWriter:
    """Writes pieces to one file, while the process goes on with other work."""

    def __init__(self) -> None:
        self._writing: Future[list[Written]] | None = None

    def start(self, path: Path, pieces: Iterable[Kept]) -> None:
        """Copy the pieces to the host's memory, and write them from there. The folder is made in one that must be there.

        Raises CheckpointError: it isn't; NonFiniteError: a tensor is NaN or infinite, and nothing is written.
        """
        self.done(wait=True)
        copies = [(name, piece, _finite(name, x.to("cpu", copy=True).contiguous())) for name, piece, x in pieces]
        try:
            path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent.parent}: not there on this machine; all machines must share it") from None
        pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing = pool.submit(_write, path, copies)
        pool.shutdown(wait=False)

    def forget(self) -> None:
        """What is being written is of no use any more, nor what became of it."""
        if self._writing is not None:
            futures.wait([self._writing])
        self._writing = None

    def done(self, wait: bool) -> list[Written] | None:
        """The files that were written, named from the checkpoint on; None while they are being written, unless told to
        ``wait``. An error of writing is raised here."""
        if self._writing is None:
            return []
        if not (wait or self._writing.done()):
            return None
        return self._writing.result()


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise NonFiniteError(f"{name} is NaN or infinite, so no checkpoint is made of it; lower optimizer.lr")
    return tensor


def _write(path: Path, copies: list[Kept]) -> list[Written]:
    """Consumes ``copies``."""
    if not copies:
        return []
    copies.sort(key=lambda entry: -entry[2].dtype.itemsize)
    kinds = {name: kind_of(tensor) for name, _, tensor in copies}
    assert len(kinds) == len(copies), "every name once"
    cuts = {name: [p.dim, p.cut.start, p.shape[p.dim]] for name, p, _ in copies if p.local_shape != p.shape}
    copies.reverse()
    with explain_full_disk(path.parents[1], FULL):
        written = write_tensors(path, kinds, (copies.pop()[2] for _ in kinds), {CUTS: json.dumps(cuts)})
    return [written._replace(name=f"{path.parent.name}/{path.name}")]


class _Place(NamedTuple):
    """What one of the files has of a tensor of ``shape``: all of it, or ``cut`` along ``dim``."""

    file: Any
    shape: tuple[int, ...]
    dim: int | None
    cut: range

    def along(self, dim: int) -> range:
        return self.cut if self.dim == dim else range(self.shape[dim])


class PieceReader:
    """The tensors in the files of a role, opened by ``with``. Raises CheckpointError: files can't be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, list[_Place]] = {}
        self._open = ExitStack()

    def __enter__(self) -> PieceReader:
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
                cuts = json.loads(file.metadata()[CUTS])
                for name in file.keys():  # noqa: SIM118 - not a dict
                    self._places.setdefault(name, []).append(_place(file, name, cuts.get(name)))
            except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{path}: can't be read ({type(error).__name__}: {error})") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._places.clear()

    def names(self) -> list[str]:
        return sorted(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def full(self, name: str) -> Tensor:
        """The whole tensor."""
        first = self._places[name][0]
        rows = range(first.shape[first.dim or 0] if first.shape else 1)
        return self.read(name, Piece(name, name, first.shape, first.dim or 0, rows, rows, True))

    def read(self, name: str, piece: Piece) -> Tensor:
        """What ``piece`` says of tensor ``name``, in memory of its own. CheckpointError: it isn't there, not all of it, or
        of another shape."""
        places = self._places.get(name, [])
        if not places:
            raise CheckpointError(f"{self.folder}: {name} is missing; resume with the model that the run was started with")
        if places[0].shape != piece.shape:
            found = f"is {list(places[0].shape)}, this run's is {list(piece.shape)}"
            raise CheckpointError(f"{self.folder}: {name} {found}; resume with the model that the run was started with")
        if not piece.shape:
            scalar: Tensor = places[0].file.get_tensor(name)
            return scalar.clone()
        dim, (at, end), parts = piece.dim, (piece.cut.start, piece.cut.stop), list[Tensor]()
        for place in sorted(places, key=lambda place: place.along(dim).start):
            there = place.along(dim)
            if there.start <= at < min(there.stop, end):
                rows = slice(at - there.start, min(there.stop, end) - there.start)
                parts.append(place.file.get_slice(name)[(slice(None),) * dim + (rows,)])
                at = min(there.stop, end)
        if at < end:
            raise CheckpointError(f"{self.folder}: row {at} of {name} is in none of the files")
        return torch.cat(parts, dim)


def _place(file: Any, name: str, cut: tuple[int, int, int] | None) -> _Place:
    """``cut``: dimension, first row, and rows of the whole tensor; None if it is whole."""
    shape = tuple(file.get_slice(name).get_shape())
    if cut is None:
        return _Place(file, shape, None, range(0))
    dim, start, size = cut
    return _Place(file, (*shape[:dim], size, *shape[dim + 1 :]), dim, range(start, start + shape[dim]))


def restore(
    reader: PieceReader,
    networks: Networks,
    optimizers: Mapping[str, Optimizer],
    steps: Mapping[str, int],
    fsdp: FsdpNetwork | None = None,
) -> None:
    """Give this rank's slices of all networks, and of the optimizers of those that are trained, what was saved of them.
    ``steps``: that each optimizer has taken. ``fsdp``: the network, where the rank has but its share of it."""
    tables = {name: network_pieces(network) for name, network in networks.items()}
    for name, network in networks.items():
        table = _by_parameter(tables[name])
        for parameter, x in _named(network).items():
            slice_ = x.detach() if fsdp is None else torch.empty(x.shape)
            for piece in table[parameter]:
                piece.of(slice_).copy_(reader.read(f"{name}.{piece.name}", piece))
            if fsdp is not None:
                fsdp.load(parameter, slice_)

    for name, optimizer in optimizers.items():
        optimizer.load(steps[name], partial(_kept_state, reader, name, _by_parameter(tables[name])))


def _kept_state(
    reader: PieceReader, network: str, pieces: Mapping[str, list[Piece]], key: str, parameter: str
) -> Tensor | None:
    """See ``Optimizer.load``."""
    own = pieces[parameter]
    names = [f"{network}.{piece.name}" if key == "weight" else f"{key}/{network}.{piece.name}" for piece in own]
    if names[0] not in reader:
        return None
    if key == "step":
        return reader.full(names[0])
    parts = [reader.read(name, piece) for name, piece in zip(names, own, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, own[0].dim)
