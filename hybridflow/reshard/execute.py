"""Takes a decoder from its training layout to its generation layout and back, on every rank of a mesh together.

    HybridWeights(decoder, lines)     parameters move into memory where generation slices are made around them
    generation()                      what the plan says is received straight into the generation slices
    training()                        what was received is dropped; training slices never moved

Who waits for whom: every rank goes through its moves in the one order of the plan and waits for a bucket when the one
after the next is due. So of all moves that aren't done, the first one has both its ranks at it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.core.errors import ContractError
from hybridflow.models.decoder import Decoder, Part
from hybridflow.parallel.mesh import ProcessMesh
from hybridflow.parallel.shard import cuts
from hybridflow.reshard.layout import slices, total
from hybridflow.reshard.memory import Arena, Memory, Reallocated, Slot
from hybridflow.reshard.plan import Account, Move, Plan, make_plan

__all__ = ["HybridWeights", "Transition", "exchange", "publish"]

BUCKET = 32 * 2**20
UNDER_WAY = 2  # buckets


@dataclass(frozen=True)
class Transition:
    """What a change of the layout took: seconds; bytes sent and received; the most bytes that the weights of this rank took
    until then, and those that it holds twice."""

    seconds: float
    sent: int
    received: int
    peak: int
    redundant: int


class HybridWeights:
    """The weights of ``decoder``, a rank's part of a model that trains, and of the part that it generates with.

    The decoder's parameters stay the objects that they are, with the same numbers, but their memory is another: build this
    before an optimizer that keeps views of them. Row-parallel weights are stored transposed. ``account``: what the plan
    says of this rank, in bytes.
    """

    plan: Plan
    account: Account
    transition: Transition
    """Of the last change of the layout."""

    def __init__(
        self,
        decoder: Decoder,
        lines: ProcessMesh,
        dtype: torch.dtype | None = None,
        memory: type[Arena] | type[Reallocated] | None = None,
    ) -> None:
        """Every rank of ``lines`` does this. dtype: of generation, by default that of the weights. memory: by default that
        of the device. ContractError: the decoder isn't what the mesh says that this rank trains."""
        weight, mesh, self.rank = decoder.anchor, lines.mesh.by_copies, lines.rank
        self.dtype = dtype or weight.dtype
        self.plan = make_plan(decoder.spec, mesh, itemsizes=(weight.dtype.itemsize, self.dtype.itemsize))
        self.account = self.plan.accounts[self.rank]
        self._training, self._generation = decoder, _generation_decoder(decoder, lines, self.plan)
        self.generation_pp = lines.generation_pp
        own, block = (_numbers(of) for of in (decoder, self._generation))
        expected = {name: total(piece.runs) for name, piece in slices(decoder.spec, self.plan.training[self.rank]).items()}
        if own != expected:
            raise ContractError(f"hybrid engine: the decoder holds {decoder.part}, which is not rank {self.rank} of {mesh}")
        shared = self.plan.shared(self.rank)
        slots = [Slot(name, own.get(name), block.get(name), shared.get(name)) for name in own | block]
        kind = memory or (Arena if weight.device.type == "cpu" else Reallocated)
        self.memory: Memory = kind(slots, (weight.dtype, self.dtype), weight.device)
        self._places = shared
        self._moves = [move for move in self.plan.moves(self.rank) if not self._in_place(move)]
        self._redundant = sum(n for name, n in own.items() if name not in shared) * weight.dtype.itemsize
        self._shapes = {name: parameter.shape for name, parameter in self._generation.named_parameters()}
        self._none = torch.empty(0, dtype=self.dtype, device=weight.device)
        self._settle()

    @property
    def generation_decoder(self) -> Decoder:
        """What ``generation`` returns, always the same object; without weights while training."""
        return self._generation

    @property
    def generates(self) -> bool:
        """Whether generation slices are there."""
        return self._generation.anchor.numel() > 0

    @torch.no_grad()
    def generation(self) -> Decoder:
        """The decoder that this rank generates with; every rank of the mesh calls this. It is of use until ``training``."""
        start, opened = time.perf_counter(), dict[str, Tensor]()

        def block(name: str) -> Tensor:
            if name not in opened:
                opened[name] = self.memory.open(name)
            return opened[name]

        def own(name: str) -> Tensor:
            if name in self._shapes:  # opening may move it
                block(name)
            return self.memory.own(name)

        sent, received = exchange(self._moves, self.rank, own, block, self.dtype)
        for name, shape in self._shapes.items():
            _assign(self._generation, name, _lying(block(name), shape, self._generation.shards[name].dim))
        self._point()
        self._finish(start, sent, received)
        return self._generation

    @torch.no_grad()
    def training(self) -> Decoder:
        """The decoder that this rank trains; the other one has no weights from now on."""
        start = time.perf_counter()
        self._empty()
        self.memory.close()
        self._point()
        self._finish(start, 0, 0)
        return self._training

    @torch.no_grad()
    def _settle(self) -> None:
        """Move the parameters to where they belong."""
        for name, parameter in self._training.named_parameters():
            own = self.memory.own(name)
            _lying(own, parameter.shape, self._training.shards[name].dim).copy_(parameter)
        self._empty()
        self._point()

    def _empty(self) -> None:
        """Without weights the generation decoder can't be taken for one that has them."""
        for name in self._shapes:
            _assign(self._generation, name, self._none)

    def _point(self) -> None:
        """Let the parameters be views of where their numbers are."""
        for name, parameter in self._training.named_parameters():
            own = _lying(self.memory.own(name), parameter.shape, self._training.shards[name].dim)
            if own.data_ptr() != parameter.data_ptr() or own.stride() != parameter.stride():
                parameter.data = own

    def _in_place(self, move: Move) -> bool:
        """Whether what is moved lies there already."""
        return move.source == move.target and self._places.get(move.parameter, -1) == move.here - move.there

    def _finish(self, start: float, sent: int, received: int) -> None:
        self.transition = Transition(time.perf_counter() - start, sent, received, self.memory.peak, self._redundant)


@torch.no_grad()
def publish(plan: Plan, rank: int, decoder: Decoder, dtype: torch.dtype) -> Transition:
    """Copy the weights of a model that trains into models on other devices, by a plan of "publish" that all ranks have.

    decoder: the part that this rank trains, or generates with, then with weights of ``dtype``. Row-parallel weights of the
    latter are stored transposed from the first time on, so that nothing is held twice.
    """
    start, parameters = time.perf_counter(), dict(decoder.named_parameters())

    def flat(name: str) -> Tensor:
        lying = parameters[name].detach() if decoder.shards[name].dim == 0 else parameters[name].detach().t()
        return lying.reshape(-1)

    if rank in plan.generation:
        for name, parameter in parameters.items():
            if decoder.shards[name].dim == 1 and not parameter.t().is_contiguous():
                parameter.data = parameter.data.t().contiguous().t()
    sent, received = exchange(plan.moves(rank), rank, flat, flat, dtype)
    account = next(account for account in plan.accounts if account.rank == rank)
    return Transition(time.perf_counter() - start, sent, received, account.peak.total, account.redundant.total)


def exchange(
    moves: Iterable[Move],
    rank: int,
    own: Callable[[str], Tensor],
    block: Callable[[str], Tensor],
    dtype: torch.dtype,
    bucket: int = BUCKET,
) -> tuple[int, int]:
    """Carry out the moves of ``rank``, of a plan that all ranks have, with ``dtype`` on the way; (bytes sent, received).

    ``own(name)`` and ``block(name)``: the flat tensors that are read, and written. Nothing is held twice, but that weights
    of another type are cast, bucket by bucket, before they are sent.
    """
    sent = received = 0
    under_way: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
    for operations in _buckets(moves, rank, own, block, dtype, bucket):
        sizes = {dist.isend: 0, dist.irecv: 0}
        for operation in operations:
            sizes[operation.op] += operation.tensor.nbytes
        sent, received = sent + sizes[dist.isend], received + sizes[dist.irecv]
        under_way.append((dist.batch_isend_irecv(operations), [operation.tensor for operation in operations]))
        if len(under_way) > UNDER_WAY:
            _wait(*under_way.popleft())
    while under_way:
        _wait(*under_way.popleft())
    return sent, received


def _buckets(
    moves: Iterable[Move],
    rank: int,
    own: Callable[[str], Tensor],
    block: Callable[[str], Tensor],
    dtype: torch.dtype,
    most: int,
) -> Iterator[list[dist.P2POp]]:
    """Sends and receives of about ``most`` bytes each; what stays on this rank is copied on the way."""
    operations, size = list[dist.P2POp](), 0
    for source, target, name, there, here, numbers in moves:
        if source == target:
            block(name)[here : here + numbers] = own(name)[there : there + numbers]
            continue
        if source == rank:
            piece = own(name)[there : there + numbers].to(dtype)
            operations.append(dist.P2POp(dist.isend, piece, target))
        else:
            piece = block(name)[here : here + numbers]
            operations.append(dist.P2POp(dist.irecv, piece, source))
        size += piece.nbytes
        if size >= most:
            yield operations
            operations, size = [], 0
    if operations:
        yield operations


def _wait(works: Iterable[dist.Work], _: list[Tensor]) -> None:
    for work in works:
        work.wait()


def _generation_decoder(decoder: Decoder, lines: ProcessMesh, plan: Plan) -> Decoder:
    """The part that this rank generates with, without memory."""
    place, spec = plan.generation[lines.rank], decoder.spec
    part = Part(
        layers=cuts(spec.num_layers, place.stages)[place.stage],
        first=place.stage == 0,
        last=place.stage == place.stages - 1,
        head=decoder.part.head,
        tp=lines.generation_tp,
        pieces=place.pieces,
    )
    with torch.device("meta"):
        made = Decoder(spec, part)
    return made.requires_grad_(False).eval()


def _numbers(decoder: Decoder) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in decoder.named_parameters()}


def _lying(flat: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """A view of this shape of numbers that lie one axis after the other, the one that is cut, ``dim``, first."""
    return flat.view(shape) if dim == 0 else flat.view(shape[::-1]).t()


def _assign(decoder: Decoder, name: str, tensor: Tensor) -> None:
    module, _, kind = name.rpartition(".")
    decoder.get_submodule(module).register_parameter(kind, nn.Parameter(tensor, requires_grad=False))
