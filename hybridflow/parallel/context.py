"""Context parallelism: every rank of a line has some tokens of every sequence, and computes with those alone.

    a sequence in 2 size parts   [ 0 | 1 | 2 | 3 ]     rank c of 2 has parts c and 3 - c: as many tokens, and, since later
    held by                        0   1   1   0       tokens attend to more, as much attention as every other rank

Only attention needs the tokens of other ranks. Two ways to bring them together, of which the one that sends less is taken:

    gather      keys and values of all tokens to every rank, which attends from its own tokens (Llama 3, Grattafiori et al.
                2024, section 3.3.2). Gradients go back in a reduce-scatter.
    exchange    queries, keys and values of all tokens, but of some heads, to every rank; attended tokens go back the same
                way (Ulysses, Jacobs et al. 2023). Gradients likewise.

What comes of the tokens, numbers a step, is brought together again (``whole``), so that a loss sees whole sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import deal_heads
from hybridflow.parallel.tensor import exchange

__all__ = ["Dealt", "HeadExchange", "gathering_sends_less", "holders", "num_own", "parts_of_tokens", "positions_of"]

Index = NDArray[np.int64]


def positions_of(lengths: Index) -> Index:
    """[N]: place of every packed token in its sequence, of sequences of ``lengths`` [B]."""
    places: Index = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return places


def parts_of_tokens(lengths: Index, parts: int) -> Index:
    """[N]: in which part of its sequence each packed token is, of sequences of ``lengths`` [B]; part i of a sequence of n
    tokens begins at i n // parts."""
    part: Index = ((positions_of(lengths) + 1) * parts - 1) // np.repeat(lengths, lengths)
    return part


def holders(lengths: Index, ranks: int) -> Index:
    """[N]: the rank that has each packed token."""
    part = parts_of_tokens(lengths, 2 * ranks)
    return np.minimum(part, 2 * ranks - 1 - part)


def num_own(lengths: Index, line: Line) -> int:
    """n, how many tokens of sequences of ``lengths`` [B] this rank has."""
    return int(lengths.sum() if line.size == 1 else (holders(lengths, line.size) == line.index).sum())


def gathering_sends_less(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether ``gather`` sends fewer bytes than ``exchange``, in units of n (ranks - 1) numbers of a head, n own tokens:
    2 kv_heads against (2 heads + 2 copies) / ranks, where each rank needs a key-value head."""
    return ranks > heads or kv_heads * ranks < heads + max(kv_heads, ranks)


class Dealt:
    """Things on one axis, such as packed tokens, thing i at rank ``holders[i]`` of a line. A rank keeps its own in their
    order. N is the number of all things, n that of this rank's."""

    def __init__(self, holders: Index, line: Line) -> None:
        self.line, self.holders = line, holders
        self.sizes: list[int] = np.bincount(holders, minlength=line.size).tolist()
        self.own: Index = np.flatnonzero(holders == line.index)

    @cached_property
    def order(self) -> Tensor:
        """[N]: the things rank by rank, as they come together."""
        return torch.from_numpy(np.argsort(self.holders, kind="stable"))

    @cached_property
    def places(self) -> Tensor:
        """[N]: where in ``order`` each thing is."""
        return torch.argsort(self.order)

    def take(self, x: Tensor) -> Tensor:
        """x [N, ...] -> this rank's [n, ...]"""
        return x if self.line.size == 1 else x[torch.from_numpy(self.own).to(x.device)]

    def gather(self, x: Tensor) -> Tensor:
        """x [n, ...] -> [N, ...] in the order of ranks (see ``order``); each rank contributes a summand to the gradient."""
        forward, backward = self.line.all_gather, self.line.reduce_scatter
        return exchange(x, partial(forward, sizes=self.sizes), partial(backward, sizes=self.sizes))

    def whole(self, x: Tensor) -> Tensor:
        """x [n, ...] -> [N, ...], to be used in the same way on every rank: each has the full gradient."""
        if self.line.size == 1:
            return x
        start = sum(self.sizes[: self.line.index])
        own = slice(start, start + self.sizes[self.line.index])
        gathered = exchange(x, partial(self.line.all_gather, sizes=self.sizes), lambda grad: grad[own])
        return gathered[self.places.to(x.device)]


class HeadExchange:
    """Tokens against heads, for ``heads`` query and ``kv_heads`` key-value heads of what is ``dealt``; heads are cut as
    tensor parallelism cuts them."""

    def __init__(self, dealt: Dealt, heads: int, kv_heads: int) -> None:
        self.dealt, self.line = dealt, dealt.line
        self.heads = [(q, kv) for q, kv, _ in deal_heads(heads, kv_heads, dealt.line.size)]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q [n, H, E], k, v [n, K, E] -> q [N, h, E], k, v [N, k, E] of the heads of this rank, in the order of ranks."""
        pieces = [x[:, cut.start : cut.stop] for qs, kvs in self.heads for x, cut in ((q, qs), (k, kvs), (v, kvs))]
        counts = [len(qs) + 2 * len(kvs) for qs, kvs in self.heads]
        x = torch.cat(pieces, dim=1)
        qs, kvs = self.heads[self.line.index]
        out = exchange(x, partial(self._apart, counts), partial(self._together, counts))
        return list(out.split_with_sizes([len(qs), len(kvs), len(kvs)], dim=1))

    def to_tokens(self, x: Tensor) -> Tensor:
        """x [N, h, E] of the query heads of this rank, in the order of ranks -> [n, H, E]."""
        counts = [len(qs) for qs, _ in self.heads]
        return exchange(x, partial(self._together, counts), partial(self._apart, counts))

    def _apart(self, counts: Sequence[int], x: Tensor) -> Tensor:
        """[n, sum(counts), E] -> [N, counts[index], E]"""
        out = x.new_empty(sum(self.dealt.sizes), counts[self.line.index], x.shape[2])
        sent = [part.contiguous() for part in torch.split(x, [*counts], dim=1)]
        self.line.all_to_all(sent, torch.split(out, self.dealt.sizes))
        return out

    def _together(self, counts: Sequence[int], x: Tensor) -> Tensor:
        """[N, counts[index], E] -> [n, sum(counts), E]"""
        received = [x.new_empty(len(self.dealt.own), count, x.shape[2]) for count in counts]
        self.line.all_to_all(torch.split(x.contiguous(), self.dealt.sizes), received)
        return torch.cat(received, dim=1)
