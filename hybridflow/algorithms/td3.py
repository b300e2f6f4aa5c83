"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018)."""

from dataclasses import replace

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm
from hybridflow.ops.actor_critic import deterministic_policy_loss, td3_critic_loss
from hybridflow.ops.td import follow

__all__ = ["TD3", "TD3Config"]


class TD3Config(Config):
    """Keys of ``[td3]``. Noise is in units of half the width of an action's bounds."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    tau: float = Field(0.005, gt=0, le=1)
    """how far the targets follow, whenever the policy is updated"""
    policy_every: int = Field(2, ge=1)
    """updates of the critics for one of the policy"""
    smoothing: float = Field(0.2, ge=0)
    """deviation of the noise on the target policy's actions"""
    smoothing_clip: float = Field(0.5, gt=0)
    """bound of that noise"""


class TD3(Algorithm):
    """Collect transitions with noise; learn twin critics from replayed ones, and the policy less often."""

    def __init__(self, config: TD3Config, actor: Actor) -> None:
        self.actor = actor
        self.critic_loss = td3_critic_loss.bind(smoothing=config.smoothing, smoothing_clip=config.smoothing_clip)
        following = follow.bind(targets={"target_policy": "policy", "target_critic": "critic"}, tau=config.tau)
        self.delayed = [replace(fn, every=config.policy_every) for fn in (deterministic_policy_loss.bind(), following)]

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        return self.actor.update(batch, self.critic_loss, *self.delayed)
