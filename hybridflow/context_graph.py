"""What a program with a context does, at three levels, as plain data that prints itself.

logical      the calls that the program makes, and what passes from one to the next
physical     who holds what: roles, processes, which environments and which steps are where
execution    the workers' calls of an epoch in their order: seconds, overlap, what is fused, what memory is used again

All of them are graphs of ``core.graph``. The workers' calls are those that the recording runtime has seen; a call of the
program is what it called of the workers, drawn together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hybridflow.config import RunConfig
from hybridflow.controller.protocols import THREE_D_ALL_MICRO_DP
from hybridflow.core.batch import Batch
from hybridflow.core.graph import Call, Edge, Graph
from hybridflow.core.metrics import Span
from hybridflow.telemetry.graph_tables import (
    HELD,
    MEMORY,
    PASSES,
    aligned,
    call_size,
    memory,
    pool_table,
    role_table,
    transfer_table,
)

__all__ = ["ExecutionPlan", "Graphs", "Line", "LogicalGraph", "PhysicalGraph", "Shard", "contracted", "shards_of"]

WAITS = ("queue", "transfer")


class Line(NamedTuple):
    """A call of the program. ``uses``: (what, number of the line that made it); ``changes``: those of them that are other
    ones afterwards. ``first`` and ``last``: the workers' calls that it made, by their numbers."""

    call: Call
    uses: tuple[tuple[str, int], ...] = ()
    changes: tuple[int, ...] = ()
    first: int = 0
    last: int = 0


@dataclass
class LogicalGraph(Graph):
    """``calls`` before the first epoch are of kind "source", the others are those of the last epoch. ``carried``: what one
    epoch leaves to the next."""

    carried: list[Edge] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        before = sum(call.kind == "source" for call in self.calls)
        yield f"The program: {before} calls once, {len(self.calls) - before} in an epoch. A row is a piece of an episode."
        for call in self.calls:
            size = f", {call_size(call, 'steps')}" if call.rows else ""
            yield f"{call.number:2}  {call.verb}  {call.function}{size}"
            for writer, edges in self.read_by(call):
                yield f"      {_told(edges)} from {writer.number} {writer.verb}"
        for edge in self.carried:
            yield f"to the next epoch: {_told([edge])} from {edge.writer} to {edge.reader} {self.calls[edge.reader].verb}"


def _told(edges: Sequence[Edge]) -> str:
    size = memory(sum(edge.bytes or 0 for edge in edges))
    return ", ".join(edge.column for edge in edges) + (f", {size}" if size else "")


def contracted(lines: Sequence[Line], workers: Graph) -> LogicalGraph:
    """The program's ``lines`` with what passes between the ``workers``' calls that they made."""
    owner = {number: line.call.number for line in lines for number in range(line.first, line.last)}
    sizes = {f"weights of {role.name}": role.weight_bytes for role in workers.roles}
    sizes["optimizer state"] = sum(role.optimizer_bytes for role in workers.roles)
    graph = LogicalGraph(workers.roles, [line.call for line in lines], pools=workers.pools)
    for line in lines:
        for what, maker in line.uses:
            _place(graph, lines, Edge(what, "", sizes.get(what), maker, line.call.number))
    passing = {
        (e.column, owner[e.writer], owner[e.reader]): e for e in workers.edges if {e.writer, e.reader} <= owner.keys()
    }
    graph.edges += [replace(e, writer=w, reader=r) for (_, w, r), e in passing.items() if w != r]
    return graph


def _place(graph: LogicalGraph, lines: Sequence[Line], edge: Edge) -> None:
    """What a line uses is as the last line before it has left it, in this epoch or in the one before."""
    changers = [line.call.number for line in lines if edge.writer in line.changes]
    before = [number for number in changers if number < edge.reader]
    graph.edges.append(replace(edge, writer=before[-1]) if before else edge)
    if changers and not before and lines[edge.reader].call.kind != "source":
        graph.carried.append(replace(edge, writer=changers[-1]))


@dataclass(frozen=True)
class Shard:
    """What of an epoch's experiences is where: of which environments, how many steps of them, and their bytes."""

    worker: str
    environments: tuple[int, ...]
    steps: int
    bytes: int


def shards_of(config: RunConfig, source: Batch, new_bytes: int) -> list[Shard]:
    """How the slots of ``source``, and the ``new_bytes`` that are made of them, are dealt to the sampler's processes."""
    mesh, pool = config.placed.mesh_of("sampler", None), config.placed.pool_of("sampler").name
    dealt = THREE_D_ALL_MICRO_DP.distribute(np.ones(len(source), np.int64), mesh)
    steps = source["num_steps"]
    shares = [(rows, int(steps[rows].sum())) for rows in dealt]
    names = [pool if config.runtime.kind == "local" else f"{pool}/{rank}" for rank in range(mesh.size)]
    return [
        Shard(name, tuple(source["slot"][rows].tolist()), taken, round(new_bytes * taken / int(steps.sum())))
        for name, (rows, taken) in zip(names, shares, strict=True)
    ]


@dataclass
class PhysicalGraph(Graph):
    """``shards``: see there. ``chosen``: what the context has decided by itself, and why."""

    shards: list[Shard] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        yield from self.chosen
        yield from ("", "Roles, and what a process holds of each.")
        yield from aligned(role_table(self), right=("parameters", "trained", *MEMORY))
        for title, rows in ((HELD, pool_table(self)), (PASSES, transfer_table(self))) if self.pools else ():
            yield from ("", title, *aligned(rows, right=(*MEMORY, "bytes")))
        header = ("process", "environments", "steps", "bytes")
        rows = [(s.worker, ", ".join(map(str, s.environments)), f"{s.steps:,}", memory(s.bytes)) for s in self.shards]
        yield from ("", "Environments, and the experiences of an epoch, which stay where they were made.")
        yield from aligned([header, *rows], right=("steps", "bytes"))


@dataclass
class ExecutionPlan(Graph):
    """``spans`` of the last epoch. ``fused``: what runs as one; ``reused``: memory that serves twice."""

    spans: list[Span] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)

    def ran(self, call: Call) -> list[Span]:
        """The spans of a call, one for each process."""
        same = [other.number for other in self.calls if other.name == call.name]
        by_worker: defaultdict[str, list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.start_s):
            if span.name == call.name and span.kind not in WAITS:
                by_worker[span.worker].append(span)
        place = same.index(call.number)
        return [spans[place] for spans in by_worker.values() if place < len(spans)]

    def overlaps(self) -> list[tuple[Call, Call, float]]:
        """Pairs of calls that ran at the same time, and for how many seconds."""
        ran = [(call, spans) for call in self.calls if (spans := self.ran(call))]
        pairs = [(*one, *other) for place, one in enumerate(ran) for other in ran[:place]]
        found = [(other, call, _shared_s(theirs, own)) for call, own, other, theirs in pairs]
        return [overlap for overlap in found if overlap[2] > 0]

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        yield "The calls of an epoch: each starts when what it reads is there and its pool is free."
        rows: list[tuple[str, ...]] = [("stage", "call", "runs", "on", "size", "seconds")]
        for number, stage in enumerate(self.stages(), 1):
            rows += [(str(number), *self._row(call)) for call in stage]
        yield from aligned(rows, right=("stage", "seconds"))
        for one, other, seconds in self.overlaps():
            yield f"overlap: {one.name} and {other.name}, {seconds:.3f} s"
        yield from (f"fused: {what}" for what in self.fused)
        yield from (f"used again: {what}" for what in self.reused)

    def _row(self, call: Call) -> tuple[str, ...]:
        spans = self.ran(call)
        seconds = f"{max(span.duration_s for span in spans):.3f}" if spans else ""
        on = self.pool_of(call) + (f" x {len(spans)}" if len(spans) > 1 else "")
        return call.name, call.function, on, call_size(call, self.unit), seconds


def _shared_s(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long some process was at one of them while another one was at the other."""
    start = max(min(span.start_s for span in spans) for spans in (one, other))
    end = min(max(span.start_s + span.duration_s for span in spans) for spans in (one, other))
    return end - start


class Graphs(NamedTuple):
    """The three levels of a program."""

    logical: LogicalGraph
    physical: PhysicalGraph
    execution: ExecutionPlan

    def __str__(self) -> str:
        return "\n\n".join(f"== {name} ==\n{graph}" for name, graph in self._asdict().items())
