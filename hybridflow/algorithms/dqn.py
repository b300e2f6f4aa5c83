"""Deep Q-learning (Mnih et al. 2015), with double Q-learning (van Hasselt et al. 2016)."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Algorithm, BlendingActor
from hybridflow.ops.td import dqn_loss

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


class DQN(Algorithm):
    """Collect transitions, learn from replayed ones, let the target network follow."""

    def __init__(self, config: DQNConfig, actor: BlendingActor) -> None:
        self.config, self.actor = config, actor
        self.loss = dqn_loss.bind(double=config.double, huber_delta=config.huber_delta)
        self.num_updates = 0

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        batch = self.actor.update(batch, self.loss)
        self.num_updates += 1
        if self.num_updates % self.config.target_update_every == 0:
            self.actor.blend("q", "target", self.config.tau)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.num_updates = state["num_updates"]
