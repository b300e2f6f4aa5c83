"""Trust region policy optimisation (Schulman et al. 2015)."""

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Critic, Estimator, chain, update
from hybridflow.ops.advantages import gae, whiten
from hybridflow.ops.losses import value_loss
from hybridflow.ops.trust_region import trust_region_step

__all__ = ["TRPO", "TRPOConfig"]


class TRPOConfig(Config):
    """Keys of ``[trpo]``. ``[actor.optimizer]`` has no part: a step's size is its KL."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    lam: float = Field(0.95, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    max_kl: float = Field(0.01, gt=0)
    """nats, the largest mean KL between the policies before and after a step"""
    damping: float = Field(0.1, ge=0)
    """added to the Fisher matrix"""


class TRPO(Algorithm):
    """Roles: actor, critic, estimator. The critic takes ``train.epochs`` x ``train.minibatches`` steps on a rollout, the
    policy one on all of it."""

    def __init__(self, config: TRPOConfig, actor: Actor, critic: Critic, estimator: Estimator) -> None:
        self.actor, self.critic, self.estimator = actor, critic, estimator
        self.advantages = chain(gae.bind(gamma=config.gamma, lam=config.lam), whiten.bind(), keep=("advantages", "returns"))
        self.policy_step = trust_region_step.bind(max_kl=config.max_kl, damping=config.damping)
        self.value_loss = value_loss.bind()

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        batch = self.critic.compute_values(batch)
        batch = self.estimator.compute(batch, self.advantages)
        update(batch, (self.critic, self.value_loss), (self.actor, self.policy_step))
        return batch
