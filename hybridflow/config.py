"""The configuration of a run: one section for each part, and the rules that span sections."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from hybridflow.algorithms import ALGORITHMS
from hybridflow.algorithms.a2c import A2CConfig
from hybridflow.algorithms.a3c import A3CConfig
from hybridflow.algorithms.ddpg import DDPGConfig
from hybridflow.algorithms.distill import DistillConfig
from hybridflow.algorithms.dpo import DPOConfig
from hybridflow.algorithms.dqn import DQNConfig
from hybridflow.algorithms.grpo import GRPOConfig
from hybridflow.algorithms.impala import ImpalaConfig
from hybridflow.algorithms.policy_gradient import KLConfig, LossConfig, PolicyGradient, ShapingConfig, conflicts
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
from hybridflow.config_runtime import PlacementConfig, RuntimeConfig
from hybridflow.core.config import Config, apply_overrides, keys, parse, read_toml, to_toml
from hybridflow.core.errors import ConfigError
from hybridflow.core.placement import MeshConfig, Placement, ResourcePool
from hybridflow.data.envs import EnvironmentConfig
from hybridflow.data.prompts import DataConfig
from hybridflow.generation.weights import Precision
from hybridflow.models.nets import NetConfig
from hybridflow.rollout.replay import ReplayConfig
from hybridflow.rollout.rewards import RewardConfig, ScorerConfig
from hybridflow.workers.env_sampler import ExplorationConfig
from hybridflow.workers.learner import UpdatePlan
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.zero import ShardMode

__all__ = ["RunConfig", "load_config", "resolved", "section_of", "validate"]


MAX_DRAWN = 8192
"""transitions of one learning call: more save no time, and of images take memory"""


class FreshModel(Config):
    """Sizes of a decoder that starts from random weights."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """architecture"""
    hidden_size: int = Field(64, gt=0)
    """width of the residual"""
    num_layers: int = Field(2, gt=0)
    """transformer layers"""
    num_heads: int = Field(4, gt=0)
    """attention heads"""
    num_kv_heads: int | None = Field(None, gt=0)
    """fewer than num_heads for grouped-query attention; the same when left out"""
    intermediate_size: int | None = Field(None, gt=0)
    """of the gated MLP; 8/3 hidden_size when left out"""
    rope_theta: float = Field(10_000.0, gt=1)
    """base of the rotary wavelengths; about the longest sequence for models of short ones"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kv_heads = self.num_kv_heads or self.num_heads
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} isn't an even multiple of num_heads {self.num_heads}")
        if self.num_heads % kv_heads:
            raise ValueError(f"num_heads {self.num_heads} isn't a multiple of num_kv_heads {kv_heads}")
        return self


class TrainedMeshConfig(MeshConfig):
    """Keys of ``[actor.mesh]`` and ``[critic.mesh]``."""

    shard: ShardMode = "none"
    """zero1: data-parallel processes share optimizer states and float32 masters out, instead of holding all of them each;
    fsdp: weights and gradients, too, and gather a layer's weights when it runs"""
    shard_ranks: int = Field(0, ge=0)
    """so many neighbours, instead of all of those processes (0), share out, and gradients are summed over such groups:
    as many as a machine has, and nothing else is sent between machines"""
    sequence_parallel: bool = False
    """with tp, norms and residuals of a process are those of its tokens alone: fewer activations, a little more is sent"""
    chunks: int = Field(1, ge=1)
    """stages of the pipeline on each process, dealt out in turns: interleaved 1F1B, with a smaller bubble"""


AXES = {"tp", "pp", "cp", "shard_ranks", "chunks"}
"""keys of a mesh that lay ranks out: fields of ``Mesh``"""


class GenerationMeshConfig(Config):
    """How the actor is cut while it draws responses."""

    tp: int = Field(1, ge=1)
    """so many processes hold a slice of every weight; if tp x pp here divide those of actor.mesh, no weight is copied"""
    pp: int = Field(1, ge=1)
    """so many processes hold some of the layers"""


class ModelConfig(Config):
    """Keys of ``[reference]`` and ``[teacher]``, and the first of ``[actor]`` and ``[critic]``."""

    model: str | None = None
    """a name (hybridflow models list) or a Hugging Face folder; the critic and the reference default to the actor's"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """of weights and activations; left out, the actor's, whose own is float32; the optimizer keeps float32 masters. For
    environments: of the activations that are learned from alone (mixed precision)"""
    token_budget: int | None = Field(None, gt=0)
    """as train.token_budget, of this model; left out, that one"""
    mesh: MeshConfig = MeshConfig()


class TrainedConfig(ModelConfig):
    """More keys of ``[actor]`` and ``[critic]``."""

    mesh: TrainedMeshConfig = TrainedMeshConfig()
    net: NetConfig = NetConfig()
    """for environments: the network"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, a third more time"""
    optimizer: OptimizerConfig = OptimizerConfig()


class ActorConfig(TrainedConfig):
    """Keys of ``[actor]``."""

    fresh: FreshModel | None = None
    """instead of model: a decoder from random weights; critic and reference start from the same"""
    generation_mesh: GenerationMeshConfig = GenerationMeshConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model is not None and self.fresh is not None:
            raise ValueError("has both model and fresh; give one")
        return self


class CriticConfig(TrainedConfig):
    """Keys of ``[critic]``."""

    input: Literal["observations", "state"] = "observations"
    """what values are of: what the agent observes or, of several agents, the state of their environment"""


class GenerationConfig(Config):
    """Keys of ``[generation]``."""

    engine: Literal["hybridflow", "vllm"] = "hybridflow"
    """what draws responses: our engine on the weights in place, or vLLM (to be installed) in a process of its own"""
    precision: Precision = "full"
    """of the engine: the actor's dtype, or bfloat16 or int8, faster, with log-probs that differ from the learner's"""
    max_new_tokens: int = Field(64, gt=0)
    """tokens of a response at most"""
    temperature: float = Field(1.0, gt=0)
    """of sampling; log-probs are of the same distribution"""
    top_k: int = Field(0, ge=0)
    """0: all tokens"""
    top_p: float = Field(1.0, gt=0, le=1)
    """smallest set of tokens with this probability; 1: all"""
    stop: tuple[str, ...] = ()
    """strings that end a response, besides the model's end tokens"""
    max_slots: int = Field(128, gt=0)
    """responses that grow side by side; lower it when memory runs out"""
    kv_cache_gb: float | None = Field(None, gt=0)
    """most memory (10^9 bytes) of keys and values, the result stays the same; none: what max_slots responses need"""


class TrainConfig(Config):
    """Keys of ``[train]``."""

    steps: int = Field(100, gt=0)
    """rollouts, each followed by learning"""
    prompts_per_step: int = Field(16, gt=0)
    """prompts of a rollout; for methods that sample nothing, demonstrations or pairs"""
    group_size: int = Field(1, gt=0)
    """responses to each prompt"""
    minibatches: int = Field(1, gt=0)
    """optimizer steps in one pass over a step's samples"""
    epochs: int = Field(1, gt=0)
    """passes over a step's samples"""
    token_budget: int = Field(4096, gt=0)
    """tokens (or environment steps) in one forward pass; lower it when memory runs out, the result stays the same"""
    max_refills: int = Field(0, ge=0)
    """dynamic sampling (DAPO): further rollouts replace groups with equal scores, at most so many a step; 0: they stay"""
    updates_per_step: int = Field(1, gt=0)
    """minibatches learned from for each rollout; above 1 only with a replay buffer"""


class EvaluationConfig(Config):
    """Keys of ``[evaluation]``."""

    every: int = Field(0, ge=0)
    """steps between evaluations; 0: only before the first and after the last step"""
    limit: int = Field(200, gt=0)
    """held-out prompts, or episodes"""
    temperature: float = Field(0.0, ge=0)
    """0: greedy"""
    functions: tuple[str, ...] = ()
    """score with these functions instead of the reward: with what a reward model stands in for, or keep an eye on it"""
    options: dict[str, Any] = Field({})
    """episodes have these environment.options, over those of training: another period, level or time limit"""


class CheckpointConfig(Config):
    """Keys of ``[checkpoint]``."""

    every: int = Field(0, ge=0)
    """steps between checkpoints, and one after the last; 0: only when the run is interrupted"""
    keep: int = Field(2, gt=0)
    """the newest ones that remain"""
    export: bool = True
    """after the last step, write the actor as a Hugging Face folder into <run_dir>/model"""
    export_every: int = Field(0, ge=0)
    """for environments: write it there before the first step, too, and every so many steps; hybridflow serve follows"""


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
    threads: int = Field(0, ge=0)
    """of torch in each process; 0: the cores, of which the workers of a machine have equal shares"""
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
    runtime: RuntimeConfig = RuntimeConfig()
    placement: PlacementConfig = PlacementConfig()

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
            self.algorithm,
            *({"critic", "cost", "teacher"} & roles.keys()),
        }
        read -= set() if self._has_critic else {"critic"}
        read |= {"loss"} if "objective" in roles else set()
        read |= {"placement"} if self.runtime.kind == "ray" else set()
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
        return math.ceil(ratio * environment.num_envs * environment.steps_per_rollout / self.replay.batch_size)

    @property
    def num_updates(self) -> int:
        """Learning calls of the whole run."""
        ratio, environment, replay = self.replay.samples_per_insert, self.environment, self.replay
        if ratio is None or environment is None or not self.replays:
            return self.train.steps * self.train.updates_per_step
        collected = self.train.steps * environment.num_envs * environment.steps_per_rollout // max(1, environment.workers)
        return int(max(0, collected - replay.warmup) * ratio / replay.batch_size)

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
        number, size = self.updates_per_step, self.replay.batch_size
        most = 1 if self.replay.priority else max(1, MAX_DRAWN // size)
        return next(draws for draws in range(min(most, number), 0, -1) if number % draws == 0)

    def learner_args(self, model: TrainedConfig) -> dict[str, Any]:
        """Arguments of the learner of ``model``; its learning rate schedule spans the whole run."""
        train = self.train
        plan = UpdatePlan(train.minibatches, train.epochs, self.token_budget_of(model))
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
    return to_toml(config, _all_sections() - config.sections())


def _all_sections() -> set[str]:
    return {name.split(".")[0] for name, *_ in keys(RunConfig) if "." in name} | set(ALGORITHMS)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, validate; ConfigError lists all problems. Paths in the file are relative to the working directory."""
    return validate(apply_overrides(read_toml(path), overrides), str(path))


def validate(data: Mapping[str, Any], source: str) -> RunConfig:
    """A checked configuration; ConfigError lists all problems of single keys, or else all between sections."""
    config = parse(RunConfig, data, source)
    problems = [f"{source}: {problem}" for problem in _conflicts(config)]
    if problems:
        raise ConfigError(problems)
    return config


def _conflicts(config: RunConfig) -> Iterator[str]:
    yield from _section_conflicts(config)
    yield from _placement_conflicts(config)
    method = ALGORITHMS[config.algorithm]
    if config.data is not None and config.environment is None:
        yield from _text_conflicts(config)
        yield from _record_conflicts(config, config.data)
        smallest = method.algorithm.smallest_group(config.method)
        if config.train.group_size < smallest:
            found = f"train.group_size = {config.train.group_size}"
            yield f"{found}: {config.algorithm} compares the responses to one prompt and needs at least {smallest}"
        if config.train.max_refills and smallest == 1:
            found = f"train.max_refills = {config.train.max_refills}"
            yield f"{found}: algorithm = {config.algorithm!r} learns from groups with equal scores too; leave it out"
    if issubclass(method.algorithm, PolicyGradient):
        given = "data" if config.environment is None else "environment"
        yield from conflicts(config.loss, config.kl, method.algorithm.kl_where, given)
    if config.evaluation.functions and (config.environment is not None or method.records == "pairs"):
        yield "evaluation.functions: they score responses, but episodes have returns and pairs are told apart; remove them"
    if config.evaluation.options and config.environment is None:
        yield "evaluation.options: they are for the [environment] of evaluations, and this run is on [data]; remove them"
    if config.train.max_refills and config.environment is not None:
        yield "train.max_refills: an [environment] has no groups; leave it out"
    yield from _environment_conflicts(config)
    yield from _offline_conflicts(config)
    yield from _replay_conflicts(config) if config.replays else ()
    if config.train.updates_per_step > 1 and not config.replays:
        yield f"train.updates_per_step: {config.algorithm} learns from fresh samples; use train.epochs or train.minibatches"
    if config.replays and (config.train.epochs > 1 or config.train.minibatches > 1):
        yield f"train.epochs, train.minibatches: {config.algorithm} replays samples; use train.updates_per_step"


def _environment_conflicts(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.export_every and config.environment is None:
        yield "checkpoint.export_every: only policies in an [environment] are served while they are trained; leave it out"
    environment = config.environment
    yield from _exploration_conflicts(config)
    yield from _net_conflicts(config)
    yield from _memory_conflicts(config)
    if config.critic.input == "state" and (environment is None or not environment.shared):
        yield 'critic.input = "state": needs several agents, environment.id = "pettingzoo:..."; leave it out'
    if config.critic.input == "state" and config.replays:
        yield f'critic.input = "state": {config.algorithm} replays no states; leave it out'
    if environment is not None:
        yield from _worker_conflicts(config, environment)
    if config.algorithm == "q_learning" and environment is not None and environment.steps_per_rollout > 1:
        yield f"environment.steps_per_rollout = {environment.steps_per_rollout}: q_learning learns from each; set it to 1"


def _worker_conflicts(config: RunConfig, environment: EnvironmentConfig) -> Iterator[str]:
    """Env workers that roll out by themselves: who can learn from them, and where they are."""
    method, workers = config.algorithm, environment.workers
    found = f"environment.workers = {workers}"
    if method == "a3c":
        yield from _a3c_conflicts(config, workers)
    elif workers and method != "impala" and not config.replays:
        yield f"{found}: {method} learns from its newest policy's rollouts alone; leave it out, or use a3c or impala"
    if method == "impala" and workers and config.impala.lag != ImpalaConfig().lag:
        yield f"impala.lag = {config.impala.lag}: with {found} rollouts are as old as they come; leave lag out"
    if workers > environment.num_envs:
        yield f"{found}: each needs an environment, but environment.num_envs = {environment.num_envs}; raise that"
    if workers and config.runtime.kind == "ray":
        yield from _worker_placement_conflicts(config, workers)


def _a3c_conflicts(config: RunConfig, workers: int) -> Iterator[str]:
    if not workers:
        yield "environment.workers = 0: a3c learns from env workers; set how many, 1 or more"
    if config.critic.optimizer != OptimizerConfig():
        yield "critic.optimizer: a3c has one optimizer, actor.optimizer; remove it"
    if config.critic.input == "state":
        yield 'critic.input = "state": env workers of a3c act on what their critic sees; leave it out'
    for name in ("actor", "critic"):
        if getattr(config, name).net.normalise:
            yield f"{name}.net.normalise: the learner of a3c sees gradients and no observations; leave it out"
    for name in ("minibatches", "epochs"):
        if getattr(config.train, name) > 1:
            yield f"train.{name} = {getattr(config.train, name)}: a3c makes one step of a rollout; leave it out"


def _worker_placement_conflicts(config: RunConfig, workers: int) -> Iterator[str]:
    """The sampler's processes are the env workers, and nobody else waits for them."""
    problems = config.placement.conflicts(config.algorithm, config.roles(), config.models, config.runtime.slots)
    if any(problems):
        return  # told already
    pool, found = config.placed.pool_of("sampler"), f"environment.workers = {workers}"
    others = [role for role in config.roles() if role != "sampler" and config.placed.pool_of(role) == pool]
    if others:
        yield f"placement.roles: {', '.join(others)} would wait for rollouts on pool {pool.name!r}; {_OWN.format(workers)}"
    elif pool.size != workers:
        yield f"placement.pools.{pool.name} = {pool.size}: {found} are a process each; make them equal"
    if config.algorithm == "a3c" and config.placed.pool_of("actor").size > 1:
        name, size = config.placed.pool_of("actor").name, config.placed.pool_of("actor").size
        yield f"placement.pools.{name} = {size}: the actor of a3c takes its steps in one process; use 1"


_OWN = 'give the sampler one of its own, such as pools = {{ learner = 1, envs = {} }}, roles.sampler = "envs"'


def _net_conflicts(config: RunConfig) -> Iterator[str]:
    for name in ("actor", "critic"):
        if getattr(config, name).net.normalise and config.replays:
            yield f"{name}.net.normalise: {config.algorithm} replays what older statistics scaled otherwise; leave it out"
    if config.actor.net.normalise_returns:
        yield "actor.net.normalise_returns: a policy has no returns; set critic.net.normalise_returns"
    if config.critic.net.normalise_returns and (config.replays or config.algorithm == "a3c"):
        yield f"critic.net.normalise_returns: {config.algorithm} learns from no returns that its critic sees; leave it out"
    for name, model in (("actor", config.actor), ("critic", config.critic)):
        if model.dtype == "bfloat16" and (config.replays or config.algorithm in ("trpo", "q_learning", "a3c")):
            yield f'{name}.dtype = "bfloat16": {config.algorithm} learns in float32; leave it out'


def _memory_conflicts(config: RunConfig) -> Iterator[str]:
    """A memory is unrolled over whole pieces, in the order of their steps."""
    actor, critic = config.actor.net.kind, config.critic.net.kind
    for name, net in (("actor", config.actor.net), ("critic", config.critic.net)):
        if net.memory and (config.replays or config.algorithm in ("trpo", "q_learning", "a3c")):
            yield f'{name}.net.kind = "{net.kind}": {config.algorithm} learns from single steps; use "mlp" or "cnn"'
            return
    if config.critic.net.memory and critic != actor:
        found = f'critic.net.kind = "{critic}", but actor.net.kind = "{actor}"'
        yield f'{found}: a critic starts from the actor\'s memory; make them equal, or the critic\'s "mlp" or "cnn"'
    elif config.critic.net.memory and config.critic.input == "state":
        yield f'critic.net.kind = "{critic}": critic.input = "state" forgets nothing; use "mlp"'
    elif critic == "attention" and config.critic.net.context != config.actor.net.context:
        found = f"critic.net.context = {config.critic.net.context}, but actor.net.context = {config.actor.net.context}"
        yield f"{found}: both see the same past observations; make them equal"


def _replay_conflicts(config: RunConfig) -> Iterator[str]:
    replay, found = config.replay, f"replay.samples_per_insert = {config.replay.samples_per_insert}"
    if replay.samples_per_insert is not None and config.train.updates_per_step > 1:
        yield f"{found}: it says how many updates follow a rollout, and so does train.updates_per_step; leave one out"
    elif config.environment is not None and config.environment.steps_per_rollout and config.num_updates == 0:
        yield f"{found}: the whole run draws less than one replay.batch_size = {replay.batch_size}; raise it or train.steps"
    if replay.overlap and config.environment is not None and config.environment.workers:
        yield "replay.overlap: environment.workers collect by themselves while others learn; leave it out"
    if config.runtime.kind == "local" and replay.shards > 1:
        yield f'replay.shards = {replay.shards}: needs worker processes; set runtime.kind = "ray" and placement.pools'


def _exploration_conflicts(config: RunConfig) -> Iterator[str]:
    """Discrete actions are explored by chance, continuous ones by noise."""
    noisy, default = config.algorithm in ("td3", "ddpg"), ExplorationConfig()
    for name in ("epsilon_start", "epsilon_end", "epsilon_decay_steps") if noisy else ("noise",):
        if getattr(config.exploration, name) != getattr(default, name):
            how = "exploration.noise" if noisy else "exploration.epsilon_start and its like"
            yield f"exploration.{name}: {config.algorithm} has no use for it and explores by {how}; leave it out"


def _section_conflicts(config: RunConfig) -> Iterator[str]:
    given = [name for name in ("data", "environment") if getattr(config, name) is not None]
    inputs = ALGORITHMS[config.algorithm].inputs
    if len(given) != 1:
        yield f"needs {' or '.join(f'[{name}]' for name in inputs)}, one of them; found {' and '.join(given) or 'none'}"
    elif given[0] not in inputs:
        yield f"algorithm = {config.algorithm!r} runs on {' or '.join(f'[{name}]' for name in inputs)}, not on [{given[0]}]"
    else:
        for name in sorted((config.model_fields_set & _all_sections()) - config.sections() - {"placement"}):
            yield f"[{name}] is set, but {config.algorithm} on [{given[0]}] doesn't read it; remove the section"


def _placement_conflicts(config: RunConfig) -> Iterator[str]:
    for name in dict.fromkeys(map(section_of, config.cuts)):
        if config.environment is not None:
            yield f"{name}.mesh: networks for environments can't be cut; remove it, the pool is data-parallel"
        elif config.runtime.kind == "local":
            yield f'{name}.mesh: a cut model needs several processes; set runtime.kind = "ray" and placement.pools'
    if config.runtime.kind == "local" and config.actor.generation_mesh != GenerationMeshConfig():
        yield 'actor.generation_mesh: needs several processes; set runtime.kind = "ray", placement.pools and actor.mesh'
    yield from _shard_conflicts(config)
    yield from _chunks_conflicts(config)
    for name, scorer in (("reward", config.reward), ("cost", config.cost)):
        if scorer.model is None and scorer.mesh != MeshConfig():
            yield f"{name}.mesh: functions aren't cut; remove it, or set {name}.model to a reward model"
        if scorer.model is None and scorer.token_budget is not None:
            yield f"{name}.token_budget: functions have no microbatches; remove it, or set {name}.model to a reward model"
    if config.runtime.kind == "ray":
        problems = list(config.placement.conflicts(config.algorithm, config.roles(), config.models, config.runtime.slots))
        yield from problems or dict.fromkeys((*_cut_conflicts(config), *_shard_ranks_conflicts(config)))
        yield from [] if problems else (*_generation_conflicts(config), *_pool_of_replay_conflicts(config))
    else:
        yield from dict.fromkeys(_shard_ranks_conflicts(config))
    if config.runtime.kind == "local" and "placement" in config.model_fields_set:
        yield 'placement: runtime.kind = "local" runs every role in this process; set runtime.kind = "ray" or remove it'


def _shard_conflicts(config: RunConfig) -> Iterator[str]:
    trained = {section_of(role): model for role, model in config.trained_sections.items()}
    for name, model in trained.items() if config.environment is not None else ():
        if model.mesh.shard == "fsdp":
            yield f'{name}.mesh.shard = "fsdp" shards decoders, not networks for environments; use "zero1" or "none"'
    if config.actor.mesh.shard == "fsdp" and config.generation.engine == "vllm" and config.runtime.kind == "ray":
        yield 'actor.mesh.shard = "fsdp": vLLM reads whole weights; use "zero1", or generation.engine = "hybridflow"'


def _chunks_conflicts(config: RunConfig) -> Iterator[str]:
    for name, mesh in {section_of(role): model.mesh for role, model in config.trained_sections.items()}.items():
        if mesh.chunks > 1 and mesh.pp == 1:
            yield f"{name}.mesh.chunks = {mesh.chunks}: one process has no pipeline; set {name}.mesh.pp, or remove it"


def section_of(role: str) -> str:
    """The section that says what the role's model is."""
    return {"cost_critic": "critic", "baseline": "reward"}.get(role, role)


def _cut_conflicts(config: RunConfig) -> Iterator[str]:
    """A pool holds a whole number of models, and of groups that share out the tokens of a sequence."""
    for name, (tp, pp, cp) in config.cuts.items():
        pool, size = config.placed.pool_of(name), tp * pp * cp
        if pool.size % size:
            shape, what = (f" x cp {cp}", "share one sequence") if cp > 1 else ("", "hold one model")
            found = f"{section_of(name)}.mesh: tp {tp} x pp {pp}{shape} = {size} processes {what}"
            yield f"{found}, but pool {pool.name!r} has {pool.size} workers; make it a multiple of {size}"


def _shard_ranks_conflicts(config: RunConfig) -> Iterator[str]:
    """The ranks that hold the same parameters are a whole number of groups that share them out."""
    for role, model in config.trained_sections.items():
        mesh, found = model.mesh, f"{section_of(role)}.mesh.shard_ranks"
        if mesh.shard_ranks and mesh.shard == "none":
            yield f'{found}: shard = "none" shares nothing out; remove it, or set {section_of(role)}.mesh.shard'
        elif mesh.shard_ranks and config.runtime.kind == "local":
            yield f'{found}: needs several processes; set runtime.kind = "ray" and placement.pools, or remove it'
        elif mesh.shard_ranks and (pool := config.placed.pool_of(role)).size % (mesh.tp * mesh.pp * mesh.cp) == 0:
            copies = pool.size // (mesh.tp * mesh.pp)
            fitting = [number for number in range(2, copies + 1) if copies % number == 0]
            held = f"{copies} of pool {pool.name!r} hold the same parameters"
            fix = f"use {' or '.join(map(str, fitting))}" if fitting else "remove it"
            yield from () if mesh.shard_ranks in fitting else (f"{found} = {mesh.shard_ranks}: {held}; {fix}",)


def _generation_conflicts(config: RunConfig) -> Iterator[str]:
    """Each copy of the model that draws responses is held by a whole number of processes."""
    mesh, name = config.actor.generation_mesh, "actor.generation_mesh"
    size = mesh.tp * mesh.pp
    if size == 1 or "sampler" not in config.roles():
        return
    if config.environment is not None:
        yield f"{name}: networks for environments can't be cut; remove it"
        return
    found = f"{name}: tp {mesh.tp} x pp {mesh.pp} = {size} processes draw responses together"
    pool = config.placed.pool_of("sampler")
    if config.generation.engine != "hybridflow":
        yield f"{name}: generation.engine = {config.generation.engine!r} runs in one process; remove it"
    elif pool.size % size:
        yield f"{found}, but pool {pool.name!r} has {pool.size} workers; make it a multiple of {size}"


def _offline_conflicts(config: RunConfig) -> Iterator[str]:
    replay, environment = config.replay, config.environment
    if environment is None or environment.steps_per_rollout:
        return
    found = "environment.steps_per_rollout = 0"
    if environment.workers:
        yield f"{found}: nothing is collected, so environment.workers have nothing to do; leave them out"
    if not config.replays:
        yield f"{found}: {config.algorithm} learns from what it collects; set it to 1 or more"
    elif replay.dataset is None:
        yield f"{found}: nothing is collected, so what is learned from has to be in replay.dataset; set one of them"
    elif replay.samples_per_insert is not None or replay.overlap:
        named = "samples_per_insert" if replay.samples_per_insert is not None else "overlap"
        yield f"{found}: nothing is collected, so replay.{named} has no effect; leave it out"


def _pool_of_replay_conflicts(config: RunConfig) -> Iterator[str]:
    if config.replays and config.replay.shards > (pool := config.placed.pool_of("replay")).size:
        found = f"replay.shards = {config.replay.shards}, but pool {pool.name!r} of role replay has {pool.size} workers"
        yield f"{found}; make the pool larger, or name another one in placement.roles.replay"


def _text_conflicts(config: RunConfig) -> Iterator[str]:
    generation = config.generation
    if generation.engine == "vllm" and generation.precision != "full":
        yield f'generation.precision = {generation.precision!r} needs generation.engine = "hybridflow"'
    if generation.precision == "int8" and config.torch_device.type != "cpu":
        yield f'generation.precision = "int8" runs on CPUs only, and this run is on {config.torch_device}; use "bfloat16"'
    if config.actor.model is None and config.actor.fresh is None:
        yield '[actor] needs model = "..." (hybridflow models list) or a section [actor.fresh]'
    if "teacher" in config.sections() and config.teacher.model is None:
        yield f'[teacher] needs model = "...", which {config.algorithm} learns from'


def _record_conflicts(config: RunConfig, data: DataConfig) -> Iterator[str]:
    """Methods on pairs need pairs, and others can't use them."""
    on_pairs, given = ALGORITHMS[config.algorithm].records == "pairs", "task" if data.task is not None else "prompts"
    if on_pairs and data.pairs is None:
        yield f"{config.algorithm} learns from data.pairs, found data.{given}; hybridflow rank makes pairs from samples"
    if not on_pairs and data.pairs is not None and "data" in ALGORITHMS[config.algorithm].inputs:
        yield f"{config.algorithm} needs data.task or data.prompts, found data.pairs, which are for reward_model and dpo"
    if on_pairs and config.train.group_size > 1:
        yield f"train.group_size = {config.train.group_size}: {config.algorithm} samples no responses; remove it"
    if config.algorithm == "dpo" and config.dpo.kind == "kto" and config.train.prompts_per_step < 2:
        yield 'train.prompts_per_step = 1: dpo.kind = "kto" compares with responses to other prompts, so it needs 2 or more'
    reference, actor = config.dtype_of(config.reference), config.dtype_of(config.actor)
    if config.algorithm == "dpo" and config.reference.model is None and reference != actor:
        found = f"reference.dtype = {reference!r}, but the actor has {actor!r}"
        yield f"{found}: dpo starts from a reference that is equal to the actor; leave reference.dtype out"
