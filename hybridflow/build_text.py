"""The parts of a run on prompts: a language model as actor, reward functions and a reference as scorers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.algorithms import ALGORITHMS
from hybridflow.build_model import (
    DecoderSource,
    actor_tokenizer,
    check_meshes,
    critic_networks,
    decoder_source,
    export_model,
    policy_networks,
    reward_folder,
    reward_networks,
    source_like_actor,
    text_networks,
)
from hybridflow.config import RunConfig
from hybridflow.config_sections import ModelConfig
from hybridflow.controller.actor import LinkedActor, StreamingActor
from hybridflow.core.batch import Batch
from hybridflow.core.errors import DataError, RewardError, UserError
from hybridflow.core.roles import Role, Runtime, Scorer
from hybridflow.data.prompts import DataConfig
from hybridflow.data.tasks import load_data
from hybridflow.generation.kv_cache import position_bytes, shortage
from hybridflow.generation.request import SamplingParams
from hybridflow.generation.vllm_engine import check_installed, refusal
from hybridflow.generation.weights import rollout_dtype
from hybridflow.hooks import Evaluation
from hybridflow.reshard.layout import generation_places, part_spec
from hybridflow.rollout.rewards import RewardSpec, ScorerConfig
from hybridflow.telemetry.result import mean_interval, wilson_interval
from hybridflow.workers.learner import Learner
from hybridflow.workers.replica import Replica
from hybridflow.workers.scorer import ModelScorer, RewardModelScorer, RewardScorer
from hybridflow.workers.text_sampler import TextSampler

__all__ = ["TextParts"]


class TextParts:
    """Makes the roles of a language model, cheap ones first: data, tokenizer and rewards before any weights."""

    def __init__(self, config: RunConfig, data: DataConfig, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.demonstrates = ALGORITHMS[config.algorithm].records == "demonstrations"
        self.imitates = config.algorithm == "safe_rlhf" and config.safe_rlhf.ptx_coef > 0
        self.task = load_data(data, config.seed, self.demonstrates or self.imitates)
        self.tokenizer = actor_tokenizer(config.actor, self.task.alphabet)
        self.prompts = data.source(self.task.train, self.tokenizer, config.seed)
        self.held_out = data.source(self.task.evaluation, self.tokenizer, config.seed) if self.task.evaluation else None
        self.decoder = decoder_source(config.actor, config, self.tokenizer.vocab_size)
        check_meshes(config, self.decoder, self.tokenizer.vocab_size)
        self._check_lengths()
        self._check_engine()

    @property
    def evaluate(self) -> Callable[[], Evaluation] | None:
        scored = self.has_reward or self.config.evaluation.functions
        return self._evaluate if self.held_out is not None and scored else None

    @property
    def has_reward(self) -> bool:
        return bool(self._reward_specs() or self.config.reward.model)

    @property
    def failures(self) -> tuple[str, ...]:
        sections = self.config.sections()
        also = {"cost_failed": "cost" in sections, "greedy_failed": "remax" in sections}
        return (*(["score_failed"] if self.has_reward else []), *(name for name, there in also.items() if there))

    def describe(self) -> str:
        """One line on the model and the data."""
        parts = [
            self.actor.describe(),
            f"{len(self.prompts)} prompts",
            f"{len(self.held_out) if self.held_out else 0} held out",
        ]
        parts += [f"{count} {what}" for what, count in self._long_prompts().items() if count]
        return ", ".join(parts)

    def _long_prompts(self) -> dict[str, int]:
        sources = [self.prompts, *([self.held_out] if self.held_out else [])]
        return {
            "skipped as too long": sum(source.num_skipped for source in sources),
            "truncated": sum(source.num_truncated for source in sources),
        }

    def source(self, step: int) -> Batch:
        train = self.config.train
        if self.demonstrates:
            return self.prompts.demonstrations(step - 1, train.prompts_per_step)
        return self.prompts.batch(step - 1, train.prompts_per_step, train.group_size)

    def draw(self, first: int, num_prompts: int) -> Batch:
        """Prompts by their number, for steps that take as many as they need."""
        return self.prompts.draw(first, num_prompts, self.config.train.group_size)

    def observe(self, batch: Batch | None) -> None:
        """What a step has learned from, whose responses later ones will resemble."""
        if batch is not None and not self.demonstrates:
            records = self.prompts.rows(batch["group_id"])
            self.prompts.expected.observe(records, batch.lengths - self.prompts.encoded(records).lengths)

    def makers(self) -> Mapping[str, Callable[[], Any]]:
        return {
            "actor": lambda: self.actor,
            "critic": self.critic,
            "scorers": self.scorers,
            "cost": lambda: self.cost,
            "baseline": self.baseline,
            "cost_critic": self.cost_critic,
            "teacher": self.teacher,
            "demonstrations": self.demonstrations,
            "greedy": lambda: self.sampling_params(0.0),
        }

    @cached_property
    def actor(self) -> LinkedActor:
        config, params = self.config, self.sampling_params(self.config.generation.temperature)
        networks = text_networks(partial(policy_networks, self.decoder, params.temperature), "policy", self.decoder.name)
        args = {"networks": networks, **config.learner_args(config.actor)}
        learner = Role("actor", Learner, args, replica=partial(Replica.at, networks))
        args = {
            "tokenizer": self.tokenizer,
            "params": params,
            "seed": config.seed,
            "max_slots": config.generation.max_slots,
            "kv_cache_gb": config.generation.kv_cache_gb,
            "engine": config.generation.engine,
            "precision": config.generation.precision,
            "max_length": self._longest() + config.generation.max_new_tokens,
        }
        if config.runtime.kind == "local" or config.schedule.kind != "async":
            return LinkedActor(self.runtime, learner, Role("sampler", TextSampler, args))
        args |= {"streams": True, "partial_rollouts": config.schedule.partial_rollouts}
        workers = config.placed.pool_of("sampler").size
        return StreamingActor(self.runtime, learner, Role("sampler", TextSampler, args), workers)

    def critic(self) -> Any:
        return self._critic("critic", {})

    def cost_critic(self) -> Any:
        """A second critic like the first one, of the costs."""
        return self._critic("cost_critic", {"values": "cost_values", "bootstrap_values": "cost_bootstrap_values"})

    def _critic(self, name: str, rename: Mapping[str, str]) -> Any:
        source = self._like_actor(self.config.critic)
        networks = text_networks(partial(critic_networks, source), "value", source.name)
        args = {"networks": networks, **self.config.learner_args(self.config.critic)}
        return self.runtime.role(Role(name, Learner, args, rename))

    def scorers(self) -> list[Scorer]:
        """The reward, if there is one or the method needs it, and the reference if the method needs it."""
        if self.config.evaluation.functions:
            _ = self.examiner  # now: a wrong function should not wait for a model to load
        needs_reward = "teacher" not in self.config.sections()
        scorers: list[Scorer] = [self.reward] if needs_reward or self.has_reward else []
        if self.config.needs_reference:
            scorers.append(self._frozen("reference", self.config.reference, "ref_log_probs"))
        return scorers

    def teacher(self) -> Scorer:
        """The model that is distilled."""
        return self._frozen("teacher", self.config.teacher, "teacher_log_probs")

    def _frozen(self, name: str, section: ModelConfig, writes: str) -> Scorer:
        source = self._like_actor(section)
        build = partial(policy_networks, source, self.config.generation.temperature)
        networks = text_networks(build, "policy", source.name)
        args = {"networks": networks, "token_budget": self.config.token_budget_of(section)}
        return self.runtime.role(Role(name, ModelScorer, args, {"log_probs": writes}))

    def demonstrations(self) -> Callable[[int], Batch]:
        """Demonstrations of the data by number of the update, as many as prompts."""
        demonstrations = partial(self.prompts.demonstrations, num_prompts=self.config.train.prompts_per_step)
        if self.imitates:
            demonstrations(0)  # tells a missing completion before any model loads
        return demonstrations

    @cached_property
    def reward(self) -> Any:
        return self._judge("reward", self.config.reward, self._reward_specs(), {})

    @cached_property
    def examiner(self) -> Any:
        """What evaluation asks: its own functions, or the task's reward where a reward model replaces it in training, or
        the reward."""
        section = ScorerConfig(functions=self.config.evaluation.functions)
        stands_in = self.config.reward.model is not None and self.task.reward is not None
        specs = section.specs() or (self._reward_specs() if stands_in else ())
        return self._judge("examiner", section, specs, {}) if specs else self.reward

    @cached_property
    def cost(self) -> Any:
        """A second scorer, whose scores are ``costs``."""
        return self._judge(
            "cost", self.config.cost, self.config.cost.specs(), {"scores": "costs", "score_failed": "cost_failed"}
        )

    def baseline(self) -> Any:
        """The reward once more, for greedy responses."""
        rename = {"scores": "greedy_scores", "score_failed": "greedy_failed"}
        return self._judge("baseline", self.config.reward, self._reward_specs(), rename)

    def _judge(self, name: str, section: ScorerConfig, specs: tuple[RewardSpec, ...], rename: Mapping[str, str]) -> Any:
        """A scorer by functions or by a reward model."""
        if section.model is not None:
            folder = reward_folder(f"{name}.model", section.model, self.tokenizer)
            build = partial(reward_networks, folder, self.decoder.dtype, self.decoder.device)
            networks = text_networks(build, "reward", section.model)
            of_model = {"networks": networks, "token_budget": self.config.token_budget_of(section)}
            of_model["end_tokens"] = self.tokenizer.eos_token_ids
            return self.runtime.role(Role(name, RewardModelScorer, of_model, rename))
        if not specs:
            hint = "" if name == "cost" else ", or use a task, which brings its own"
            raise RewardError(f"no {name}: set {name}.functions or {name}.model{hint}")
        of_functions = {"specs": specs, "config": self.config.reward}
        judge = self.runtime.role(Role(name, RewardScorer, of_functions, rename, max_workers=1))
        judge.check(set.intersection(*(set(record.fields) for record in self.task.train)))
        return judge

    def sampling_params(self, temperature: float) -> SamplingParams:
        generation = self.config.generation
        return SamplingParams(
            generation.max_new_tokens,
            temperature,
            generation.top_k,
            generation.top_p,
            self.tokenizer.eos_token_ids,
            generation.stop,
        )

    def export(self, folder: Path) -> None:
        """Write the actor as a Hugging Face folder with its tokenizer."""
        export_model(self.actor.learner, self.decoder, self.tokenizer, folder)

    def _evaluate(self) -> Evaluation:
        """Mean score on held-out prompts; of scores that are all 0 or 1, accuracy with Wilson's interval."""
        assert self.held_out is not None
        batch = self.held_out.all(self.config.evaluation.limit)
        expected = self.prompts.expected.of_others(batch.ragged("prompt").lengths)  # evaluations leave no trace
        batch = batch.with_columns(expected_length=expected)
        batch = self.actor.sampler.rollout(batch, self.sampling_params(self.config.evaluation.temperature))
        batch = self.examiner.score(batch)
        scores = batch["scores"][~batch["score_failed"]].astype(np.float64)
        if not len(scores):
            raise RewardError("evaluation: the reward failed on every held-out prompt")
        others = self._others(batch)
        if np.isin(scores, (0.0, 1.0)).all():
            return Evaluation(float(scores.mean()), *wilson_interval(int(scores.sum()), len(scores)), len(scores), others)
        return Evaluation(*mean_interval(scores.tolist()), len(scores), others)

    def _others(self, batch: Batch) -> dict[str, float]:
        """Of the evaluated responses, what training looks at besides the score: mean reward, mean cost."""
        others = {}
        if self.has_reward and self.examiner is not self.reward:
            others["reward"] = _mean(self.reward.score(batch), "scores", "score_failed")
        if "cost" in self.config.sections():
            others["cost"] = _mean(self.cost.score(batch), "costs", "cost_failed")
        return others

    def _reward_specs(self) -> tuple[RewardSpec, ...]:
        own = (RewardSpec(self.task.reward),) if self.task.reward else ()
        return self.config.reward.specs() or own

    def _like_actor(self, model: ModelConfig) -> DecoderSource:
        return source_like_actor(model, self.config, self.decoder, self.tokenizer.vocab_size)

    def _longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompts.longest, self.held_out.longest if self.held_out else 0)

    def _check_engine(self) -> None:
        """vLLM must be there and able to run the model, before it loads."""
        if self.config.generation.engine == "vllm" and self.decoder.device.type != "meta":
            check_installed(self.decoder.device)
            for temperature in (self.config.generation.temperature, self.config.evaluation.temperature):
                if problem := refusal(self.decoder.spec, self.decoder.device, temperature):
                    raise UserError(f'generation.engine = "vllm": {problem}; use the engine "hybridflow"')

    def _check_lengths(self) -> None:
        """A prompt and its longest response must fit the model and the cache, before it loads."""
        longest, limit, generation = self._longest(), self.decoder.spec.max_positions, self.config.generation
        if longest + generation.max_new_tokens > limit:
            raise DataError(
                f"the longest prompt has {longest} tokens; with generation.max_new_tokens = "
                f"{generation.max_new_tokens} that is over the model's {limit} positions; "
                "set data.max_prompt_tokens and data.on_long_prompt, or lower max_new_tokens"
            )
        if generation.kv_cache_gb is not None:
            problem = shortage(self._position_bytes(), generation.kv_cache_gb, longest, generation.max_new_tokens)
            if problem:
                raise DataError(f"[generation] the longest prompt doesn't fit the cache: {problem}")

    def _position_bytes(self) -> int:
        """Of keys and values of a token, in the process that holds most of them."""
        itemsize = rollout_dtype(self.config.generation.precision, self.decoder.dtype).itemsize
        places = set(generation_places(self.config.placed.mesh_of("sampler", None)))
        return max(position_bytes(part_spec(self.decoder.spec, place), itemsize) for place in places)


def _mean(batch: Batch, name: str, failed: str) -> float:
    """Of the rows on which the scorer did not fail; NaN if there is none."""
    return float(np.mean(batch[name][~batch[failed]], dtype=np.float64))
