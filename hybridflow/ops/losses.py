"""Losses of policies, values and supervised fine-tuning.

    loss = ppo_clip.bind(clip=0.2, entropy_coef=0.01)
    terms, metrics, _ = loss({"log_probs": new, "entropy": entropy}, {"log_probs": old, "advantages": a, "row_index": rows})

Everything is packed over the action steps: ``outputs`` (of the model) and time columns are [N], ``row_index`` [N] (int64,
non-decreasing) says the row of each step. A row is never split. Terms are unreduced: the caller sums them and divides by
one normaliser of the whole minibatch, its action steps (``per`` step) or its rows with action steps (``per`` row), so the
loss doesn't depend on how a minibatch is split. Metrics are detached, one value a step or row.

Metrics of every policy loss: ``policy_kl`` (k3 estimate of KL(sampling policy || current policy)), ``entropy``, and, with
``kl_coef``, ``kl`` against the reference.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Loss, columns
from hybridflow.ops.kl import LOG_RATIO_LIMIT, KLKind, estimate_kl

__all__ = ["Aggregation", "cispo", "cross_entropy", "gspo", "ppo_clip", "reinforce", "value_loss"]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
"""How steps weigh: every step of the minibatch alike (DAPO); every row alike, whatever its length (GRPO); every step alike,
over rows x ``max_tokens`` instead of the steps that there are (Dr. GRPO)."""

Params = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


def _reads(*names: str) -> Callable[[Params], tuple[str, ...]]:
    """These columns, and the reference's if there is a KL term."""

    def reads(params: Params) -> tuple[str, ...]:
        if params.get("aggregation") == "constant" and not params["max_tokens"]:
            raise ContractError('aggregation "constant" needs max_tokens > 0, what the sum over a row is divided by')
        return (*names, "ref_log_probs") if params["kl_coef"] > 0 else names

    return reads


def _per(params: Params) -> Literal["step", "row"]:
    return "step" if params["aggregation"] == "token_mean" else "row"


def _row_sums(values: Tensor, row_index: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [R] of ``values`` [N] over each row that has steps, and the numbers of steps [R]."""
    _, index, counts = torch.unique_consecutive(row_index, return_inverse=True, return_counts=True)
    return values.new_zeros(len(counts)).index_add(0, index, values), counts


def _row_means(values: Tensor, row_index: Tensor) -> Tensor:
    sums, counts = _row_sums(values, row_index)
    return sums / counts


def _aggregate(terms: Tensor, row_index: Tensor, aggregation: Aggregation, max_tokens: int | None) -> Tensor:
    """[N] terms per step, as they are or as [R] terms per row."""
    if aggregation == "token_mean":
        return terms
    if aggregation == "sequence_mean":
        return _row_means(terms, row_index)
    assert max_tokens, "checked when the loss is bound"
    return _row_sums(terms, row_index)[0] / max_tokens


def _log_ratio(outputs: Tensors, columns: Tensors) -> Tensor:
    """[N] log of current over sampling probability; clipped (no gradient beyond), since an infinite ratio gives NaN."""
    return (outputs["log_probs"] - columns["log_probs"]).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _penalties(
    outputs: Tensors, columns: Tensors, entropy_coef: float, kl_coef: float, kl_kind: KLKind
) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] entropy bonus and KL term of each step, and the metrics that all policy losses share."""
    log_probs, entropy = outputs["log_probs"], outputs["entropy"]
    terms = torch.zeros_like(log_probs)
    metrics = {"policy_kl": estimate_kl(columns["log_probs"], log_probs.detach(), "k3"), "entropy": entropy.detach()}
    if entropy_coef:  # an unused entropy costs no backward pass
        terms = terms - entropy_coef * entropy
    if kl_coef > 0:
        kl = estimate_kl(log_probs, columns["ref_log_probs"], kl_kind)
        terms, metrics["kl"] = terms + kl_coef * kl, kl.detach()
    return terms, metrics


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A ρ, -A clip(ρ, 1 - clip, 1 + clip_high)), at most -A dual_clip where A < 0; steps or rows alike."""
    plain = -advantages * ratio
    terms = torch.maximum(plain, -advantages * ratio.clip(1 - clip, 1 + (clip if clip_high is None else clip_high)))
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.minimum(terms, -advantages * dual_clip), terms)
    return terms, {"ratio": ratio.detach(), "clipped": (terms != plain).detach().float()}


@columns(reads=_reads("log_probs", "advantages"), per=_per)
def ppo_clip(
    outputs: Tensors,
    columns: Tensors,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token_mean",
    max_tokens: int | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
) -> Loss:
    """Clipped policy loss (PPO, Schulman et al. 2017, eq. 7), also of GRPO, DAPO and Dr. GRPO.

    ``clip_high``: another limit upwards (clip-higher of DAPO, Yu et al. 2025). ``dual_clip`` > 1: limit of the ratio where
    A < 0 (Ye et al. 2020, eq. 5). Further metrics: ``ratio``, ``clipped`` (1 where a limit took the gradient away).
    """
    ratio = _log_ratio(outputs, columns).exp()
    terms, metrics = _clipped_surrogate(ratio, columns["advantages"], clip, clip_high, dual_clip)
    penalties, shared = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    return Loss(_aggregate(terms + penalties, columns["row_index"], aggregation, max_tokens), {**metrics, **shared})


@columns(reads=_reads("log_probs", "advantages"), per="row")
def gspo(
    outputs: Tensors,
    columns: Tensors,
    clip: float,
    clip_high: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
) -> Loss:
    """Group sequence policy optimisation (Zheng et al. 2025, eq. 5 to 7): one ratio a row, clipped as in PPO.

        s = exp(mean over the row of log π - log π_old)

    The advantage of a row is the mean of its steps'. ``ratio`` and ``clipped`` have one value a row. Entropy and KL terms
    are means over the row.
    """
    row_index = columns["row_index"]
    ratio = _row_means(_log_ratio(outputs, columns), row_index).exp()
    advantages = _row_means(columns["advantages"], row_index)
    terms, metrics = _clipped_surrogate(ratio, advantages, clip, clip_high)
    penalties, shared = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    return Loss(terms + _row_means(penalties, row_index), {**metrics, **shared})


@columns(reads=_reads("log_probs", "advantages"), per=_per)
def cispo(
    outputs: Tensors,
    columns: Tensors,
    clip_high: float,
    clip_low: float | None = None,
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token_mean",
    max_tokens: int | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
) -> Loss:
    """-sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π (CISPO, MiniMax-M1 2025, eq. 4, 5): no step loses its gradient.

    Without ``clip_low`` there is no lower limit, as in the paper. Further metrics: ``ratio``, ``clipped``.
    """
    ratio = _log_ratio(outputs, columns).detach().exp()
    weight = ratio.clip(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    penalties, metrics = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    terms = penalties - weight * columns["advantages"] * outputs["log_probs"]
    metrics |= {"ratio": ratio, "clipped": (weight != ratio).float()}
    return Loss(_aggregate(terms, columns["row_index"], aggregation, max_tokens), metrics)


@columns(reads=_reads("log_probs", "advantages"), per=_per)
def reinforce(
    outputs: Tensors,
    columns: Tensors,
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token_mean",
    max_tokens: int | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
) -> Loss:
    """-A log π (Williams 1992), for advantages of any estimator: actor-critic, RLOO, ReMax, V-trace."""
    penalties, metrics = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    terms = penalties - columns["advantages"] * outputs["log_probs"]
    return Loss(_aggregate(terms, columns["row_index"], aggregation, max_tokens), metrics)


@columns(reads=lambda params: ("returns",) if params["clip"] is None else ("values", "returns"))
def value_loss(outputs: Tensors, columns: Tensors, clip: float | None = None) -> Loss:
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²); plain ½ (V - R)² without ``clip``.

    Metrics: ``values``, ``value_error`` (|V - R|) and, with ``clip``, ``value_clipped``.
    """
    values, returns = outputs["values"], columns["returns"]
    terms = 0.5 * (values - returns) ** 2
    metrics = {"values": values.detach(), "value_error": (values - returns).detach().abs()}
    if clip is not None:
        near = values.clip(columns["values"] - clip, columns["values"] + clip)
        bounded = 0.5 * (near - returns) ** 2
        metrics["value_clipped"] = (bounded > terms).float()
        terms = torch.maximum(terms, bounded)
    return Loss(terms, metrics)


@columns(reads=())
def cross_entropy(outputs: Tensors, columns: Tensors) -> Loss:
    """-log π of every action step: supervised fine-tuning. Metric: ``nll``."""
    terms = -outputs["log_probs"]
    return Loss(terms, {"nll": terms.detach()})
