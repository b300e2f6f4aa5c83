"""What moves where when a model goes from its training layout to its generation layout, and what that costs. No torch.

    hybridflow   every rank fills its generation slices: its training slices are parts of them, the rest comes from the
                 ranks of its micro data-parallel group
    vanilla      generation groups are neighbours; every rank gathers the whole model from its data-parallel block and
                 keeps its slices of it (HybridFlow-V in the paper)
    gather_all   weights are shared out over all ranks (ZeRO-3); every rank gathers the whole model from all of them
                 (DeepSpeed-Chat)
    broadcast    generation runs on as many other devices, numbered behind; each gets the whole model, parameter by
                 parameter, and keeps its slices (OpenRLHF)
    publish      the same devices get their slices alone

Layers that the same stages hold move alike, so a plan is worked out for one of them. Nothing here depends on the order of
ranks' answers: every rank makes the same plan by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

from hybridflow.core.placement import Mesh
from hybridflow.models.spec import DecoderSpec
from hybridflow.reshard.layout import (
    Grouping,
    Place,
    Runs,
    Section,
    Slice,
    find,
    generation_places,
    groups,
    held,
    replicated,
    sections,
    total,
    training_places,
)

__all__ = ["STRATEGIES", "Account", "Move", "Plan", "Size", "Strategy", "make_plan", "model_size", "table2"]

Strategy = Literal["hybridflow", "vanilla", "gather_all", "broadcast", "publish"]
STRATEGIES: tuple[Strategy, ...] = ("hybridflow", "vanilla", "gather_all", "broadcast", "publish")
GATHERING = ("vanilla", "gather_all", "broadcast")  # what arrives is the whole model
ELSEWHERE = ("broadcast", "publish")

WHOLE = Place()


class Move(NamedTuple):
    """``numbers`` of a parameter that a rank takes from its training slice, from number ``there`` on, and that another one,
    or itself, puts into what lands there, from number ``here`` on."""

    source: int
    target: int
    parameter: str
    there: int
    here: int
    numbers: int


@dataclass(frozen=True)
class Size:
    """Bytes: of weights that are ``cut`` over the ranks of one model, and of those that several of them hold."""

    cut: int = 0
    replicated: int = 0

    @property
    def total(self) -> int:
        return self.cut + self.replicated

    def __add__(self, other: Size) -> Size:
        return Size(self.cut + other.cut, self.replicated + other.replicated)

    def __sub__(self, other: Size) -> Size:
        return Size(self.cut - other.cut, self.replicated - other.replicated)

    def __mul__(self, factor: int) -> Size:
        return Size(self.cut * factor, self.replicated * factor)


NOTHING = Size()


@dataclass(frozen=True)
class Account:
    """What a plan costs one rank, in bytes.

    ``training`` and ``generation``: its slices. ``in_place``: training slices that are a part of the generation slices'
    memory. ``copied``: what it takes from its own training slices elsewhere. ``redundant``: what is held twice while
    generating: training slices that are in no generation slice; on other devices all of it. ``peak``: the most that all
    parameters take; where models are gathered, slices of the same type count as parts of the gathered model, as in the
    paper's table 2.
    """

    rank: int
    training: Size
    generation: Size
    sent: Size
    received: Size
    in_place: Size
    copied: Size
    redundant: Size
    peak: Size


Slices = Mapping[str, Slice]


class _Part(NamedTuple):
    """A section, and what each rank that holds it has of it."""

    section: Section
    training: Mapping[int, Slices]
    generation: Mapping[int, Slices]
    landing: Mapping[int, Slices]


class _Span(NamedTuple):
    """Numbers that land in one piece, and who has them: (rank, from which number of its slice on)."""

    here: int
    numbers: int
    options: tuple[tuple[int, int], ...]
    replicated: bool


@dataclass(frozen=True)
class Plan:
    """Who holds what before (``training``), after (``generation``) and right after the moves (``landing``), by rank.

    ``blocks``: the ranks of ``training`` that a rank takes from, ``near``: those of them that it takes from first.
    """

    spec: DecoderSpec
    mesh: Mesh
    strategy: Strategy
    itemsizes: tuple[int, int]
    training: Mapping[int, Place]
    generation: Mapping[int, Place]
    landing: Mapping[int, Place]
    blocks: Mapping[int, range] = field(repr=False)
    near: Mapping[int, frozenset[int]] = field(repr=False)

    @cached_property
    def _parts(self) -> list[_Part]:
        phases = self.training, self.generation, self.landing
        found = sections(self.spec, {place for places in phases for place in places.values()})
        return [_Part(section, *(self._holders(places, section) for places in phases)) for section in found]

    def _holders(self, places: Mapping[int, Place], section: Section) -> dict[int, Slices]:
        made = {place: held(self.spec, place, section) for place in {*places.values()}}
        return {rank: made[place] for rank, place in places.items() if made[place]}

    @cached_property
    def ranks(self) -> list[int]:
        return sorted(self.training.keys() | self.generation.keys())

    def shared(self, rank: int) -> dict[str, int]:
        """Where in the generation slice of a parameter the training slice begins, if the latter is a part of it."""
        return {
            name: start
            for part in self._parts
            for template, start in self._shared(rank, part).items()
            for name in part.section.names(template)
        }

    def _shared(self, rank: int, part: _Part) -> dict[str, int]:
        if self.strategy == "gather_all" or self.itemsizes[0] != self.itemsizes[1]:
            return {}
        here, there = part.training.get(rank, {}), part.generation.get(rank, {})
        places = {name: _find(here[name].runs, there[name].runs) for name in here if name in there}
        return {name: place for name, place in places.items() if place is not None}

    def moves(self, rank: int | None = None) -> Iterator[Move]:
        """Those that ``rank`` takes part in, or all, in an order that is the same for all ranks."""
        for part in self._parts:
            found = [
                Move(move[0], target, template, *move[1:])
                for template, target, spans, _ in self._fills(part)
                for move in _merged(self._chosen(spans, target))
                if rank is None or rank in (target, move[0])
            ]
            if part.section.name:
                yield from found
                continue
            for layer in part.section.layers:
                before = f"layers.{layer}."
                for source, target, template, there, here, numbers in found:
                    yield Move(source, target, before + template[len("layers.0.") :], there, here, numbers)

    def _fills(self, part: _Part) -> Iterator[tuple[str, int, list[_Span], bool]]:
        """(parameter in layer 0, rank, what lands there, whether that is new), parameter by parameter."""
        owners = {
            block: [(rank, part.training[rank]) for rank in block if rank in part.training]
            for block in {self.blocks[rank] for rank in part.landing}
        }
        for name in next(iter(part.landing.values())):
            made: dict[tuple[Place, range], list[_Span]] = {}
            for rank, slices in part.landing.items():
                key = self.landing[rank], self.blocks[rank]
                if new := key not in made:
                    have = [(owner, theirs[name].runs) for owner, theirs in owners[key[1]]]
                    made[key] = _spans(slices[name].runs, have, self._copies[name])
                yield name, rank, made[key], new

    @cached_property
    def _copies(self) -> dict[str, range]:
        return replicated(self.spec, self.mesh.tp, self.mesh.pp)

    def _chosen(self, spans: Sequence[_Span], target: int) -> Iterator[tuple[int, int, int, int]]:
        """(source, there, here, numbers): its own numbers first, then those of near ranks, then by turns."""
        near, count = self.near[target], len(self.ranks)
        for here, numbers, options, _ in spans:
            if len(options) == 1:
                source, there = options[0]
            else:
                source, there = min(options, key=lambda o: (o[0] != target, o[0] not in near, (o[0] - target) % count))
            yield source, there, here, numbers

    @cached_property
    def links(self) -> dict[tuple[int, int], Size]:
        """Bytes by (source, target), those that stay on a rank included."""
        found = Counter[tuple[int, int, bool]]()
        alike: dict[tuple[Place, range], Counter[tuple[int, bool]]] = {}  # what only one rank has, by what lands where
        for part in self._parts:
            layers = len(part.section.layers)
            for _, target, spans, new in self._fills(part):
                if new:
                    same = alike.setdefault((self.landing[target], self.blocks[target]), Counter())
                    for span in spans:
                        if len(span.options) == 1:
                            same[span.options[0][0], span.replicated] += span.numbers * layers
                several = [span for span in spans if len(span.options) > 1]
                for (source, _, _, numbers), span in zip(self._chosen(several, target), several, strict=True):
                    found[source, target, span.replicated] += numbers * layers
        for target, place in self.landing.items():
            for (source, double), numbers in alike[place, self.blocks[target]].items():
                found[source, target, double] += numbers
        keys = sorted({(source, target) for source, target, _ in found})
        return {key: Size(found[*key, False], found[*key, True]) * self.itemsizes[1] for key in keys}

    @cached_property
    def accounts(self) -> list[Account]:
        """Of every rank, in order."""
        if self.strategy in ("hybridflow", "vanilla") and self.mesh.dp > 1:  # data-parallel blocks are alike
            block = make_plan(self.spec, replace(self.mesh, dp=1), self.strategy, itemsizes=self.itemsizes).accounts
            return [replace(one, rank=one.rank + d * len(block)) for d in range(self.mesh.dp) for one in block]
        sent, received, own = (dict.fromkeys(self.ranks, NOTHING) for _ in range(3))
        for (source, target), size in self.links.items():
            if source == target:
                own[target] += size
            else:
                sent[source] += size
                received[target] += size
        return [self._account(rank, sent[rank], received[rank], own[rank]) for rank in self.ranks]

    def _account(self, rank: int, sent: Size, received: Size, own: Size) -> Account:
        training, generation, in_place = NOTHING, NOTHING, NOTHING
        for part in self._parts:
            here, layers, shared = part.training.get(rank, {}), len(part.section.layers), self._shared(rank, part)
            training += self._size(here, layers * self.itemsizes[0])
            in_place += self._size({name: here[name] for name in shared}, layers * self.itemsizes[0])
            generation += self._size(part.generation.get(rank, {}), layers * self.itemsizes[1])
        redundant = generation if self.strategy in ELSEWHERE else training - in_place
        return Account(
            rank=rank,
            training=training,
            generation=generation,
            sent=sent,
            received=received,
            in_place=in_place,
            copied=own - in_place if self.strategy == "hybridflow" else own,
            redundant=redundant,
            peak=self._peak(training, generation, redundant),
        )

    def _peak(self, training: Size, generation: Size, redundant: Size) -> Size:
        if self.strategy == "hybridflow":
            return generation + redundant
        if self.strategy in ELSEWHERE:  # a rank either trains or generates
            passing = self._largest if self.strategy == "broadcast" and generation.total else NOTHING
            return training + generation + passing
        whole = model_size(self.spec, self.mesh.tp, self.mesh.pp) * self.itemsizes[1]
        return whole if self.itemsizes[0] == self.itemsizes[1] else whole + training

    def _size(self, slices: Slices, factor: int) -> Size:
        cut = double = 0
        for name, piece in slices.items():
            size = _count(piece.runs, self._copies[name])
            cut, double = cut + size.cut, double + size.replicated
        return Size(cut * factor, double * factor)

    @cached_property
    def _largest(self) -> Size:
        """The parameter that takes most."""
        whole = {name: piece.runs for part in self._parts for name, piece in held(self.spec, WHOLE, part.section).items()}
        name = max(whole, key=lambda name: total(whole[name]))
        return _count(whole[name], self._copies[name]) * self.itemsizes[1]


def make_plan(
    spec: DecoderSpec,
    mesh: Mesh,
    strategy: Strategy = "hybridflow",
    *,
    itemsizes: tuple[int, int] = (2, 2),
    other: Mesh | None = None,
) -> Plan:
    """The plan from training on ``mesh`` to generation as it says. ``itemsizes``: bytes of a number in both. ``other``: the
    mesh of other devices, by default as many as train, with replicas of generation's size.

    Where t_g divides t and p_g divides p, ``hybridflow`` holds nothing twice; else some ranks keep a training slice that is
    in none of their generation slices. Raises UserError: the model is too small for the mesh.
    """
    mesh = mesh.by_copies
    training = dict(enumerate(training_places(mesh, shared=strategy == "gather_all")))
    size, per_block = mesh.size, mesh.tp * mesh.pp
    if strategy in ELSEWHERE:
        generation_tp, generation_pp = mesh.generation
        there = (other or Mesh(dp=mesh.num_replicas, tp=generation_tp, pp=generation_pp)).by_copies
        generation = {size + rank: place for rank, place in enumerate(training_places(there))}
        block = {size + rank: there.coordinates(rank)[0] % mesh.dp for rank in range(there.size)}
        near: dict[int, frozenset[int]] = dict.fromkeys(generation, frozenset())
    else:
        grouping: Grouping = "hybridflow" if strategy == "hybridflow" else "vanilla"
        generation = dict(enumerate(generation_places(mesh, grouping)))
        block = {rank: mesh.coordinates(rank)[0] for rank in range(size)}
        near = {rank: frozenset(group) for group in groups(mesh, grouping)["micro dp"] for rank in group}
    blocks = {rank: range(d * per_block, (d + 1) * per_block) for rank, d in block.items()}
    if strategy == "gather_all":
        blocks = dict.fromkeys(blocks, range(size))
    landing = dict.fromkeys(generation, WHOLE) if strategy in GATHERING else generation
    return Plan(spec, mesh, strategy, itemsizes, training, generation, landing, blocks, near)


def model_size(spec: DecoderSpec, tp: int = 1, pp: int = 1) -> Size:
    """How many numbers a model has, by what is cut and what is held by several ranks of ``tp`` x ``pp``."""
    copies, size = replicated(spec, tp, pp), NOTHING
    for section in sections(spec, [WHOLE]):
        for name, piece in held(spec, WHOLE, section).items():
            size += _count(piece.runs, copies[name]) * len(section.layers)
    return size


def table2(strategy: Strategy, mesh: Mesh) -> tuple[Fraction, Fraction, Fraction]:
    """(received, peak, redundant) of a rank that generates, in units of the model's size: table 2 of the paper, and its
    counterparts for generation on other devices. Of ``vanilla`` the redundancy is that of the worst rank, of ``hybridflow``
    all are for nested layouts."""
    block, size = mesh.tp * mesh.pp, mesh.size
    own = Fraction(1, prod(mesh.generation))
    return {
        "hybridflow": (own - Fraction(1, block), own, Fraction(0)),
        "vanilla": (Fraction(block - 1, block), Fraction(1), Fraction(1, block)),
        "gather_all": (Fraction(size - 1, size), Fraction(1), Fraction(1, size)),
        "broadcast": (Fraction(1), own, own),
        "publish": (own, own, own),
    }[strategy]


# ---------------------------------------------------------------------------------------------------------- runs of numbers

_find = lru_cache(maxsize=4096)(find)


@lru_cache(maxsize=4096)
def _count(runs: Runs, copies: range) -> Size:
    double = sum(max(0, min(run.stop, copies.stop) - max(run.start, copies.start)) for run in runs)
    return Size(total(runs) - double, double)


def _spans(need: Runs, have: Sequence[tuple[int, Runs]], copies: range) -> list[_Span]:
    """The numbers ``need``ed, in pieces that someone has whole, of what ranks ``have``."""
    bounds = sorted(
        {bound for _, runs in have for run in runs for bound in (run.start, run.stop)} | {copies.start, copies.stop}
    )
    options: list[list[tuple[int, int]]] = [[] for _ in bounds]
    for rank, runs in have:
        at = 0
        for run in runs:
            first = bisect_right(bounds, run.start) - 1
            while bounds[first] < run.stop:
                options[first].append((rank, at + bounds[first] - run.start))
                first += 1
            at += len(run)
    spans, here = [], 0
    for run in need:
        start = run.start
        while start < run.stop:
            piece = bisect_right(bounds, start) - 1
            stop, skipped = min(run.stop, bounds[piece + 1]), start - bounds[piece]
            sources = tuple((rank, there + skipped) for rank, there in options[piece])
            spans.append(_Span(here, stop - start, sources, start in copies))
            here, start = here + stop - start, stop
    return spans


def _merged(moves: Iterator[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """With those that go on in both places as one."""
    found: list[tuple[int, int, int, int]] = []
    for source, there, here, numbers in moves:
        if found:
            last, from_there, from_here, before = found[-1]
            if (source, there, here) == (last, from_there + before, from_here + before):
                found[-1] = last, from_there, from_here, before + numbers
                continue
        found.append((source, there, here, numbers))
    return found
