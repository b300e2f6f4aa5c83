"""What a run needs, from its configuration alone: bytes of every role and pool, FLOPs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from torch import nn

from hybridflow.build_trace import held, places_of, traced
from hybridflow.config import RunConfig
from hybridflow.controller.trace_runtime import TraceRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.graph import Call, RoleSize
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import Role
from hybridflow.generation.kv_cache import Shape, position_bytes
from hybridflow.models.decoder import Decoder
from hybridflow.models.policy import TextCritic, TextPolicy, TextReward
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.pipeline_plan import interleaved
from hybridflow.planner.flops import backward_flops, decode_flops, forward_flops
from hybridflow.planner.memory import (
    Footprint,
    Head,
    Microbatch,
    Stage,
    activation_bytes,
    forward_bytes,
    head_buffer_bytes,
    peak_bytes,
    repacked_bytes,
)
from hybridflow.workers.fsdp import gathered_bytes
from hybridflow.workers.optimizer import freeze
from hybridflow.workers.parts import WHOLE, Lines

__all__ = ["Need", "needs", "pool_peaks", "rank_need"]

PREFILL_TOKENS = 2048
"""of a step of the rollout engine"""


@dataclass(frozen=True)
class Need:
    """Of a role: ``footprint`` of the process that holds most, ``flops`` of a step, all ranks together; both without what
    isn't counted: networks of environments, and vLLM's process but for its weights."""

    role: str
    pool: str
    mesh: str
    where: str
    microbatch: Microbatch | None
    footprint: Footprint
    flops: float


def needs(config: RunConfig) -> list[Need]:
    """Of every role that has a model or draws responses."""
    runtime, first = traced(config)
    planner = _Planner(config, runtime, first)
    return [planner.need(size) for size in runtime.graph.roles if size.weight_bytes or size.name in runtime.shared]


def pool_peaks(found: list[Need]) -> dict[str, int]:
    """The most that tensors take in a process of each pool: all roles hold what they hold, and one of them works."""
    pools = dict.fromkeys(need.pool for need in found)
    peaks = {}
    for pool in pools:
        there = [need.footprint for need in found if need.pool == pool]
        peaks[pool] = sum(one.held for one in there) + max(one.working for one in there)
    return peaks


class _Planner:
    def __init__(self, config: RunConfig, runtime: TraceRuntime, first: Batch) -> None:
        self.config, self.runtime, self.device = config, runtime, config.torch_device.type
        rollouts = [call for call in runtime.graph.calls if call.kind == "generate" and call.tokens_in]
        tokens = sum(call.tokens_in + call.tokens_out for call in rollouts)
        self.decisive = sum(call.tokens_out for call in rollouts) / tokens if tokens else 1.0
        if not rollouts and "response_mask" in first:
            self.decisive = float(first.ragged("response_mask").values.mean())

    def need(self, size: RoleSize) -> Need:
        role = self.runtime.roles[size.name]
        calls = [call for call in self.runtime.graph.calls if call.role == size.name]
        mesh = self.config.placed.mesh_of(role.name, role.max_workers)
        batch, footprint, flops = None, Footprint(weights=size.weight_bytes), 0.0
        if role.name in self.runtime.shared:
            footprint, flops = self._sampler(role, size, mesh, calls)
        else:
            options = [rank_need(role.args, lines, mesh, calls, self.decisive, self.device) for lines in places_of(mesh)]
            batch, footprint = max(options, key=lambda option: option[1].peak)
            flops = self._model_flops(role, calls)
        return Need(size.name, size.pool, size.mesh, size.where, batch, footprint, flops)

    def _model_flops(self, role: Role[Any], calls: list[Call]) -> float:
        stage = stage_of(role.args, WHOLE, self.device)
        if stage is None:
            return 0.0
        total = 0.0
        for call in calls:
            actions = call.rows if stage.head == "score" else call.tokens_in * self.decisive
            work = (stage.spec, call.tokens_in, actions, call.tokens_in / max(call.rows, 1), stage.head == "policy")
            flops = forward_flops(*work)
            if call.kind == "train":
                flops = role.args["plan"].epochs * (
                    flops * (1 + stage.checkpointing) + backward_flops(*work, stage.frozen, stage.trains_head)
                )
            total += flops * call.times
        return total

    def _sampler(self, role: Role[Any], size: RoleSize, mesh: Mesh, calls: list[Call]) -> tuple[Footprint, float]:
        """A sampler of text: its cache, its repacked weights, and a forward of a prompt's chunk or of all slots."""
        learner = self.runtime.roles[self.runtime.shared[role.name]].args
        stage, footprint = stage_of(learner, WHOLE, self.device), Footprint(weights=size.weight_bytes)
        if stage is None or not calls:
            return footprint, 0.0
        flops = sum(self._rollout_flops(stage.spec, call) * call.times for call in calls)
        if self.config.generation.engine == "vllm":
            return footprint, flops
        call, mesh = max(calls, key=lambda one: one.rows), mesh.while_generating
        parts = [part for lines in places_of(mesh) if (part := stage_of(learner, lines, self.device)) is not None]
        options = [self._rollout(footprint, replace(part, sequence_parallel=False), mesh, call) for part in parts]
        return max(options, key=lambda option: option.peak), flops

    def _rollout(self, footprint: Footprint, stage: Stage, mesh: Mesh, call: Call) -> Footprint:
        """With what a part of the decoder takes to draw the rows of a replica."""
        generation, itemsize = self.config.generation, stage.itemsize
        if generation.precision == "bfloat16":
            itemsize = 2
        held_spec = replace(stage.local, num_layers=stage.layers)
        rows = min(generation.max_slots, ceil(call.rows / mesh.dp))
        cache = self._shape(call, rows).rounded.size * position_bytes(held_spec, itemsize)
        if generation.kv_cache_gb is not None:
            cache = min(cache, int(generation.kv_cache_gb * 1e9))
        width = ceil(call.tokens_in / call.rows)
        prompts = min(PREFILL_TOKENS, call.tokens_in)
        tokens = max(rows, prompts)
        chunk = Microbatch(max(1, tokens // width), width, tokens, rows)
        forward = forward_bytes(replace(stage, itemsize=itemsize), chunk)
        copied = repacked_bytes(held_spec, stage.itemsize, generation.precision, generation.max_new_tokens, stage.device)
        return replace(footprint, forward=forward, cache=cache, repacked=copied, working=cache + forward + copied)

    def _shape(self, call: Call, rows: int) -> Shape:
        """Prompts with several responses lie apart."""
        prompt, response, group = ceil(call.tokens_in / call.rows), ceil(call.tokens_out / call.rows), self._group
        if group == 1:
            return Shape(rows, prompt + response)
        return Shape(rows, response, min(rows, ceil(call.rows / group)), prompt)

    @property
    def _group(self) -> int:
        return self.config.train.group_size

    def _rollout_flops(self, spec: DecoderSpec, call: Call) -> float:
        """A prompt that several responses share goes through the layers once."""
        prompt, response = call.tokens_in / call.rows, call.tokens_out / call.rows
        first = forward_flops(spec, call.tokens_in / self._group, call.rows, prompt, head=True)
        return first + decode_flops(spec, prompt, response - 1, call.rows)


def rank_need(
    args: Mapping[str, Any], lines: Lines, mesh: Mesh, calls: Sequence[Call], decisive: float, device: str
) -> tuple[Microbatch | None, Footprint]:
    """What the rank at this place of a mesh needs for ``calls``, by its role's arguments, and the microbatch that takes
    it. ``decisive``: the share of tokens that decide about an action."""
    size, stage = held(args, lines), stage_of(args, lines, device)
    footprint = Footprint(size.weight_bytes, size.gradient_bytes, size.optimizer_bytes)
    working = [call for call in calls if call.rows]
    if stage is None or not working:
        return None, footprint
    updates = [call for call in working if call.kind == "train"]
    batches = [_microbatch(args, stage, call, mesh, decisive) for call in (updates or working)]
    batch, number = max(batches, key=lambda found: found[0].tokens)
    others = [_microbatch(args, stage, call, mesh, decisive)[0] for call in working if call.kind != "train"]
    forward = max((forward_bytes(stage, other) for other in others), default=0)
    if not updates:
        return batch, replace(footprint, forward=forward, working=forward)
    plan, rank = interleaved(lines.pp.size, lines.chunks, number), lines.pp.index
    kinds = (replace(stage, checkpointing=recompute).stages for recompute in (False, True))
    whole, recomputed = (plan.in_flight(rank, [activation_bytes(one, batch) for one in stages]) for stages in kinds)
    gradients = size.gradient_bytes
    messages = 3 * stage.itemsize * batch.tokens * stage.spec.hidden_size if lines.pp.size > 1 else 0
    summed = beside = 0
    if mesh.copies > 1 and args["shard"] == "fsdp":
        beside, summed = gathered_bytes(args["networks"].at(lines)[args["networks"].main], mesh.sharing)
        summed = max(summed, gradients if mesh.sharing < mesh.copies else 0)
    elif mesh.copies > 1:
        summed = gradients if args["shard"] == "none" else gradients + gradients // mesh.sharing
    learning = peak_bytes(stage, batch, gradients, plan, rank) + messages + beside
    working_bytes = max(learning, gradients + summed, (gradients if number > 1 else 0) + beside + forward)
    return batch, replace(
        footprint,
        activations=whole,
        checkpointed=recomputed,
        forward=forward,
        head=head_buffer_bytes(stage, batch.actions, train=True),
        communication=max(summed, messages, beside),
        working=max(0, working_bytes - gradients),
    )


def stage_of(args: Mapping[str, Any], lines: Lines, device: str) -> Stage | None:
    """What the rank at this place of a mesh runs; None for networks of environments."""
    networks = args["networks"]
    network = networks.at(lines)[networks.main]
    heads: Mapping[type[nn.Module], Head] = {TextPolicy: "policy", TextCritic: "value", TextReward: "score"}
    head = heads.get(type(network))
    if head is None:
        return None
    decoder: Decoder = network.decoder
    part = decoder.part
    if "optimizer" in args:
        freeze(network, args["optimizer"].freeze, lines.whole)
    trained = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in decoder.layers]
    below = part.first and not decoder.embed.weight.requires_grad
    return Stage(
        decoder.spec,
        len(decoder.layers),
        head,
        first=part.first,
        last=part.last,
        tp=part.tp.size,
        rank=part.tp.index,
        sequence_parallel=part.sequence_parallel,
        itemsize=decoder.anchor.element_size(),
        device=device,
        checkpointing=decoder.activation_checkpointing,
        frozen=[*trained, True].index(True) if below else 0,
        trains_head=part.last and head == "policy" and decoder.head_weight.requires_grad,
        chunks=tuple(map(len, part.chunks(decoder.spec.num_layers))),
    )


def _microbatch(args: Mapping[str, Any], stage: Stage, call: Call, mesh: Mesh, decisive: float) -> tuple[Microbatch, int]:
    """The fullest of a call, a rank's part of rows of mean length, and how many there are in a minibatch of a block."""
    plan = args.get("plan")
    budget = args["token_budget"] if plan is None else plan.token_budget
    minibatches = plan.minibatches if plan is not None and call.kind == "train" else 1
    length, block = max(1, ceil(call.tokens_in / call.rows)), ceil(ceil(call.rows / minibatches) / mesh.dp)
    rows = min(block, max(1, budget // length))
    actions = rows if stage.head == "score" else ceil(rows * length * decisive)
    own = ceil(length / mesh.cp)
    return Microbatch(rows, own, rows * own, ceil(actions / mesh.cp)), ceil(block / rows)
