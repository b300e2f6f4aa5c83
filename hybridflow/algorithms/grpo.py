"""GRPO (Shao et al. 2024) and what grew out of it, by switches.

| method                              | keys                                                                             |
|-------------------------------------|----------------------------------------------------------------------------------|
| GRPO (Shao et al. 2024, eq. 3)      | loss.aggregation = "sequence_mean", kl.coef = 0.04                               |
| Dr. GRPO (Liu et al. 2025)          | grpo.scale = "none", loss.aggregation = "constant"                               |
| DAPO (Yu et al. 2025, eq. 8, 13)    | loss.clip_high = 0.28, shaping.overlong_buffer, train.max_refills                |
| GSPO (Zheng et al. 2025, eq. 5)     | loss.kind = "gspo"                                                               |
| CISPO (MiniMax-M1 2025, eq. 4)      | loss.kind = "cispo"                                                              |
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from hybridflow.algorithms.policy_gradient import Objective, PolicyGradient, Where
from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Estimator, Fn, Scorer, chain
from hybridflow.ops.advantages import group_centred

__all__ = ["GRPO", "GRPOConfig"]


class GRPOConfig(Config):
    """Keys of ``[grpo]``."""

    scale: Literal["std", "none"] = "std"
    """divide by the group's standard deviation, or not"""


class GRPO(PolicyGradient):
    """Roles: actor, estimator, scorers (reward, and the reference when there is a KL)."""

    kl_where: ClassVar[Where] = "loss"

    def __init__(
        self, config: GRPOConfig, objective: Objective, actor: Actor, estimator: Estimator, scorers: Sequence[Scorer]
    ) -> None:
        self.config, self.objective = config, objective
        self.actor, self.estimator, self.scorers = actor, estimator, scorers

    @classmethod
    def smallest_group(cls, config: GRPOConfig) -> int:
        return group_centred.min_group

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        return batch

    def learn(self, batch: Batch) -> Batch:
        batch = self.objective.prepare(self.actor, batch)
        batch = self.estimator.compute(batch, self.advantages())
        self.actor.update(batch, self.objective.policy_loss())
        return batch

    def advantages(self) -> Fn:
        """Scores against the mean of their group (eq. 3 with outcome supervision, 4.1.2)."""
        return chain(*self.objective.shaped_scores(), group_centred.bind(scale=self.config.scale), keep=("advantages",))
