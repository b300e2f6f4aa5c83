"""The local runtime: every role lives in the driver process, so pdb works and nothing needs Ray.

It is as strict as a distributed one: a verb sees only the columns that it declared to read, must return exactly those that
it declared to write, one row for each row unless it makes its own, and every array that leaves a worker is read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from hybridflow.controller.handle import Handle, check_reads
from hybridflow.controller.state import KeepsState
from hybridflow.core.batch import Batch
from hybridflow.core.effort import Meter
from hybridflow.core.errors import ContractError
from hybridflow.core.metrics import Metrics, Span
from hybridflow.core.roles import Drained, Role, Verb, WorkerContext, is_control

__all__ = ["LocalRuntime"]

W = TypeVar("W")


class LocalRuntime(KeepsState):
    """Builds workers in this process and calls them directly. ``meter``: of what calls take."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.roles: dict[str, Role[Any]] = {}
        self._workers: dict[str, Any] = {}
        self._contexts: dict[str, WorkerContext] = {}
        self._metrics, self._spans = Metrics(), list[Span]()

    def role(self, role: Role[W], /) -> W:
        """Build the role's worker; the handle has the worker's own type."""
        if role.name in self._workers:
            raise ContractError(f"two roles are called {role.name!r}")
        context = self._contexts[role.name] = WorkerContext()
        self._workers[role.name] = role.worker(context, **role.args)
        self.roles[role.name] = role
        return cast(W, Handle(self, role))

    def share(self, learner: str, sampler: str) -> None:
        """Let the sampler read the learner's networks in place: no copy, nothing to publish."""
        self._workers[sampler].attach(self._workers[learner])

    def publish(self, learner: str, sampler: str, rank: int | None = None) -> None:
        """Nothing to do: the sampler reads the learner's own networks."""

    def member(self, handle: W, rank: int) -> W:
        """There is one process, which is every member: members differ in the rows that they are given."""
        return handle

    def wait_any(self, batches: Sequence[Batch]) -> int:
        """Calls are done when they return, so the first is."""
        return 0

    def pending(self, batches: Sequence[Batch]) -> list[Batch]:
        """Calls are done when they return."""
        return []

    def num_workers(self, role: str) -> int:
        """This process."""
        return 1

    def ready(self) -> None:
        """Roles are built when they are named."""

    def call(
        self, role: Role[Any], name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...], rank: int | None = None
    ) -> Batch:
        """Call the worker, on the columns that the verb reads alone, and hold it to what it declares to write."""
        reads, writes = role.columns_of(verb, arguments)
        where = f"{role.name}.{name}"
        check_reads(where, reads, batch)
        seen = batch.select(reads)
        with self.meter.call(where) as measured:
            new = getattr(self._workers[role.name], name)(seen, *arguments)
        effort = measured.effort(seen, new, self._contexts[role.name].processes)
        self._spans.append(Span(where, verb.kind, measured.start_s, measured.duration_s, effort=effort))
        metrics = self._contexts[role.name].metrics
        self._metrics.merge(metrics, prefix=f"{role.name}/")
        metrics.clear()
        if set(new.columns) != set(writes):
            raise ContractError(f"{where} wrote {sorted(new.columns)}, but declares {sorted(writes)}")
        out = new
        if role.rename:
            out = Batch({role.rename.get(column, column): values for column, values in new.columns.items()}, len(new))
        out.freeze()
        return batch.with_columns(**out.columns) if verb.rows == "same" else out

    def control(self, role: Role[Any], name: str, method: Any, arguments: tuple[Any, ...]) -> Any:
        """Control methods pass straight through."""
        return getattr(self._workers[role.name], name)(*arguments)

    def drain(self) -> Drained:
        """Metrics and spans since the last drain."""
        drained = Drained(self._metrics, self._spans)
        self._metrics, self._spans = Metrics(), []
        return drained

    def stop(self) -> None:
        """Release what the workers hold."""
        for worker in self._workers.values():
            if is_control(getattr(type(worker), "close", None)):
                worker.close()
        self._workers.clear()
        self.roles.clear()
