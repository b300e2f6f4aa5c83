"""Bytes that a decoder takes besides its weights, from its sizes: what autograd saves, what a forward pass holds, what a
rollout keeps. Counted from the code of ``models.decoder`` and ``ops.log_probs``, and tested against what autograd saves.

Shapes as there: N tokens, M of them decide about an action, P places in the padded rectangle of attention, D hidden size,
H heads, K key-value heads, E size of a head, I intermediate size, V vocabulary, n and m tokens of a rank that cuts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hybridflow.generation.weights import MIN_STEPS, Precision
from hybridflow.models.decoder import SLOW_WIDTH
from hybridflow.models.layout import local_spec
from hybridflow.models.spec import DecoderSpec
from hybridflow.ops.log_probs import CHUNK_BYTES, KEPT_BYTES
from hybridflow.parallel.pipeline_plan import Plan
from hybridflow.parallel.shard import lengths
from hybridflow.planner.sizes import Head

__all__ = [
    "Footprint",
    "Head",
    "Microbatch",
    "Stage",
    "WayBack",
    "activation_bytes",
    "forward_bytes",
    "head_buffer_bytes",
    "peak_bytes",
    "repacked_bytes",
    "way_back",
]


@dataclass(frozen=True)
class Microbatch:
    """What goes through a model at once: ``rows`` sequences of ``tokens`` in all, the longest of ``width``."""

    rows: int
    width: int
    tokens: int
    actions: int

    @property
    def padded(self) -> int:
        """P"""
        return self.rows * self.width


@dataclass(frozen=True)
class Stage:
    """What of a decoder a rank runs, ``layers`` of them, and how. ``rank``: its place in a tensor-parallel line of ``tp``.

    ``frozen``: layers at the beginning before which nothing is trained, so that nothing is saved in them. ``trains_head``:
    whether the matrix of the vocabulary has a gradient. ``chunks``: of an interleaved pipeline, the layers of each
    stage that the rank runs.
    """

    spec: DecoderSpec
    layers: int
    head: Head
    first: bool = True
    last: bool = True
    tp: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    itemsize: int = 4
    device: str = "cpu"
    checkpointing: bool = False
    frozen: int = 0
    trains_head: bool = True
    chunks: tuple[int, ...] = ()

    @property
    def stages(self) -> list[Stage]:
        """One for each of the chunks; else itself."""
        first, *others = self.chunks or (self.layers,)
        start = replace(self, layers=first, last=self.last and not others, frozen=min(first, self.frozen), chunks=())
        ends = [self.last and number == len(others) for number in range(1, len(others) + 1)]
        later = zip(others, ends, strict=True)
        return [start, *(replace(start, layers=n, first=False, last=end, frozen=0) for n, end in later)]

    @cached_property
    def local(self) -> DecoderSpec:
        """Sizes of the slices that are here."""
        return local_spec(self.spec, self.rank, self.tp)

    def own(self, tokens: int) -> int:
        """n, of N tokens."""
        return lengths(tokens, self.tp)[self.rank] if self.sequence_parallel else tokens


@dataclass(frozen=True)
class Footprint:
    """Bytes of a role in the process that holds most of it.

    ``activations`` of all microbatches that are in flight at once, without checkpointing, ``checkpointed`` with it;
    ``forward``: of a pass without gradients; ``head``: chunks of logits and the head's gradient; ``communication``: what
    gradients are summed in, and messages of a pipeline; ``repacked``: weights, for a rollout. ``working``: what the role
    takes at most on top of weights, gradients and optimizer, as it is configured.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    checkpointed: int = 0
    forward: int = 0
    cache: int = 0
    head: int = 0
    communication: int = 0
    repacked: int = 0
    working: int = 0

    @property
    def held(self) -> int:
        """What stays while other roles work."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.held + self.working


def activation_bytes(stage: Stage, batch: Microbatch) -> int:
    """What is held between the forward and the backward pass of a microbatch; with checkpointing the inputs of the layers,
    and all that one of them saves when it runs again."""
    layers = _layers(stage, batch)
    ends = _inputs(stage, batch) + _outputs(stage, batch)
    if not stage.checkpointing:
        return ends + sum(layers)
    inputs = len(layers) * stage.itemsize * stage.own(batch.tokens) * stage.spec.hidden_size
    return ends + inputs + max(layers, default=0)


def forward_bytes(stage: Stage, batch: Microbatch) -> int:
    """The most that a pass without gradients holds at once: in a layer's MLP, or with the logits of a chunk."""
    s, size = stage.local, stage.itemsize
    attended = (3 * s.num_heads + 3 * s.num_kv_heads) * s.head_dim
    layer = size * batch.tokens * (3 * s.hidden_size + attended + 4 * s.intermediate_size)
    head = head_buffer_bytes(stage, batch.actions, train=False) + size * batch.actions * s.hidden_size
    return max(layer, head) + size * 2 * batch.tokens * s.head_dim


def peak_bytes(stage: Stage, batch: Microbatch, gradients: int, plan: Plan, rank: int) -> int:
    """The most that a step takes besides weights and optimizer until its gradients are there: at the start of the way back
    of the last of the microbatches that ``plan`` has in flight on a rank, or at its end. Gradients of earlier ones
    are there, if any."""
    ways = [way_back(one, batch) for one in stage.stages]
    held, earlier = plan.in_flight(rank, [way.kept for way in ways]), plan.in_flight(rank) < len(plan.actions[rank]) // 2
    return max(held - way.kept + way.peak(gradients, earlier) for way in ways)


class WayBack(NamedTuple):
    """Bytes of a microbatch: ``kept`` while others go their way back, then at the ``start`` of its own, and ``within`` it,
    when gradients are there."""

    kept: int
    start: int
    within: int

    def peak(self, gradients: int, earlier: bool) -> int:
        """``gradients``: bytes of them, which are there from the start if there were ``earlier`` microbatches."""
        return max((gradients if earlier else 0) + self.start, gradients + self.within)


def way_back(stage: Stage, batch: Microbatch) -> WayBack:
    saved, layer = activation_bytes(stage, batch), max(_layers(stage, batch), default=0)
    kept = saved - (layer if stage.checkpointing else 0)
    start = kept + head_buffer_bytes(stage, batch.actions, train=True)
    return WayBack(kept, start, saved - _outputs(stage, batch) if stage.checkpointing else layer)


def head_buffer_bytes(stage: Stage, tokens: int, train: bool) -> int:
    """While log-probabilities of M = ``tokens``, or their gradients, are made, besides what is saved. Forward: a chunk of
    logits, of probabilities and of their product, in fp32. Backward: probabilities, if they were not saved, and the
    gradients of logits, also as the matrix product takes them; the gradients of hidden states and of the head's matrix, and
    what a chunk adds to that. Nothing for other heads."""
    if stage.head != "policy" or not stage.last:
        return 0
    s, row, kept = stage.local, 4 * stage.local.vocab_size, train and _keeps(stage, tokens)
    chunk = row * min(tokens, max(1, CHUNK_BYTES[stage.device] // row))
    forward = chunk * (2 if kept else 3)
    if not train:
        return forward
    backward = chunk * (1 if kept else 2) + (chunk // 2 if stage.itemsize < 4 else 0)
    backward += stage.itemsize * tokens * s.hidden_size
    return max(forward, backward + (4 + stage.itemsize) * s.vocab_size * s.hidden_size * stage.trains_head)


def _keeps(stage: Stage, tokens: int) -> bool:
    """Whether probabilities wait for the backward pass."""
    return tokens <= KEPT_BYTES[stage.device] // (4 * stage.local.vocab_size)


def _inputs(stage: Stage, batch: Microbatch) -> int:
    """Cosines and sines, which places are real, token ids; and what came from the stage before, if a norm keeps a copy."""
    total = 2 * stage.itemsize * batch.tokens * stage.spec.head_dim
    total += batch.padded if batch.padded != batch.tokens else 0
    if stage.first:
        return total + (0 if stage.frozen else (8 if stage.tp == 1 else 9) * batch.tokens)
    copied = stage.device == "cpu" and stage.itemsize < 4
    return total + (stage.itemsize * stage.own(batch.tokens) * stage.spec.hidden_size if copied else 0)


def _outputs(stage: Stage, batch: Microbatch) -> int:
    """From the final norm on."""
    if not stage.last:
        return 0
    actions, hidden = batch.actions, stage.spec.hidden_size
    total = 8 * actions + _norm(stage, stage.own(actions), hidden) + stage.itemsize * actions * hidden
    if stage.head != "policy":
        return total
    kept = 4 * stage.local.vocab_size * actions if _keeps(stage, actions) else 0
    return total + kept + (12 if stage.tp == 1 else 17) * actions


def _layers(stage: Stage, batch: Microbatch) -> list[int]:
    """What each layer saves that saves anything."""
    layers = [_layer(stage, batch, None)] * (stage.layers - stage.frozen)
    if stage.last and layers:
        layers[-1] = _layer(stage, batch, batch.actions)
    if stage.frozen and layers and stage.device == "cpu":  # of the first norm's input, nobody wants the gradient
        layers[0] -= 4 * stage.own(batch.tokens) * (stage.spec.hidden_size + 1)
    return layers


def _layer(stage: Stage, batch: Microbatch, wanted: int | None) -> int:
    """``wanted``: M in the last layer, of which the others are spared most."""
    s, size = stage.local, stage.itemsize
    tokens = batch.tokens if wanted is None else wanted
    normed = batch.tokens if wanted is not None else stage.own(batch.tokens)
    total = _norm(stage, normed, s.hidden_size) + size * batch.tokens * s.hidden_size
    total += _attention(stage, batch, wanted)
    total += _norm(stage, stage.own(tokens), s.hidden_size)
    return total + size * tokens * (s.hidden_size + 4 * s.intermediate_size)


def _norm(stage: Stage, rows: int, width: int) -> int:
    """On a CPU torch makes RMSNorm of plain operations in fp32, which save input, scale and normalised input; the kernel of
    a GPU saves input and scale. The output is saved by what reads it."""
    return rows * (8 * width + 4 if stage.device == "cpu" else stage.itemsize * width + 4)


def _attention(stage: Stage, batch: Microbatch, wanted: int | None) -> int:
    """From q, k and v to what attention gives. Where rows are equally long and the dtype stays, q, k and v are read where
    they lie, in the outputs of the projection and of the rotation; else they are copied."""
    s, size, places = stage.local, stage.itemsize, batch.padded
    q, qk, qkv = (n * s.head_dim for n in (s.num_heads, s.num_heads + s.num_kv_heads, s.num_heads + 2 * s.num_kv_heads))
    cast = stage.device == "cpu" and size == 2 and batch.width <= SLOW_WIDTH
    in_place = places == batch.tokens and not cast
    if in_place:
        total = size * batch.tokens * (qkv + qk + q) + size * (wanted or 0) * q
    else:
        total = (4 if cast else size) * places * (qkv + q) + size * (batch.tokens if wanted is None else wanted) * q
    total += 4 * places * s.num_heads
    if s.qk_norm:
        total += _norm(stage, batch.tokens * (s.num_heads + s.num_kv_heads), s.head_dim)
        reads_qkv = stage.device != "cpu" or size == 4
        total -= size * batch.tokens * qk if reads_qkv else 0
        total += size * batch.tokens * qkv if reads_qkv and not in_place else 0
    return total


def repacked_bytes(spec: DecoderSpec, itemsize: int, precision: Precision, steps: int, device: str) -> int:
    """Of the copy of the matrices, and of all parameters if their type changes, that a rollout of ``steps`` works on."""
    size = {"full": itemsize, "bfloat16": 2, "int8": 1}[precision]
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * heads + 2 * kv_heads + 3 * spec.intermediate_size)
    packs, table = device == "cpu" and steps >= MIN_STEPS, spec.vocab_size * spec.hidden_size
    if precision == "full":
        return size * (spec.num_layers * layer + table) if packs else 0
    cast = 2 * table if precision == "bfloat16" and itemsize != 2 else 0
    head = (itemsize if precision == "int8" else 2) * table if packs else 0
    return (size * spec.num_layers * layer if packs or precision == "int8" or cast else 0) + head + cast
