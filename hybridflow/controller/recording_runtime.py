"""The recording runtime: runs a program on another runtime and writes down on the trace runtime what it calls.

    program ──verb(batch)──> the runtime beneath: does it
                       └───> the trace: call and edges into the graph, by sizes that are known before

Columns are known by identity, so whatever the program does between two calls, an edge leads from who wrote a column to who
reads it. Nothing is read and nobody is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from hybridflow.controller.handle import Handle
from hybridflow.controller.trace_runtime import TraceRuntime
from hybridflow.core.batch import Batch, Column
from hybridflow.core.fields import FIELDS
from hybridflow.core.files import Written
from hybridflow.core.roles import Drained, Role, Runtime, Verb
from hybridflow.core.traced import Part, Traced

__all__ = ["RecordingRuntime"]

W = TypeVar("W")


class _Calling(Runtime, Protocol):
    def call(
        self, role: Role[Any], name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...], rank: int | None, /
    ) -> Batch: ...
    def control(self, role: Role[Any], name: str, method: Any, arguments: tuple[Any, ...], /) -> Any: ...


class RecordingRuntime:
    """``trace.graph`` holds the calls since ``begin``; ``new_bytes``: what each of them wrote, by its number."""

    def __init__(self, runtime: Runtime, trace: TraceRuntime) -> None:
        self.runtime, self.trace = cast(_Calling, runtime), trace
        self.new_bytes: dict[int, int] = {}
        self._known: dict[int, tuple[Column, Traced]] = {}

    def begin(self, batch: Batch, new_steps: float) -> None:
        """Forget what was recorded; a step starts from ``batch``, whose rows bring ``new_steps`` steps each."""
        self.trace.begin(new_steps)
        self._known, self.new_bytes = {}, {}
        self._learn(batch, self.trace.source("environment", "slots", batch))

    def call(
        self, role: Role[Any], name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...], rank: int | None = None
    ) -> Batch:
        new = self.runtime.call(role, name, verb, batch, arguments, rank)
        shown = self.trace.call(role, name, verb, self._shown(batch), arguments)
        written = self.trace.graph.calls[-1].writes
        self._learn(new.select(written), shown)
        self.new_bytes[len(self.trace.graph.calls) - 1] = sum(_bytes(shown.columns[name]) for name in written)
        return new

    def _learn(self, batch: Batch, shown: Batch) -> None:
        # With the column itself: as long as it is known, no other one can have its identity.
        self._known |= {id(column): (column, cast(Traced, shown.columns[n])) for n, column in batch.columns.items()}

    def _shown(self, batch: Batch) -> Batch:
        """The batch without values. What the program made by itself has no writer."""
        known = {name: self._known[id(column)][1] for name, column in batch.columns.items() if id(column) in self._known}
        made = [name for name in batch.columns if name not in known]
        if not made:
            return Batch(known)
        like = next((traced for name, traced in known.items() if FIELDS[name].axis == "time"), None)
        rows = like.parts if like is not None else (Part(None, len(batch), float(batch.lengths.mean())),)
        return Batch({**known, **{name: self._made(name, rows) for name in made}})

    def _made(self, name: str, rows: Sequence[Part]) -> Traced:
        field = FIELDS[name]
        dtype = np.dtype("object" if field.axis == "object" else field.dtype or self.trace.workload.types[name])
        return Traced(name, dtype, tuple(Part(None, r.rows, r.steps if field.axis == "time" else 1.0) for r in rows))

    # All else goes to the runtime beneath.

    def role(self, role: Role[W], /) -> W:
        self.runtime.role(role)
        return cast(W, Handle(self, role))

    def control(self, role: Role[Any], name: str, method: Any, arguments: tuple[Any, ...]) -> Any:
        return self.runtime.control(role, name, method, arguments)

    def share(self, learner: str, sampler: str, /) -> None:
        self.runtime.share(learner, sampler)

    def publish(self, learner: str, sampler: str, rank: int | None = None, /) -> None:
        self.runtime.publish(learner, sampler, rank)

    def member(self, handle: W, rank: int, /) -> W:
        return cast(W, Handle(self, cast(Handle, handle).role, rank))

    def wait_any(self, batches: Sequence[Batch], /) -> int:
        return self.runtime.wait_any(batches)

    def pending(self, batches: Sequence[Batch], /) -> list[Batch]:
        return self.runtime.pending(batches)

    def num_workers(self, role: str, /) -> int:
        return self.runtime.num_workers(role)

    def ready(self) -> None:
        self.runtime.ready()

    def drain(self) -> Drained:
        return self.runtime.drain()

    def save(self, folder: Path, /) -> dict[str, Any]:
        return self.runtime.save(folder)

    def saved(self, wait: bool, /) -> dict[str, list[Written]] | None:
        return self.runtime.saved(wait)

    def sees(self, file: Path, /) -> None:
        self.runtime.sees(file)

    def load(self, folder: Path, state: Mapping[str, Any], files: Mapping[str, Sequence[Written]], /) -> None:
        self.runtime.load(folder, state, files)

    def stop(self) -> None:
        self.runtime.stop()


def _bytes(column: Column) -> int:
    return round(column.entries * column.dtype.itemsize) if isinstance(column, Traced) and column.dtype != object else 0
