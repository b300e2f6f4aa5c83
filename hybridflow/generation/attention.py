"""The key-value cache and the ``attend`` of a rollout step: the only part of the decoder that the engine replaces.

Shapes: as in ``models.decoder``, and S cache rows, C cached positions, A rows that decode, G = H / K query heads of a
key-value head, M cache entries written in a step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.generation.kv_cache import round_up
from hybridflow.generation.request import IntArray
from hybridflow.generation.scheduler import Packing
from hybridflow.models.decoder import CausalAttention
from hybridflow.models.spec import DecoderSpec

__all__ = ["KVCache", "StepAttention"]


class KVCache:
    """For each layer keys [S, K, E, C] and values [S, K, C, E]: both are right-hand sides of matrix products as they lie.

    Untouched entries are 0, never garbage: what is masked is still multiplied, and 0 * NaN is NaN.
    """

    def __init__(self, spec: DecoderSpec, weight: Tensor) -> None:
        """Without rows; dtype and device are those of ``weight``."""
        self.spec, self.rows, self.length = spec, 0, 0
        self.dtype, self.device = weight.dtype, weight.device
        self.keys = [weight.new_zeros(0, spec.num_kv_heads, spec.head_dim, 0) for _ in range(spec.num_layers)]
        self.values = [weight.new_zeros(0, spec.num_kv_heads, 0, spec.head_dim) for _ in range(spec.num_layers)]
        self.kept: list[tuple[Tensor, Tensor]] = []
        self._window: list[tuple[Tensor, Tensor]] = []
        self._window_size = (0, 0)

    def reshape(self, rows: int, length: int) -> None:
        """Another number of rows and positions; what lies in both stays. Only one layer is held twice meanwhile."""
        n, c = min(rows, self.rows), min(length, self.length)
        for layer, (old_keys, old_values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.keys[layer] = old_keys.new_zeros(rows, *old_keys.shape[1:3], length)
            self.keys[layer][:n, :, :, :c] = old_keys[:n, :, :, :c]
            self.values[layer] = old_values.new_zeros(rows, old_values.shape[1], length, old_values.shape[3])
            self.values[layer][:n, :, :c] = old_values[:n, :, :c]
        self.rows, self.length, self._window, self._window_size = rows, length, [], (0, 0)

    def write(self, layer: int, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [M, K, E] -> entries (rows [M], positions [M])."""
        self.keys[layer][rows, :, :, positions] = k
        self.values[layer][rows, :, positions] = v

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Rows ``sources`` -> rows ``targets``, their first ``length`` positions."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[targets, :, :, :length] = keys[sources, :, :, :length]
            values[targets, :, :length] = values[sources, :, :length]

    def keep(self, row: int, length: int) -> None:
        """Set the first ``length`` positions of a row aside."""
        pairs = zip(self.keys, self.values, strict=True)
        self.kept = [(keys[row, :, :, :length].clone(), values[row, :, :length].clone()) for keys, values in pairs]

    def restore(self, rows: Tensor) -> None:
        """What was set aside -> the rows."""
        for keys, values, (kept_keys, kept_values) in zip(self.keys, self.values, self.kept, strict=True):
            keys[rows, :, :, : kept_keys.shape[-1]] = kept_keys
            values[rows, :, : kept_values.shape[-2]] = kept_values

    def window(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """For each layer views keys [rows * K, E, length], values [rows * K, length, E] of the first rows and positions."""
        if (rows, length) != self._window_size:
            end = rows * self.spec.num_kv_heads
            self._window = [
                (keys.flatten(0, 1)[:end, :, :length], values.flatten(0, 1)[:end, :length])
                for keys, values in zip(self.keys, self.values, strict=True)
            ]
            self._window_size = (rows, length)
        return self._window


class StepAttention:
    """``attend`` for A decode tokens, one a cache row, followed by whole prompts.

    Every new key and value is written first, where the packing says; then decode tokens see their row of the cache, and
    prompt tokens their prompt.
    """

    def __init__(self, cache: KVCache, packing: Packing, lengths: Sequence[int]) -> None:
        """lengths [P]: of the prompts that follow the decode tokens."""
        self.cache, self.device = cache, cache.device
        self.num_decoding = len(packing.positions) - sum(lengths)
        self.rows = self.tensor(packing.rows)
        self.copies, self.causal = None, None
        if lengths:
            self.copies = self.tensor(packing.copies)
            self.causal = CausalAttention(torch.tensor(lengths, device=self.device))
        self.positions = self.tensor(packing.positions[packing.copies])
        if self.num_decoding:
            self.see(self.tensor(packing.positions[: self.num_decoding]))

    def tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def see(self, places: Tensor) -> None:
        """places [A]: what each decode token may see is its row of the cache up to its own place."""
        spec, length = self.cache.spec, min(self.cache.length, round_up(int(places.max()) + 1))
        self.window = self.cache.window(len(places), length)
        self.scale = spec.head_dim**-0.5
        hidden = torch.arange(length, device=self.device) > places[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        group = spec.num_heads // spec.num_kv_heads
        self.mask = mask[:, None, None].expand(-1, spec.num_kv_heads, group, -1).flatten(0, 1)  # [A * K, G, length]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        written = (k, v) if self.copies is None else (k[self.copies], v[self.copies])
        self.cache.write(layer, self.rows, self.positions, *written)
        if self.causal is None:
            return self.decode(layer, q)
        split = self.num_decoding
        prompts = self.causal(layer, q[split:], k[split:], v[split:])
        return torch.cat([self.decode(layer, q[:split]), prompts]) if split else prompts

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """q [A, H, E] -> [A, H, E]. The G query heads of a key-value head are the rows of one small matrix product."""
        keys, values = self.window[layer]
        scores = torch.baddbmm(self.mask, q.reshape(len(keys), -1, keys.shape[1]), keys, alpha=self.scale)
        return torch.bmm(scores.softmax(-1), values).view(q.shape)
