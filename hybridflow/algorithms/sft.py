"""Supervised fine-tuning: the likelihood of demonstrations. What a rollout is for the other methods is a look into the
data set here, so it runs in the same loop."""

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm
from hybridflow.ops.losses import cross_entropy

__all__ = ["SFT", "SFTConfig"]


class SFTConfig(Config):
    """SFT has no keys of its own."""


class SFT(Algorithm):
    """Roles: actor."""

    def __init__(self, config: SFTConfig, actor: Actor) -> None:
        self.actor, self.loss = actor, cross_entropy.bind()

    def rollout(self, source: Batch) -> Batch:
        return source

    def learn(self, batch: Batch) -> Batch:
        self.actor.update(batch, self.loss)
        return batch
