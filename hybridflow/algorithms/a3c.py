"""Asynchronous advantage actor-critic (Mnih et al. 2016, algorithm S3): env workers make gradients, the learner steps.

Each worker acts with weights of its own, turns its rollout into gradients of policy and value, and then gets the newest
weights. Others have taken steps meanwhile: ``actor/staleness`` tells how many. The optimizer's statistics are shared.
Gradients of policy and value are clipped each by itself, or the value's, which are far larger, would silence the policy's.
"""

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Algorithm, WorkingActor, chain
from hybridflow.ops.advantages import gae
from hybridflow.ops.losses import reinforce, value_loss

__all__ = ["A3C", "A3CConfig"]


class A3CConfig(Config):
    """Keys of ``[a3c]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of generalised advantage estimation; 1: all rewards up to the rollout's end, as in the paper"""
    entropy_coef: float = Field(0.01, ge=0)
    """weight of the entropy bonus"""


class A3C(Algorithm):
    """Roles: actor, whose env workers hold copies of policy and value."""

    def __init__(self, config: A3CConfig, actor: WorkingActor) -> None:
        self.actor = actor
        self.advantages = chain(gae.bind(gamma=config.gamma, lam=config.lam))
        self.policy_loss, self.value_loss = reinforce.bind(entropy_coef=config.entropy_coef), value_loss.bind()

    def rollout(self, source: Batch, /) -> Batch:
        batch = self.actor.rollout(source)
        return self.actor.gradients(batch, self.advantages, self.policy_loss, self.value_loss)

    def learn(self, batch: Batch, /) -> Batch:
        return self.actor.apply(batch)
