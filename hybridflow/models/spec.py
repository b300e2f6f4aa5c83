"""Sizes of a decoder: what a config.json of the Llama, Mistral, Qwen2 and Qwen3 families says, and nothing more."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["DecoderSpec", "Family", "RopeScaling"]

Family = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``kind`` "linear" divides every frequency by ``factor``; "llama3" (Llama 3.1) keeps the high ones, divides the low ones
    and blends between, by wavelength against ``original_max_positions``.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. ``num_kv_heads < num_heads`` is grouped-query attention."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
