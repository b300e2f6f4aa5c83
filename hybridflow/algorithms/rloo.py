"""RLOO (Ahmadian et al. 2024, "Back to Basics"): REINFORCE with the mean score of the other responses as baseline."""

from collections.abc import Sequence

from hybridflow.algorithms.policy_gradient import Objective, PolicyGradient
from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Estimator, Fn, Scorer, chain
from hybridflow.ops.advantages import leave_one_out

__all__ = ["RLOO", "RLOOConfig"]


class RLOOConfig(Config):
    """RLOO has no keys of its own."""


class RLOO(PolicyGradient):
    """Roles: actor, estimator, scorers (reward, and the reference when there is a KL)."""

    def __init__(
        self, config: RLOOConfig, objective: Objective, actor: Actor, estimator: Estimator, scorers: Sequence[Scorer]
    ) -> None:
        self.objective = objective
        self.actor, self.estimator, self.scorers = actor, estimator, scorers

    @classmethod
    def smallest_group(cls, config: RLOOConfig) -> int:
        return leave_one_out.min_group

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
        """R(y_i, x) - mean of R of the others, where R = score - coef log π(y|x) / π_ref(y|x)."""
        return chain(*self.objective.shaped_scores(), leave_one_out.bind(), keep=("advantages",))
