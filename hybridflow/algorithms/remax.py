"""ReMax (Li et al. 2023): REINFORCE whose baseline is the score of the greedy response: PPO with one more generation and
without a critic."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

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
    ``greedy_scores``). ``greedy``: sampling parameters that take the likeliest token.
    """

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
        self.objective, self.greedy = objective, greedy
        self.actor, self.estimator, self.scorers, self.baseline = actor, estimator, scorers, baseline

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        prompts, prompt_of = one_of_each_group(source)
        greedy = self.baseline.score(self.actor.rollout(prompts, self.greedy))
        for penalty in self.greedy_penalties():
            greedy = self.estimator.compute(greedy, penalty)
        return with_baseline(batch, greedy, prompt_of)

    def learn(self, batch: Batch) -> Batch:
        batch = self.objective.prepare(self.actor, batch)
        batch = self.estimator.compute(batch, self.advantages())
        self.actor.update(batch, self.objective.policy_loss())
        return batch

    def greedy_penalties(self) -> list[Fn]:
        """Those of the samples' scores, here where the length of the greedy responses is known."""
        return [renamed(fn, {"scores": "greedy_scores"}) for fn in self.objective.penalties()]

    def advantages(self) -> Fn:
        """Rewards to go minus the score of the greedy response (algorithm 1), both on one scale."""
        rewards = self.objective.token_rewards(normalise=normalise_with_greedy)
        return chain(*rewards, greedy_baseline.bind(), keep=("rewards", "advantages"))


def one_of_each_group(source: Batch) -> tuple[Batch, np.ndarray]:
    """(the first row of every group, [B] the place of each row's group among them)."""
    place_of: dict[Any, int] = {}
    places = np.array([place_of.setdefault(key, len(place_of)) for key in source["group_id"].tolist()], np.int64)
    _, first = np.unique(places, return_index=True)
    return source.rows(first), places


def with_baseline(batch: Batch, greedy: Batch, prompt_of: np.ndarray) -> Batch:
    """``batch`` with the greedy score of each row's prompt; where the greedy response could not be scored, the group has
    no part in learning."""
    failed, mask = greedy["score_failed"][prompt_of], batch.ragged("response_mask")
    return batch.with_columns(
        greedy_scores=greedy["greedy_scores"][prompt_of],
        score_failed=batch["score_failed"] | failed,
        response_mask=mask.like(mask.values & ~failed[mask.row_index]),
    )
