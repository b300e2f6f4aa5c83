"""Where the columns of a Ray run are: references for workers that read them, and the way to them for the driver."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray

from hybridflow.controller.manifest import Manifest, Output, describe
from hybridflow.controller.ray_process import Call, OutputRefs, local_fetch, ship, unship
from hybridflow.controller.ray_tasks import OpenTasks
from hybridflow.controller.ray_watch import Key
from hybridflow.core.batch import Batch
from hybridflow.core.columns import Held, Lazy, Loaded, Source, num_bytes
from hybridflow.core.placement import Mesh, Rows

__all__ = ["Columns", "RemoteSource", "reports_of"]

INLINE_BYTES = 64_000


class Columns:
    """``peers``: the process of each (pool, rank)."""

    def __init__(self, tasks: OpenTasks) -> None:
        self.tasks, self.peers = tasks, dict[Key, Any]()
        self._driver_bytes = 0
        self._held: dict[tuple[int, str], tuple[OutputRefs, Any]] = {}

    def call(
        self, role: str, verb: str, batch: Batch, arguments: tuple[Any, ...], writes: Sequence[str], mesh: Mesh
    ) -> Call:
        """The call as data: references to what it reads, and where in it the rows stand."""
        outputs: dict[int, OutputRefs] = {}
        read: dict[int, list[str]] = {}
        columns = {}
        for name, column in batch.columns.items():
            lazy = column if isinstance(column, Lazy) else Lazy(((Held(cast(Loaded, column)), ""),))
            parts = []
            for source, there in lazy.parts:
                refs = self._references(source, name)
                there = there or name
                outputs[id(refs)] = refs
                read.setdefault(id(refs), []).append(there)
                parts.append((list(outputs).index(id(refs)), there))
            columns[name] = tuple(parts), lazy.places
        only = [refs.only(read[key]) for key, refs in outputs.items()]
        return Call(role, verb, arguments, tuple(writes), only, columns, batch.known_rows, mesh)

    def _references(self, source: Source, name: str) -> OutputRefs:
        """Where the values of a source are; a column of the driver is stored once a step."""
        if isinstance(source, RemoteSource):
            return source.refs
        column = cast(Held, source).column
        if (id(column), name) not in self._held:
            manifest = describe(Batch({name: column}), np.arange(len(column)), len(column), "", ("", 0))
            size = num_bytes(column)
            self._driver_bytes += size
            value = ship(column)
            stored = ray.put(value) if size > INLINE_BYTES else value
            self._held[id(column), name] = OutputRefs("driver", [manifest], {name: [stored]}), column
        return self._held[id(column), name][0]

    def fetch(self, manifest: Manifest, reference: Any, rows: Rows) -> Loaded:
        """Rows of a column for the driver."""
        node = ray.get_runtime_context().get_node_id()
        with self.tasks.blaming():
            if manifest.node not in ("", node) and len(rows) < manifest.num_rows:
                column = unship(ray.get(self.peers[manifest.worker].fetch.remote([reference], rows)))
            else:
                column = local_fetch(reference, rows)
        self._driver_bytes += num_bytes(column)
        return column

    def forget(self) -> int:
        """What no batch refers to any more; the bytes that came from the driver, or to it, since it last did so."""
        size, self._driver_bytes = self._driver_bytes, 0
        self._held.clear()
        return size


class RemoteSource:
    """The output of a call, for batches of the driver: reading it waits for the call."""

    def __init__(self, columns: Columns, refs: OutputRefs, reports: Sequence[Any], known_rows: int | None) -> None:
        self.columns, self.refs, self.reports, self.known_rows = columns, refs, reports, known_rows

    @cached_property
    def _output(self) -> Output:
        self.columns.tasks.wait(self.reports)
        with self.columns.tasks.blaming():
            manifests: list[Manifest] = ray.get(list(self.refs.manifests))

        columns, refs = self.columns, self.refs.columns  # no cycle through self: objects go when the batch goes

        def fetch(piece: int, name: str, rows: Rows) -> Loaded:
            return columns.fetch(manifests[piece], refs[name][piece], rows)

        return Output(manifests, fetch, self.refs.writer)

    @property
    def num_rows(self) -> int:
        return self._output.num_rows if self.known_rows is None else self.known_rows

    def lengths(self, name: str, rows: Rows | None, /) -> NDArray[Any]:
        return self._output.lengths(name, rows)

    def load(self, name: str, rows: Rows | None, /) -> Loaded:
        return self._output.load(name, rows)


def reports_of(batch: Batch) -> list[Any]:
    """References to the reports of the calls that make columns of the batch."""
    parts = [source for column in batch.columns.values() if isinstance(column, Lazy) for source, _ in column.parts]
    return [report for source in dict.fromkeys(parts) if isinstance(source, RemoteSource) for report in source.reports]
