"""Attention of tokens that context parallelism has cut over a line of ranks: see ``parallel.context``."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Part:
    """One part of every sequence, padded. Its queries are the ``tokens`` [m] of this rank's, at the ``slots`` [m] of
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
        self._whole: tuple[CausalAttention, Tensor, Tensor] | None = None
        self._gathered: tuple[list[_Part], Tensor] | None = None
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, H, E], k, v [n, K, E] -> [n, H, E]"""
        gather = gathering_sends_less(q.shape[1], k.shape[1], self.line.size)
        return self.gather(q, k, v) if gather else self.exchange(layer, q, k, v)

    def exchange(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Some heads of all tokens."""
        if self._whole is None:
            causal = CausalAttention(torch.from_numpy(self.lengths).to(self.device))
            self._whole = causal, self.dealt.places.to(self.device), self.dealt.order.to(self.device)
        causal, places, order = self._whole
        heads = HeadExchange(self.dealt, q.shape[1], k.shape[1])
        attended = causal(layer, *(x[places] for x in heads.to_heads(q, k, v)))
        return heads.to_tokens(attended[order])

    def gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All heads of this rank's tokens, over the keys and values of all. A rank without tokens attends with zeros, so
        that it takes part in the backward pass, too."""
        if self._gathered is None:
            self._gathered = self._parts(), self._slots()
        parts, slots = self._gathered
        batch, width = len(self.lengths), int(self.lengths.max(initial=1))
        dtype, gqa = computed_in(q, width), q.shape[1] != k.shape[1]
        gathered = self.dealt.gather(torch.cat([k, v], dim=1)).to(dtype)
        kv = gathered.new_zeros(batch * width, *gathered.shape[1:])
        kv[slots] = gathered
        k, v = kv.view(batch, width, *kv.shape[1:]).transpose(1, 2).chunk(2, dim=1)  # [B, K, T, E]
        out = torch.empty_like(q)
        for number, part in enumerate(parts):
            padded = q.new_zeros(batch * part.queries, *q.shape[1:], dtype=dtype)
            padded[part.slots] = q[part.tokens].to(dtype)
            padded = padded.view(batch, part.queries, *q.shape[1:]).transpose(1, 2)
            if (number, dtype) not in self._masks:
                self._masks[number, dtype] = part.mask(padded)
            mask, seen = self._masks[number, dtype], slice(part.width)
            attended = F.scaled_dot_product_attention(padded, k[:, :, seen], v[:, :, seen], mask, enable_gqa=gqa)
            out[part.tokens] = attended.transpose(1, 2).flatten(0, 1)[part.slots].to(q.dtype)
        return out

    def _parts(self) -> list[_Part]:
        """The two parts that this rank has of every sequence."""
        parts, own = 2 * self.line.size, self.dealt.own
        part_of, rows, places = parts_of_tokens(self.lengths, parts)[own], self.rows[own], self.places[own]
        made = []
        for part in (self.line.index, parts - 1 - self.line.index):
            starts, ends = part * self.lengths // parts, (part + 1) * self.lengths // parts
            queries, width = int((ends - starts).max(initial=1)), int(ends.max(initial=1))
            tokens = np.flatnonzero(part_of == part)
            row = rows[tokens]
            slots = row * queries + queries - 1 - (places[tokens] - starts[row])
            made.append(_Part(self._index(tokens), self._index(slots), self._index(starts), queries, width))
        return made

    def _slots(self) -> Tensor:
        """[N]: where in [B, T] the tokens lie, in the order in which they are gathered."""
        slots = self.rows * int(self.lengths.max(initial=1)) + self.places
        return self._index(slots[self.dealt.order.numpy()])

    def _index(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(self.device)
