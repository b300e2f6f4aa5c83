"""Deep deterministic policy gradient (Lillicrap et al. 2016)."""

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm
from hybridflow.ops.actor_critic import deterministic_policy_loss, td3_critic_loss
from hybridflow.ops.td import follow

__all__ = ["DDPG", "DDPGConfig"]


class DDPGConfig(Config):
    """Keys of ``[ddpg]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    tau: float = Field(0.005, gt=0, le=1)
    """how far the targets follow in every update"""


class DDPG(Algorithm):
    """Collect transitions with noise; learn critic and policy from replayed ones."""

    def __init__(self, config: DDPGConfig, actor: Actor) -> None:
        self.actor = actor
        self.critic_loss = td3_critic_loss.bind(smoothing=0.0, smoothing_clip=1.0)
        self.policy_loss = deterministic_policy_loss.bind()
        self.follow = follow.bind(targets={"target_policy": "policy", "target_critic": "critic"}, tau=config.tau)

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        return self.actor.update(batch, self.critic_loss, self.policy_loss, self.follow)
