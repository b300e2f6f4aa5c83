"""Which numbers of every parameter of a decoder each rank holds, while training and while generating. Plain data, no torch.

A parameter is a row of numbers, counted along the axis that is cut first: a rank's slice is a few runs of them, and so it
lies in memory. Row-parallel weights (out, down), which are cut along columns, are therefore counted and stored transposed.

    training        [q0 k0 v0]  [q1 k1 v1]  [q2 k2 v2]  [q3 k3 v3]        t = 4, a rank each
    generation      [q0 k0 v0 | q1 k1 v1]   [q2 k2 v2 | q3 k3 v3]         t_g = 2: training slices, one behind the other

Pipeline stages cut the layers at i L // p; the first one has the embedding, the last one norm and head, and a copy of the
embedding if the head is tied to it. Ranks are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal

from hybridflow.core.errors import UserError
from hybridflow.core.placement import Mesh
from hybridflow.models.layout import decoder_shards, local_spec
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.shard import Shard, cuts

__all__ = [
    "Grouping",
    "Place",
    "Runs",
    "Section",
    "Slice",
    "find",
    "generation_places",
    "groups",
    "held",
    "part_spec",
    "replicated",
    "sections",
    "slices",
    "total",
    "training_places",
]

Grouping = Literal["hybridflow", "vanilla"]
Runs = tuple[range, ...]
"""Runs of numbers in the order in which they lie; neighbours that go on are one run."""


@dataclass(frozen=True)
class Slice:
    """What a rank holds of one parameter: ``runs`` of its numbers, as they lie in memory.

    ``shard`` says the same by lines of the axis that is cut. Rank 1 of 2 has, of a down weight [32, 24],
    ``Slice(Shard((32, 24), 1, (range(12, 24),), (True,)), (range(384, 768),))``: columns 12 to 23, 32 numbers each.
    With ``Place.share`` the runs are a part of the shard's.
    """

    shard: Shard
    runs: Runs


@dataclass(frozen=True)
class Place:
    """Where a rank stands: ``stage`` of ``stages`` of the layers, and of the cut weights the slices number index pieces up
    to (index + 1) pieces - 1 of size pieces, one behind the other. ``share`` (d, dp): it holds part d of dp of each slice
    alone, as FSDP and ZeRO-3 cut them."""

    stage: int = 0
    stages: int = 1
    index: int = 0
    size: int = 1
    pieces: int = 1
    share: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Section:
    """Parameters that the same ranks hold: those of all ``layers``, or one outside of them, whose ``name`` is given."""

    name: str = ""
    layers: range = range(1)

    def names(self, template: str) -> list[str]:
        """The parameters that the template of one stands for."""
        return [self.name] if self.name else [template.replace("layers.0.", f"layers.{n}.", 1) for n in self.layers]


# --------------------------------------------------------------------------------------------------------- where ranks are


def training_places(mesh: Mesh, shared: bool = False) -> tuple[Place, ...]:
    """Of every rank while training. ``shared``: the ranks of a data-parallel line share the weights out (FSDP, ZeRO-3)."""
    found = []
    for rank in range(mesh.size):
        d, p, t = mesh.coordinates(rank)
        found.append(Place(p, mesh.pp, t, mesh.tp, share=(d, mesh.dp) if shared else (0, 1)))
    return tuple(found)


def generation_places(mesh: Mesh, grouping: Grouping = "hybridflow") -> tuple[Place, ...]:
    """Of every rank while generating. Slices are those of training, one behind the other, wherever t_g divides t."""
    size, stages = mesh.generation
    pieces = mesh.tp // size if mesh.tp % size == 0 else 1
    found = [_replica(mesh, grouping)(rank) for rank in range(mesh.size)]
    return tuple(Place(stage, stages, index, size, pieces) for _, stage, index in found)


def groups(mesh: Mesh, grouping: Grouping = "hybridflow") -> dict[str, list[list[int]]]:
    """The ranks of every group by the group's kind: tensor, pipeline and data parallelism of training, and tensor,
    pipeline and micro data parallelism of generation."""
    train, replica = mesh.coordinates, _replica(mesh, grouping)
    keys: dict[str, Callable[[int], object]] = {
        "train tp": lambda rank: train(rank)[:2],
        "train pp": lambda rank: (train(rank)[0], train(rank)[2]),
        "train dp": lambda rank: train(rank)[1:],
        "generate tp": lambda rank: replica(rank)[:2],
        "generate pp": lambda rank: (replica(rank)[0], replica(rank)[2]),
        "micro dp": lambda rank: (train(rank)[0], *replica(rank)[1:]),
    }
    found: dict[str, list[list[int]]] = {}
    for kind, key in keys.items():
        members: dict[object, list[int]] = {}
        for rank in range(mesh.size):
            members.setdefault(key(rank), []).append(rank)
        found[kind] = list(members.values())
    return found


def _replica(mesh: Mesh, grouping: Grouping) -> Callable[[int], tuple[int, int, int]]:
    return mesh.replica if grouping == "hybridflow" else mesh.neighbouring_replica


# ------------------------------------------------------------------------------------------------------- what they hold


def slices(spec: DecoderSpec, place: Place) -> dict[str, Slice]:
    """Of every parameter that is held at a place, by name, in the order of ``decoder_shards``.

    Raises UserError: heads, neurons, tokens or layers are fewer than the ranks that they are cut over.
    """
    return {
        name: piece
        for section in sections(spec, [place])
        for layer in _each(section)
        for template, piece in held(spec, place, layer).items()
        for name in layer.names(template)
    }


def _each(section: Section) -> Iterable[Section]:
    return [section] if section.name else [Section(layers=range(n, n + 1)) for n in section.layers]


def sections(spec: DecoderSpec, places: Iterable[Place]) -> list[Section]:
    """All parameters, in their order, in sections that no stage of any of the places cuts."""
    bounds = {layers.start for place in places for layers in _stages(spec, place.stages)} | {spec.num_layers}
    middle = [Section(layers=range(a, b)) for a, b in pairwise(sorted(bounds))]
    return [Section("embed.weight"), *middle, Section("norm.weight"), *([] if spec.tied else [Section("lm_head.weight")])]


def held(spec: DecoderSpec, place: Place, section: Section) -> Mapping[str, Slice]:
    """The slices of a section at a place, by the parameter's name in layer 0; none if other stages have it."""
    return _tables(spec, replace(place, stage=0, stages=1))[section.name] if _on(spec, place, section) else {}


def part_spec(spec: DecoderSpec, place: Place) -> DecoderSpec:
    """The sizes of what is computed at a place: its layers and heads."""
    layers = _stages(spec, place.stages)[place.stage]
    return replace(local_spec(spec, place.index, place.size, place.pieces), num_layers=len(layers))


def _on(spec: DecoderSpec, place: Place, section: Section) -> bool:
    if not section.name:
        return section.layers.start in _stages(spec, place.stages)[place.stage]
    first, last = place.stage == 0, place.stage == place.stages - 1
    if section.name == "embed.weight":
        return first or (last and spec.tied)
    return last


@lru_cache(maxsize=256)
def _stages(spec: DecoderSpec, stages: int) -> list[range]:
    if stages > spec.num_layers:
        raise UserError(
            f"mesh: pp = {stages}, but the model has {spec.num_layers} layers: a stage needs one; "
            f"lower pp to {spec.num_layers}"
        )
    return cuts(spec.num_layers, stages)


@lru_cache(maxsize=4096)
def _tables(spec: DecoderSpec, place: Place) -> dict[str, dict[str, Slice]]:
    """By section; that of layers has no name."""
    count, first = place.size * place.pieces, place.index * place.pieces
    pieces = [decoder_shards(_one_layer(spec), first + number, count) for number in range(place.pieces)]
    tables: dict[str, dict[str, Slice]] = {}
    for name in pieces[0]:
        section = "" if name.startswith("layers.") else name
        tables.setdefault(section, {})[name] = _slice([table[name] for table in pieces], place.share)
    return tables


@lru_cache(maxsize=64)
def _one_layer(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, num_layers=1)


def _slice(pieces: list[Shard], share: tuple[int, int]) -> Slice:
    """The pieces, one behind the other, of a parameter that is cut; of one that isn't, the whole once."""
    shard = pieces[0]
    if not shard.whole:
        ranges = tuple(cut for piece in pieces for cut in piece.ranges)
        shard = replace(shard, ranges=ranges, owned=tuple(own for piece in pieces for own in piece.owned))
    width = prod(shard.shape) // shard.shape[shard.dim]
    runs = _joined(range(cut.start * width, cut.stop * width) for cut in shard.ranges)
    d, dp = share
    return Slice(shard, runs if dp == 1 else _part(runs, cuts(total(runs), dp)[d]))


@lru_cache(maxsize=256)
def replicated(spec: DecoderSpec, tp: int, pp: int) -> dict[str, range]:
    """The numbers, by the parameter's name in layer 0, that several ranks of one model hold while training: norms, output
    biases, key-value heads if they are fewer than ranks, an embedding that is the head of another stage."""
    found = {}
    for name, shard in decoder_shards(_one_layer(spec), 0, tp, sequence_parallel=True).items():
        width = prod(shard.shape) // shard.shape[shard.dim]
        found[name] = range(shard.summed.start * width, shard.summed.stop * width)
    if spec.tied and pp > 1:
        found["embed.weight"] = range(spec.vocab_size * spec.hidden_size)
    return found


# ---------------------------------------------------------------------------------------------------------- runs of numbers


def total(runs: Runs) -> int:
    """How many numbers they are."""
    return sum(map(len, runs))


def find(own: Runs, block: Runs) -> int | None:
    """Where ``own`` lies in one piece in ``block``; None if it doesn't."""
    size, at = total(own), 0
    if not size:
        return 0
    for run in block:
        if own[0].start in run:
            start = at + own[0].start - run.start
            if _part(block, range(start, start + size)) == own:
                return start
        at += len(run)
    return None


def _part(runs: Runs, part: range) -> Runs:
    """The numbers at the places of ``part``."""
    found, at = [], 0
    for run in runs:
        here = range(run.start + max(part.start - at, 0), run.start + min(part.stop - at, len(run)))
        if here:
            found.append(here)
        at += len(run)
    return tuple(found)


def _joined(runs: Iterable[range]) -> Runs:
    found: list[range] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        elif run:
            found.append(run)
    return tuple(found)
