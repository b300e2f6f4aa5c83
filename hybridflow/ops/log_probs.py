"""Log-probabilities and entropies of tokens from hidden states, without the [N, V] logits of all tokens at once.

The logits of a chunk of tokens are made, used and dropped; the backward pass makes them again (one matrix product more
than the plain way). If the probabilities of all tokens are small enough, they are kept instead.

If every rank of a line has some rows of the vocabulary, each works with its own logits; what a token needs of the other
ranks are four numbers of each: greatest logit, log of the sum, mean logit, logit of the target.
"""

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridflow.ops.linear import linear, product
from hybridflow.parallel.tensor import VocabShard

__all__ = ["log_probs_and_entropy"]

CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}
"""Size of a chunk of fp32 logits. On a CPU, glibc takes 32 MB and more from the system anew each time: twice as slow."""

KEPT_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""Most fp32 probabilities that wait for the backward pass."""


@overload
def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = ...,
    chunk_tokens: int | None = ...,
    shard: VocabShard | None = ...,
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
    shard: VocabShard | None = ...,
    entropy: Literal[False],
) -> tuple[Tensor, None]: ...


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    shard: VocabShard | None = None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weightᵀ / temperature) at ``targets``, and the entropy of that distribution, in nats.

    ``hidden`` [N, D], ``weight`` [V, D], ``targets`` [N] (int64) -> [N], [N] (None unless ``entropy``), fp32 (fp64 for
    fp64 inputs). The matrix products are in the type of ``hidden``, all else, and the sum of the weight's gradient over
    chunks, in fp32. The entropy's gradient costs time only if it is used. ``chunk_tokens`` at a time, by default as many
    as 16 MB of fp32 logits hold (256 MB on a GPU).

    With a ``shard``, ``weight`` is the rows of it that are here. All ranks of its line pass the same ``hidden`` and
    ``targets``, get the same results, and must give the same gradients for them.
    """
    row = 4 * len(weight)
    keep = torch.is_grad_enabled() and len(hidden) <= (chunk_tokens or KEPT_BYTES[hidden.device.type] // row)
    chunk_tokens = chunk_tokens or max(1, CHUNK_BYTES[hidden.device.type] // row)
    result: tuple[Tensor, Tensor | None] = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, (temperature, chunk_tokens, keep, entropy), shard
    )
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: tuple[float, int, bool, bool],
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        temperature, chunk_tokens, keep, entropy = options
        target, log_norm, greatest = hidden.new_empty(3, len(hidden), dtype=_exact(hidden))
        mean = torch.empty_like(target) if entropy else None
        rows, here = (targets, None) if shard is None else shard.local(targets, len(weight))
        matrix, kept = weight.to(hidden.dtype), []
        for chunk in _chunks(len(hidden), chunk_tokens):
            logits, probs, greatest[chunk] = _softmax(hidden[chunk], matrix, temperature)
            log_norm[chunk] = -probs.amax(-1).log()  # log sum exp(logits): the greatest of these logits is 0
            target[chunk] = logits.gather(-1, rows[chunk, None]).squeeze(-1)
            if mean is not None:
                mean[chunk] = torch.linalg.vecdot(probs, logits)
            if keep:
                kept.append(probs)
            del logits, probs  # before the next chunk is made
        share = None
        if shard is not None and here is not None:
            target.masked_fill_(~here, -torch.inf)
            target, log_norm, mean, share = _join(shard, greatest, target, log_norm, mean)
        entropies = None if mean is None else log_norm - mean
        ctx.save_for_backward(hidden, weight, rows, here, share, entropies, *kept)
        ctx.temperature, ctx.chunk_tokens, ctx.shard = temperature, chunk_tokens, shard
        ctx.set_materialize_grads(False)
        return target - log_norm, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, here, share, entropies, *kept = ctx.saved_tensors
        grad = torch.zeros(len(hidden), dtype=_exact(hidden), device=hidden.device) if grad is None else grad
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if need_hidden else None
        # Transposed: oneDNN then takes the great matrix of logits as it lies.
        weight_grad = hidden.new_zeros(weight.T.shape, dtype=_exact(hidden)) if need_weight else None
        matrix = weight.to(hidden.dtype)
        for number, chunk in enumerate(_chunks(len(hidden), ctx.chunk_tokens)):
            probs = kept[number] if kept else _softmax(hidden[chunk], matrix, ctx.temperature)[1]
            logits_grad = _logits_grad(
                probs if share is None else probs * share[chunk, None],
                (rows[chunk], None if here is None else here[chunk]),
                grad[chunk] / ctx.temperature,
                None if entropy_grad is None else (entropy_grad[chunk] / ctx.temperature, entropies[chunk]),
            ).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[chunk] = product(logits_grad, matrix)
            if weight_grad is not None:
                weight_grad += product(hidden[chunk].T, logits_grad)
            del probs, logits_grad
        if hidden_grad is not None and ctx.shard is not None:
            ctx.shard.line.all_reduce(hidden_grad)
        return hidden_grad, None if weight_grad is None else weight_grad.T, None, None, None


def _exact(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _softmax(hidden: Tensor, matrix: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[C, V] logits / temperature, shifted so that the greatest of a token is 0, [C, V] probabilities, the shift [C]."""
    logits = linear(hidden, matrix).to(_exact(hidden))
    if temperature != 1.0:
        logits.div_(temperature)
    greatest = logits.amax(-1, keepdim=True)
    logits.sub_(greatest)
    return logits, torch.softmax(logits, dim=-1), greatest.squeeze(-1)


def _join(
    shard: VocabShard, greatest: Tensor, target: Tensor, log_norm: Tensor, mean: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(target, log_norm, mean) of the whole vocabulary from those of this shard, [N] each, relative to the greatest logit
    of all instead of that of this shard; and the shard's share [N] of the probability."""
    line = shard.line
    own = torch.stack([greatest, target, log_norm, torch.zeros_like(target) if mean is None else mean])
    greatest, target, log_norms, means = line.all_gather(own[None], [1] * line.size).unbind(1)
    shift = greatest - greatest.amax(0)
    log_norm = (log_norms + shift).logsumexp(0)
    shares = (log_norms + shift - log_norm).exp()
    mean = None if mean is None else (shares * (means + shift)).sum(0)
    return (target + shift).amax(0), log_norm, mean, shares[line.index]


def _logits_grad(
    probs: Tensor, targets: tuple[Tensor, Tensor | None], grad: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """[C, V] for d log p_target / dz = onehot - p and, given (gradient of H, H), dH / dz = -p (log p + H).

    targets: (row, whether it is here: None for all), [C] each.
    """
    rows, here = targets
    out = probs * -grad[:, None]
    if entropy is not None:
        entropy_grad, entropies = entropy
        factor = torch.xlogy(probs, probs).addcmul_(probs, entropies[:, None])  # p (log p + H)
        out.addcmul_(factor, -entropy_grad[:, None])
    return out.scatter_add_(-1, rows[:, None], (grad if here is None else grad * here)[:, None])
