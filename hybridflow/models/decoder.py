"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

    tokens [N] ──embed──> x [N, D]
      every layer:  x += out(attend(rope(norm?(q)), rope(norm?(k)), v))       q, k, v = split(qkv(norm(x)))
                    x += down(silu(gate) * up)                                gate, up = split(gate_up(norm(x)))
    ──norm──> hidden [N, D]

All sequences of a call are packed into one axis of N tokens; padding exists only inside ``attend``, the function that
says which tokens see which. Training, prefill and decoding differ in ``attend`` alone, so they can't disagree on anything
else. q, k and v are one weight, gate and up another: the rollout engine needs them fused, and reads them in place.

Shapes: N packed tokens, D hidden size, H heads, K key-value heads, E size of a head, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridflow.models.spec import DecoderSpec, RopeScaling
from hybridflow.ops.linear import linear

__all__ = ["Attend", "CausalAttention", "Decoder", "init_weights", "rope_frequencies"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, E], k [N, K, E], v [N, K, E]) -> [N, H, E]"""


class Decoder(nn.Module):
    """The transformer without its head. ``lm_head`` is None when the head is tied to the embedding."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.lm_head = None if spec.tied else Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.activation_checkpointing = False
        # Plain attributes, not buffers: they stay fp32 whatever the dtype of the weights.
        self._cos, self._sin = rope_tables(spec, 0, torch.device("cpu"))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, outputs: Tensor | None = None) -> Tensor:
        """tokens [N], positions [N] (place of each token in its sequence) -> hidden [M, D], normalised.

        outputs [M]: the tokens whose hidden state is wanted, all by default; the others are spared most of the last layer.
        """
        cos, sin = self.rope(positions)
        x = self.embed(tokens)
        for layer in self.layers:
            wanted = outputs if layer is self.layers[-1] else None
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, wanted, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend, wanted)
        return self.norm(x)  # type: ignore[no-any-return]

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: logits are ``hidden @ head_weight.T``."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [N, 1, E] of the positions, in the dtype of the weights; tables grow as needed."""
        longest = int(positions.max()) + 1 if len(positions) else 0
        if longest > len(self._cos) or self._cos.device != positions.device:
            self._cos, self._sin = rope_tables(self.spec, max(longest, 2 * len(self._cos)), positions.device)
        dtype = self.embed.weight.dtype
        return self._cos[positions, None].to(dtype), self._sin[positions, None].to(dtype)


class Layer(nn.Module):
    """Attention and gated MLP, each behind a norm and a residual."""

    def __init__(self, spec: DecoderSpec, index: int) -> None:
        super().__init__()
        self.index, self.spec = index, spec
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.qkv = Linear(spec.hidden_size, q + 2 * kv, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.out = Linear(q, spec.hidden_size, bias=spec.output_bias)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, outputs: Tensor | None) -> Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (heads + 2 * kv_heads, self.spec.head_dim))
        qk, v = qkv.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])], dim=1)
        q, k = rotate(qk, cos, sin).split_with_sizes([heads, kv_heads], dim=1)
        attended = attend(self.index, q, k, v).flatten(1)
        if outputs is not None:
            x, attended = x[outputs], attended[outputs]
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """``nn.Linear`` through ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CausalAttention:
    """``attend`` for whole sequences packed side by side: every token sees itself and what precedes it in its sequence."""

    def __init__(self, lengths: Tensor) -> None:
        """lengths [B] (int64): tokens of each sequence, in order."""
        self.lengths, self.width = lengths, int(lengths.max()) if len(lengths) else 0
        columns = torch.arange(self.width, device=lengths.device)
        self.valid = columns < lengths[:, None]
        self.rectangular = bool(self.valid.all())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (self.pad(x).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, E]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2)
        return out.flatten(0, 1) if self.rectangular else out[self.valid]

    def pad(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]; zeros behind the ends, which a causal mask never lets a real token see."""
        if self.rectangular:
            return x.view(len(self.lengths), self.width, *x.shape[1:])
        out = x.new_zeros(*self.valid.shape, *x.shape[1:])
        out[self.valid] = x
        return out

    @property
    def positions(self) -> Tensor:
        """[N]: place of every packed token in its sequence."""
        return torch.arange(self.width, device=self.lengths.device).expand_as(self.valid)[self.valid]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves convention of Hugging Face; cos, sin of ``rope``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rope_frequencies(spec: DecoderSpec) -> Tensor:
    """[E / 2] angular frequencies, scaled as the spec says."""
    exponents = torch.arange(0, spec.head_dim, 2, device="cpu").float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    return frequencies / scaling.factor if scaling.kind == "linear" else _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rope_tables(spec: DecoderSpec, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [length, E], fp32; sin is negated in its first half, so that rotating is x * cos + swap_halves(x) * sin."""
    # On the CPU whatever the default device: the same tables everywhere, and real ones in a model built on "meta".
    angles = torch.outer(torch.arange(length, device="cpu").float(), rope_frequencies(spec))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def init_weights(decoder: Decoder, generator: torch.Generator) -> None:
    """Fresh weights: normal, std sqrt(2 / 5D) ("small init", Nguyen and Salazar 2019), so that narrow models start as alive
    as wide ones; projections back into the residual are scaled by 1 / sqrt(2 layers) (Radford et al. 2019)."""
    std = math.sqrt(2 / (5 * decoder.spec.hidden_size))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * decoder.spec.num_layers) if residual else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)
