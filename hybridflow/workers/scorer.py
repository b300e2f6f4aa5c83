"""Scorers: reward functions, reward models and frozen policies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import NonFiniteError
from hybridflow.core.roles import WorkerContext, control, remote
from hybridflow.ops.kl import estimate_kl
from hybridflow.rollout.rewards import RewardConfig, RewardPool, RewardResult, RewardSpec
from hybridflow.workers.forward import forward, score_rows
from hybridflow.workers.networks import Networks, all_tensors
from hybridflow.workers.offload import Shelf, Shelved
from hybridflow.workers.parts import Lines

__all__ = ["ModelScorer", "RewardModelScorer", "RewardScorer"]


class RewardScorer:
    """Scores responses with reward functions, in processes of their own.

    A function that fails gives no score, never a zero: its row is marked, and estimators drop its group, or the run
    stops, as the configuration says; more failures in a batch than the budget stop the run.
    """

    def __init__(self, context: WorkerContext, *, specs: tuple[RewardSpec, ...], config: RewardConfig) -> None:
        self.context, self.config = context, config
        self.pool = RewardPool(specs, config.timeout_s, config.workers, config.retries, config.secrets)

    @remote(
        ONE_TO_ALL,
        reads=("prompt_text", "response", "fields"),
        writes=("scores", "score_failed"),
        kind="reward",
    )
    def score(self, batch: Batch, /) -> Batch:
        """``scores``, and which of them mean nothing."""
        allowed = 0.0 if self.config.on_failure == "raise" else self.config.max_failed_fraction
        results = self.pool.score(batch["prompt_text"], batch["response"], batch["fields"], int(allowed * len(batch)))
        failed = np.array([result.score is None for result in results], bool)
        scores = np.array([0.0 if result.score is None else result.score for result in results], np.float32)
        self._observe(results, failed, scores)
        self.context.processes = max(1, self.pool.num_workers)
        return Batch({"scores": scores, "score_failed": failed}, len(batch))

    def _observe(self, results: list[RewardResult], failed: np.ndarray, scores: np.ndarray) -> None:
        add, good = self.context.metrics.add, scores[~failed].astype(np.float64)
        add("mean", good.sum(), len(good))
        self.context.metrics.deviation("std", good)
        add("failed", failed.sum())
        for result in results:
            for name, value in result.metrics.items():
                add(name, value)

    @control
    def check(self, fields: Collection[str]) -> None:
        """RewardError if a function needs a field that the data doesn't have."""
        self.pool.check(fields)

    @control
    def num_workers(self) -> int:
        """Processes that call the functions; 0 where services score."""
        return self.pool.num_workers

    @control
    def resize(self, workers: int) -> None:
        """Let so many processes call the functions from the next ``score`` on."""
        self.pool.resize(workers)

    @control
    def close(self) -> None:
        self.pool.close()


class RewardModelScorer(Shelved):
    """A frozen reward model: ``scores`` of whole rows, prompt and response. A score of NaN is a NonFiniteError.

    Every row is read with the first of ``end_tokens`` behind it, also where a limit cut the response: the rows of pairs,
    which the model was trained on, end so, and its score is read off the last token.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        networks: Networks,
        token_budget: int,
        end_tokens: tuple[int, ...],
    ) -> None:
        self.context, self.token_budget, self.end_tokens = context, token_budget, end_tokens
        self.lines = Lines.of(context)
        self.model: Any = networks.at(self.lines)[networks.main].requires_grad_(False)
        self.shelves = {"weights": Shelf(lambda: all_tensors(self.model))}

    @remote(
        THREE_D,
        reads=lambda args: args["networks"].inputs,
        writes=("scores", "score_failed"),
        kind="reward",
    )
    def score(self, batch: Batch, /) -> Batch:
        rows = Batch({"tokens": _ended(batch.ragged("tokens"), self.end_tokens)}, len(batch))
        scores = score_rows(self.model, rows, self.token_budget, self.lines.pp)
        if not np.isfinite(scores).all():
            raise NonFiniteError(f"the reward model gives row {int((~np.isfinite(scores)).argmax())} no finite score")
        exact = scores.astype(np.float64)
        self.context.metrics.add("mean", exact.sum(), len(exact))
        self.context.metrics.deviation("std", exact)
        return Batch({"scores": scores, "score_failed": np.zeros(len(batch), bool)}, len(batch))


def _ended(tokens: Ragged, end_tokens: tuple[int, ...]) -> Ragged:
    rows = [[*(row[:-1] if row[-1] in end_tokens else row), end_tokens[0]] for row in tokens]
    return Ragged.from_rows(rows, np.int64)


class ModelScorer(Shelved):
    """A frozen policy: the log-probability that it gives to the responses. ``sampled``: the trained policy wrote them, so
    they come with its own ``log_probs``, and their KL is a metric."""

    def __init__(self, context: WorkerContext, *, networks: Networks, token_budget: int, sampled: bool = True) -> None:
        self.context, self.token_budget, self.sampled = context, token_budget, sampled
        self.lines = Lines.of(context)
        self.model: Any = networks.at(self.lines)[networks.main].requires_grad_(False)
        self.shelves = {"weights": Shelf(lambda: all_tensors(self.model))}

    @remote(
        THREE_D,
        reads=lambda args: (
            *(("log_probs",) if args.get("sampled", True) else ()),
            "response_mask",
            *args["networks"].inputs,
        ),
        writes=("log_probs",),
    )
    def score(self, batch: Batch, /) -> Batch:
        """``log_probs`` of every action step (the role renames them); metric ``kl`` of the sampling policy against them."""
        mask = batch.ragged("response_mask").values
        own = forward(self.model, batch, ("log_probs",), self.token_budget, self.lines.pp)["log_probs"]
        if self.sampled:
            sampling, reference = (c.values[mask].astype(np.float64) for c in (batch.ragged("log_probs"), own))
            self.context.metrics.add("kl", float(estimate_kl(sampling, reference, "k3").sum()), len(sampling))
        return Batch({"log_probs": own}, len(batch))
