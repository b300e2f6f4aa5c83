"""Reward modelling (Ouyang et al. 2022, section 3.5): a score whose differences tell which of two responses is preferred.

The result scores responses as ``[reward] model``. Trained on pairs that prefer the more harmful, it is a ``[cost] model``.
"""

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm
from hybridflow.ops.preference import pairwise

__all__ = ["RewardModel", "RewardModelConfig"]


class RewardModelConfig(Config):
    """Keys of ``[reward_model]``."""

    use_margins: bool = False
    """scores of a pair must differ by its margin (Llama 2), a column of data.pairs; not at all by default"""


class RewardModel(Algorithm):
    """Roles: actor, whose model is the reward model."""

    def __init__(self, config: RewardModelConfig, actor: Actor) -> None:
        self.actor, self.loss = actor, pairwise.bind(use_margins=config.use_margins)

    def rollout(self, source: Batch) -> Batch:
        return source

    def learn(self, batch: Batch) -> Batch:
        self.actor.update(batch, self.loss)
        return batch
