"""Attention of tokens that context parallelism has cut over a line of ranks: see ``parallel.context``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.models.decoder import CausalAttention, computed_in
from hybridflow.parallel.context import Dealt, HeadExchange, gathering_sends_less, holders, parts_of_tokens, positions_of
from hybridflow.parallel.mesh import Line

__all__ = ["ContextAttention"]

QUERIES = 256
"""Most tokens of a sequence that attend at once: they all meet the keys up to the last of them. With so few, ranks of 4,096
tokens take the CPU time of causal attention in one process; with whole parts, two ranks took a sixth more."""


@dataclass(frozen=True)
class _Piece:
    """A piece of every sequence, padded. Its queries are the ``tokens`` [m] of this rank's, at the ``slots`` [m] of
    [B, W], of each sequence from ``starts`` [B] on. They attend to some of the first ``width`` keys of their sequence.

    Queries lie backwards, so that query i of the W sees the keys before start + W - i: a mask of which every row is the
    one above moved by one. So it is made of W + width numbers, which the rows share, instead of W times width.
    """

    tokens: Tensor
    slots: Tensor
    starts: Tensor
    queries: int
    width: int

    def mask(self, like: Tensor) -> Tensor:
        """[B, 1, W, width], 0 for what a query sees, else -inf."""
        batch, row = len(self.starts), self.queries + self.width
        seen = torch.arange(row, device=like.device) < self.starts[:, None] + self.queries
        row_of = torch.zeros(batch, row, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)
        return row_of.as_strided((batch, 1, self.queries, self.width), (row, 0, 1, 1))


class ContextAttention:
    """``attend`` for the tokens that this rank of ``line`` has of whole sequences packed side by side. ``dealt`` says which
    they are, ``positions`` [n] are their places in their sequences."""

    def __init__(self, lengths: NDArray[np.int64], line: Line, device: torch.device) -> None:
        """lengths [B]: tokens of each sequence, in order."""
        self.lengths, self.line, self.device = lengths, line, device
        self.dealt = Dealt(holders(lengths, line.size), line)
        self.rows, self.places = np.repeat(np.arange(len(lengths)), lengths), positions_of(lengths)
        self.positions = self._index(self.places[self.dealt.own])
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, H, E], k, v [n, K, E] -> [n, H, E]"""
        gather = gathering_sends_less(q.shape[1], k.shape[1], self.line.size)
        return self.gather(q, k, v) if gather else self.exchange(layer, q, k, v)

    def exchange(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Some heads of all tokens."""
        heads, (causal, places, order) = HeadExchange(self.dealt, q.shape[1], k.shape[1]), self._causal
        attended = causal(layer, *(x[places] for x in heads.to_heads(q, k, v)))
        return heads.to_tokens(attended[order])

    def gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All heads of this rank's tokens, over the keys and values of all. A rank without tokens attends with zeros, so
        that it takes part in the backward pass, too."""
        batch, width = len(self.lengths), self.width
        dtype, gqa = computed_in(q, width), q.shape[1] != k.shape[1]
        gathered = self.dealt.gather(torch.cat([k, v], dim=1)).to(dtype)
        kv = gathered.new_zeros(batch * width, *gathered.shape[1:])
        kv[self._slots] = gathered
        k, v = kv.view(batch, width, *kv.shape[1:]).transpose(1, 2).chunk(2, dim=1)  # [B, K, T, E]
        out = []
        for number, piece in enumerate(self._pieces):
            padded = q.new_zeros(batch * piece.queries, *q.shape[1:], dtype=dtype)
            padded[piece.slots] = q[piece.tokens].to(dtype)
            padded = padded.view(batch, piece.queries, *q.shape[1:]).transpose(1, 2)
            if (number, dtype) not in self._masks:
                self._masks[number, dtype] = piece.mask(padded)
            mask, seen = self._masks[number, dtype], slice(piece.width)
            attended = F.scaled_dot_product_attention(padded, k[:, :, seen], v[:, :, seen], mask, enable_gqa=gqa)
            out.append(attended.transpose(1, 2).flatten(0, 1)[piece.slots].to(q.dtype))
        return torch.cat(out)[self._order]

    @property
    def width(self) -> int:
        """Of the longest sequence."""
        return int(self.lengths.max(initial=1))

    @cached_property
    def _causal(self) -> tuple[CausalAttention, Tensor, Tensor]:
        """Attention of whole sequences, and the ways from the order of ranks and back."""
        causal = CausalAttention(self._index(self.lengths))
        return causal, self.dealt.places.to(self.device), self.dealt.order.to(self.device)

    @cached_property
    def _pieces(self) -> list[_Piece]:
        """What this rank has of every sequence: two parts, each in so many pieces that they are small."""
        number = ceil(self.width / (2 * self.line.size * QUERIES))
        first, parts, own = self.line.index * number, 2 * self.line.size * number, self.dealt.own
        part_of, rows, places = parts_of_tokens(self.lengths, parts)[own], self.rows[own], self.places[own]
        made = []
        for part in (*range(first, first + number), *range(parts - first - number, parts - first)):
            starts, ends = part * self.lengths // parts, (part + 1) * self.lengths // parts
            queries, width = int((ends - starts).max(initial=1)), int(ends.max(initial=1))
            tokens = np.flatnonzero(part_of == part)
            row = rows[tokens]
            slots = row * queries + queries - 1 - (places[tokens] - starts[row])
            made.append(_Piece(self._index(tokens), self._index(slots), self._index(starts), queries, width))
        return made

    @cached_property
    def _order(self) -> Tensor:
        """[n]: where this rank's tokens are among those of its pieces, one behind the other."""
        return torch.argsort(torch.cat([piece.tokens for piece in self._pieces]))

    @cached_property
    def _slots(self) -> Tensor:
        """[N]: where in [B, T] the tokens lie, in the order in which they are gathered."""
        slots = self.rows * self.width + self.places
        return self._index(slots[self.dealt.order.numpy()])

    def _index(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(self.device)
