"""Soft actor-critic with an automatic temperature (Haarnoja et al. 2018; for discrete actions Christodoulou 2019)."""

import math

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import ActionSpace, Actor, Algorithm
from hybridflow.ops.actor_critic import (
    discrete_sac_critic_loss,
    discrete_sac_policy_loss,
    sac_critic_loss,
    sac_policy_loss,
)
from hybridflow.ops.td import follow

__all__ = ["SAC", "SACConfig"]


class SACConfig(Config):
    """Keys of ``[sac]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    tau: float = Field(0.005, gt=0, le=1)
    """how far the target critic follows in every update"""
    temperature: float = Field(1.0, gt=0)
    """weight of the entropy; where it adapts, at the start"""
    adapt: bool = True
    """move the temperature so that the entropy meets its target"""
    target_entropy: float | None = None
    """left out, minus one for every number of an action, or 0.98 log of the number of discrete actions"""


class SAC(Algorithm):
    """Collect transitions; learn critics, policy and temperature from replayed ones."""

    def __init__(self, config: SACConfig, actor: Actor, action_space: ActionSpace) -> None:
        self.actor = actor
        discrete = action_space.discrete
        automatic = 0.98 * math.log(action_space.size) if discrete else -float(action_space.size)
        target = automatic if config.target_entropy is None else config.target_entropy
        policy_loss = discrete_sac_policy_loss if discrete else sac_policy_loss
        self.critic_loss = (discrete_sac_critic_loss if discrete else sac_critic_loss).bind()
        self.policy_loss = policy_loss.bind(target_entropy=target if config.adapt else None)
        self.follow = follow.bind(targets={"target_critic": "critic"}, tau=config.tau)

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        return self.actor.update(batch, self.critic_loss, self.policy_loss, self.follow)
