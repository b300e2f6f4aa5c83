"""PPO (Schulman et al. 2017; for language models Ouyang et al. 2022). One file for tokens and for environments: a response
is an episode whose actions are tokens, so only the scorers differ (environments have none).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Critic, Estimator, Fn, Scorer, chain, update
from hybridflow.ops.advantages import gae, kl_penalty, score_rewards, whiten
from hybridflow.ops.kl import AdaptiveKL
from hybridflow.ops.losses import ppo_clip, value_loss

__all__ = ["PPO", "PPOConfig"]


class PPOConfig(Config):
    """Keys of ``[ppo]``."""

    gamma: float = Field(1.0, ge=0, le=1)
    """discount; 1 for language models, 0.99 for most environments"""
    lam: float = Field(0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    clip: float = Field(0.2, gt=0)
    """the probability ratio is clipped to 1 ± clip"""
    value_clip: float = Field(0.2, ge=0)
    """values are clipped to this distance from the old ones; 0: not clipped"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    kl_coef: float = Field(0.0, ge=0)
    """weight of the KL penalty against the reference, in the token rewards"""
    kl_target: float | None = Field(None, gt=0)
    """adapt kl_coef so that the KL per token stays near this"""
    kl_horizon: int = Field(10_000, gt=0)
    """samples over which kl_coef adapts"""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """estimator of the KL (Schulman 2020)"""

    @model_validator(mode="after")
    def _target_needs_penalty(self) -> "PPOConfig":
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target adapts kl_coef, so kl_coef must start above 0")
        return self


class PPO(Algorithm):
    """Roles: actor, critic, estimator, scorers (reward and reference for language models, none for environments)."""

    def __init__(
        self, config: PPOConfig, actor: Actor, critic: Critic, estimator: Estimator, scorers: Sequence[Scorer]
    ) -> None:
        self.actor, self.critic, self.estimator, self.scorers = actor, critic, estimator, scorers
        self.config, self.num_samples = config, 0
        self.kl = AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
        self.policy_loss = ppo_clip.bind(clip=config.clip, entropy_coef=config.entropy_coef)
        self.value_loss = value_loss.bind(clip=config.value_clip or None)

    @classmethod
    def needs_reference(cls, config: PPOConfig) -> bool:
        return config.kl_coef > 0

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        return batch

    def learn(self, batch: Batch) -> Batch:
        self.num_samples = len(batch)
        batch = self.critic.compute_values(batch)
        batch = self.estimator.compute(batch, self.advantages())
        update(batch, (self.critic, self.value_loss), (self.actor, self.policy_loss))
        return batch

    def advantages(self) -> Fn:
        """Rewards from scores and KL (environments bring their own), then GAE."""
        shaping = [score_rewards.bind()] if self.scorers else []
        if self.config.kl_coef > 0:
            shaping.append(kl_penalty.bind(coef=self.kl.coef, kind=self.config.kl_kind))
        return chain(*shaping, gae.bind(gamma=self.config.gamma, lam=self.config.lam), whiten.bind())

    def observe(self, metrics: Mapping[str, float]) -> None:
        if self.config.kl_coef > 0:
            self.kl.update(metrics["reference/kl"], self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        return self.kl.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state_dict(state)
