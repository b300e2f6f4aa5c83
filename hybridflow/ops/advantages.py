"""Estimators: rewards, penalties, advantages and returns, computed on whole batches.

    estimate = chain(score_rewards.bind(), kl_penalty.bind(coef=0.05), gae.bind(gamma=1.0, lam=0.95), whiten.bind())

Each one takes a ``Batch`` and returns the columns that it declares; time columns are zero outside the action steps (where
``response_mask`` is False). All see only the action steps: the step before an action step is the previous *action* step of
its row, whatever lies between, and the contents of other steps never matter. A row without action steps (a response whose
scorer failed, see ``drop_failed``) has no influence on any other. Arithmetic is in float64, results are float32.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.roles import columns
from hybridflow.ops.kl import KLKind, estimate_kl

__all__ = [
    "discounted_returns",
    "drop_cut",
    "drop_failed",
    "gae",
    "greedy_baseline",
    "group_baseline",
    "group_centred",
    "group_counts",
    "kl_into_scores",
    "kl_penalty",
    "lagrangian",
    "leave_one_out",
    "n_step_returns",
    "normalise_scores",
    "normalise_with_greedy",
    "overlong_penalty",
    "score_rewards",
    "teacher_rewards",
    "v_trace",
    "whiten",
]

Floats = NDArray[np.float64]
BOOTSTRAPPED = ("rewards", "values", "bootstrap_values", "terminated", "response_mask")


class _Steps:
    """The action steps of a batch: packed [N], or aligned to the left [B, K] with zeros behind (K: most steps of a row)."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.mask = batch, batch.ragged("response_mask")
        self.row_index = self.mask.row_index[self.mask.values]
        self.counts = np.bincount(self.row_index, minlength=len(batch))
        self.acts = np.arange(self.counts.max(initial=0)) < self.counts[:, None]

    def packed(self, name: str) -> Floats:
        """[N]"""
        return self.batch.ragged(name).values[self.mask.values].astype(np.float64)

    def aligned(self, name: str) -> Floats:
        """[B, K]"""
        return Ragged(self.packed(name), self.counts).padded()

    def bootstrap(self) -> Floats:
        """[B] value of what follows the last step: zero after a terminal one."""
        return np.where(self.batch["terminated"], 0.0, self.batch["bootstrap_values"].astype(np.float64))

    def following(self, values: Floats) -> Floats:
        """[B, K] value after each step, given ``values`` [B, K] before each."""
        after = np.roll(values, -1, axis=1)
        rows = np.flatnonzero(self.counts)
        after[rows, self.counts[rows] - 1] = self.bootstrap()[rows]
        return after

    def column(self, values: Floats) -> Ragged:
        """A time column with ``values``, [N] or [B, K], on the action steps and zeros elsewhere."""
        out = np.zeros(len(self.mask.values), np.float32)
        out[self.mask.values] = values[self.acts] if values.ndim == 2 else values
        return self.mask.like(out)

    def row_column(self, values: Floats) -> Ragged:
        """A time column with ``values`` [B] on all action steps of each row."""
        return self.column(values[self.row_index])


def _accumulate(deltas: Floats, decay: Floats | float) -> Floats:
    """[B, K] x_t = delta_t + decay_t · x_{t+1}, from the last step to the first."""
    decay = np.broadcast_to(decay, deltas.shape)
    out, last = np.zeros_like(deltas), np.zeros(len(deltas))
    for t in range(deltas.shape[1] - 1, -1, -1):
        out[:, t] = last = deltas[:, t] + decay[:, t] * last
    return out


@columns(reads=("scores", "response_mask"), writes=("rewards",))
def score_rewards(batch: Batch) -> dict[str, Ragged]:
    """The score as reward of the last action step; zero before."""
    steps = _Steps(batch)
    last = np.arange(steps.acts.shape[1]) == steps.counts[:, None] - 1
    return {"rewards": steps.column(np.where(last, batch["scores"].astype(np.float64)[:, None], 0.0))}


@columns(reads=("rewards", "log_probs", "ref_log_probs", "response_mask"), writes=("rewards",))
def kl_penalty(batch: Batch, coef: float, kind: KLKind = "k1") -> dict[str, Ragged]:
    """r_t - coef · KL(sampling policy || reference)_t (Ziegler et al. 2019). ``kind``: see ``ops.kl.estimate_kl``."""
    steps = _Steps(batch)
    kl = estimate_kl(steps.packed("log_probs"), steps.packed("ref_log_probs"), kind)
    return {"rewards": steps.column(steps.packed("rewards") - coef * kl)}


@columns(reads=("log_probs", "teacher_log_probs", "response_mask"), writes=("rewards",))
def teacher_rewards(batch: Batch) -> dict[str, Ragged]:
    """r_t = log π_teacher - log π of the sampled token: minus the reverse KL(π || π_teacher), from one sample."""
    steps = _Steps(batch)
    return {"rewards": steps.column(steps.packed("teacher_log_probs") - steps.packed("log_probs"))}


@columns(reads=("advantages", "cost_advantages", "response_mask"), writes=("advantages",))
def lagrangian(batch: Batch, multiplier: float) -> dict[str, Ragged]:
    """(A - λ A_cost) / (1 + λ) with λ = ``multiplier`` ≥ 0 (Safe RLHF, Dai et al. 2024)."""
    steps = _Steps(batch)
    mixed = steps.packed("advantages") - multiplier * steps.packed("cost_advantages")
    return {"advantages": steps.column(mixed / (1 + multiplier))}


@columns(reads=("scores", "log_probs", "ref_log_probs", "response_mask"), writes=("scores",))
def kl_into_scores(batch: Batch, coef: float, kind: KLKind = "k1") -> dict[str, Array]:
    """score - coef · KL(sampling policy || reference), summed over the row: for estimators that compare whole responses."""
    steps = _Steps(batch)
    kl = estimate_kl(steps.packed("log_probs"), steps.packed("ref_log_probs"), kind)
    sums = np.bincount(steps.row_index, kl, len(batch))
    return {"scores": (batch["scores"].astype(np.float64) - coef * sums).astype(np.float32)}


@columns(reads=("scores", "response_mask"), writes=("scores",))
def overlong_penalty(batch: Batch, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> dict[str, Array]:
    """Soft punishment of long responses (DAPO, Yu et al. 2025, eq. 13), taken off the score.

    Nothing up to ``max_tokens - buffer_tokens`` action steps, growing linearly to ``penalty`` at ``max_tokens``, and
    ``penalty`` beyond. Without a buffer, ``penalty`` beyond ``max_tokens`` at once.
    """
    excess = _Steps(batch).counts - (max_tokens - buffer_tokens)
    punishment = penalty * (excess / max(buffer_tokens, 1)).clip(0.0, 1.0)
    return {"scores": (batch["scores"].astype(np.float64) - punishment).astype(np.float32)}


@columns(reads=("scores", "response_mask"), writes=("scores",))
def normalise_scores(batch: Batch, mean: float | None = None, std: float | None = None) -> dict[str, Array]:
    """(score - mean) / (std + 1e-8), by default with mean and population std of the rows that have action steps.

    Equal scores, and a single one, become 0.
    """
    scores = batch["scores"].astype(np.float64)
    return {"scores": _normalised(scores, _Steps(batch).counts > 0, mean, std)}


@columns(reads=("scores", "greedy_scores", "response_mask"), writes=("scores", "greedy_scores"))
def normalise_with_greedy(batch: Batch, mean: float | None = None, std: float | None = None) -> dict[str, Array]:
    """``normalise_scores`` for scores that are compared with those of greedy responses: both on one scale.

    By default that of both together: samples that are all alike then don't blow up the distance to another greedy score.
    """
    both = np.concatenate([batch["scores"], batch["greedy_scores"]]).astype(np.float64)
    scores, greedy = np.split(_normalised(both, np.tile(_Steps(batch).counts > 0, 2), mean, std), 2)
    return {"scores": scores, "greedy_scores": greedy}


def _normalised(scores: Floats, valid: NDArray[np.bool_], mean: float | None, std: float | None) -> Array:
    """``scores`` less their mean over their deviation, or the given ones; 0 where not ``valid``."""
    scores = np.where(valid, scores, 0.0)
    count = max(int(valid.sum()), 1)
    centred = np.where(valid, scores - (scores.sum() / count if mean is None else mean), 0.0)
    deviation = np.sqrt((centred**2).sum() / count) if std is None else std
    return (centred / (deviation + 1e-8)).astype(np.float32)


@columns(reads=BOOTSTRAPPED, writes=("advantages", "returns"))
def gae(batch: Batch, gamma: float, lam: float) -> dict[str, Ragged]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16); returns = advantages + values.

        δ_t = r_t + γ V_{t+1} - V_t,   A_t = δ_t + γ λ A_{t+1}

    After the last step, V is ``bootstrap_values`` (truncated or cut rows), or 0 (terminated ones).
    """
    steps = _Steps(batch)
    values = steps.aligned("values")
    deltas = steps.aligned("rewards") + gamma * steps.following(values) - values
    advantages = _accumulate(np.where(steps.acts, deltas, 0.0), gamma * lam)
    return {"advantages": steps.column(advantages), "returns": steps.column(advantages + values)}


@columns(reads=("rewards", "response_mask"), writes=("advantages", "returns"))
def discounted_returns(batch: Batch, gamma: float) -> dict[str, Ragged]:
    """Monte Carlo: G_t = r_t + γ G_{t+1}. Advantages are the returns themselves (REINFORCE without a baseline).

    Nothing is bootstrapped: a truncated row counts as ended.
    """
    steps = _Steps(batch)
    returns = steps.column(_accumulate(steps.aligned("rewards"), gamma))
    return {"advantages": returns, "returns": returns}


@columns(reads=BOOTSTRAPPED, writes=("advantages", "returns"))
def n_step_returns(batch: Batch, gamma: float, n: int) -> dict[str, Ragged]:
    """G_t = r_t + ... + γ^{n-1} r_{t+n-1} + γ^n V_{t+n}, shorter where the row ends before; advantages = G - V.

    As in A3C (Mnih et al. 2016, 4) with a fixed horizon; after the last step, V is as in ``gae``.
    """
    steps = _Steps(batch)
    rewards, values = steps.aligned("rewards"), steps.aligned("values")
    returns = values
    for _ in range(min(n, values.shape[1])):
        returns = np.where(steps.acts, rewards + gamma * steps.following(returns), 0.0)
    return {"advantages": steps.column(returns - values), "returns": steps.column(returns)}


@columns(reads=(*BOOTSTRAPPED, "log_probs", "learner_log_probs"), writes=("advantages", "returns"))
def v_trace(batch: Batch, gamma: float, rho_clip: float = 1.0, c_clip: float = 1.0) -> dict[str, Ragged]:
    """V-trace targets and advantages for off-policy actors (IMPALA, Espeholt et al. 2018, eq. 1 and 4.2).

        v_t = V_t + δ_t + γ c_t (v_{t+1} - V_{t+1}),   δ_t = ρ_t (r_t + γ V_{t+1} - V_t)
        A_t = ρ_t (r_t + γ v_{t+1} - V_t),   ρ_t = min(ρ̄, π/μ),  c_t = min(c̄, π/μ)

    π is the learner's policy (``learner_log_probs``), μ the sampling one. The advantages already hold the weight ρ: train
    on them with ``losses.reinforce``.
    """
    steps = _Steps(batch)
    rewards, values = steps.aligned("rewards"), steps.aligned("values")
    log_ratio = steps.aligned("learner_log_probs") - steps.aligned("log_probs")
    rho, c = (np.exp(np.minimum(log_ratio, np.log(limit))) for limit in (rho_clip, c_clip))
    deltas = np.where(steps.acts, rho * (rewards + gamma * steps.following(values) - values), 0.0)
    targets = values + _accumulate(deltas, gamma * c)
    advantages = rho * (rewards + gamma * steps.following(targets) - values)
    return {"advantages": steps.column(advantages), "returns": steps.column(targets)}


@columns(reads=("advantages", "response_mask"), writes=("advantages",))
def whiten(batch: Batch) -> dict[str, Ragged]:
    """Mean 0 and standard deviation 1 over all action steps of the batch: (A - mean) / (std + 1e-8), population std.

    Equal advantages, and a single one, become 0.
    """
    steps = _Steps(batch)
    advantages, count = steps.packed("advantages"), max(len(steps.row_index), 1)
    centred = advantages - advantages.sum() / count  # exactly 0 for equal values: fp32 values add up exactly in fp64
    return {"advantages": steps.column(centred / (np.sqrt((centred**2).sum() / count) + 1e-8))}


class _Groups:
    """Rows by ``group_id``, equal ids together, whatever they are; rows without action steps belong to no group."""

    def __init__(self, batch: Batch, steps: _Steps) -> None:
        index_of: dict[Any, int] = {}
        self.index = np.array([index_of.setdefault(key, len(index_of)) for key in batch["group_id"].tolist()], np.int64)
        self.valid = steps.counts > 0
        self.scores = np.where(self.valid, batch["scores"].astype(np.float64), 0.0)
        self.sizes = self.sum(self.valid.astype(np.float64))

    def sum(self, values: Floats) -> Floats:
        """[B] sum of ``values`` [B] over the group of each row."""
        return np.bincount(self.index, values).astype(np.float64)[self.index]

    def centred(self) -> Floats:
        """[B] scores minus the mean of their group; 0 where a row has no action step."""
        return np.where(self.valid, self.scores - self.sum(self.scores) / self.sizes.clip(1), 0.0)


def group_counts(batch: Batch) -> dict[str, int]:
    """How many groups have a row with action steps; of these, how many have only one, and how many several with equal
    scores: neither has a score to compare with. Reads ``scores``, ``group_id``, ``response_mask``."""
    groups = _Groups(batch, _Steps(batch))
    first = np.unique(groups.index[groups.valid], return_index=True)[1]
    sizes = groups.sizes[groups.valid][first]
    spread = groups.sum((groups.centred() != 0).astype(np.float64))[groups.valid][first]
    return {
        "groups": len(first),
        "groups_of_one": int((sizes == 1).sum()),
        "groups_with_equal_scores": int(((sizes > 1) & (spread == 0)).sum()),
    }


@columns(reads=("scores", "group_id", "response_mask"), writes=("advantages",), min_group=2)
def group_centred(batch: Batch, scale: Literal["std", "none"]) -> dict[str, Ragged]:
    """Score minus the mean score of its group, on every action step.

    ``scale="std"`` divides by the standard deviation of the group + 1e-6 (GRPO, Shao et al. 2024, 4.1.2). The paper leaves
    open which one; this is the sample deviation (divided by n - 1), as in TRL and verl. ``"none"`` is Dr. GRPO (Liu et al.
    2025). Groups with equal scores, and groups of which one valid row is left, get exactly 0.
    """
    steps = _Steps(batch)
    groups = _Groups(batch, steps)
    centred = groups.centred()
    if scale == "std":
        centred = centred / (np.sqrt(groups.sum(centred**2) / (groups.sizes - 1).clip(1)) + 1e-6)
    return {"advantages": steps.row_column(centred)}


@columns(reads=("scores", "group_id", "response_mask"), writes=("scores",), min_group=2)
def group_baseline(batch: Batch) -> dict[str, Array]:
    """Score minus the mean score of its group, as a score: for methods that go on with rewards of tokens."""
    groups = _Groups(batch, _Steps(batch))
    return {"scores": groups.centred().astype(np.float32)}


@columns(reads=("scores", "group_id", "response_mask"), writes=("advantages",), min_group=2)
def leave_one_out(batch: Batch) -> dict[str, Ragged]:
    """Score minus the mean score of the *other* rows of its group (RLOO, Ahmadian et al. 2024); 0 where none is left."""
    steps = _Steps(batch)
    groups = _Groups(batch, steps)
    others = (groups.sum(groups.scores) - groups.scores) / (groups.sizes - 1).clip(1)
    return {"advantages": steps.row_column(np.where(groups.sizes > 1, groups.scores - others, 0.0))}


@columns(reads=lambda params: (*params["failures"], "group_id", "response_mask"), writes=("response_mask",))
def drop_failed(batch: Batch, failures: tuple[str, ...]) -> dict[str, Ragged]:
    """Groups in which a scorer failed, as the columns ``failures`` say, lose their action steps, so influence nothing."""
    failed = np.logical_or.reduce([batch[name] for name in failures])
    dropped = np.isin(batch["group_id"], batch["group_id"][failed])
    mask = batch.ragged("response_mask")
    return {"response_mask": mask.like(mask.values & ~dropped[mask.row_index])}


@columns(reads=("terminated", "truncated", "response_mask"), writes=("response_mask",))
def drop_cut(batch: Batch) -> dict[str, Ragged]:
    """Rows whose episode goes on lose their action steps: what is still to come of their returns isn't known."""
    mask, ended = batch.ragged("response_mask"), batch["terminated"] | batch["truncated"]
    return {"response_mask": mask.like(mask.values & ended[mask.row_index])}


@columns(reads=("rewards", "greedy_scores", "response_mask"), writes=("advantages",))
def greedy_baseline(batch: Batch) -> dict[str, Ragged]:
    """ReMax (Li et al. 2023): A_t = Σ_{s≥t} r_s - score of the greedy response to the same prompt."""
    steps = _Steps(batch)
    to_go = _accumulate(steps.aligned("rewards"), 1.0)
    return {"advantages": steps.column(to_go - batch["greedy_scores"].astype(np.float64)[:, None])}
