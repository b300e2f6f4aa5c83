"""Process groups along the axes of a mesh, and the collectives of one such line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.core.placement import Mesh

__all__ = ["ALONE", "Line", "ProcessMesh"]


@dataclass(frozen=True)
class Line:
    """The ranks of a mesh that differ in one axis, or in two: this is number ``index`` of ``size``.

    A line of one communicates nothing and needs no ``group``. Every rank of the line makes the same calls in the same
    order. gloo mixes up tensors that don't lie row by row, so all methods take care of that.
    ``traffic``: bytes that this rank has sent, by method; a ring is assumed for all_reduce.
    """

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    traffic: Counter[str] = field(default_factory=Counter, compare=False)

    def all_reduce(self, x: Tensor) -> Tensor:
        """``x``, in place, summed over the line."""
        if self.size > 1:
            dense = x.contiguous()
            self.traffic["all_reduce"] += 2 * x.nbytes * (self.size - 1) // self.size
            dist.all_reduce(dense, group=self.group)
            if dense is not x:
                x.copy_(dense)
        return x

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.index] = number
        return int(self.all_reduce(numbers).max())

    def all_gather(self, x: Tensor, sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
        """[sum(sizes), ...]: the tensors of all ranks, [sizes[i], ...], one behind the other; in ``out`` if it is given.

        Point to point, since gloo gathers equal parts only, and through a second copy of all of them.
        """
        if self.size == 1:
            return x
        out = x.new_empty(sum(sizes), *x.shape[1:]) if out is None else out
        parts = torch.split(out, [*sizes])
        parts[self.index].copy_(x)
        self._exchange("all_gather", [parts[self.index]] * self.size, parts)
        return out

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [sum(sizes), ...] -> [sizes[index], ...]: the rows of this rank, summed over the line in the order of ranks."""
        if self.size == 1:
            return x
        sent = torch.split(x.contiguous(), [*sizes])
        received = x.new_empty(self.size, *sent[self.index].shape)
        received[self.index].copy_(sent[self.index])
        self._exchange("reduce_scatter", sent, received.unbind())
        return received.sum(0)

    def send(self, x: Tensor, peer: int) -> None:
        """To rank ``peer`` of the line, which calls ``receive``."""
        self.traffic["send"] += x.nbytes
        dist.send(x.contiguous(), group=self.group, group_dst=peer)

    def receive(self, x: Tensor, peer: int) -> Tensor:
        """``x``, which lies row by row, filled by what rank ``peer`` sends."""
        dist.recv(x, group=self.group, group_src=peer)
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """``x``, which lies row by row, in place: that of rank ``source`` on all ranks."""
        if self.size > 1:
            self.traffic["broadcast"] += x.nbytes * (self.index == source)
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send ``sent[i]`` to rank i, and fill ``received[i]`` by what rank i sends here. All lie row by row."""
        received[self.index].copy_(sent[self.index])
        self._exchange("all_to_all", sent, received)

    def add(self, x: Tensor, peer: int) -> Tensor:
        """``x``, in place, plus that of rank ``peer`` of the line, which calls this with our index."""
        if not x.numel():
            return x
        theirs = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.traffic["add"] += x.nbytes
        self._run([self._to(peer, x.contiguous()), self._from(peer, theirs)])
        return x.add_(theirs)

    def _exchange(self, method: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send sent[i] to rank i, and fill received[i] by what it sends here; this rank's own parts stay."""
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        self.traffic[method] += sum(sent[peer].nbytes for peer in others)
        sends = [self._to(peer, sent[peer]) for peer in others if sent[peer].numel()]
        self._run(sends + [self._from(peer, received[peer]) for peer in reversed(others) if received[peer].numel()])

    def _to(self, peer: int, x: Tensor) -> dist.P2POp:
        return dist.P2POp(dist.isend, x, group=self.group, group_peer=peer)

    def _from(self, peer: int, x: Tensor) -> dist.P2POp:
        return dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer)

    def _run(self, operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


ALONE = Line()


class ProcessMesh:
    """The lines of ``rank`` along data, context, pipeline and tensor parallelism, and along the first two together: the
    ranks of ``dp_cp`` hold the same parameters, of which each sees other tokens. Those that share them out, if any do, are
    a line ``shard``, part of ``dp_cp``; ranks that then hold the same share are a line ``replicate``. And the lines along
    the latter two axes while the mesh generates.

    Every process of the world makes one, in the same order and with the same ``mesh``, as torch demands for groups; for a
    process outside of the mesh all lines are of one. ``groups``: those made before, by their ranks; new ones are added.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        timeout: timedelta,
        groups: dict[tuple[int, ...], dist.ProcessGroup] | None = None,
    ) -> None:
        self.mesh, self.rank, self._timeout = mesh, rank, timeout
        self._groups = {} if groups is None else groups
        self.dp, self.cp, self.pp, self.tp = (self._line(axis) for axis in "dcpt")
        self.dp_cp = self._line("dc") if mesh.cp > 1 else self.dp
        self.shard, self.replicate = self.dp_cp, ALONE
        if mesh.sharing < mesh.copies:
            self.shard = self._among(lambda rank: (mesh.copy(rank) // mesh.sharing, *mesh.coordinates(rank)[1:]))
            self.replicate = self._among(lambda rank: (mesh.copy(rank) % mesh.sharing, *mesh.coordinates(rank)[1:]))
        self.generation_tp = self._among(lambda rank: mesh.replica(rank)[:2])
        self.generation_pp = self._among(lambda rank: mesh.replica(rank)[::2])

    def _line(self, axes: str) -> Line:
        """Of ranks that differ in these coordinates alone."""

        def others(rank: int) -> tuple[int, ...]:
            d, p, t = self.mesh.coordinates(rank)
            place = {"d": d, "c": self.mesh.context(rank), "p": p, "t": t}
            return tuple(number for axis, number in place.items() if axis not in axes)

        return self._among(others)

    def _among(self, key: Callable[[int], tuple[int, ...]]) -> Line:
        """Of the ranks of the mesh that have the same key as this one."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.size):
            lines.setdefault(key(rank), []).append(rank)
        mine = ALONE
        for ranks in lines.values():
            if len(ranks) == 1:
                continue
            if (members := tuple(ranks)) not in self._groups:
                self._groups[members] = self._group(ranks)
            if self.rank in ranks:
                mine = Line(len(ranks), ranks.index(self.rank), self._groups[members])
        return mine

    def _group(self, ranks: list[int]) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None, "torch.distributed has started"
        return world if len(ranks) == world.size() else dist.new_group(ranks, self._timeout)
