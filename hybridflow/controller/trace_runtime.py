"""The trace runtime: the same program on batches without values. No worker is built; what would be called is written down.

    program ──verb(batch)──> handle: the columns that it reads must be there  ──> call and edges into the graph
            <──batch with the columns that it writes, without values──────────

Shapes are means: a response is as long as the workload says, and every row of a call is like the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from hybridflow.controller.handle import Handle, check_reads
from hybridflow.controller.state import KeepsState
from hybridflow.core.batch import Batch, Column
from hybridflow.core.errors import ContractError
from hybridflow.core.fields import FIELDS, Axis
from hybridflow.core.graph import Call, Edge, Graph
from hybridflow.core.metrics import Metrics
from hybridflow.core.roles import Drained, Fn, Role, Verb
from hybridflow.core.traced import Part, Traced

__all__ = ["TraceRuntime", "Workload"]

W = TypeVar("W")


@dataclass(frozen=True)
class Workload:
    """What a trace assumes. ``new_steps``: mean tokens of a response, or steps of an environment in one rollout.

    ``types``: of an entry, with its shape, for columns whose type the vocabulary leaves to the environment. ``seats``:
    agents in each environment.
    """

    new_steps: float
    types: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    seats: int = 1


class TraceRuntime(KeepsState):
    """Records ``graph`` and ``roles``. Metrics stay empty: nothing is computed. ``times``: see ``Call``."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.graph, self.times = workload, Graph(), 1
        self.roles: dict[str, Role[Any]] = {}
        self.shared: dict[str, str] = {}

    def role(self, role: Role[W], /) -> W:
        """A handle of the worker's type; nothing is built."""
        if role.name in self.roles:
            raise ContractError(f"two roles are called {role.name!r}")
        self.roles[role.name] = role
        return cast(W, Handle(self, role))

    def share(self, learner: str, sampler: str, /) -> None:
        """``shared[sampler]`` is the learner whose networks it reads."""
        self.shared[sampler] = learner

    def publish(self, learner: str, sampler: str, rank: int | None = None, /) -> None:
        return None

    def member(self, handle: W, rank: int, /) -> W:
        return handle

    def wait_any(self, batches: Sequence[Batch], /) -> int:
        return 0

    def pending(self, batches: Sequence[Batch], /) -> list[Batch]:
        return []

    def num_workers(self, role: str, /) -> int:
        return 1

    def ready(self) -> None:
        return None

    def drain(self) -> Drained:
        return Drained(Metrics(), [])

    def stop(self) -> None:
        return None

    def begin(self, new_steps: float) -> None:
        """Forget the calls so far; from here on ``new_steps`` is that of the workload."""
        self.workload = replace(self.workload, new_steps=new_steps)
        self.graph = replace(self.graph, calls=[], edges=[])

    def source(self, role: str, verb: str, batch: Batch) -> Batch:
        """A real batch without its values, as what ``role.verb`` gives."""
        return self._record(role, verb, "source", "", Batch({}, len(batch)), batch.traced(self._number))

    def resample(self, role: str, verb: str, batch: Batch, names: Sequence[str], rows: int, steps: float) -> Batch:
        """``rows`` of so many steps of ``batch`` with columns ``names``, as a replay buffer gives them."""
        columns = {name: self._column(name, rows, steps if FIELDS[name].axis == "time" else 1.0) for name in names}
        return self._record(role, verb, "compute", "", batch, Batch(columns, rows))

    def call(
        self, role: Role[Any], name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...], rank: int | None = None
    ) -> Batch:
        reads, writes = role.columns_of(verb, arguments)
        check_reads(f"{role.name}.{name}", reads, batch)
        seen = batch.select(reads)
        steps = _steps(seen, "prompt") + self.workload.new_steps if verb.kind == "generate" else _steps(batch, "time")
        names = [role.rename.get(written, written) for written in writes]
        rows = len(batch) * (self.workload.seats if verb.kind == "generate" else 1)
        rows, steps = (1, 1.0) if verb.rows == "one" else (rows, steps)
        columns = {name: self._column(name, rows, steps if FIELDS[name].axis == "time" else 1.0) for name in names}
        function = ", ".join(argument.name for argument in arguments if isinstance(argument, Fn))
        new = self._record(role.name, name, verb.kind, function, seen, Batch(columns, rows))
        self.graph.calls[-1] = replace(self.graph.calls[-1], protocol=verb.protocol.name)
        return batch.with_columns(**new.columns) if verb.rows == "same" else new

    def control(self, role: Role[Any], name: str, method: Any, arguments: tuple[Any, ...]) -> None:
        """There is no worker, so nothing happens."""

    @property
    def _number(self) -> int:
        """Of the call that is being made."""
        return len(self.graph.calls)

    def _column(self, name: str, rows: int, steps: float) -> Traced:
        dtype = "object" if FIELDS[name].axis == "object" else FIELDS[name].dtype
        return Traced(name, np.dtype(dtype) if dtype else self.workload.types[name], (Part(self._number, rows, steps),))

    def _record(self, role: str, verb: str, kind: str, function: str, seen: Batch, new: Batch) -> Batch:
        self.graph.edges += [edge for column in seen.columns.values() for edge in _edges(column, self._number)]
        generates = kind == "generate"
        tokens_in = _entries(seen, "prompt" if generates else "time")
        tokens_out = _entries(new, "time") - tokens_in if generates else 0
        counts = (len(new), round(tokens_in), round(tokens_out))
        self.graph.calls.append(Call(self._number, role, verb, kind, function, *counts, tuple(new.columns), self.times))
        return new


def _edges(column: Column, reader: int) -> Iterator[Edge]:
    """From every call that wrote rows of the column."""
    if not isinstance(column, Traced):
        return
    for writer in dict.fromkeys(part.writer for part in column.parts if part.writer is not None):
        entries = sum(part.entries for part in column.parts if part.writer == writer)
        size = None if column.dtype == object else round(entries * column.dtype.itemsize)
        shape = str(list(column.dtype.shape)) if column.dtype.shape else ""
        yield Edge(column.name, f"{column.dtype.base.name}{shape}", size, writer, reader)


def _entries(batch: Batch, axis: Axis) -> float:
    """Entries of the batch on an axis, 0 if it has no such column."""
    columns = (column for name, column in batch.columns.items() if FIELDS[name].axis == axis)
    return next((column.entries for column in columns if isinstance(column, Traced)), 0.0)


def _steps(batch: Batch, axis: Axis) -> float:
    """Mean entries of a row."""
    return _entries(batch, axis) / max(len(batch), 1)
