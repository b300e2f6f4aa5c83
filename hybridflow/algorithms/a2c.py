"""Advantage actor-critic (Mnih et al. 2016, synchronous): one step of policy and value on every short rollout."""

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Critic, Estimator, chain, update
from hybridflow.ops.advantages import gae
from hybridflow.ops.losses import reinforce, value_loss

__all__ = ["A2C", "A2CConfig"]


class A2CConfig(Config):
    """Keys of ``[a2c]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of generalised advantage estimation; 1: all rewards up to the rollout's end, as in the paper"""
    entropy_coef: float = Field(0.01, ge=0)
    """weight of the entropy bonus"""


class A2C(Algorithm):
    """Roles: actor, critic, estimator."""

    def __init__(self, config: A2CConfig, actor: Actor, critic: Critic, estimator: Estimator) -> None:
        self.actor, self.critic, self.estimator = actor, critic, estimator
        self.advantages = chain(gae.bind(gamma=config.gamma, lam=config.lam))
        self.policy_loss = reinforce.bind(entropy_coef=config.entropy_coef)
        self.value_loss = value_loss.bind()

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        batch = self.critic.compute_values(batch)
        batch = self.estimator.compute(batch, self.advantages)
        update(batch, (self.critic, self.value_loss), (self.actor, self.policy_loss))
        return batch
