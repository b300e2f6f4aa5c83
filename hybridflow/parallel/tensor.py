"""Tensor parallelism: what the ranks of a line exchange so that each computes with its slices of the weights alone.

                    tokens whole on every rank              sequence parallel: tokens cut over the line
    norm            all tokens                              own tokens
    ── enter        identity      (gradient: all-reduce)    all-gather       (gradient: reduce-scatter)
    qkv, gate_up    own output rows                         same
    out, down       own input columns                       same
    ── leave        all-reduce    (gradient: identity)      reduce-scatter   (gradient: all-gather)
    residual        all tokens                              own tokens

as in Megatron-LM (Shoeybi et al. 2019) with the sequence parallelism of Korthikanti et al. 2022. Torch's DTensor does the
same but doesn't let a parameter be a view into another buffer, as generation needs, except through private fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridflow.parallel.mesh import ALONE, Line
from hybridflow.parallel.shard import Shard, lengths

__all__ = ["Region", "VocabShard", "exchange", "gradient_norm", "in_order", "sum_shared", "take"]

Collective = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    """``forward`` on the tensor, ``backward`` on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.backward_collective = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_collective(grad), None, None


def exchange(x: Tensor, forward: Collective, backward: Collective) -> Tensor:
    """``forward(x)``, whose gradient is ``backward`` of the result's."""
    return _Exchange.apply(x, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(line: Line, x: Tensor) -> Tensor:
    return line.all_reduce(x.clone(memory_format=torch.contiguous_format))


@dataclass(frozen=True)
class Region:
    """Where a line of ranks computes with slices of weights, between ``enter`` and ``leave``.

    N is the number of tokens; with ``sequence`` parallelism rank i keeps n of them outside of the region, those of part i
    of ``cuts(N, size)``; else n = N. Without gradients ``leave`` may sum in place.
    """

    line: Line = ALONE
    sequence: bool = False

    def enter(self, x: Tensor, total: int) -> Tensor:
        """x [n, ...], of N = ``total`` tokens -> [N, ...]; each rank contributes a summand to the gradient."""
        if self.line.size == 1 or not (self.sequence or torch.is_grad_enabled()):
            return x
        if not self.sequence:
            return exchange(x, _same, partial(_sum, self.line))
        sizes = lengths(total, self.line.size)
        return exchange(x, partial(self.line.all_gather, sizes=sizes), partial(self.line.reduce_scatter, sizes=sizes))

    def leave(self, x: Tensor) -> Tensor:
        """x [N, ...], of which each rank has a summand -> the sum [n, ...]."""
        if self.line.size == 1:
            return x
        if not self.sequence:
            if not torch.is_grad_enabled():
                return self.line.all_reduce(x)
            return exchange(x, partial(_sum, self.line), _same)
        sizes = lengths(len(x), self.line.size)
        return exchange(x, partial(self.line.reduce_scatter, sizes=sizes), partial(self.line.all_gather, sizes=sizes))

    def whole(self, x: Tensor, total: int) -> Tensor:
        """x [n, ...] -> [N, ...], to be used in the same way on every rank: each has the full gradient."""
        if self.line.size == 1 or not self.sequence:
            return x
        sizes = lengths(total, self.line.size)
        own = slice(sum(sizes[: self.line.index]), sum(sizes[: self.line.index + 1]))
        return exchange(x, partial(self.line.all_gather, sizes=sizes), lambda grad: grad[own])

    def own(self, x: Tensor) -> Tensor:
        """x [N, ...] -> the tokens of this rank [n, ...], without communication: only this rank's use counts."""
        if self.line.size == 1 or not self.sequence:
            return x
        return torch.split(x, lengths(len(x), self.line.size))[self.line.index]


@dataclass(frozen=True)
class VocabShard:
    """Which rows a rank holds of a matrix with one for each of ``total`` tokens: those of its part of ``cuts``."""

    line: Line
    total: int

    @property
    def first(self) -> int:
        """Where they begin."""
        return self.total * self.line.index // self.line.size

    @property
    def sizes(self) -> list[int]:
        """How many each rank has."""
        return lengths(self.total, self.line.size)

    def local(self, tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """tokens [N] -> (their rows here, 0 for a token of another rank; whether they are here), with ``rows`` here."""
        places = tokens - self.first
        here = (places >= 0) & (places < rows)
        return places.where(here, 0), here

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """tokens [N], weight [rows, D] -> [N, D], zero for tokens of other ranks."""
        places, here = self.local(tokens, len(weight))
        return F.embedding(places, weight).where(here[:, None], 0)


# ------------------------------------------------------------------------------------- full parameters and their gradients


def in_order(x: Tensor, like: Tensor) -> Tensor:
    """A view of ``x`` with its axes as those of ``like`` lie in memory: transposed if ``like`` is stored transposed."""
    return x if like.is_contiguous() else x.t()


def take(full: Tensor, shard: Shard) -> Tensor:
    """The slice of a full parameter."""
    if shard.whole:
        return full
    return torch.cat([full.narrow(shard.dim, cut.start, len(cut)) for cut in shard.ranges], dim=shard.dim)


@torch.no_grad()
def sum_shared(line: Line, gradients: Mapping[str, Tensor], shards: Mapping[str, Shard], over: Line = ALONE) -> None:
    """Sum, in place, the gradients of what several ranks hold and each has but a share of: once, after the last backward.

    These are norms, biases and key-value heads (see ``Shard.summed``); all in one all-reduce. The names are those of
    ``shards``, the same on every rank; parameters without a gradient are left out. ``over``: a line whose ranks hold each
    a piece of a rank's slices, of which ``shards`` tell; they all call this.
    """
    targets = [(x, shards[name]) for name, x in sorted(gradients.items()) if shards[name].summed]
    if line.size == 1 or not targets:
        return
    sizes = [len(shard.summed) * x.shape[1:].numel() for x, shard in targets]
    dtype = torch.promote_types(targets[0][0].dtype, torch.float32)
    flat = torch.zeros(sum(sizes), dtype=dtype, device=targets[0][0].device)
    pairs = []
    for (x, shard), buffer in zip(targets, torch.split(flat, sizes), strict=True):
        rows = buffer.view(len(shard.summed), *x.shape[1:])
        for cut, place, _ in shard.places:
            if cut.start in shard.summed:
                start = cut.start - shard.summed.start
                pairs.append((x[place.start : place.stop], rows[start : start + len(cut)]))
    for gradient, row in pairs:
        row.copy_(gradient)
    for each in (
        line,
        over,
    ):  # no two ranks of ``over`` have the same numbers, but those of ``line`` may lie with any of them
        each.all_reduce(flat)
    for gradient, row in pairs:
        gradient.copy_(row)


@torch.no_grad()
def gradient_norm(gradients: Mapping[str, Tensor], shards: Mapping[str, Shard], lines: Sequence[Line]) -> Tensor:
    """The 2-norm, fp64, of the gradient of the full model, whose parameters are cut over the ``lines``.

    Every number counts once, at its owner. Gradients must have been summed before, see ``sum_shared``.
    """
    owned = [piece for name, x in gradients.items() for piece in owned_pieces(x, shards[name])]
    squares = nn.utils.get_total_norm(owned).double().square()
    for line in lines:
        line.all_reduce(squares)
    return squares.sqrt()


def owned_pieces(x: Tensor, shard: Shard) -> list[Tensor]:
    """Views of what this rank owns of its slice."""
    if all(shard.owned):
        return [x]
    return [x.narrow(shard.dim, place.start, len(place)) for _, place, own in shard.places if own]
