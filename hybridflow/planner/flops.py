"""Floating-point operations of a decoder, from its sizes: those of the matrix products that a pass can't do without."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.models.spec import DecoderSpec

__all__ = ["backward_flops", "decode_flops", "forward_flops"]


def forward_flops(spec: DecoderSpec, tokens: float, actions: float, length: float, head: bool) -> float:
    """Of a pass over ``tokens``, in sequences of mean ``length``, of which ``actions`` decide: these alone go through the
    last layer past its attention, and through the ``head`` of the vocabulary if there is one."""
    qkv, rest = _layer(spec)
    attention = 2 * spec.num_heads * spec.head_dim * tokens * length * spec.num_layers  # causal: half of the products
    everywhere = (spec.num_layers - 1) * (qkv + rest) + qkv
    return 2 * (everywhere * tokens + (rest + _head(spec) * head) * actions) + attention


def backward_flops(
    spec: DecoderSpec, tokens: float, actions: float, length: float, head: bool, frozen: int, trains_head: bool
) -> float:
    """Of the way back of the same pass: the gradients of inputs and of weights. Nothing for the first ``frozen`` layers,
    before which nothing is trained."""
    if frozen == spec.num_layers:
        return 0.0
    above = replace(spec, num_layers=spec.num_layers - frozen)
    untrained = 0 if trains_head or not head else 2 * _head(spec) * actions
    return 2 * forward_flops(above, tokens, actions, length, head) - untrained


def decode_flops(spec: DecoderSpec, prompt: float, response: float, rows: int) -> float:
    """Of ``rows`` responses, a token at a time, to prompts of mean length ``prompt`` that are in the cache."""
    qkv, rest = _layer(spec)
    attention = 4 * spec.num_heads * spec.head_dim * (prompt + response / 2) * spec.num_layers
    return rows * response * (2 * (spec.num_layers * (qkv + rest) + _head(spec)) + attention)


def _layer(spec: DecoderSpec) -> tuple[int, int]:
    """Entries of a layer's matrices: (those before attention, those behind it)."""
    heads = spec.num_heads * spec.head_dim
    return spec.hidden_size * (heads + 2 * spec.num_kv_heads * spec.head_dim), spec.hidden_size * (
        heads + 3 * spec.intermediate_size
    )


def _head(spec: DecoderSpec) -> int:
    return spec.hidden_size * spec.vocab_size
