"""Sections of a run's configuration that belong to no other class: models and their meshes, generation, training."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridflow.core.config import Config
from hybridflow.core.placement import MeshConfig
from hybridflow.generation.weights import Precision
from hybridflow.models.nets import NetConfig
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.zero import ShardMode

__all__ = [
    "AXES",
    "MAX_DRAWN",
    "ActorConfig",
    "CheckpointConfig",
    "CriticConfig",
    "EvaluationConfig",
    "FreshModel",
    "GenerationConfig",
    "GenerationMeshConfig",
    "ModelConfig",
    "TrainConfig",
    "TrainedConfig",
    "TrainedMeshConfig",
    "section_of",
]


MAX_DRAWN = 8192
"""transitions of one learning call: more save no time, and of images take memory"""


class FreshModel(Config):
    """Sizes of a decoder that starts from random weights."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """architecture"""
    hidden_size: int = Field(64, gt=0)
    """width of the residual; the gated MLP is 8/3 as wide"""
    num_layers: int = Field(2, gt=0)
    """transformer layers"""
    num_heads: int = Field(4, gt=0)
    """attention heads"""
    num_kv_heads: int | None = Field(None, gt=0)
    """fewer than num_heads for grouped-query attention; the same when left out"""
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
    keep_best: str | None = None
    """a metric of evaluations, like "eval/score": of those steps, the checkpoint with the largest value remains as well"""
    deadline_s: float = Field(30, gt=0)
    """seconds from SIGTERM, with which clusters announce a preemption, to the end of the process: a step that is done by
    then is saved"""
    export_every: int = Field(0, ge=0)
    """for environments: write the policy to <run_dir>/model before the first step, too, and every so many; hybridflow serve
    follows"""


def section_of(role: str) -> str:
    """The section that says what the role's model is."""
    return {"cost_critic": "critic", "baseline": "reward"}.get(role, role)
