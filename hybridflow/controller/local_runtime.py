"""The local runtime: every role lives in the driver process, so pdb works and nothing needs Ray.

It is as strict as a distributed one: a verb sees only the columns that it declared to read, must return exactly those that
it declared to write, one row for each row unless it makes its own, and every array that leaves a worker is read-only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError
from hybridflow.core.metrics import Metrics, Span
from hybridflow.core.roles import Drained, Role, Verb, WorkerContext, is_control, verb_of

__all__ = ["LocalRuntime", "check_reads"]

W = TypeVar("W")


class LocalRuntime:
    """Builds workers in this process and calls them directly."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._metrics, self._spans = Metrics(), list[Span]()

    def role(self, role: Role[W], /) -> W:
        """Build the role's worker; the handle has the worker's own type."""
        if role.name in self._workers:
            raise ContractError(f"two roles are called {role.name!r}")
        context = WorkerContext()
        worker = role.worker(context, **role.args)
        self._workers[role.name] = worker
        return cast(W, _Handle(self, role, worker, context))

    def share(self, learner: str, sampler: str) -> None:
        """Let the sampler read the learner's networks in place: no copy, nothing to publish."""
        self._workers[sampler].attach(self._workers[learner])

    def publish(self, learner: str, sampler: str) -> None:
        """Nothing to do: the sampler reads the learner's own networks."""

    def ready(self) -> None:
        """Roles are built when they are named."""

    def call(self, handle: _Handle, name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...]) -> Batch:
        role = handle.role
        reads, writes = role.columns_of(verb, arguments)
        where = f"{role.name}.{name}"
        check_reads(where, reads, batch)
        start = time.perf_counter()
        new = getattr(handle.worker, name)(batch.select(reads), *arguments)
        self._spans.append(Span(where, verb.kind, start, time.perf_counter() - start))
        self._metrics.merge(handle.context.metrics, prefix=f"{role.name}/")
        handle.context.metrics.clear()
        if set(new.columns) != set(writes):
            raise ContractError(f"{where} wrote {sorted(new.columns)}, but declares {sorted(writes)}")
        renamed = {role.rename.get(column, column): values for column, values in new.columns.items()}
        out = Batch(renamed, len(new)).freeze()
        return out if verb.rows == "new" else batch.with_columns(**out.columns)

    def drain(self) -> Drained:
        """Metrics and spans since the last drain."""
        drained = Drained(self._metrics, self._spans)
        self._metrics, self._spans = Metrics(), []
        return drained

    def state_dict(self) -> dict[str, Any]:
        """State of every worker that has one, by role."""
        return {name: worker.state_dict() for name, worker in self._workers.items() if _has_state(worker)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, worker in self._workers.items():
            if _has_state(worker):
                worker.load_state_dict(state[name])

    def stop(self) -> None:
        """Release what the workers hold."""
        for worker in self._workers.values():
            if is_control(getattr(type(worker), "close", None)):
                worker.close()
        self._workers.clear()


def check_reads(where: str, reads: Sequence[str], batch: Batch) -> None:
    """ContractError if ``batch`` lacks a column that the call ``where`` reads."""
    missing = [column for column in reads if column not in batch]
    if missing:
        raise ContractError(f"{where} reads {', '.join(missing)}; the batch has {', '.join(sorted(batch.columns))}")


def _has_state(worker: Any) -> bool:
    return is_control(getattr(type(worker), "state_dict", None))


class _Handle:
    """Looks like the worker: verbs go through the runtime's checks, control methods pass straight through."""

    def __init__(self, runtime: LocalRuntime, role: Role[Any], worker: Any, context: WorkerContext) -> None:
        self.runtime, self.role, self.worker, self.context = runtime, role, worker, context

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(type(self.worker), name, None)
        verb = verb_of(method)
        if verb is not None:
            return lambda batch, *arguments: self.runtime.call(self, name, verb, batch, arguments)
        if is_control(method):
            return cast(Callable[..., Any], getattr(self.worker, name))
        raise AttributeError(f"role {self.role.name!r} has no verb {name!r}")
