"""Deep deterministic policy gradient (Lillicrap et al. 2016)."""

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Algorithm, BlendingActor
from hybridflow.ops.actor_critic import deterministic_policy_loss, td3_critic_loss

__all__ = ["DDPG", "DDPGConfig"]


class DDPGConfig(Config):
    """Keys of ``[ddpg]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    tau: float = Field(0.005, gt=0, le=1)
    """how far the targets follow in every update"""


class DDPG(Algorithm):
    """Collect transitions with noise; learn critic and policy from replayed ones."""

    def __init__(self, config: DDPGConfig, actor: BlendingActor) -> None:
        self.config, self.actor = config, actor
        self.critic_loss = td3_critic_loss.bind(smoothing=0.0, smoothing_clip=1.0)
        self.policy_loss = deterministic_policy_loss.bind()

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        batch = self.actor.update(batch, self.critic_loss, self.policy_loss)
        for name in ("policy", "critic"):
            self.actor.blend(name, f"target_{name}", self.config.tau)
        return batch
