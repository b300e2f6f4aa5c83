"""Deep Q-learning (Mnih et al. 2015), with double Q-learning (van Hasselt et al. 2016), duelling networks (Wang et al.
2016) and categorical values (C51, Bellemare et al. 2017); n-step returns and priorities are the replay buffer's. With a
memory it learns from replayed sequences (R2D2, Kapturowski et al. 2019).
"""

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Fn
from hybridflow.ops.td import c51_loss, dqn_loss, follow, recurrent_dqn_loss
from hybridflow.rollout.replay import ReplayConfig

__all__ = ["DQN", "DQNConfig"]


class DQNConfig(Config):
    """Deep Q-learning."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    double: bool = True
    """the online network chooses the next action, the target network values it"""
    huber_delta: float | None = Field(None, gt=0)
    """errors beyond this count linearly (Huber loss; 1 suits clipped rewards); left out, all count squared"""
    target_update_every: int = Field(1, ge=1)
    """updates between two moves of the target network"""
    tau: float = Field(0.02, gt=0, le=1)
    """how far a move goes towards the online network; 1 copies it"""
    duelling: bool = False
    """the network is a value of the state and an advantage of each action"""
    atoms: int | None = Field(None, ge=2)
    """learn the distribution of returns over so many values (C51: 51); left out, its mean"""
    v_min: float | None = None
    """with atoms: the smallest return"""
    v_max: float | None = None
    """with atoms: the largest return"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = (self.v_min is not None) + (self.v_max is not None)
        if self.atoms is None and given:
            raise ValueError("v_min and v_max have no effect without atoms; set atoms = 51, or remove them")
        if self.atoms is not None and given < 2:
            raise ValueError(f"atoms = {self.atoms} lie between v_min and v_max; set both")
        if self.atoms is not None and self.huber_delta is not None:
            raise ValueError(f"huber_delta = {self.huber_delta} has no effect with atoms; remove one of them")
        if self.v_min is not None and self.v_max is not None and self.v_min >= self.v_max:
            raise ValueError(f"v_min = {self.v_min} is not below v_max = {self.v_max}")
        return self


class DQN(Algorithm):
    """Collect transitions, learn from replayed ones, let the target network follow."""

    def __init__(self, config: DQNConfig, actor: Actor, replay: ReplayConfig) -> None:
        self.actor, self.loss = actor, _loss(config, replay)
        self.follow = replace(follow.bind(targets={"target": "q"}, tau=config.tau), every=config.target_update_every)

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        return self.actor.update(batch, self.loss, self.follow)


def _loss(config: DQNConfig, replay: ReplayConfig) -> Fn:
    if config.atoms is not None:
        return c51_loss.bind(double=config.double)
    squared = {"double": config.double, "huber_delta": config.huber_delta}
    if replay.sequence > 1:
        return recurrent_dqn_loss.bind(gamma=config.gamma, n_steps=replay.n_steps, **squared)
    return dqn_loss.bind(**squared)
