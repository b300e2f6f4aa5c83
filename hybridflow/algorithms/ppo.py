"""PPO (Schulman et al. 2017; for language models Ouyang et al. 2022). One file for tokens and for environments: a response
is an episode whose actions are tokens, so only the scorers differ (environments have none).
"""

from collections.abc import Sequence

from pydantic import Field

from hybridflow.algorithms.policy_gradient import Objective, PolicyGradient
from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Critic, Estimator, Fn, Scorer, chain, update
from hybridflow.ops.advantages import gae, whiten
from hybridflow.ops.losses import value_loss

__all__ = ["PPO", "PPOConfig"]


class PPOConfig(Config):
    """Keys of ``[ppo]``."""

    gamma: float = Field(1.0, ge=0, le=1)
    """discount; 1 for language models, 0.99 for most environments"""
    lam: float = Field(0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    value_clip: float = Field(0.2, ge=0)
    """values are clipped to this distance from the old ones; 0: not clipped"""


class PPO(PolicyGradient):
    """Roles: actor, critic, estimator, scorers (reward and reference for language models, none for environments)."""

    config: PPOConfig

    def __init__(
        self,
        config: PPOConfig,
        objective: Objective,
        actor: Actor,
        critic: Critic,
        estimator: Estimator,
        scorers: Sequence[Scorer],
    ) -> None:
        super().__init__(config, objective, actor, estimator, scorers)
        self.critic = critic
        self.value_loss = value_loss.bind(clip=config.value_clip or None)

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        return batch

    def learn(self, batch: Batch) -> Batch:
        batch = self.objective.prepare(self.actor, batch)
        batch = self.critic.compute_values(batch)
        batch = self.estimator.compute(batch, self.objective.scored(self.advantages()))
        update(batch, (self.critic, self.value_loss), (self.actor, self.objective.policy_loss()))
        return batch

    def advantages(self) -> Fn:
        """Rewards from scores and KL (environments bring their own), then GAE, whitened."""
        rewards = self.objective.token_rewards() if self.scorers else ()
        advantages = gae.bind(gamma=self.config.gamma, lam=self.config.lam)
        return chain(*rewards, advantages, whiten.bind(), keep=("rewards", "advantages", "returns"))
