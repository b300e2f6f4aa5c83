"""The configuration of a run: one section for each part. What sections are, and the rules between them, have files of their
own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator

from hybridflow.algorithms import ALGORITHMS
from hybridflow.algorithms.a2c import A2CConfig
from hybridflow.algorithms.a3c import A3CConfig
from hybridflow.algorithms.ddpg import DDPGConfig
from hybridflow.algorithms.distill import DistillConfig
from hybridflow.algorithms.dpo import DPOConfig
from hybridflow.algorithms.dqn import DQNConfig
from hybridflow.algorithms.grpo import GRPOConfig
from hybridflow.algorithms.impala import ImpalaConfig
from hybridflow.algorithms.policy_gradient import KLConfig, LossConfig, PolicyGradient, ShapingConfig
from hybridflow.algorithms.ppo import PPOConfig
from hybridflow.algorithms.q_learning import QLearningConfig
from hybridflow.algorithms.reinforce import ReinforceConfig
from hybridflow.algorithms.reinforce_pp import ReinforcePPConfig
from hybridflow.algorithms.remax import ReMaxConfig
from hybridflow.algorithms.reward_model import RewardModelConfig
from hybridflow.algorithms.rloo import RLOOConfig
from hybridflow.algorithms.sac import SACConfig
from hybridflow.algorithms.safe_rlhf import SafeRLHFConfig
from hybridflow.algorithms.sft import SFTConfig
from hybridflow.algorithms.td3 import TD3Config
from hybridflow.algorithms.trpo import TRPOConfig
from hybridflow.config_rules import all_sections, conflicts_of
from hybridflow.config_runtime import PlacementConfig, RuntimeConfig
from hybridflow.config_sections import (
    AXES,
    MAX_DRAWN,
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    EvaluationConfig,
    GenerationConfig,
    ModelConfig,
    TrainConfig,
    TrainedConfig,
    section_of,
)
from hybridflow.controller.recovery import RecoveryConfig
from hybridflow.core.config import Config, apply_overrides, parse, read_toml, to_toml
from hybridflow.core.errors import ConfigError, ModelError
from hybridflow.core.placement import Placement, ResourcePool
from hybridflow.data.envs import EnvironmentConfig
from hybridflow.data.prompts import DataConfig
from hybridflow.rollout.replay import ReplayConfig
from hybridflow.rollout.rewards import RewardConfig, ScorerConfig
from hybridflow.rollout.schedule import ScheduleConfig
from hybridflow.telemetry.guards import GuardsConfig
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.workers.env_sampler import ExplorationConfig
from hybridflow.workers.learner import UpdatePlan

__all__ = ["RunConfig", "load_config", "load_run", "resolved", "validate"]


class RunConfig(Config):
    """The whole configuration of a run."""

    algorithm: Literal[
        "sft",
        "reward_model",
        "dpo",
        "grpo",
        "rloo",
        "reinforce_pp",
        "remax",
        "ppo",
        "safe_rlhf",
        "distill",
        "a2c",
        "a3c",
        "impala",
        "q_learning",
        "reinforce",
        "trpo",
        "dqn",
        "sac",
        "td3",
        "ddpg",
    ]
    """what trains; hybridflow algorithms lists them"""
    seed: int = Field(1, ge=0)
    """all randomness derives from it"""
    run_dir: str
    """where the run writes; a new folder"""
    threads: int | Literal["auction"] = 0
    """of torch in each process; 0: the cores, of which the workers of a machine have equal shares; "auction": while the run
    goes on, pools bid for the CPU slots of its machines, with threads, env workers and reward workers as their units"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where models live; auto: the GPU if there is one"""
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    dpo: DPOConfig = DPOConfig()
    grpo: GRPOConfig = GRPOConfig()
    rloo: RLOOConfig = RLOOConfig()
    reinforce_pp: ReinforcePPConfig = ReinforcePPConfig()
    remax: ReMaxConfig = ReMaxConfig()
    ppo: PPOConfig = PPOConfig()
    safe_rlhf: SafeRLHFConfig = SafeRLHFConfig()
    distill: DistillConfig = DistillConfig()
    a2c: A2CConfig = A2CConfig()
    a3c: A3CConfig = A3CConfig()
    impala: ImpalaConfig = ImpalaConfig()
    q_learning: QLearningConfig = QLearningConfig()
    reinforce: ReinforceConfig = ReinforceConfig()
    trpo: TRPOConfig = TRPOConfig()
    dqn: DQNConfig = DQNConfig()
    sac: SACConfig = SACConfig()
    td3: TD3Config = TD3Config()
    ddpg: DDPGConfig = DDPGConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    shaping: ShapingConfig = ShapingConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ModelConfig = ModelConfig()
    reward: RewardConfig = RewardConfig()
    cost: ScorerConfig = ScorerConfig()
    teacher: ModelConfig = ModelConfig()
    data: DataConfig | None = None
    environment: EnvironmentConfig | None = None
    replay: ReplayConfig = ReplayConfig()
    exploration: ExplorationConfig = ExplorationConfig()
    generation: GenerationConfig = GenerationConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guards: GuardsConfig = GuardsConfig()
    """checks of every step, each by name: kl = "stop", or kl = { limit = 5, steps = 1, action = "stop" }"""
    runtime: RuntimeConfig = RuntimeConfig()
    placement: PlacementConfig = PlacementConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    recovery: RecoveryConfig = RecoveryConfig()

    @field_validator("threads", mode="before")
    @classmethod
    def _check_threads(cls, threads: Any) -> Any:
        if threads != "auction" and (type(threads) is not int or threads < 0):
            raise ValueError(f'expected how many, 0 or more, or "auction", got {threads!r}')
        return threads

    @property
    def num_threads(self) -> int:
        """That ``threads`` begins with."""
        return 0 if self.threads == "auction" else self.threads

    @property
    def torch_device(self) -> torch.device:
        """What ``device`` comes to on this machine."""
        found = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(found if self.device == "auto" else self.device)

    def dtype_of(self, model: ModelConfig) -> str:
        """What the ``dtype`` of a section comes to."""
        return model.dtype or self.actor.dtype or "float32"

    def sections(self) -> set[str]:
        """The sections that a run of this algorithm, on these inputs, reads."""
        method = ALGORITHMS[self.algorithm]
        roles = inspect.signature(method.algorithm).parameters
        read = {
            "actor",
            "train",
            "evaluation",
            "checkpoint",
            "runtime",
            "schedule",
            self.algorithm,
            *({"critic", "cost", "teacher"} & roles.keys()),
        }
        read -= set() if self._has_critic else {"critic"}
        read |= {"loss"} if "objective" in roles else set()
        read |= {"placement", "recovery"} if self.runtime.kind == "ray" else set()
        if self.environment is not None:
            return read | {"environment", *method.reads}
        if method.records == "pairs":
            return read | {"data"} | ({"reference"} if self.needs_reference else set())
        read |= {"data", "generation", "reward", *(["kl", "shaping"] if "objective" in roles else [])}
        return read | ({"reference"} if self.needs_reference else set())

    @property
    def _has_critic(self) -> bool:
        return ALGORITHMS[self.algorithm].algorithm.needs_critic(self.method)

    def roles(self) -> dict[str, bool]:
        """The roles of the run; False for those that it may turn out not to have, by its data or without an evaluation."""
        method = ALGORITHMS[self.algorithm]
        parts, read = inspect.signature(method.algorithm).parameters, self.sections()
        there = {"actor", "critic", "cost_critic", "estimator", "baseline", "cost", "teacher"} & parts.keys()
        there -= set() if self._has_critic else {"critic"}
        there |= ({"reference"} & read) | ({"sampler"} if method.records != "pairs" else set())
        roles = dict.fromkeys(sorted(there), True)
        roles |= {"replay": True} if self.replays else {}
        if "reward" in read:
            scores = bool(self.reward.functions or self.reward.model or (self.data is not None and self.data.task))
            roles |= {"reward": "scorers" in parts and (scores or "teacher" not in parts), "examiner": False}
        return roles

    @property
    def models(self) -> list[str]:
        """The roles that hold a model of their own."""
        judges = {"reward": self.reward.model, "baseline": self.reward.model, "cost": self.cost.model}
        own = {"actor", "critic", "cost_critic", "reference", "teacher", *(name for name, model in judges.items() if model)}
        return [name for name in self.roles() if name in own]

    @property
    def model_sections(self) -> dict[str, ModelConfig | ScorerConfig]:
        """The section of each role that holds a model of its own."""
        return {name: getattr(self, section_of(name)) for name in self.models}

    @property
    def trained_sections(self) -> dict[str, TrainedConfig]:
        """The section of each role whose model is trained."""
        return {name: model for name, model in self.model_sections.items() if isinstance(model, TrainedConfig)}

    @property
    def cuts(self) -> dict[str, tuple[int, int, int]]:
        """(tp, pp, cp) of the roles whose models or sequences are cut."""
        meshes = {name: section.mesh for name, section in self.model_sections.items()}
        cuts = {name: (mesh.tp, mesh.pp, mesh.cp) for name, mesh in meshes.items()}
        return {name: cut for name, cut in cuts.items() if cut != (1, 1, 1)}

    @property
    def placed(self) -> Placement:
        """The pools, and the pool of each role; on the local runtime all of them are in the driver."""
        if self.runtime.kind == "ray":
            meshes = {name: section.mesh.model_dump(include=AXES) for name, section in self.model_sections.items()}
            return self._with_sampler(replace(self.placement.placement(self.roles()), meshes=meshes))
        return Placement((ResourcePool("driver", (1,)),), dict.fromkeys(self.roles(), "driver"), "driver")

    def _with_sampler(self, placement: Placement) -> Placement:
        """Where the sampler's processes are those that hold copies of the actor, it has the actor's mesh and draws from its
        weights in place; else it has a mesh of its own, and gets a copy."""
        if "sampler" not in self.roles() or self.generation.engine != "hybridflow":
            return placement
        own, mesh = self.actor.generation_mesh, self.actor.mesh
        cut, fits = mesh.tp * mesh.pp > 1, mesh.tp * mesh.pp % (own.tp * own.pp) == 0
        together = placement.pool_of("sampler") == placement.pool_of("actor")
        if not together or not fits or mesh.chunks > 1 or (cut and mesh.shard == "fsdp"):
            return replace(placement, meshes={**placement.meshes, "sampler": own.model_dump()})
        if not cut:
            return placement
        generation = {"generation_tp": own.tp, "generation_pp": own.pp}
        of_actor = {**placement.meshes["actor"], **generation}
        of_sampler = {"tp": mesh.tp, "pp": mesh.pp, **generation}  # ranks that share sequences draw some each
        return replace(placement, meshes={**placement.meshes, "actor": of_actor, "sampler": of_sampler})

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy scores the responses."""
        algorithm = ALGORITHMS[self.algorithm].algorithm
        return algorithm.needs_reference(self.method) or (issubclass(algorithm, PolicyGradient) and self.kl.coef > 0)

    @property
    def updates_per_step(self) -> int:
        """Learning calls after a rollout, at most."""
        ratio, environment = self.replay.samples_per_insert, self.environment
        if ratio is None or environment is None or not self.replays:
            return self.train.updates_per_step
        return math.ceil(ratio * environment.num_envs * environment.steps_per_rollout / self.replay.draw_steps)

    @property
    def num_updates(self) -> int:
        """Learning calls of the whole run."""
        ratio, environment, replay = self.replay.samples_per_insert, self.environment, self.replay
        if ratio is None or environment is None or not self.replays:
            return self.train.steps * self.train.updates_per_step
        collected = self.train.steps * environment.num_envs * environment.steps_per_rollout // max(1, environment.workers)
        return int(max(0, collected - replay.warmup) * ratio / replay.draw_steps)

    @property
    def method(self) -> Config:
        """The section of the algorithm."""
        section: Config = getattr(self, self.algorithm)
        return section

    def token_budget_of(self, model: ModelConfig | ScorerConfig) -> int:
        """What the ``token_budget`` of a section comes to."""
        return model.token_budget or self.train.token_budget

    @property
    def replays(self) -> bool:
        """Whether it learns from a replay buffer."""
        return "replay" in ALGORITHMS[self.algorithm].reads

    @property
    def draws_per_update(self) -> int:
        """Draws of the replay buffer that are learned from in one call, a minibatch each: those of a step, as far as they
        are ``MAX_DRAWN`` transitions; one where what is learned changes what is drawn."""
        number, size = self.updates_per_step, self.replay.draw_steps
        most = 1 if self.replay.priority else max(1, MAX_DRAWN // size)
        return next(draws for draws in range(min(most, number), 0, -1) if number % draws == 0)

    def learner_args(self, model: TrainedConfig) -> dict[str, Any]:
        """Arguments of the learner of ``model``; its learning rate schedule spans the whole run."""
        train = self.train
        plan = UpdatePlan(train.minibatches, train.epochs, self.token_budget_of(model), max_skips=self.guards.max_skips)
        if self.replays:
            plan = replace(plan, minibatches=self.draws_per_update, drawn=self.replay.batch_size)
        return {
            "optimizer": model.optimizer,
            "plan": plan,
            "total_steps": max(1, self.num_updates) * train.minibatches * train.epochs,
            "seed": self.seed,
            "shard": model.mesh.shard,
        }


def resolved(config: RunConfig) -> str:
    """The configuration with all defaults, as TOML; without the sections that nothing reads."""
    return to_toml(config, all_sections(config) - config.sections())


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, validate; ConfigError lists all problems. Paths in the file are relative to the working directory."""
    return validate(apply_overrides(read_toml(path), overrides), str(path))


def load_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """A run's own configuration, with the model that it exported. CheckpointError: no run; ModelError: no model yet."""
    directory = RunDirectory.open(run)
    if not directory.model.is_dir():
        fix = "give a run that has finished, or that exports every so many steps (checkpoint.export_every)"
        raise ModelError(f"{run}: no exported model; {fix}, or a configuration file")
    data = read_toml(directory.config)
    # Of methods on pairs the reference is the actor's first model, so the actor stays: see PairParts.start_from.
    if ALGORITHMS[data["algorithm"]].records != "pairs":
        actor = {key: value for key, value in data["actor"].items() if key != "fresh"}
        data["actor"] = {**actor, "model": str(directory.model)}
    return validate(apply_overrides(data, overrides), str(directory.config))


def validate(data: Mapping[str, Any], source: str) -> RunConfig:
    """A checked configuration; ConfigError lists all problems of single keys, or else all between sections."""
    config = parse(RunConfig, data, source)
    problems = [f"{source}: {problem}" for problem in conflicts_of(config)]
    if problems:
        raise ConfigError(problems)
    return config
