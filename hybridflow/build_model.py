"""Where the weights of a run's language models come from, and where they go."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.config import RunConfig
from hybridflow.config_sections import ActorConfig, FreshModel, ModelConfig, TrainedConfig, TrainedMeshConfig, section_of
from hybridflow.core.errors import DataError, ModelError, UserError
from hybridflow.core.seeding import torch_generator
from hybridflow.data.text import Tokenizer
from hybridflow.models.decoder import Decoder, Part, init_weights
from hybridflow.models.layout import head_cut
from hybridflow.models.policy import TextCritic, TextPolicy, TextReward, fresh_score
from hybridflow.models.sources import resolve
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import (
    decoder_sizes,
    empty_decoder,
    is_reward_model,
    load_decoder,
    load_reward,
    read_spec,
    save_decoder,
)
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import cuts
from hybridflow.rollout.rewards import ScorerConfig
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import freeze
from hybridflow.workers.parts import WHOLE, Lines

__all__ = [
    "DecoderSource",
    "actor_tokenizer",
    "check_meshes",
    "critic_networks",
    "decoder_source",
    "export_model",
    "policy_networks",
    "reward_folder",
    "reward_networks",
    "source_like_actor",
    "text_networks",
    "trained_reward",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class DecoderSource:
    """Where a decoder's weights come from: a folder, or a seed. On the device "meta" there are none, only sizes.

    ``name``: what users call it.
    """

    name: str
    spec: DecoderSpec
    folder: Path | None
    dtype: torch.dtype
    device: torch.device
    seed: int
    activation_checkpointing: bool = False
    sequence_parallel: bool = False

    def build(self, lines: Lines = WHOLE) -> Decoder:
        """The decoder, or what the rank at this place of a mesh holds of it."""
        part = self._part(lines)
        if self.folder is None or self.device.type == "meta":
            return self._ready(self._new(self.spec, part))
        return self._ready(load_decoder(self.folder, self.dtype, part))

    def body(self, lines: Lines = WHOLE) -> tuple[Decoder, Tensor | None]:
        """The decoder without language head, and the head of scores [1, D] of a reward model."""
        spec, part = replace(self.spec, tied=True), replace(self._part(lines), head=False)
        if self.folder is None or self.device.type == "meta":
            return self._ready(self._new(spec, part)), None
        decoder, score = load_reward(self.folder, self.dtype, part)
        return self._ready(decoder), score

    def _part(self, lines: Lines) -> Part:
        return replace(part_at(self.spec, lines), sequence_parallel=self.sequence_parallel and lines.tp.size > 1)

    def _new(self, spec: DecoderSpec, part: Part) -> Decoder:
        if self.device.type == "meta":
            return decoder_sizes(spec, self.dtype, part)
        decoder = empty_decoder(spec, torch.float32, part)
        init_weights(decoder, torch_generator(self.seed, "init"))
        return decoder

    def _ready(self, decoder: Decoder) -> Decoder:
        decoder = decoder.to(self.device, self.dtype)
        decoder.activation_checkpointing = self.activation_checkpointing
        return decoder


def decoder_source(model: ModelConfig, config: RunConfig, vocab_size: int) -> DecoderSource:
    """The decoder that a section describes; ``vocab_size`` is that of the tokenizer, for a fresh model."""
    folder = None if model.model is None else resolve(model.model)
    if folder is not None:
        spec = read_spec(folder)
        if is_reward_model(folder) and config.algorithm != "reward_model":
            raise ModelError(f"{folder}: holds a reward model, expected a language model; use it as reward.model")
    else:
        assert isinstance(model, ActorConfig) and model.fresh is not None, "validated"
        spec = fresh_spec(model.fresh, vocab_size)
    name, dtype = model.model or f"fresh {spec.family}", DTYPES[config.dtype_of(model)]
    source = DecoderSource(name, spec, folder, dtype, config.torch_device, config.seed)
    if not isinstance(model, TrainedConfig):
        return source
    kept, cut = model.activation_checkpointing, isinstance(model.mesh, TrainedMeshConfig) and model.mesh.sequence_parallel
    return replace(source, activation_checkpointing=kept, sequence_parallel=cut)


def fresh_spec(fresh: FreshModel, vocab_size: int) -> DecoderSpec:
    """Sizes of a fresh decoder."""
    return DecoderSpec(
        family=fresh.family,
        vocab_size=vocab_size,
        hidden_size=fresh.hidden_size,
        intermediate_size=fresh.hidden_size * 8 // 3,
        num_layers=fresh.num_layers,
        num_heads=fresh.num_heads,
        num_kv_heads=fresh.num_kv_heads or fresh.num_heads,
        head_dim=fresh.hidden_size // fresh.num_heads,
        max_positions=2048,
        rope_theta=fresh.rope_theta,
        qkv_bias=fresh.family == "qwen2",
        qk_norm=fresh.family == "qwen3",
    )


def reward_folder(key: str, model: str, tokenizer: Tokenizer) -> Path:
    """The folder of a reward model that reads the actor's tokens. ModelError, without loading it, if it can't."""
    folder = resolve(model)
    if not is_reward_model(folder):
        hint = 'train one with algorithm = "reward_model"'
        raise ModelError(f"{key}: {folder} holds a language model, expected one for sequence classification; {hint}")
    if not Tokenizer.load(folder).same(tokenizer):
        hint = "it reads the actor's tokens, so train it from the same model"
        raise ModelError(f"{key}: the tokenizer of {folder} is not the actor's; {hint}")
    return folder


def actor_tokenizer(actor: ModelConfig, alphabet: str | None) -> Tokenizer:
    """The tokenizer of the actor's folder; of a fresh actor, one token for each character of ``alphabet``."""
    if actor.model is not None:
        return Tokenizer.load(resolve(actor.model))
    if alphabet is None:
        raise DataError("[actor.fresh] needs a task with an alphabet (addition, reverse, sort); or set actor.model")
    return Tokenizer.characters(alphabet)


def source_like_actor(model: ModelConfig, config: RunConfig, actor: DecoderSource, vocab_size: int) -> DecoderSource:
    """The section's own model, or the actor's first weights."""
    if model.model is None:
        own = {name: value for name, value in model if name in ("dtype", "activation_checkpointing", "mesh")}
        model = config.actor.model_copy(update=own)
    source = decoder_source(model, config, vocab_size)
    if source.spec.vocab_size != actor.spec.vocab_size:
        raise ModelError(
            f"{model.model}: has {source.spec.vocab_size} tokens, but the actor {actor.spec.vocab_size}; "
            "critic and reference read the actor's tokens, so they need the same tokenizer"
        )
    return source


def part_at(spec: DecoderSpec, lines: Lines) -> Part:
    """What the rank at this place of a mesh holds of a decoder. UserError if it has fewer layers than stages."""
    ranks, chunks, most = lines.pp.size, lines.chunks, spec.num_layers
    if ranks > most:
        raise UserError(f"mesh: pp = {ranks}, but the model has {most} layers; lower pp to {most}")
    if ranks * chunks > most:
        found = f"mesh: pp {ranks} x chunks {chunks} = {ranks * chunks} stages, but the model has {most} layers"
        raise UserError(f"{found}; lower chunks to {most // ranks}")
    stages = cuts(most, ranks * chunks)
    layers = stages[lines.pp.index] if chunks == 1 else tuple(stages[lines.pp.index :: ranks])
    first, last = lines.pp.index == 0, lines.pp.index == ranks - 1
    return Part(layers, first=first, last=last, tp=lines.tp, pp=lines.pp, cp=lines.cp)


def check_meshes(config: RunConfig, actor: DecoderSource, vocab_size: int) -> None:
    """UserError, before any model loads: one has fewer layers, heads, ... than its section's mesh has ranks for them, or
    ``optimizer.freeze`` names nothing in it, which no rank with a part of the model could tell."""
    for role, (tp, pp, _) in config.cuts.items():
        section = config.model_sections[role]
        if isinstance(section, ScorerConfig):
            assert section.model is not None, "it has a mesh"
            _check_cut(f"{section_of(role)}.", read_spec(resolve(section.model)), tp, pp)
            continue
        source = actor if role == "actor" else source_like_actor(section, config, actor, vocab_size)
        chunks = section.mesh.chunks if isinstance(section, TrainedConfig) else 1
        _check_cut(f"{section_of(role)}.", source.spec, tp, pp, chunks)
        if isinstance(section, TrainedConfig):
            (sizes,) = _networks_of(role, config.algorithm, replace(source, device=torch.device("meta"))).values()
            freeze(sizes, section.optimizer.freeze)

    _check_cut("actor.generation_", actor.spec, config.actor.generation_mesh.tp, config.actor.generation_mesh.pp)


def _check_cut(where: str, spec: DecoderSpec, tp: int, pp: int, chunks: int = 1) -> None:
    try:
        part_at(spec, Lines(pp=Line(pp), chunks=chunks))
        head_cut(spec, 0, tp)
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _networks_of(role: str, algorithm: str, source: DecoderSource) -> dict[str, nn.Module]:
    if role != "actor":
        return critic_networks(source)
    return trained_reward(source) if algorithm == "reward_model" else policy_networks(source, 1.0)


def text_networks(build: Callable[..., Mapping[str, nn.Module]], main: str, model: str) -> Networks:
    """Networks of a decoder, which can be cut over a mesh: ``build(lines)``. ``model``: what users call it."""
    return Networks(build, main, ("tokens",), model, part=build)


def policy_networks(source: DecoderSource, temperature: float, lines: Lines = WHOLE) -> dict[str, nn.Module]:
    return {"policy": TextPolicy(source.build(lines), temperature)}


def critic_networks(source: DecoderSource, lines: Lines = WHOLE) -> dict[str, nn.Module]:
    return {"value": TextCritic(source.body(lines)[0])}


def reward_networks(folder: Path, dtype: torch.dtype, device: torch.device, lines: Lines = WHOLE) -> dict[str, nn.Module]:
    spec = replace(read_spec(folder), tied=True)
    part = replace(part_at(spec, lines), head=False)
    if device.type == "meta":
        return {"reward": TextReward(decoder_sizes(spec, dtype, part), torch.empty(1, spec.hidden_size))}
    decoder, score = load_reward(folder, dtype, part)
    if score is None:
        raise ModelError(f"{folder}: no score.weight in it; copy the weights of the reward model again")
    return {"reward": TextReward(decoder, score).to(device)}


def trained_reward(source: DecoderSource, lines: Lines = WHOLE) -> dict[str, nn.Module]:
    """A reward model that goes on from a reward model, or starts from a language model with a fresh head."""
    decoder, score = source.body(lines)
    if score is None:
        score = fresh_score(decoder, torch_generator(source.seed, "init", 1))
    return {"reward": TextReward(decoder, score)}


def export_model(learner: Any, source: DecoderSource, tokenizer: Tokenizer, folder: Path) -> None:
    """Write what ``learner`` has trained as a Hugging Face folder with its tokenizer."""
    if source.folder is not None:
        learner.export(partial(_save, folder=folder, copy_from=source.folder, pad_token_id=tokenizer.pad_token_id))
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder.parent) as scratch:  # where the workers see it, too
        tokenizer.save(Path(scratch))
        learner.export(partial(_save, folder=folder, copy_from=Path(scratch), pad_token_id=tokenizer.pad_token_id))


def _save(model: TextPolicy | TextReward, folder: Path, copy_from: Path, pad_token_id: int) -> None:
    score = model.score if isinstance(model, TextReward) else None
    save_decoder(model.decoder, folder, copy_from=copy_from, score=score, pad_token_id=pad_token_id)
