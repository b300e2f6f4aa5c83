"""ZeRO-1 (Rajbhandari et al. 2020): the ranks that hold the same parameters share optimizer states and fp32 masters out.

The trained parameters that a rank holds, one behind the other, are a row of numbers. Each rank of the line owns an equal
part of it, whichever parameters the cuts go through, and AdamW moves what it owns alone:

    gradients of this block's rows   [ embed | qkv | norm | ... ]   summed over tp and pp where those share parameters
    reduce-scatter                   [ rank 0 | rank 1 | rank 2 ]   each has the sums of its own part, in fp32
    norm, AdamW                      own part: masters, both moments
    all-gather of the weights        [ embed | qkv | norm | ... ]   in their own dtype

AdamW works number by number, so every step is that of the optimizer that isn't sharded. A rank holds 1/size of 8 bytes for
each weight (12 with a master), and sends (size - 1)/size of the gradients and of the weights. Where a line is but some of
the ranks with the same parameters, each then sums its own part over the other lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridflow.parallel.shard import cuts, run_of, whole
from hybridflow.parallel.tensor import gradient_norm, in_order
from hybridflow.workers.optimizer import MOMENTS, Optimizer, OptimizerConfig, sum_in_fp32
from hybridflow.workers.parts import Cut, Lines

__all__ = ["ShardMode", "ShardedOptimizer", "sharded_bytes", "share_out"]

ShardMode = Literal["none", "zero1", "fsdp"]

# A CPU rounds the last numbers of a tensor, which fill no register, in another way. With cuts at whole registers (64 bytes)
# they stay the same ones, and so do all steps, bit for bit.
ALIGNED = 16

Share = dict[str, range]
"""Which numbers a rank owns, row by row, of some parameters."""


def share_out(sizes: Mapping[str, int], ranks: int) -> list[Share]:
    """The share of each rank in parameters of so many numbers: an equal part of all of them, in their order, but that
    within a parameter cuts are at multiples of ``ALIGNED``."""
    shares: list[Share] = [{} for _ in range(ranks)]
    for share, part in zip(shares, cuts(sum(sizes.values()), ranks), strict=True):
        start = 0
        for name, size in sizes.items():
            if run := range(_cut(part.start - start, size), _cut(part.stop - start, size)):
                share[name] = run
            start += size
    return shares


def _cut(place: int, size: int) -> int:
    return size if place >= size else max(place, 0) // ALIGNED * ALIGNED


def sharded_bytes(module: nn.Module, ranks: int) -> int:
    """The most that one of the ranks holds of the optimizer of the trained parameters of ``module``: see
    ``training_bytes``."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    each = {name: 8 if parameter.dtype == torch.float32 else 12 for name, parameter in trained.items()}
    shares = share_out({name: parameter.numel() for name, parameter in trained.items()}, ranks)
    return max(sum(each[name] * len(run) for name, run in share.items()) for share in shares)


@dataclass
class _Sum:
    """Where the gradients of all microbatches of a weight that isn't fp32 add up."""

    grad: Tensor | None = None


class ShardedOptimizer(Optimizer):
    """An ``Optimizer`` of which every rank of ``lines.shard`` holds a share. All of them, and of ``lines.replicate``, call
    its methods together.

    ``masters`` are the pieces [n] of parameters that this rank owns: views of fp32 weights, and copies of others.
    """

    sharded = True

    def __init__(self, module: nn.Module, config: OptimizerConfig, total_steps: int, cut: Cut | None, lines: Lines) -> None:
        self.lines, self._anchor = lines, next(module.parameters())
        super().__init__(module, config, total_steps, cut)
        self._owned = {
            name: run_of(whole(self.parameters[name].shape) if cut is None else cut.shards[name], run)
            for name, run in self.share.items()
        }

    def _make_masters(self) -> dict[str, Tensor]:
        self.shares = share_out(
            {name: parameter.numel() for name, parameter in self.parameters.items()}, self.lines.shard.size
        )
        self.share = self.shares[self.lines.shard.index]
        self._sums: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            self._sums[name] = parameter
            if parameter.dtype != torch.float32:
                self._sums[name] = _Sum()
                sum_in_fp32(parameter, self._sums[name])
        return {name: self._weights(name).float() for name in self.share}

    def _weights(self, name: str) -> Tensor:
        """The piece of a parameter that this rank owns, in place."""
        return _piece(self._row(name, self.parameters[name].detach()), self.share[name])

    def _row(self, name: str, x: Tensor) -> Tensor:
        """The numbers of a tensor of the parameter's shape in the order in which the parameter has them in memory."""
        return in_order(x, self.parameters[name]).reshape(-1)

    def zero_grad(self) -> None:
        super().zero_grad()
        for holder in self._sums.values():
            holder.grad = None

    def reduce_gradients(self, over_ranks: Callable[[Tensor], Tensor] | None) -> None:
        """Give the masters the gradients of the whole minibatch, in one reduce-scatter and, where several ranks have
        the same share, one sum; and drop those of the parameters.

        Sums over tp and pp come before, as there the same parameters lie in other ranks' shares. The part of each rank
        begins with whether its pieces have a gradient at all; see ``sum_gradients``.
        """
        self.sum_parts()
        flat = torch.cat([x for share in self.shares for x in self._summands(share)])
        self.zero_grad()
        sums = self.lines.shard.reduce_scatter(flat, [len(share) + sum(map(len, share.values())) for share in self.shares])
        sums = self.lines.replicate.all_reduce(sums)
        there, *pieces = torch.split(sums, [len(self.share), *map(len, self.share.values())])
        for master, piece, count in zip(self.masters.values(), pieces, there.tolist(), strict=True):
            master.grad = piece if count else None

    def _summands(self, share: Share) -> list[Tensor]:
        """What this rank adds to the sums of the rank with this share."""
        gradients = self._gradients()
        there = torch.tensor([float(name in gradients) for name in share], device=self._anchor.device)
        none = there.new_zeros(1)
        return [there] + [
            _piece(self._row(name, gradients[name]), run) if name in gradients else none.expand(len(run))
            for name, run in share.items()
        ]

    def _gradients(self) -> dict[str, Tensor]:
        """Of this rank's block, before they are reduced."""
        return {name: holder.grad for name, holder in self._sums.items() if holder.grad is not None}

    def clip(self) -> float:
        gradients = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        lines = self.lines
        norm = float(gradient_norm(gradients, self._owned, (lines.shard, lines.tp, lines.pp)))
        self._scale_down(gradients, norm)
        return norm

    def _round(self) -> None:
        with torch.no_grad():
            for name, master in self._copies().items():
                self._weights(name).copy_(master)
            for dtype in sorted({parameter.dtype for parameter in self.parameters.values()}, key=str):
                names = [name for name, parameter in self.parameters.items() if parameter.dtype == dtype]
                own = {name: self._weights(name) for name in self.share}
                for name, full in self._joined(own, names, dtype).items():
                    self.parameters[name].copy_(full)

    def _joined(self, pieces: Mapping[str, Tensor], names: Collection[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """Whole tensors of the parameters ``names``, of the ``pieces`` that each rank owns of them."""
        shares = [{name: run for name, run in share.items() if name in names} for share in self.shares]
        like = {name: in_order(p, p) for name, p in self.parameters.items() if name in names}
        empty = self._anchor.new_empty(0, dtype=dtype)
        own = torch.cat([empty, *(pieces[name] for name in shares[self.lines.shard.index])])
        row = self.lines.shard.all_gather(own, [sum(map(len, share.values())) for share in shares])
        parts = torch.split(row, [x.numel() for x in like.values()])
        return {
            name: in_order(part.view(x.shape), self.parameters[name])
            for (name, x), part in zip(like.items(), parts, strict=True)
        }

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """As an ``Optimizer`` does, but each parameter on one rank alone: the first one that owns a piece of it. What has
        several owners is joined, one tensor after another."""
        mine: dict[str, dict[str, Tensor]] = {}
        for key, name, tensor in super().states():
            mine.setdefault(name, {})[key] = tensor
        turn, turns = self.lines.replicate.index, self.lines.replicate.size
        for name, parameter in list(self.parameters.items())[turn::turns]:
            owners = [rank for rank, share in enumerate(self.shares) if name in share]
            own, here = mine.get(name, {}), owners[0] == self.lines.shard.index
            if here and "step" in own:
                yield "step", name, own["step"]
            for key in (*MOMENTS, *(() if parameter.dtype == torch.float32 else ("master",))):
                whole = own.get(key) if len(owners) == 1 else self._whole(name, own.get(key))
                if here and key in own and whole is not None:
                    yield key, name, in_order(whole.view(in_order(parameter, parameter).shape), parameter)

    def _whole(self, name: str, piece: Tensor | None) -> Tensor:
        """[n] all numbers of a parameter, of the pieces that several ranks own; zeros where there is none."""
        sizes = [len(share.get(name, range(0))) for share in self.shares]
        empty = self._anchor.new_zeros(sizes[self.lines.shard.index], dtype=torch.float32)
        return self.lines.shard.all_gather(empty if piece is None else piece, sizes)

    def _kept(self, name: str, tensor: Tensor | None) -> Tensor:
        return _piece(self._row(name, super()._kept(name, tensor)), self.share[name]).clone()


def _piece(row: Tensor, run: range) -> Tensor:
    return row[run.start : run.stop]
