"""The key-value cache and the ``attend`` of a rollout step: the only part of the decoder that the engine replaces.

Shapes: as in ``models.decoder``, and S rows of a rectangle, C positions of it, A tokens that decode, P shared prompts, R
most rows that see one of them, G = H / K query heads of a key-value head, M entries written in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.generation.kv_cache import Copy, Place, Shape, round_up
from hybridflow.generation.request import IntArray
from hybridflow.generation.scheduler import Prefill
from hybridflow.models.decoder import CausalAttention
from hybridflow.models.spec import DecoderSpec

__all__ = ["Decoding", "KVCache", "StepAttention"]


class Rectangle:
    """For each layer keys [S, K, E, C] and values [S, K, C, E]: both are right-hand sides of matrix products as they lie.

    Untouched entries are 0, never garbage: what is masked is still multiplied, and 0 * NaN is NaN.
    """

    def __init__(self, spec: DecoderSpec, weight: Tensor) -> None:
        self.rows = self.length = 0
        self.keys = [weight.new_zeros(0, spec.num_kv_heads, spec.head_dim, 0) for _ in range(spec.num_layers)]
        self.values = [weight.new_zeros(0, spec.num_kv_heads, 0, spec.head_dim) for _ in range(spec.num_layers)]
        self._windows: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def reshape(self, rows: int, length: int) -> None:
        """Another number of rows and positions; what lies in both stays. Only one layer is held twice meanwhile."""
        if (rows, length) == (self.rows, self.length):
            return
        n, c = min(rows, self.rows), min(length, self.length)
        for layer, (old_keys, old_values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.keys[layer] = old_keys.new_zeros(rows, *old_keys.shape[1:3], length)
            self.keys[layer][:n, :, :, :c] = old_keys[:n, :, :, :c]
            self.values[layer] = old_values.new_zeros(rows, old_values.shape[1], length, old_values.shape[3])
            self.values[layer][:n, :, :c] = old_values[:n, :, :c]
        self.rows, self.length, self._windows = rows, length, {}

    def write(self, layer: int, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [M, K, E] -> entries (rows [M], positions [M])."""
        self.keys[layer][rows, :, :, positions] = k
        self.values[layer][rows, :, positions] = v

    def window(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """For each layer views keys [rows * K, E, length], values [rows * K, length, E] of the first rows and positions."""
        if (rows, length) not in self._windows:
            self._windows = {
                (rows, length): [
                    (keys[:rows].flatten(0, 1)[:, :, :length], values[:rows].flatten(0, 1)[:, :length])
                    for keys, values in zip(self.keys, self.values, strict=True)
                ]
            }
        return self._windows[rows, length]


class KVCache:
    """Keys and values of rows, and of shared prompts."""

    def __init__(self, spec: DecoderSpec, weight: Tensor, first_layer: int = 0) -> None:
        """Empty; dtype and device are those of ``weight``. Of ``spec.num_layers`` layers, from ``first_layer`` on."""
        self.spec, self.dtype, self.device, self.shape = spec, weight.dtype, weight.device, Shape()
        self.first_layer = first_layer
        self.rows, self.prompts = Rectangle(spec, weight), Rectangle(spec, weight)

    def reshape(self, shape: Shape) -> None:
        self.rows.reshape(shape.rows, shape.length)
        self.prompts.reshape(shape.prompts, shape.prompt_length)
        self.shape = shape

    def of(self, place: Place) -> Rectangle:
        """The rectangle that the place is of."""
        return self.prompts if place.shared else self.rows

    def copy(self, copies: Sequence[Copy]) -> None:
        """One after another."""
        for source, target, length in copies:
            old, new = self.of(source), self.of(target)
            for layer in range(self.spec.num_layers):
                new.keys[layer][target.row, :, :, :length] = old.keys[layer][source.row, :, :, :length]
                new.values[layer][target.row, :, :length] = old.values[layer][source.row, :, :length]


@dataclass(frozen=True)
class Decoding:
    """Where the A tokens that decode lie, one a row: ``own`` place in its row; and which shared prompt each row sees."""

    own: IntArray
    """[A]"""
    entries: IntArray
    """[A] place of the prompt, -1: none"""
    offsets: IntArray
    """[A] its tokens"""


class StepAttention:
    """``attend`` for tokens that decode, one a row, followed by those of prefills.

    Every new key and value is written first. Then a decoding token sees its prompt, if that is a shared one, and its row up
    to itself; a token of a prefill sees what lies before it in its sequence.
    """

    def __init__(self, cache: KVCache, decoding: Decoding, prefills: Sequence[Prefill]) -> None:
        """prefills: those that start at 0 come first."""
        self.cache, self.device, self.num_decoding = cache, cache.device, len(decoding.own)
        self.scale = cache.spec.head_dim**-0.5
        self.prefills = [prefill for prefill in prefills if prefill.start]
        whole = [prefill.end for prefill in prefills if not prefill.start]
        self.causal = CausalAttention(torch.tensor(whole, device=self.device)) if whole else None
        self.sizes = [self.num_decoding, sum(whole), *(prefill.end - prefill.start for prefill in self.prefills)]
        self.writes = self._writes(decoding, prefills)
        if self.num_decoding:
            self._see_rows(decoding.own)
            self._see_prompts(decoding)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer -= self.cache.first_layer
        for rectangle, tokens, rows, positions in self.writes:
            written = (k, v) if tokens is None else (k[tokens], v[tokens])
            rectangle.write(layer, rows, positions, *written)
        if self.num_decoding == q.shape[0]:
            return self.decode(layer, q)
        parts = q.split_with_sizes(self.sizes)
        out = [self.decode(layer, parts[0])] if self.num_decoding else []
        if self.causal is not None:
            span = slice(self.sizes[0], self.sizes[0] + self.sizes[1])
            out.append(self.causal(layer, parts[1], k[span], v[span]))
        pairs = zip(self.prefills, parts[2:], strict=True)
        return torch.cat([*out, *(self.extend(layer, part, prefill) for prefill, part in pairs)])

    def _writes(
        self, decoding: Decoding, prefills: Sequence[Prefill]
    ) -> list[tuple[Rectangle, Tensor | None, Tensor, Tensor]]:
        """For each rectangle that is written: the tokens (None: all), and the row and position of each."""
        shared = [np.zeros(self.num_decoding, bool)]
        rows, positions = [np.arange(self.num_decoding)], [decoding.own]
        for prefill in prefills:
            count = prefill.end - prefill.start
            shared.append(np.full(count, prefill.place.shared))
            rows.append(np.full(count, prefill.place.row))
            positions.append(np.arange(prefill.start, prefill.end))
        in_prompts, row, position = (np.concatenate(parts) for parts in (shared, rows, positions))
        writes: list[tuple[Rectangle, Tensor | None, Tensor, Tensor]] = []
        for rectangle, mine in ((self.cache.rows, ~in_prompts), (self.cache.prompts, in_prompts)):
            if mine.any():
                tokens = None if mine.all() else self._tensor(np.flatnonzero(mine))
                writes.append((rectangle, tokens, self._tensor(row[mine]), self._tensor(position[mine])))
        return writes

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _mask(self, visible: Tensor) -> Tensor:
        """0 where ``visible``, -inf elsewhere."""
        mask = torch.zeros(visible.shape, dtype=self.cache.dtype, device=self.device)
        return mask.masked_fill_(~visible, -torch.inf)

    def _see_rows(self, own: IntArray) -> None:
        spec, length = self.cache.spec, min(self.cache.rows.length, round_up(int(own.max()) + 1))
        self.window = self.cache.rows.window(len(own), length)
        mask = self._mask(torch.arange(length, device=self.device) <= self._tensor(own)[:, None])
        group = spec.num_heads // spec.num_kv_heads
        self.mask = mask[:, None, None].expand(-1, spec.num_kv_heads, group, -1).flatten(0, 1)  # [A * K, G, length]

    def _see_prompts(self, decoding: Decoding) -> None:
        """members [P, R]: the rows that see each prompt, any row where there are fewer; seen [A']: where in that table the
        rows that see one are; sharing [A']: these rows, None for all."""
        sharing = np.flatnonzero(decoding.entries >= 0)
        self.members: Tensor | None = None
        if not len(sharing):
            return
        entries = decoding.entries[sharing]
        counts = np.bincount(entries)
        order = np.argsort(entries, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        members = np.zeros((len(counts), counts.max()), np.int64)
        members[entries, rank] = sharing
        self.members, self.seen = self._tensor(members), self._tensor(entries * members.shape[1] + rank)
        self.sharing = None if len(sharing) == len(decoding.own) else self._tensor(sharing)
        lengths = np.zeros(len(counts), np.int64)
        lengths[entries] = decoding.offsets[sharing]
        length = round_up(int(lengths.max()))
        self.prompt_window = self.cache.prompts.window(len(counts), length)
        # A prompt that no row sees shows its first token: a softmax over nothing would be NaN.
        visible = torch.arange(length, device=self.device) < self._tensor(lengths.clip(1))[:, None]
        self.prompt_mask = self._mask(visible).repeat_interleave(self.cache.spec.num_kv_heads, 0)[:, None]

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """q [A, H, E] -> [A, H, E]. The G query heads of a key-value head are the rows of one small matrix product, and for
        a shared prompt those of all rows that see it. Both parts are joined by their share of the softmax's sum."""
        queries = q.reshape(q.shape[0] * self.cache.spec.num_kv_heads, -1, q.shape[-1])
        if self.members is None:
            return self._weigh(queries, *self.window[layer], self.mask)[0].view(q.shape)
        own, own_sum = self._weigh(queries, *self.window[layer], self.mask, log_sum=True)
        shape = (*self.members.shape, self.cache.spec.num_kv_heads, *queries.shape[1:])  # P, R, K, G, E
        shared = queries.view(-1, *shape[2:])[self.members].transpose(1, 2)
        prompt, prompt_sum = self._weigh(
            shared.reshape(-1, shape[1] * shape[3], shape[4]), *self.prompt_window[layer], self.prompt_mask, log_sum=True
        )
        prompt, prompt_sum = (self._by_row(x, shape)[self.seen] for x in (prompt, prompt_sum))
        own, own_sum = own.view(q.shape), own_sum.view(*q.shape[:2], 1)
        if self.sharing is None:
            return torch.lerp(own, prompt, (prompt_sum - own_sum).sigmoid().to(own.dtype))
        mine = own[self.sharing]
        own[self.sharing] = torch.lerp(mine, prompt, (prompt_sum - own_sum[self.sharing]).sigmoid().to(own.dtype))
        return own

    def _by_row(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """[P * K, R * G, E or 1] -> [P * R, H, E or 1]."""
        prompts, rows, kv_heads, group, _ = shape
        return x.view(prompts, kv_heads, rows, group, -1).transpose(1, 2).reshape(prompts * rows, kv_heads * group, -1)

    def _weigh(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, log_sum: bool = False
    ) -> tuple[Tensor, Tensor]:
        """queries [b, n, E], keys [b, E, C], values [b, C, E] -> [b, n, E] and the log of the softmax's sum [b, n, 1]."""
        scores = torch.baddbmm(mask, queries, keys, alpha=self.scale)
        probs = scores.softmax(-1)
        out = torch.bmm(probs, values)
        if not log_sum:
            return out, out
        # At the greatest score, probability = exp(score) / sum.
        return out, scores.amax(-1, keepdim=True).float() - probs.amax(-1, keepdim=True).float().log()

    def extend(self, layer: int, q: Tensor, prefill: Prefill) -> Tensor:
        """q [T, H, E] of tokens start to end of a sequence, whose keys and values lie in its place -> [T, H, E]."""
        rectangle, row, end = self.cache.of(prefill.place), prefill.place.row, prefill.end
        keys = rectangle.keys[layer][row, :, :, :end].transpose(1, 2)
        values = rectangle.values[layer][row, :, :end]
        places = torch.arange(end, device=self.device)
        visible = places <= places[prefill.start :, None]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], attn_mask=visible, enable_gqa=q.shape[1] != len(keys)
        )
        return out[0].transpose(0, 1)
