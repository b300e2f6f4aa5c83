"""Log-probabilities and entropies of tokens from hidden states, without the [N, V] logits of all tokens at once.

The logits of a chunk of tokens are made, used and dropped; the backward pass makes them again (one matrix product more
than the plain way). If all tokens fit into one chunk, their log-softmax is kept instead.
"""

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["log_probs_and_entropy"]

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**28}
"""Size of a chunk of fp32 logits. On a CPU, 16 MB gives smaller products and 64 MB slower allocations."""


@overload
def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = ...,
    chunk_tokens: int | None = ...,
    entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = ...,
    chunk_tokens: int | None = ...,
    entropy: Literal[False],
) -> tuple[Tensor, None]: ...


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weightᵀ / temperature) at ``targets``, and the entropy of that distribution, in nats.

    ``hidden`` [N, D], ``weight`` [V, D], ``targets`` [N] (int64) -> [N], [N] (None unless ``entropy``), fp32 (fp64 for
    fp64 inputs). The matrix products are in the type of ``hidden``, all else, and the sum of the weight's gradient over
    chunks, in fp32. The entropy's gradient costs time only if it is used. ``chunk_tokens`` at a time, by default as many
    as 32 MB of fp32 logits hold (256 MB on a GPU).
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES[hidden.device.type] // (4 * len(weight)))
    result: tuple[Tensor, Tensor | None] = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_tokens, entropy
    )
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        log_probs = hidden.new_empty(len(hidden), dtype=_exact(hidden))
        entropies = torch.empty_like(log_probs) if entropy else None
        matrix, kept = weight.to(hidden.dtype), None
        for chunk in _chunks(len(hidden), chunk_tokens):
            kept = _log_softmax(hidden[chunk], matrix, temperature)
            log_probs[chunk] = kept.gather(-1, targets[chunk, None]).squeeze(-1)
            if entropies is not None:
                entropies[chunk] = -torch.linalg.vecdot(kept.exp(), kept)
        ctx.save_for_backward(hidden, weight, targets, entropies, kept if len(hidden) <= chunk_tokens else None)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropies, kept = ctx.saved_tensors
        grad = torch.zeros(len(hidden), dtype=_exact(hidden), device=hidden.device) if grad is None else grad
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if need_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=_exact(hidden)) if need_weight else None
        matrix = weight.to(hidden.dtype)
        for chunk in _chunks(len(hidden), ctx.chunk_tokens):
            log_softmax = _log_softmax(hidden[chunk], matrix, ctx.temperature) if kept is None else kept
            logits_grad = _logits_grad(
                log_softmax,
                targets[chunk],
                grad[chunk] / ctx.temperature,
                None if entropy_grad is None else (entropy_grad[chunk] / ctx.temperature, entropies[chunk]),
            ).to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(logits_grad, matrix, out=hidden_grad[chunk])
            if weight_grad is not None:
                _add_product(weight_grad, logits_grad.T, hidden[chunk])
        return hidden_grad, weight_grad, None, None, None, None


def _exact(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _log_softmax(hidden: Tensor, matrix: Tensor, temperature: float) -> Tensor:
    """[C, V]"""
    logits = (hidden @ matrix.T).to(_exact(hidden))
    return torch.log_softmax(logits if temperature == 1.0 else logits.div_(temperature), dim=-1)


def _logits_grad(log_softmax: Tensor, targets: Tensor, grad: Tensor, entropy: tuple[Tensor, Tensor] | None) -> Tensor:
    """[C, V] for d log p_target / dz = onehot - p and, given (gradient of H, H), dH / dz = -p (log p + H)."""
    probs = log_softmax.exp()
    if entropy is None:
        out = probs.mul_(-grad[:, None])
    else:
        entropy_grad, entropies = entropy
        factor = log_softmax * -entropy_grad[:, None]
        out = probs.mul_(factor.sub_((grad + entropy_grad * entropies)[:, None]))
    return out.scatter_add_(-1, targets[:, None], grad[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where ``total`` may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
