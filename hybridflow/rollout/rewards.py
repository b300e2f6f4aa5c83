"""Rewards: ordinary Python functions, called in processes of their own, and services, asked over HTTP.

    def exact(response: str, answer: str) -> float: ...           # rewards.py; answer is a field of the data set

    with RewardPool([RewardSpec("rewards.py:exact")]) as pool:
        pool.check({"answer"})                                    # before anything runs
        results = pool.score(prompts, responses, fields)          # RewardResult(score=1.0, failure=None, metrics={})

A function is called with those of ``prompt``, ``response`` and the row's fields that its signature names (all of them if it
takes ``**fields``). It returns a finite number, or a dict with "score" whose other numbers become metrics. Everything else
is a *failure* of that row, with a reason, and never a zero: another type, NaN, an exception, a call over ``timeout_s`` (its
process is killed and replaced) and a process that died. ``rollout.reward_service`` says the same of services.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from hybridflow.core.config import Config
from hybridflow.core.errors import RewardError
from hybridflow.core.placement import MeshConfig
from hybridflow.rollout.reward_outcomes import Failures, Outcome
from hybridflow.rollout.reward_service import RewardService, is_url
from hybridflow.rollout.reward_workers import RewardWorkers

__all__ = ["RewardConfig", "RewardPool", "RewardResult", "RewardSpec", "ScorerConfig"]


@dataclass(frozen=True)
class RewardSpec:
    """A reward and its weight in the sum.

    A function is given as ``package.module:function`` or ``path/file.py:function``, with parameters as
    ``package.module:function?limit=50``; a service by its URL.
    """

    function: str
    weight: float = 1.0


@dataclass(frozen=True)
class RewardResult:
    """What a row got: ``score`` (the weighted sum), or None with the reason in ``failure``.

    ``metrics``: numbers beside "score" that the functions returned. With several functions each one's own score is among
    them, under its name, and its other metrics are called ``name/metric``.
    """

    score: float | None
    failure: str | None
    metrics: Mapping[str, float]


class ScorerConfig(Config):
    """Keys of ``[cost]``, and the first of ``[reward]``: functions, or a reward model."""

    functions: tuple[str, ...] = ()
    """functions "package.module:function", "path/file.py:function" or a service's URL; the score is the weighted sum"""
    weights: tuple[float, ...] | None = None
    """one weight for each function; all 1 if not given"""
    model: str | None = None
    """instead of functions: a reward model with the actor's tokenizer, a Hugging Face folder such as runs/reward/model; a
    task's own reward still scores evaluations"""
    token_budget: int | None = Field(None, gt=0)
    """as train.token_budget, of a reward model; left out, that one"""
    mesh: MeshConfig = MeshConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model is not None and self.functions:
            raise ValueError("has both model and functions; give one")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} weights for {len(self.functions)} functions; give one weight for each")
        if len(set(self.functions)) < len(self.functions):
            raise ValueError("a function is given twice; use weights instead")
        return self

    def specs(self) -> tuple[RewardSpec, ...]:
        """The functions with their weights."""
        weights = self.weights or (1.0,) * len(self.functions)
        return tuple(RewardSpec(function, weight) for function, weight in zip(self.functions, weights, strict=True))


class RewardConfig(ScorerConfig):
    """The reward, and what happens when one of its functions, or one of the cost's, fails."""

    timeout_s: float = Field(10.0, gt=0)
    """a call that takes longer is killed and counts as failed, and so does a request to a service"""
    workers: int | None = Field(None, ge=1)
    """processes that call the functions; as many as there are processors, at most 4, if not given"""
    secrets: tuple[str, ...] = ()
    """environment variables that functions get although they are called like secrets, such as OPENAI_API_KEY"""
    retries: int = Field(0, ge=0)
    """how often a failed call is tried again, and a request to a service that gave no answer"""
    on_failure: Literal["raise", "drop_group"] = "drop_group"
    """what a failed row does: stop the run, or leave its prompt's group out of the update"""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """a step in which a greater part of the rows fails stops the run"""


class RewardPool:
    """Scores rows with reward functions, in ``workers`` processes, and with services. RewardError if one isn't there.

    ``secrets``: environment variables that functions get although they are called like secrets.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        timeout_s: float = 10.0,
        workers: int | None = None,
        retries: int = 0,
        secrets: Collection[str] = (),
    ) -> None:
        if not specs:
            raise RewardError("no reward function is given; set reward.functions")
        self.specs = tuple(specs)
        functions = [spec.function for spec in specs]
        self._names = _names(functions)
        self._services = {url: RewardService(url, timeout_s, retries) for url in functions if is_url(url)}
        local = [function for function in functions if not is_url(function)]
        self._workers = RewardWorkers(local, timeout_s, workers, retries, secrets) if local else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def fields(self) -> Collection[str]:
        """What the data set's rows must have."""
        return {name for names in self._required().values() for name in names} - {"prompt", "response"}

    def check(self, fields: Collection[str]) -> None:
        """RewardError if a function requires a parameter that is neither ``prompt``, ``response`` nor one of ``fields``."""
        there = {"prompt", "response", *fields}
        for function, names in self._required().items():
            for name in names:
                if name not in there:
                    hint = "rename the parameter, give it a default, or add the field to the data set"
                    found = f"requires a parameter {name!r}, but there are {', '.join(sorted(there))}"
                    raise RewardError(f"reward {function!r}: {found}; {hint}")

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        fields: Sequence[Mapping[str, Any]],
        max_failures: int | None = None,
    ) -> list[RewardResult]:
        """One result a row, in order.

        RewardError, before anything runs, if a row lacks a field that a function requires; and as soon as more than
        ``max_failures`` rows have failed, with the reason of the first of them.
        """
        for names in {frozenset(row) for row in fields}:
            self.check(names)
        parts = zip(prompts, responses, fields, strict=True)
        rows = [{**row, "prompt": prompt, "response": response} for prompt, response, row in parts]
        outcomes = self._outcomes(rows, Failures(len(rows), len(rows) if max_failures is None else max_failures))
        columns = [outcomes[spec.function] for spec in self.specs]
        return [self._result([column[i] for column in columns]) for i in range(len(rows))]

    @property
    def num_workers(self) -> int:
        """Processes that call the functions; 0 if all are services."""
        return self._workers.num_workers if self._workers else 0

    def resize(self, workers: int) -> None:
        """Let so many processes call the functions from now on; services have their own."""
        if self._workers:
            self._workers.resize(workers)

    def close(self) -> None:
        """End the processes."""
        for service in self._services.values():
            service.close()
        if self._workers:
            self._workers.close()

    def _required(self) -> dict[str, Collection[str]]:
        """The fields that each reward must get."""
        required = {url: service.required for url, service in self._services.items()}
        return required | dict(self._workers.required if self._workers else {})

    def _outcomes(self, rows: Sequence[dict[str, Any]], failures: Failures) -> dict[str, list[Outcome]]:
        """What each reward gave: the services answer while the processes run. No request outlives a failure for long."""
        asked: dict[str, list[Future[list[Outcome]]]] = {}
        try:
            for url, service in self._services.items():
                asked[url] = service.start(rows, failures)
            outcomes = self._workers.score(rows, failures) if self._workers else {}
            for answered in as_completed(future for futures in asked.values() for future in futures):
                answered.result()
                failures.check()
        finally:
            failures.over.set()
            for future in (future for futures in asked.values() for future in futures):
                future.cancel()
        return outcomes | {url: [made for future in futures for made in future.result()] for url, futures in asked.items()}

    def _result(self, outcomes: Sequence[Outcome]) -> RewardResult:
        """Of one row, from what each reward gave it."""
        failure = next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)
        if failure is not None:
            return RewardResult(None, failure, {})
        total = math.fsum(spec.weight * outcome.score for spec, outcome in zip(self.specs, outcomes, strict=True))
        if len(outcomes) == 1:
            return RewardResult(total, None, outcomes[0].metrics)
        metrics: dict[str, float] = {}
        for name, outcome in zip(self._names, outcomes, strict=True):
            metrics[name] = outcome.score
            metrics |= {f"{name}/{key}": value for key, value in outcome.metrics.items()}
        return RewardResult(total, None, metrics)


def _names(rewards: Sequence[str]) -> list[str]:
    """Of functions their own names, of services host and port; or whole specs where those are not unique."""
    names = [urlsplit(spec).netloc if is_url(spec) else spec.partition("?")[0].rpartition(":")[2] for spec in rewards]
    return names if len(set(names)) == len(names) else list(rewards)
