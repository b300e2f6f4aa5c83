"""GRPO (Shao et al. 2024) and its family, by switches: RLOO baseline, Dr. GRPO, DAPO, GSPO, CISPO.

| method   | keys                                                                              |
|----------|-----------------------------------------------------------------------------------|
| GRPO     | the defaults, with aggregation = "sequence_mean" as in its paper                   |
| RLOO     | baseline = "leave_one_out", loss = "reinforce"                                     |
| Dr. GRPO | scale = "none", aggregation = "constant"                                           |
| DAPO     | clip_high = 0.28, aggregation = "token_mean", overlong_buffer, overlong_penalty    |
| GSPO     | loss = "gspo", clip = 3e-4, clip_high = 4e-4                                       |
| CISPO    | loss = "cispo"                                                                     |
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Estimator, Fn, Scorer, chain
from hybridflow.ops.advantages import group_centred, kl_into_scores, leave_one_out, overlong_penalty
from hybridflow.ops.losses import cispo, gspo, ppo_clip, reinforce

__all__ = ["GRPO", "GRPOConfig"]


class GRPOConfig(Config):
    """Keys of ``[grpo]``."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """what a response's score is compared with: the mean of its group, or of the others in it"""
    scale: Literal["std", "none"] = "std"
    """divide by the group's standard deviation, or not; only for baseline = "mean" """
    loss: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    """the policy loss; the table in hybridflow/algorithms/grpo.py says which method each combination is"""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """tokens weigh alike; or sequences do; or each token weighs 1 / max_new_tokens"""
    clip: float = Field(0.2, gt=0)
    """the ratio is clipped below at 1 - clip"""
    clip_high: float | None = Field(None, gt=0)
    """and above at 1 + clip_high; clip when left out"""
    dual_clip: float | None = Field(None, gt=1)
    """bound of the loss of bad responses (Ye et al. 2020)"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    kl_coef: float = Field(0.0, ge=0)
    """weight of the KL against the reference; above 0 it adds the reference model"""
    kl_in: Literal["loss", "reward"] = "loss"
    """the KL is a term of the loss, or lowers the score"""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """estimator of the KL (Schulman 2020)"""
    overlong_buffer: int = Field(0, ge=0)
    """the last tokens before max_new_tokens over which the penalty rises (DAPO)"""
    overlong_penalty: float = Field(1.0, ge=0)
    """what a response of full length loses; only with overlong_buffer"""


class GRPO(Algorithm):
    """Roles: actor, estimator, scorers (reward, and the reference when there is a KL)."""

    def __init__(
        self, config: GRPOConfig, actor: Actor, estimator: Estimator, scorers: Sequence[Scorer], max_new_tokens: int
    ) -> None:
        self.actor, self.estimator, self.scorers = actor, estimator, scorers
        self.advantages = advantages(config, max_new_tokens)
        self.loss = policy_loss(config, max_new_tokens)

    @classmethod
    def smallest_group(cls, config: GRPOConfig) -> int:
        return advantages(config, 1).min_group

    @classmethod
    def needs_reference(cls, config: GRPOConfig) -> bool:
        return config.kl_coef > 0

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        return batch

    def learn(self, batch: Batch) -> Batch:
        batch = self.estimator.compute(batch, self.advantages)
        self.actor.update(batch, self.loss)
        return batch


def advantages(config: GRPOConfig, max_new_tokens: int) -> Fn:
    """Score shaping, then the group's baseline."""
    steps = []
    if config.overlong_buffer:
        steps.append(
            overlong_penalty.bind(
                max_tokens=max_new_tokens, buffer_tokens=config.overlong_buffer, penalty=config.overlong_penalty
            )
        )
    if config.kl_coef > 0 and config.kl_in == "reward":
        steps.append(kl_into_scores.bind(coef=config.kl_coef, kind=config.kl_kind))
    baseline = leave_one_out.bind() if config.baseline == "leave_one_out" else group_centred.bind(scale=config.scale)
    return chain(*steps, baseline)


def policy_loss(config: GRPOConfig, max_new_tokens: int) -> Fn:
    """The surrogate objective."""
    params: dict[str, Any] = {"entropy_coef": config.entropy_coef}
    if config.kl_coef > 0 and config.kl_in == "loss":
        params |= {"kl_coef": config.kl_coef, "kl_kind": config.kl_kind}
    clip = {"clip": config.clip, "clip_high": config.clip_high}
    if config.loss == "gspo":
        return gspo.bind(**params, **clip)
    params |= {"aggregation": config.aggregation}
    if config.aggregation == "constant":
        params["max_tokens"] = max_new_tokens
    if config.loss == "ppo_clip":
        return ppo_clip.bind(**params, **clip, dual_clip=config.dual_clip)
    if config.loss == "cispo":
        return cispo.bind(**params, clip_high=config.clip if config.clip_high is None else config.clip_high)
    return reinforce.bind(**params)
