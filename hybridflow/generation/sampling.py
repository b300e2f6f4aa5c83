"""One token for every row of logits, by inverse CDF: a row's token depends on its own logits and its own uniform alone.

Where the vocabulary is cut over R ranks, no logits are sent: the ranks' shares of the softmax say which of them has the
token, and that one finds it; of truncated distributions, they join their most probable tokens. Up to rounding that is the
token that one process draws, and all ranks have the same.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.generation.request import SamplingParams
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.tensor import VocabShard

__all__ = ["inverse_cdf", "sample"]

_BLOCK = 64
_BELOW_ONE = 1 - 2**-24  # the largest fp32 number below 1


def sample(
    logits: Tensor, uniforms: NDArray[np.float64], params: SamplingParams, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """logits [B, V] (fp32; overwritten), uniforms [B] in [0, 1) -> tokens [B] int64, log_probs [B] fp32.

    ``log_probs`` are under softmax(logits / temperature) before truncation; at temperature 0, under softmax(logits).
    With ``shard`` the logits are those of its tokens; all ranks of its line call this with the same uniforms.
    """
    if params.temperature not in (0, 1):
        logits.div_(params.temperature)
    draws = torch.from_numpy(uniforms.astype(np.float32)).to(logits.device)
    if shard is not None:
        return _sample_cut(logits, draws, params, shard)
    probs = logits.softmax(-1)
    if params.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    elif 0 < params.top_k < probs.shape[1] or params.top_p < 1:
        weights, candidates = truncate(probs, params.top_k, params.top_p)
        tokens = candidates.gather(1, inverse_cdf(weights, draws)[:, None])
    else:
        tokens = inverse_cdf(probs, draws)[:, None]
    return tokens[:, 0], probs.gather(1, tokens)[:, 0].log()


def _sample_cut(logits: Tensor, draws: Tensor, params: SamplingParams, shard: VocabShard) -> tuple[Tensor, Tensor]:
    norms = logits.logsumexp(-1)
    if params.temperature == 0:
        best, places = logits.max(-1)
        greatest, norms, tokens = _of_all(shard.line, best, norms, places + shard.first)
        owner = greatest.argmax(0, keepdim=True)
        return tokens.gather(0, owner)[0].long(), (greatest.gather(0, owner)[0] - norms.logsumexp(0)).float()
    (norms,) = _of_all(shard.line, norms)
    total = norms.logsumexp(0)
    log_probs = logits.sub_(total[:, None].float())
    if 0 < params.top_k < shard.total or params.top_p < 1:
        weights, candidates = truncate(log_probs.exp(), params.top_k, params.top_p, shard)
        place = inverse_cdf(weights, draws)[:, None]
        return candidates.gather(1, place)[:, 0], weights.gather(1, place)[:, 0].log()
    masses = (norms - total).exp().float().T.contiguous()
    owner, rest = _locate(masses, draws[:, None] * masses.sum(-1, keepdim=True))
    places = inverse_cdf(log_probs.exp(), (rest / masses.gather(1, owner))[:, 0])
    chosen = torch.stack([(places + shard.first).double(), log_probs.gather(1, places[:, None])[:, 0].double()])
    tokens, log_probs = shard.line.all_reduce(chosen.where(owner[:, 0] == shard.line.index, 0))
    return tokens.long(), log_probs.float()


def _of_all(line: Line, *values: Tensor) -> tuple[Tensor, ...]:
    """Values [B] of a rank -> [R, B] each, fp64: those of all ranks. In one small sum, which is faster than to gather."""
    out = torch.zeros(line.size, len(values), len(values[0]), dtype=torch.float64, device=values[0].device)
    for row, value in zip(out[line.index], values, strict=True):
        row.copy_(value)
    return line.all_reduce(out).unbind(1)


def inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """weights [B, V] (fp32, >= 0), draws [B] in [0, 1] -> [B]: index i with probability weights[i] / sum(weights).

    Never an index of weight 0. Two levels, blocks and the entries of one block: on CPU sums are vectorised and running sums
    are not (9 times slower at V = 8192).
    """
    vocab = weights.shape[1]
    if vocab <= 2 * _BLOCK:
        return _locate(weights, draws[:, None] * weights.sum(-1, keepdim=True))[0][:, 0]
    if vocab % _BLOCK:
        weights = F.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.view(len(weights), -1, _BLOCK)
    masses = blocks.sum(-1)
    block, target = _locate(masses, draws[:, None] * masses.sum(-1, keepdim=True))
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0]
    return (block * _BLOCK + _locate(inside, target)[0])[:, 0].clamp_(max=vocab - 1)


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1] each: the first index whose running sum exceeds target [B, 1], and what of the target is left before it."""
    cdf = weights.cumsum(-1)
    # Rounding may put the target at the total or above; strictly below it, an index of positive weight exists.
    target = torch.minimum(target, cdf[:, -1:] * _BELOW_ONE)
    # The clamp, here and above, is for NaN alone, which has no index: the caller finds it in the log-probability.
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=weights.shape[1] - 1)
    return index, target - (cdf.gather(1, index) - weights.gather(1, index))


def truncate(probs: Tensor, top_k: int, top_p: float, shard: VocabShard | None = None) -> tuple[Tensor, Tensor]:
    """probs [B, V] -> weights [B, C], tokens [B, C] of the candidates, most probable first; weight 0: not a candidate.

    Top-k, then the smallest set of its most probable tokens that holds at least top_p of its mass (Holtzman et al. 2020).
    """
    vocab = probs.shape[1] if shard is None else shard.total
    if 0 < top_k < vocab:
        weights, tokens = _top(probs, top_k, shard)
        return _nucleus(weights, top_p * weights.sum(-1, keepdim=True)), tokens
    count = min(64, vocab)
    weights, tokens = _top(probs, count, shard)
    while (
        count < vocab and float(weights.sum(-1).min()) < top_p
    ):  # seldom: a whole sort costs 10 times the rest of the step
        count = min(8 * count, vocab)
        weights, tokens = _top(probs, count, shard)
    return _nucleus(weights, torch.full_like(weights[:, :1], top_p)), tokens


def _top(probs: Tensor, count: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """The ``count`` most probable tokens of the whole vocabulary: weights, tokens [B, count]."""
    if shard is None:
        return probs.topk(count)
    weights, places = probs.topk(min(count, probs.shape[1]))
    pairs = torch.stack([weights.double(), (places + shard.first).double()]).permute(2, 0, 1)
    of_all = shard.line.all_gather(pairs, [min(count, size) for size in shard.sizes])
    every_weight, every_token = of_all.permute(1, 2, 0)
    weights, order = every_weight.topk(count)
    return weights.float(), every_token.gather(1, order).long()


def _nucleus(weights: Tensor, mass: Tensor) -> Tensor:
    """weights [B, C], descending: those before which less than mass [B, 1] was gathered, the others 0."""
    return weights * (weights.cumsum(-1) - weights < mass)
