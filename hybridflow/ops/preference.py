"""Losses that learn from preferences: reward models, and policies without one.

    loss = dpo.bind(beta=0.1)
    columns = {"ref_log_probs": ref, "row_index": rows, "preferred": preferred, "group_id": pairs}
    terms, metrics, *_ = loss({"log_probs": new}, columns)

Two rows of one ``group_id`` are a pair, one of them ``preferred``; losses per group get pairs whole, row by row. Columns of
time are packed over the action steps [N], ``row_index`` [N] says the row of each; row columns are [R]; P = R / 2 pairs. The
implicit reward of a row (Rafailov et al. 2023, eq. 5) is β (log π(y|x) - log π_ref(y|x)).
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Loss, columns

__all__ = ["calibration", "dpo", "ipo", "kto", "kto_reference_points", "mismatched", "pairwise", "row_log_ratios"]

Params = Mapping[str, object]
Tensors = Mapping[str, Tensor]


def _pair_reads(params: Params) -> tuple[str, ...]:
    return ("group_id", "preferred", "margins") if params["use_margins"] else ("group_id", "preferred")


@columns(reads=_pair_reads, per="group")
def pairwise(outputs: Tensors, columns: Tensors, use_margins: bool = False) -> Loss:
    """-log σ(r_w - r_l - m) [P]: reward model of Bradley and Terry (1952; Ouyang et al. 2022, eq. 1), r = ``scores`` [R].

    The margin m of a pair (Touvron et al. 2023, eq. 2) is ``margins`` with ``use_margins``, else 0. Metrics: ``accuracy``
    (r_w > r_l), ``margin`` (r_w - r_l), ``probability`` σ(r_w - r_l), its ``brier`` score, ``chosen``, ``rejected`` (r).
    """
    chosen, rejected = _split(outputs["scores"], columns)
    margin = chosen - rejected
    offset = _split(columns["margins"], columns)[0] if use_margins else 0.0
    probability = margin.detach().sigmoid()
    metrics = {"probability": probability, "brier": (1 - probability) ** 2, **_metrics(chosen, rejected)}
    return Loss(-F.logsigmoid(margin - offset), metrics)


@columns(reads=("ref_log_probs", "group_id", "preferred"), per="group")
def dpo(outputs: Tensors, columns: Tensors, beta: float, label_smoothing: float = 0.0) -> Loss:
    """-(1 - ε) log σ(h) - ε log σ(-h) [P], h the difference of the implicit rewards (DPO, Rafailov et al. 2023, eq. 7).

    ε = ``label_smoothing``: the share of labels taken to be wrong (conservative DPO, Mitchell 2023). Metrics: ``accuracy``
    (h > 0), ``margin`` (h), ``chosen`` and ``rejected`` (implicit rewards), ``chosen_log_prob`` (of the whole response).
    """
    chosen, rejected = _split(beta * _log_ratios(outputs, columns), columns)
    margin = chosen - rejected
    terms = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return Loss(terms, {**_metrics(chosen, rejected), "chosen_log_prob": _chosen_log_probs(outputs, columns)})


@columns(reads=("ref_log_probs", "group_id", "preferred"), per="group")
def ipo(outputs: Tensors, columns: Tensors, beta: float) -> Loss:
    """(h / β - 1 / 2β)² [P]: the difference of log-ratios is drawn to 1 / 2β (IPO, Azar et al. 2023, eq. 17, τ = β).

    Sums over the response, as in the paper. Metrics as of ``dpo``.
    """
    chosen, rejected = _split(beta * _log_ratios(outputs, columns), columns)
    terms = ((chosen - rejected) / beta - 1 / (2 * beta)) ** 2
    return Loss(terms, {**_metrics(chosen, rejected), "chosen_log_prob": _chosen_log_probs(outputs, columns)})


@columns(reads=("ref_log_probs", "preferred", "reference_points"), per="row")
def kto(outputs: Tensors, columns: Tensors, beta: float) -> Loss:
    """1 - σ(±(r - β z)) [R], + for desirable (``preferred``) rows, - for others (KTO, Ethayarajh et al. 2024, eq. 7, 8).

    r is the implicit reward, z the ``reference_points`` of the rows, both λ are 1. Rows need no partner. Metrics:
    ``reference_point``; ``chosen`` and ``rejected``, the implicit rewards of desirable and other rows.
    """
    rewards, preferred = beta * _log_ratios(outputs, columns), columns["preferred"]
    gains = rewards - beta * columns["reference_points"]
    kept = rewards.detach()
    metrics = {"chosen": kept[preferred], "rejected": kept[~preferred], "reference_point": columns["reference_points"]}
    return Loss(1 - torch.where(preferred, gains, -gains).sigmoid(), metrics)


@columns(reads=("learner_log_probs", "ref_log_probs", "response_mask"), writes=("reference_points",))
def kto_reference_points(batch: Batch) -> dict[str, NDArray[np.float32]]:
    """max(0, mean over the rows of log π(y'|x) - log π_ref(y'|x)), the same for every row [B].

    On ``mismatched`` rows this is the estimate of KL(π || π_ref) of KTO (Ethayarajh et al. 2024, section 4.1). It is made
    once for the whole batch, before its first minibatch, where the paper makes one for each microbatch: so it can't depend
    on how the batch is split. It carries no gradient, as there.
    """
    point = max(0.0, float(row_log_ratios(batch).mean())) if len(batch) else 0.0
    return {"reference_points": np.full(len(batch), point, np.float32)}


@columns(reads=("tokens", "response_mask"), writes=("tokens", "response_mask"))
def mismatched(batch: Batch) -> dict[str, Ragged]:
    """``tokens`` and ``response_mask`` of each prompt with the response of the next pair's row of the same side.

    ContractError if there are fewer than two pairs. Rows come in pairs, preferred first.
    """
    if len(batch) < 4:
        raise ContractError(f"{len(batch)} rows: a response to another prompt needs two pairs")
    tokens, masks = list(batch.ragged("tokens")), list(batch.ragged("response_mask"))
    others = np.roll(np.arange(len(batch)), -2)
    rows = [(tokens[i][~masks[i]], tokens[j][masks[j]]) for i, j in enumerate(others)]
    mixed = Ragged.from_rows([np.concatenate(row) for row in rows], np.int64)
    mask = [np.repeat([False, True], [len(prompt), len(response)]) for prompt, response in rows]
    return {"tokens": mixed, "response_mask": Ragged.from_rows(mask, bool)}


def row_log_ratios(batch: Batch) -> NDArray[np.float64]:
    """[B] log π(y|x) - log π_ref(y|x) of every row, from ``learner_log_probs`` and ``ref_log_probs``."""
    mask = batch.ragged("response_mask")
    new, ref = (
        batch.ragged(name).values[mask.values].astype(np.float64) for name in ("learner_log_probs", "ref_log_probs")
    )
    sums = np.zeros(len(batch))
    np.add.at(sums, mask.row_index[mask.values], new - ref)
    return sums


def calibration(margins: NDArray[np.float64], bins: int = 10) -> dict[str, float]:
    """How far σ(margin) [P] can be taken for the probability that the preferred response is the better one.

    ``probability``: its mean. ``brier``: mean of (1 - p)². ``calibration_error``: |accuracy - confidence| of each of the
    equal bins of [½, 1], weighted by its pairs; confidence is max(p, 1 - p) (ECE, Guo et al. 2017, eq. 3).
    """
    p = 0.5 * (1 + np.tanh(margins / 2))
    confidence, right = np.maximum(p, 1 - p), (margins > 0) + 0.5 * (margins == 0)
    places = np.minimum((2 * bins * (confidence - 0.5)).astype(int), bins - 1)
    gaps = np.abs(np.bincount(places, right - confidence, bins))
    return {"probability": p.mean(), "brier": ((1 - p) ** 2).mean(), "calibration_error": gaps.sum() / len(p)}


def _split(values: Tensor, columns: Tensors) -> tuple[Tensor, Tensor]:
    """[P], [P]: ``values`` [R] of the preferred row of every pair and of the other one."""
    preferred, pairs = columns["preferred"], columns["group_id"]
    if not torch.equal(pairs[preferred], pairs[~preferred]):
        raise ContractError("rows are no pairs: every group_id needs one preferred row and one other, side by side")
    return values[preferred], values[~preferred]


def _log_ratios(outputs: Tensors, columns: Tensors) -> Tensor:
    """[R] log π(y|x) - log π_ref(y|x)."""
    return _row_sums(outputs["log_probs"] - columns["ref_log_probs"], columns)


def _row_sums(values: Tensor, columns: Tensors) -> Tensor:
    return values.new_zeros(len(columns["preferred"])).index_add(0, columns["row_index"], values)


def _chosen_log_probs(outputs: Tensors, columns: Tensors) -> Tensor:
    return _row_sums(outputs["log_probs"].detach(), columns)[columns["preferred"]]


def _metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    margin = chosen - rejected
    return {"accuracy": (margin > 0).float(), "margin": margin, "chosen": chosen, "rejected": rejected}
