"""ReMax (Li et al. 2023): REINFORCE whose baseline is the score of the greedy response: PPO with one more generation and
without a critic."""

from collections.abc import Sequence
from typing import Any, Protocol

from hybridflow.algorithms.policy_gradient import Objective, PolicyGradient
from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Estimator, Fn, Scorer, chain, renamed
from hybridflow.ops.advantages import greedy_baseline, normalise_with_greedy

__all__ = ["ReMax", "ReMaxConfig", "SamplingActor"]


class ReMaxConfig(Config):
    """ReMax has no keys of its own."""


class SamplingActor(Actor, Protocol):
    """An actor that samples with other parameters when asked to."""

    def rollout(self, batch: Batch, params: Any = None, /) -> Batch: ...


class ReMax(PolicyGradient):
    """Roles: actor, estimator, scorers (reward, and the reference when there is a KL), baseline (the reward again, writing
    ``greedy_scores`` and ``greedy_failed``). ``greedy``: sampling parameters that take the likeliest token.
    """

    actor: SamplingActor

    def __init__(
        self,
        config: ReMaxConfig,
        objective: Objective,
        actor: SamplingActor,
        estimator: Estimator,
        scorers: Sequence[Scorer],
        baseline: Scorer,
        greedy: Any,
    ) -> None:
        super().__init__(config, objective, actor, estimator, scorers)
        self.baseline, self.greedy = baseline, greedy

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        greedy = self.baseline.score(self.actor.rollout(source.first_of_groups(), self.greedy))
        for penalty in self.greedy_penalties():
            greedy = self.estimator.compute(greedy, penalty)
        return batch.join_groups(greedy, "greedy_scores", "greedy_failed")

    def greedy_penalties(self) -> list[Fn]:
        """Those of the samples' scores, here where the length of the greedy responses is known."""
        return [renamed(fn, {"scores": "greedy_scores"}) for fn in self.objective.penalties()]

    def advantages(self) -> Fn:
        """Rewards to go minus the score of the greedy response (algorithm 1), both on one scale."""
        rewards = self.objective.token_rewards(normalise=normalise_with_greedy)
        return chain(*rewards, greedy_baseline.bind(), keep=("rewards", "advantages"))
