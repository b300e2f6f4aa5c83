"""The configuration of a run: one section for each part, and the rules that span sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hybridflow.algorithms import ALGORITHMS
from hybridflow.algorithms.dqn import DQNConfig
from hybridflow.algorithms.grpo import GRPOConfig
from hybridflow.algorithms.ppo import PPOConfig
from hybridflow.algorithms.sft import SFTConfig
from hybridflow.core.config import Config, apply_overrides, parse, read_toml, to_toml
from hybridflow.core.errors import ConfigError
from hybridflow.data.envs import EnvironmentConfig
from hybridflow.data.prompts import DataConfig
from hybridflow.models.nets import NetConfig
from hybridflow.rollout.buffer import ReplayConfig
from hybridflow.rollout.rewards import RewardConfig
from hybridflow.workers.env_sampler import ExplorationConfig
from hybridflow.workers.learner import UpdatePlan
from hybridflow.workers.optimizer import OptimizerConfig

__all__ = ["RunConfig", "load_config", "resolved", "validate"]


class FreshModel(Config):
    """Sizes of a decoder that starts from random weights."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    hidden_size: int = Field(64, gt=0)
    num_layers: int = Field(2, gt=0)
    num_heads: int = Field(4, gt=0)
    num_kv_heads: int | None = Field(None, gt=0)
    """fewer than num_heads for grouped-query attention; the same when left out"""
    intermediate_size: int | None = Field(None, gt=0)
    """of the gated MLP; 8/3 hidden_size when left out"""
    rope_theta: float = Field(10_000.0, gt=1)
    """base of the rotary wavelengths; about the longest sequence for models of short ones"""


class ModelConfig(Config):
    """Keys of ``[actor]``, ``[critic]`` and ``[reference]``."""

    model: str | None = None
    """a name (hybridflow models list) or a Hugging Face folder; the critic and the reference default to the actor's"""
    fresh: FreshModel | None = None
    """instead of model: a decoder from random weights"""
    net: NetConfig = NetConfig()
    """for environments: the network"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights and activations; the optimizer keeps float32 masters"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, a third more time"""
    optimizer: OptimizerConfig = OptimizerConfig()


class GenerationConfig(Config):
    """Keys of ``[generation]``."""

    max_new_tokens: int = Field(64, gt=0)
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0)
    """0: all tokens"""
    top_p: float = Field(1.0, gt=0, le=1)
    stop: tuple[str, ...] = ()
    """strings that end a response, besides the model's end tokens"""
    max_slots: int = Field(128, gt=0)
    """responses that grow side by side; lower it when memory runs out"""


class TrainConfig(Config):
    """Keys of ``[train]``."""

    steps: int = Field(100, gt=0)
    prompts_per_step: int = Field(16, gt=0)
    group_size: int = Field(1, gt=0)
    """responses to each prompt"""
    minibatches: int = Field(1, gt=0)
    """optimizer steps in one pass over a step's samples"""
    epochs: int = Field(1, gt=0)
    """passes over a step's samples"""
    token_budget: int = Field(4096, gt=0)
    """tokens (or environment steps) in one forward pass; lower it when memory runs out, the result stays the same"""
    updates_per_step: int = Field(1, gt=0)
    """learning calls for each rollout; above 1 only with a replay buffer"""


class EvaluationConfig(Config):
    """Keys of ``[evaluation]``."""

    every: int = Field(0, ge=0)
    """steps between evaluations; 0: only before the first and after the last step"""
    limit: int = Field(200, gt=0)
    """held-out prompts, or episodes"""
    temperature: float = Field(0.0, ge=0)
    """0: greedy"""


class CheckpointConfig(Config):
    """Keys of ``[checkpoint]``."""

    every: int = Field(0, ge=0)
    """steps between checkpoints, and one after the last; 0: only when the run is interrupted"""
    keep: int = Field(2, gt=0)
    """the newest ones that remain"""
    export: bool = True
    """after the last step, write the actor as a Hugging Face folder into <run_dir>/model"""


class RunConfig(Config):
    """The whole configuration of a run."""

    algorithm: Literal["sft", "grpo", "ppo", "dqn"]
    seed: int = Field(1, ge=0)
    run_dir: str
    """where the run writes; a new folder"""
    threads: int = Field(0, ge=0)
    """of torch; 0: one for each core"""
    sft: SFTConfig = SFTConfig()
    grpo: GRPOConfig = GRPOConfig()
    ppo: PPOConfig = PPOConfig()
    dqn: DQNConfig = DQNConfig()
    actor: ModelConfig = ModelConfig()
    critic: ModelConfig = ModelConfig()
    reference: ModelConfig = ModelConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig | None = None
    environment: EnvironmentConfig | None = None
    replay: ReplayConfig = ReplayConfig()
    exploration: ExplorationConfig = ExplorationConfig()
    generation: GenerationConfig = GenerationConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def method(self) -> Config:
        """The section of the algorithm."""
        section: Config = getattr(self, self.algorithm)
        return section

    def learner_args(self, model: ModelConfig) -> dict[str, Any]:
        """Arguments of the learner of ``model``; its learning rate schedule spans the whole run."""
        train = self.train
        return {
            "optimizer": model.optimizer,
            "plan": UpdatePlan(train.minibatches, train.epochs, train.token_budget),
            "total_steps": train.steps * train.updates_per_step * train.minibatches * train.epochs,
            "seed": self.seed,
        }


def resolved(config: RunConfig) -> str:
    """The configuration with all defaults, as TOML; without the sections of other algorithms, which nothing reads."""
    return to_toml(config, set(ALGORITHMS) - {config.algorithm})


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
    method = ALGORITHMS[config.algorithm]
    if config.data is not None and config.environment is None:
        yield from _text_conflicts(config)
        smallest = method.algorithm.smallest_group(config.method)
        if config.train.group_size < smallest:
            found = f"train.group_size = {config.train.group_size}"
            yield f"{found}: {config.algorithm} compares the responses to one prompt and needs at least {smallest}"
    if config.train.updates_per_step > 1 and config.algorithm != "dqn":
        yield f"train.updates_per_step: {config.algorithm} learns from fresh samples; use train.epochs or train.minibatches"


def _section_conflicts(config: RunConfig) -> Iterator[str]:
    others = [name for name in ALGORITHMS if name != config.algorithm and name in config.model_fields_set]
    for name in others:
        yield f"[{name}] is set, but algorithm = {config.algorithm!r} doesn't read it; remove the section"
    given = [name for name in ("data", "environment") if getattr(config, name) is not None]
    inputs = ALGORITHMS[config.algorithm].inputs
    if len(given) != 1:
        yield f"needs {' or '.join(f'[{name}]' for name in inputs)}, one of them; found {' and '.join(given) or 'none'}"
    elif given[0] not in inputs:
        yield f"algorithm = {config.algorithm!r} runs on {' or '.join(f'[{name}]' for name in inputs)}, not on [{given[0]}]"


def _text_conflicts(config: RunConfig) -> Iterator[str]:
    for name in ("actor", "critic", "reference"):
        model: ModelConfig = getattr(config, name)
        if model.model is not None and model.fresh is not None:
            yield f"[{name}] has both model and fresh; give one"
    if config.actor.model is None and config.actor.fresh is None:
        yield '[actor] needs model = "..." (hybridflow models list) or a section [actor.fresh]'
    fresh = config.actor.fresh
    if fresh and fresh.hidden_size % fresh.num_heads:
        yield f"actor.fresh: hidden_size {fresh.hidden_size} isn't a multiple of num_heads {fresh.num_heads}"
    if fresh and fresh.num_kv_heads and fresh.num_heads % fresh.num_kv_heads:
        yield f"actor.fresh: num_heads {fresh.num_heads} isn't a multiple of num_kv_heads {fresh.num_kv_heads}"
