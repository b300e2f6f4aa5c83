"""Q-learning with a table (Watkins 1989), for small discrete environments."""

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm
from hybridflow.ops.td import q_table_step

__all__ = ["QLearning", "QLearningConfig"]


class QLearningConfig(Config):
    """Keys of ``[q_learning]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    alpha: float = Field(0.1, gt=0, le=1)
    """how far a value goes towards what a transition says"""


class QLearning(Algorithm):
    """Step the environments, then move the table by every transition. Role: actor."""

    def __init__(self, config: QLearningConfig, actor: Actor) -> None:
        self.actor = actor
        self.step = q_table_step.bind(gamma=config.gamma, alpha=config.alpha)

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        return self.actor.update(batch, self.step)
