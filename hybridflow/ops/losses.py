"""Losses of policies, values and supervised fine-tuning.

    loss = ppo_clip.bind(clip=0.2, entropy_coef=0.01)
    terms, metrics, *_ = loss(
        {"log_probs": new, "entropy": entropy}, {"log_probs": old, "advantages": a, "row_index": rows}
    )

Everything is packed over the action steps: ``outputs`` (of the model) and time columns are [N], ``row_index`` [N] (int64,
non-decreasing) says the row of each step. A row is never split. Terms are unreduced: the caller sums them and divides by
one normaliser of the whole minibatch, its action steps (``per`` step) or its rows with action steps (``per`` row), so the
loss doesn't depend on how a minibatch is split. Metrics are detached, one value a step or row.

Metrics of every policy loss: ``policy_kl`` (k3 estimate of KL(sampling policy || current policy)), ``entropy``, and, with
``kl_coef``, ``kl`` against the reference, with a ``correction`` the ``weight`` of steps and ``weight_cut`` (1 where a limit
changed it).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.core.errors import ContractError
from hybridflow.core.fields import FIELDS
from hybridflow.core.roles import Fn, Loss, columns
from hybridflow.ops.kl import LOG_RATIO_LIMIT, KLKind, estimate_kl

__all__ = [
    "Aggregation",
    "Correction",
    "cispo",
    "cross_entropy",
    "gspo",
    "in_one_update",
    "ppo_clip",
    "reinforce",
    "value_loss",
    "with_demonstrations",
]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
"""How steps weigh: every step of the minibatch alike (DAPO); every row alike, whatever its length (GRPO); every step alike,
over rows x ``max_tokens`` instead of the steps that there are (Dr. GRPO)."""

Correction = Literal["none", "truncate", "mask"]
"""What is done about sampling with another policy than the learner's (another engine, or older weights): nothing; or every
step weighs w = π_learner / π_sampled, where π_learner is the learner's before the update (``learner_log_probs``), and the
ratio is one to π_learner (decoupled PPO, Hilton et al. 2022). w is cut at the cap (truncated importance sampling, Yao et
al. 2025), or steps whose w is outside [1 / cap, cap] count nothing (masked, as in IcePop)."""

Params = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


def _reads(*names: str) -> Callable[[Params], tuple[str, ...]]:
    """These columns, the reference's if there is a KL term, and the learner's if there is a correction."""

    def reads(params: Params) -> tuple[str, ...]:
        if params.get("aggregation") == "constant" and not params["max_tokens"]:
            raise ContractError('aggregation "constant" needs max_tokens > 0, what the sum over a row is divided by')
        more = ["ref_log_probs"] if params["kl_coef"] > 0 else []
        return (*names, *more, *(["learner_log_probs"] if params["correction"] != "none" else []))

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


def _aggregate(
    terms: Tensor, penalties: Tensor | None, row_index: Tensor, aggregation: Aggregation, max_tokens: int | None
) -> Tensor:
    """[N] terms and penalties per step, as they are or as [R] terms per row."""
    terms = terms if penalties is None else terms + penalties
    if aggregation == "token_mean":
        return terms
    if aggregation == "sequence_mean":
        return _row_means(terms, row_index)
    assert max_tokens, "checked when the loss is bound"
    return _row_sums(terms, row_index)[0] / max_tokens


def _log_ratio(outputs: Tensors, columns: Tensors, correction: Correction) -> Tensor:
    """[N] log of current over old probability; clipped (no gradient beyond), since an infinite ratio gives NaN."""
    old = columns["log_probs" if correction == "none" else "learner_log_probs"]
    return F.hardtanh(outputs["log_probs"] - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _corrected(
    terms: Tensor, columns: Tensors, correction: Correction, cap: float, per_row: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Surrogate terms, per step or per row, times w, and its metrics. The w of a row is exp of the mean of its logs."""
    if correction == "none":
        return terms, {}
    log_weight = (columns["learner_log_probs"] - columns["log_probs"]).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = (_row_means(log_weight, columns["row_index"]) if per_row else log_weight).exp()
    kept = (
        weight.clip(max=cap) if correction == "truncate" else torch.where((weight <= cap) & (weight * cap >= 1), weight, 0)
    )
    return terms * kept, {"weight": kept, "weight_cut": (kept != weight).float()}


def _loss(terms: Tensor, metrics: Mapping[str, Tensor], outputs: Tensors, columns: Tensors) -> Loss:
    return Loss(terms, metrics, drift=outputs["log_probs"].detach() - columns["log_probs"])


def _penalties(
    outputs: Tensors, columns: Tensors, entropy_coef: float, kl_coef: float, kl_kind: KLKind
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """[N] entropy bonus and KL term of each step, None if there is neither; the metrics that all policy losses share."""
    log_probs, entropy = outputs["log_probs"], outputs["entropy"]
    terms: Tensor | None = None
    metrics = {"policy_kl": estimate_kl(columns["log_probs"], log_probs.detach(), "k3"), "entropy": entropy.detach()}
    if entropy_coef:  # an unused entropy costs no backward pass
        terms = -entropy_coef * entropy
    if kl_coef > 0:
        kl = estimate_kl(log_probs, columns["ref_log_probs"], kl_kind)
        terms, metrics["kl"] = kl_coef * kl if terms is None else terms + kl_coef * kl, kl.detach()
    return terms, metrics


def _sloped(values: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """``values`` with the derivative ``slope`` by ``x``: how both are made costs no backward pass."""
    return torch.addcmul(values, slope, x - x.detach())


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A ρ, -A clip(ρ, 1 - clip, 1 + clip_high)), at most -A dual_clip where A < 0; steps or rows alike."""
    losses, ratio = -advantages, log_ratio.detach().exp()
    plain = losses * ratio
    terms = torch.maximum(plain, losses * ratio.clip(1 - clip, 1 + (clip if clip_high is None else clip_high)))
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.minimum(terms, losses * dual_clip), terms)
    clipped = terms != plain  # a limit binds, so there is no gradient
    terms = _sloped(terms, log_ratio, plain.masked_fill(clipped, 0.0))
    return terms, {"ratio": ratio, "clipped": clipped.float()}


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
    correction: Correction = "none",
    correction_cap: float = 2.0,
) -> Loss:
    """Clipped policy loss (PPO, Schulman et al. 2017, eq. 7), also of GRPO, DAPO and Dr. GRPO.

    ``clip_high``: another limit upwards (clip-higher of DAPO, Yu et al. 2025). ``dual_clip`` > 1: limit of the ratio where
    A < 0 (Ye et al. 2020, eq. 5). Further metrics: ``ratio``, ``clipped`` (1 where a limit took the gradient away).
    """
    log_ratio = _log_ratio(outputs, columns, correction)
    terms, metrics = _clipped_surrogate(log_ratio, columns["advantages"], clip, clip_high, dual_clip)
    terms, weights = _corrected(terms, columns, correction, correction_cap)
    penalties, shared = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    terms = _aggregate(terms, penalties, columns["row_index"], aggregation, max_tokens)
    return _loss(terms, {**metrics, **weights, **shared}, outputs, columns)


@columns(reads=_reads("log_probs", "advantages"), per="row")
def gspo(
    outputs: Tensors,
    columns: Tensors,
    clip: float,
    clip_high: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    correction: Correction = "none",
    correction_cap: float = 2.0,
) -> Loss:
    """Group sequence policy optimisation (Zheng et al. 2025, eq. 5 to 7): one ratio a row, clipped as in PPO.

        s = exp(mean over the row of log π - log π_old)

    The advantage of a row is the mean of its steps'. ``ratio`` and ``clipped`` have one value a row. Entropy and KL terms
    are means over the row.
    """
    row_index = columns["row_index"]
    log_ratio = _row_means(_log_ratio(outputs, columns, correction), row_index)
    advantages = _row_means(columns["advantages"], row_index)
    terms, metrics = _clipped_surrogate(log_ratio, advantages, clip, clip_high)
    terms, weights = _corrected(terms, columns, correction, correction_cap, per_row=True)
    penalties, shared = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    terms = terms if penalties is None else terms + _row_means(penalties, row_index)
    return _loss(terms, {**metrics, **weights, **shared}, outputs, columns)


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
    correction: Correction = "none",
    correction_cap: float = 2.0,
) -> Loss:
    """-sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π (CISPO, MiniMax-M1 2025, eq. 4, 5): no step loses its gradient.

    Without ``clip_low`` there is no lower limit, as in the paper. Further metrics: ``ratio``, ``clipped``.
    """
    ratio = _log_ratio(outputs, columns, correction).detach().exp()
    bounded = ratio.clip(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    penalties, shared = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    terms = -bounded * columns["advantages"] * outputs["log_probs"]
    terms, weights = _corrected(terms, columns, correction, correction_cap)
    metrics = {"ratio": ratio, "clipped": (bounded != ratio).float(), **weights, **shared}
    terms = _aggregate(terms, penalties, columns["row_index"], aggregation, max_tokens)
    return _loss(terms, metrics, outputs, columns)


@columns(reads=_reads("log_probs", "advantages"), per=_per)
def reinforce(
    outputs: Tensors,
    columns: Tensors,
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token_mean",
    max_tokens: int | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    correction: Correction = "none",
    correction_cap: float = 2.0,
) -> Loss:
    """-A log π (Williams 1992), for advantages of any estimator: actor-critic, RLOO, ReMax, V-trace."""
    penalties, metrics = _penalties(outputs, columns, entropy_coef, kl_coef, kl_kind)
    terms, weights = _corrected(-columns["advantages"] * outputs["log_probs"], columns, correction, correction_cap)
    terms = _aggregate(terms, penalties, columns["row_index"], aggregation, max_tokens)
    return _loss(terms, {**metrics, **weights}, outputs, columns)


@columns(reads=lambda params: ("returns",) if params["clip"] is None else ("values", "returns"))
def value_loss(outputs: Tensors, columns: Tensors, clip: float | None = None) -> Loss:
    """½ max((V - R)², (clip(V, V_old ± clip) - R)²); plain ½ (V - R)² without ``clip``.

    With the output ``value_scale``, errors and ``clip`` are in such units. Metrics: ``values``, ``value_error`` (|V - R|)
    and, with ``clip``, ``value_clipped``.
    """
    values, returns, scale = outputs["values"], columns["returns"], outputs.get("value_scale")
    errors = values.detach() - returns
    off, slope = errors.abs(), errors
    metrics = {"values": values.detach(), "value_error": off}
    if clip is not None:
        within = clip if scale is None else clip * scale
        near = values.detach().clip(columns["values"] - within, columns["values"] + within)
        bounded = (near - returns).abs()
        clipped = bounded > off
        metrics["value_clipped"] = clipped.float()
        # A clipped value that is further off has no gradient.
        off, slope = torch.maximum(bounded, off), errors.masked_fill(clipped, 0.0)
    terms = _sloped(0.5 * off * off, values, slope)
    return Loss(terms if scale is None else terms / (scale * scale), metrics)


@columns(reads=())
def cross_entropy(outputs: Tensors, columns: Tensors) -> Loss:
    """-log π of every action step: supervised fine-tuning. Metric: ``nll``."""
    terms = -outputs["log_probs"]
    return Loss(terms, {"nll": terms.detach()})


@columns(
    reads=lambda params: (*params["functions"][0].reads, "demonstrated"),
    per=lambda params: params["functions"][0].per,
)
def with_demonstrations(outputs: Tensors, columns: Tensors, functions: tuple[Fn], coef: float) -> Loss:
    """A policy loss on sampled rows and ``coef`` times the cross-entropy on rows that are ``demonstrated`` (PPO-ptx of
    Ouyang et al. 2022), in one minibatch: one optimizer step sees both gradients.

    A demonstration's token weighs ``coef`` times what a sampled one weighs; a row, if the loss is per row, ``coef`` times a
    row. ``functions``: the policy loss. Further metric: ``demonstration_nll``.
    """
    (loss,) = functions
    row_index, rows = columns["row_index"], ~columns["demonstrated"]
    steps = rows[row_index]
    sampled: Loss = loss({name: x[steps] for name, x in outputs.items()}, _kept(columns, steps, rows))
    nll = -outputs["log_probs"][~steps]
    imitation = nll if loss.per == "step" else _row_means(nll, row_index[~steps])
    metrics = {**sampled.metrics, "demonstration_nll": nll.detach()}
    return sampled._replace(terms=torch.cat([sampled.terms, coef * imitation]), metrics=metrics)


@columns(
    reads=lambda params: tuple(name for name in params["functions"][0].reads if name != "learner_log_probs"),
    per=lambda params: params["functions"][0].per,
)
def in_one_update(outputs: Tensors, columns: Tensors, functions: tuple[Fn]) -> Loss:
    """A policy loss with a correction, for batches of which all rows make one optimizer step: the policy before the step is
    that of its own forward pass, so nobody has to compute it beforehand. ``functions``: the loss."""
    (loss,) = functions
    result: Loss = loss(outputs, {**columns, "learner_log_probs": outputs["log_probs"].detach()})
    return result


def _kept(columns: Tensors, steps: Tensor, rows: Tensor) -> dict[str, Tensor]:
    on_rows = {name for name in columns if name in FIELDS and FIELDS[name].axis == "row"}
    return {name: x[rows if name in on_rows else steps] for name, x in columns.items()}
