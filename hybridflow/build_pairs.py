"""The parts of a run on preferences: a reward model, or a policy with its reference. Nothing is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.build_model import (
    actor_tokenizer,
    check_meshes,
    decoder_source,
    export_model,
    policy_networks,
    source_like_actor,
    text_networks,
    trained_reward,
)
from hybridflow.config import RunConfig
from hybridflow.core.batch import Batch
from hybridflow.core.errors import DataError
from hybridflow.core.roles import Role, Runtime
from hybridflow.data.pairs import PairSource, load_pairs
from hybridflow.data.prompts import DataConfig
from hybridflow.hooks import Evaluation
from hybridflow.ops.preference import calibration, row_log_ratios
from hybridflow.telemetry.result import wilson_interval
from hybridflow.workers.learner import Learner
from hybridflow.workers.scorer import ModelScorer

__all__ = ["PairParts"]


class PairParts:
    """Makes actor and reference, cheap things first: data and tokenizer before any weights."""

    failures: tuple[str, ...] = ()

    def __init__(self, config: RunConfig, data: DataConfig, runtime: Runtime) -> None:
        self.config, self.runtime, self.scores = config, runtime, config.algorithm == "reward_model"
        train, held_out = load_pairs(data)
        texts = [text for r in (*train, *held_out) for text in (str(r.prompt), r.chosen, r.rejected)]
        self.tokenizer = actor_tokenizer(config.actor, "".join(sorted(set().union(*texts))))
        self.pairs = PairSource(train, data, self.tokenizer, config.seed)
        self.held_out = PairSource(held_out, data, self.tokenizer, config.seed) if held_out else None
        self.decoder = decoder_source(config.actor, config, self.tokenizer.vocab_size)
        self._check(data)
        check_meshes(config, self.decoder, self.tokenizer.vocab_size)

    def _check(self, data: DataConfig) -> None:
        """What the configuration asks of the pairs, before a model loads."""
        longest = max(pairs.longest for pairs in (self.pairs, self.held_out) if pairs is not None)
        if longest > self.decoder.spec.max_positions:
            found = f"{longest} tokens, over the model's {self.decoder.spec.max_positions} positions"
            raise DataError(f"the longest prompt with its response has {found}; set data.max_prompt_tokens, or shorten it")
        if self.scores and self.config.reward_model.use_margins and not self.pairs.has_margins:
            raise DataError(f"{data.pairs}: reward_model.use_margins needs a margin in every row; add them or unset it")

    def describe(self) -> str:
        """One line on the model and the data."""
        total, trained = self.actor.num_parameters()
        kind = "reward model" if self.scores else "policy"
        of_them = "" if trained == total else f", {trained:,} trained"
        return f"{kind} of {total:,} parameters{of_them}, {len(self.pairs)} pairs, {len(self.held_out or ())} held out"

    def source(self, step: int) -> Batch:
        return self.pairs.batch(step - 1, self.config.train.prompts_per_step)

    def makers(self) -> Mapping[str, Callable[[], Any]]:
        return {"actor": lambda: self.actor, "reference": lambda: self.reference}

    def start_from(self, folder: Path) -> None:
        """Let the actor be what a run exported; the reference stays as configured. Call it before the actor is made."""
        self.decoder = replace(self.decoder, folder=folder)

    @cached_property
    def actor(self) -> Any:
        """What is trained: a reward model or a policy."""
        if self.scores:
            networks = text_networks(partial(trained_reward, self.decoder), "reward", self.decoder.name)
        else:
            networks = text_networks(partial(policy_networks, self.decoder, 1.0), "policy", self.decoder.name)
        return self.runtime.role(
            Role("actor", Learner, {"networks": networks, **self.config.learner_args(self.config.actor)})
        )

    @cached_property
    def reference(self) -> Any:
        """The first policy, frozen."""
        source = source_like_actor(self.config.reference, self.config, self.decoder, self.tokenizer.vocab_size)
        networks = text_networks(partial(policy_networks, source, 1.0), "policy", source.name)
        budget = self.config.token_budget_of(self.config.reference)
        args = {"networks": networks, "token_budget": budget, "sampled": False}
        return self.runtime.role(Role("reference", ModelScorer, args, {"log_probs": "ref_log_probs"}))

    def export(self, folder: Path) -> None:
        """Write what was trained as a Hugging Face folder with its tokenizer."""
        export_model(self.actor, self.decoder, self.tokenizer, folder)

    @property
    def evaluate(self) -> Callable[[], Evaluation] | None:
        return self._evaluate if self.held_out is not None else None

    def _evaluate(self) -> Evaluation:
        """Share of the held-out pairs whose preferred response gets more, with Wilson's interval. What it gets is the score
        of the reward model, or the policy's implicit reward. Ties count half: before training, DPO has nothing else."""
        batch = self._compared
        if self.scores:
            values = self.actor.compute_scores(batch)["scores"].astype(np.float64)
        else:
            values = self.config.dpo.beta * row_log_ratios(self.actor.compute_log_probs(batch))
        margins: NDArray[np.float64] = values[batch["preferred"]] - values[~batch["preferred"]]
        right, count = float((margins > 0).sum() + (margins == 0).sum() / 2), len(margins)
        others = {"margin": float(margins.mean()), **calibration(margins)}
        return Evaluation(right / count, *wilson_interval(right, count), count, others)

    @cached_property
    def _compared(self) -> Batch:
        """The held-out pairs, with the reference's log-probs, which never change, if the policy is compared with it."""
        assert self.held_out is not None
        batch = self.held_out.all(self.config.evaluation.limit)
        return batch if self.scores else self.reference.score(batch)
