"""The Ray runtime: every role is a group of SPMD worker processes, and the driver only says who does what.

    program ──verb(batch)──> one task for each rank, with references to its inputs
            <──batch of lazy columns, at once── one reference a rank for the manifest, the report, every column

Columns never pass through the driver unless the program reads them. Calls on different pools run side by side as soon as
their inputs are there; calls on one pool run in the order in which the program makes them. Whatever the driver waits for,
it watches every task that is open: the first that fails ends all processes and is raised here.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import numpy as np
import ray
from numpy.typing import NDArray

from hybridflow.controller.cores import Share
from hybridflow.controller.handle import Handle, check_reads
from hybridflow.controller.manifest import Manifest, Output, describe
from hybridflow.controller.protocols import ALL_TO_ALL, ONE_TO_ALL, THREE_D_PP_ONLY
from hybridflow.controller.ray_group import WorkerGroup, connect, homes, reserve, shares
from hybridflow.controller.ray_process import Call, OutputRefs, Report, Setup, local_fetch, num_bytes, ship, unship
from hybridflow.controller.state import KeepsState
from hybridflow.core.batch import Batch
from hybridflow.core.columns import Held, Lazy, Loaded, Source
from hybridflow.core.errors import ContractError, HybridFlowError, UserError, WorkerError
from hybridflow.core.metrics import Metrics, Span
from hybridflow.core.placement import Mesh, Placement, ResourcePool, Rows
from hybridflow.core.roles import Drained, Role, Verb, control_protocol, is_control

__all__ = ["RayRuntime"]

W = TypeVar("W")
INLINE_BYTES = 64_000
INLINE_CALL_BYTES = 128_000
"""what all copies of a call may have together; storing it once costs every rank about half a millisecond"""
CLOSE_S = 10.0
BLAME_S = 0.5


@dataclass(frozen=True)
class _Task:
    """Something that a process was asked to do. ``done`` gets its result."""

    role: str
    what: str
    group: WorkerGroup
    rank: int
    done: Callable[[Any], None]
    alone: bool = False
    """a member's own, which ``drain`` doesn't wait for"""

    @property
    def who(self) -> str:
        return f"{self.what} in {self.group.name(self.rank)}"


class RayRuntime(KeepsState):
    """A worker group for each pool. ``threads``: of torch in each process, 0 for the cores of
    its machine divided by the workers that this runtime has there. ``gpus``: each
    worker gets one. See ``RuntimeConfig`` for the rest.
    """

    def __init__(
        self, placement: Placement, *, address: str | None, slots: int, threads: int, timeout_s: float, gpus: bool
    ) -> None:
        self.placement, self.timeout_s, self.address, self.slots = placement, timeout_s, address, slots
        self.threads, self.gpus = threads, gpus
        self.roles: dict[str, Role[Any]] = {}
        self._open: dict[Any, _Task] = {}
        self._reports: dict[int, tuple[Role[Any], str, bool, Report]] = {}
        self._number, self._driver_bytes = 0, 0
        self._held: dict[tuple[int, str], tuple[OutputRefs, Any]] = {}
        self._in_place: set[str] = set()
        self._buckets: dict[str, int] = {}
        self._methods: dict[tuple[str, int, int], Any] = {}
        self.groups: dict[str, WorkerGroup] = {}
        self._started = self.paused = False
        self._clock_s = time.time() - time.perf_counter()

    def start(self) -> None:
        """Start the processes of every pool and let them find each other. The first role does it."""
        self._started = connect(self.address, self.slots)
        pools = self.placement.pools
        rooms = reserve(pools, "GPU" if self.gpus else "CPU")
        dealt = shares(pools, homes(rooms))
        for pool in pools:
            setups = [self._setup(pool, rank, share) for rank, share in enumerate(dealt[pool.name])]
            self.groups[pool.name] = WorkerGroup(pool, rooms[pool.name], setups, self.gpus)
        groups = self.groups.values()
        addresses = {group.pool.name: group.listen() for group in groups}
        self.peers = {(group.pool.name, rank): p for group in groups for rank, p in enumerate(group.processes)}
        for group in groups:
            for rank, reference in enumerate(group.join(addresses[group.pool.name], self.peers)):
                self._track(reference, _Task("", "start", group, rank, _ignore))
        self.ready()

    def _setup(self, pool: ResourcePool, rank: int, share: Share) -> Setup:
        return Setup(
            pool.name,
            rank,
            pool.size,
            threads=self.threads,
            share=share,
            folder=os.getcwd(),
            timeout_s=self.timeout_s,
            loopback=self.address is None,
            offload=self.placement.offload,
        )

    def role(self, role: Role[W], /) -> W:
        """Build the role's worker in the processes of its pool; the handle has the worker's own type. Errors come later."""
        if role.name in self.roles:
            raise ContractError(f"two roles are called {role.name!r}")
        if not self.groups:
            self.start()
        self.roles[role.name] = role
        mesh, shipped = self.mesh(role), ray.put(role)
        group = self._group(role.name)
        for rank, process in enumerate(group.processes):
            self._track(process.add.remote(shipped, mesh), _Task(role.name, f"{role.name}: start", group, rank, _ignore))
        return cast(W, Handle(self, role))

    def mesh(self, role: Role[Any]) -> Mesh:
        return self.placement.mesh_of(role.name, role.max_workers)

    def share(self, learner: str, sampler: str, /) -> None:
        """In place where both are in the same processes; otherwise the sampler gets a copy that ``publish`` renews."""
        one, other = self.roles[learner], self.roles[sampler]
        same_pool = self.placement.pool_of(learner) == self.placement.pool_of(sampler)
        if same_pool and self.mesh(one).by_copies == self.mesh(other):
            self._in_place.add(sampler)
            self._each(sampler, f"{sampler}: start", lambda process: process.share.remote(learner, sampler))
        else:
            shipped = ray.put(one)
            self._each(sampler, f"{sampler}: start", lambda process: process.replicate.remote(shipped, sampler))

    def publish(self, learner: str, sampler: str, only: int | None = None, /) -> None:
        """Send the learner's weights to the sampler, unless it reads them in place: bucket by bucket, each read while the
        next one is made. They don't pass through the driver. ``only``: to this rank of it."""
        if sampler in self._in_place:
            return
        role = self.roles[learner]
        group, mesh = self._group(learner), self.mesh(role)
        if learner not in self._buckets:
            self._buckets[learner] = self.control(role, "num_buckets", cast(Any, role.worker).num_buckets, ())
        for bucket in range(last := self._buckets[learner]):
            # Of every rank, as it may hold but a share of what those of the first copy send.
            asked = [p.weights.options(num_returns=2).remote(learner, bucket) for p in group.processes[: mesh.size]]
            for rank, (done, _) in enumerate(asked):
                self._track(done, _Task(learner, f"{learner}.weights", group, rank, _ignore))
            parts = [asked[rank][1] for rank in THREE_D_PP_ONLY.collect(mesh)]
            self._each(sampler, f"{sampler}.load", partial(_load, sampler, bucket == last - 1, parts), only)

    def member(self, handle: W, rank: int, /) -> W:
        """The role's process ``rank`` alone."""
        return cast(W, Handle(self, cast(Handle, handle).role, rank))

    def ready(self) -> None:
        """Wait until every role is built; WorkerError names who is missing after ``timeout_s``."""
        self._wait(tuple(self._open))

    def _group(self, role: str) -> WorkerGroup:
        if not self.groups:
            raise WorkerError(f"role {role!r} has no workers any more: an error or stop() ended them")
        return self.groups[self.placement.pool_of(role).name]

    def _each(self, role: str, what: str, ask: Callable[[Any], Any], only: int | None = None) -> None:
        """Ask every process of a role, or one, for something that has no result."""
        group = self._group(role)
        for rank in range(self.mesh(self.roles[role]).size) if only is None else (only,):
            self._track(ask(group.processes[rank]), _Task(role, what, group, rank, _ignore, only is not None))

    def _track(self, reference: Any, task: _Task) -> None:
        self._open[reference] = task

    # Verbs.

    def call(
        self, role: Role[Any], name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...], only: int | None = None
    ) -> Batch:
        """Ask every rank for its part, or one for all of it; the result's columns are lazy."""
        reads, writes = role.columns_of(verb, arguments)
        where, group, alone = f"{role.name}.{name}", self._group(role.name), only is not None
        mesh = Mesh() if alone else self.mesh(role)
        check_reads(where, reads, batch)
        call = replace(self._describe(role.name, name, batch.select(reads), arguments, writes), alone=alone)
        shipped = call if mesh.size * call.num_bytes < INLINE_CALL_BYTES else ray.put(call)
        refs = [self._method(group, rank + (only or 0), 2 + len(writes)).remote(shipped) for rank in range(mesh.size)]
        counted = mesh.leaders if verb.protocol.view else verb.protocol.collect(mesh)
        for rank, (report, *_) in enumerate(refs):
            done = self._reporting(role, where, rank in counted)
            self._track(report, _Task(role.name, where, group, rank + (only or 0), done, alone))
        collected = [refs[rank] for rank in verb.protocol.collect(mesh)]
        names = [role.rename.get(column, column) for column in writes]
        output = OutputRefs(
            where, [ref[1] for ref in collected], {n: [ref[2 + i] for ref in collected] for i, n in enumerate(names)}
        )
        known = batch.known_rows if verb.rows == "same" else None
        source = _Source(self, output, [ref[0] for ref in collected], known)
        new = {column: Lazy(((source, column),)) for column in names}
        return batch.with_columns(**new) if verb.rows == "same" else Batch(new)

    def _method(self, group: WorkerGroup, rank: int, num_returns: int) -> Any:
        key = group.pool.name, rank, num_returns
        if key not in self._methods:
            self._methods[key] = group.processes[rank].call.options(num_returns=num_returns)
        return self._methods[key]

    def _describe(self, role: str, verb: str, batch: Batch, arguments: tuple[Any, ...], writes: Sequence[str]) -> Call:
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
        return Call(role, verb, arguments, tuple(writes), only, columns, batch.known_rows)

    def _references(self, source: Source, name: str) -> OutputRefs:
        """Where the values of a source are; a column of the driver is stored once a step."""
        if isinstance(source, _Source):
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
        if manifest.node not in ("", node) and len(rows) < manifest.num_rows:
            column = unship(ray.get(self.peers[manifest.worker].fetch.remote([reference], rows)))
        else:
            column = local_fetch(reference, rows)
        self._driver_bytes += num_bytes(column)
        return column

    def control(self, role: Role[Any], name: str, method: Any, arguments: tuple[Any, ...]) -> Any:
        """Call a control method on every rank. One that returns None by its signature is not waited for."""
        group, mesh, protocol = self._group(role.name), self.mesh(role), control_protocol(method)
        wanted = (0,) if protocol is None else tuple(range(mesh.size) if protocol is ONE_TO_ALL else protocol.collect(mesh))
        results: dict[int, Any] = {}
        asked = []
        for rank in range(mesh.size):
            own = _own_entries(arguments, rank, mesh) if protocol is ALL_TO_ALL else arguments
            reference = group.processes[rank].control.remote(role.name, name, rank in wanted, *own)
            asked.append(reference)
            self._track(reference, _Task(role.name, f"{role.name}.{name}", group, rank, _keeper(results, rank)))
        if inspect.signature(method).return_annotation in (None, "None"):
            return None
        self._wait(asked)
        return results[0] if protocol is None else [entry for rank in wanted for entry in results[rank]]

    # Waiting.

    def _wait(self, references: Collection[Any]) -> None:
        """Until these tasks are done. An error of any open task ends everything and is raised."""
        self._wait_first([references])

    def _wait_first(self, tasks: Sequence[Collection[Any]]) -> int:
        """Until all tasks of one of these collections are done; its number. See ``_wait``."""
        since = time.monotonic()
        while True:
            missing = [[ref for ref in references if ref in self._open] for references in tasks]
            if [] in missing:
                return missing.index([])
            ready, _ = ray.wait(list(self._open), num_returns=1, timeout=1.0, fetch_local=False)
            if ready:
                self._settle()
            if ready or self.paused:
                since = time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                self._give_up([ref for references in missing for ref in references])

    def wait_any(self, batches: Sequence[Batch], /) -> int:
        """Until all columns of one of ``batches`` are there; its number."""
        return self._wait_first([_reports(batch) for batch in batches])

    def _settle(self) -> None:
        """Take in all that is done."""
        references = list(self._open)
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        try:
            values = ray.get(ready)
        except ray.exceptions.RayError:
            values = [self._result(reference) for reference in ready]
        for reference, value in zip(ready, values, strict=True):
            self._open.pop(reference).done(value)

    def _result(self, reference: Any) -> Any:
        """Of a task that is done; if it failed, its blame is raised."""
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            raise self._blame(reference, error) from None

    def _blame(self, reference: Any, error: Exception) -> Exception:
        """Of the errors that come together, the one that is the cause: a death, or else the first in the program's order.

        The other ranks of a group fail too when one does, or wait for it for ever, so this ends all processes. Only a
        user's mistake in a role of one process harms nobody else: what was learned can still be saved.
        """
        deadline, errors = time.monotonic() + BLAME_S, {reference: error}
        while time.monotonic() < deadline and not isinstance(error, ray.exceptions.RayActorError):
            others = [ref for ref in self._open if ref not in errors]
            ready, _ = ray.wait(others, num_returns=1, timeout=0.05, fetch_local=False) if others else ([], [])
            for ref in ready:
                try:
                    value = ray.get(ref)
                except ray.exceptions.RayError as another:
                    errors[ref] = another
                else:
                    self._open.pop(ref).done(value)
        order = [ref for ref in self._open if ref in errors]
        died = [ref for ref, e in errors.items() if isinstance(e, ray.exceptions.RayActorError)]
        first = min(died or errors, key=order.index)
        task, cause = self._open[first], errors[first]
        own = getattr(cause, "cause", None)
        if isinstance(own, UserError) and task.role in self.roles and self.mesh(self.roles[task.role]).size == 1:
            self._let_finish()
            return own
        self.kill()
        if isinstance(cause, ray.exceptions.RayActorError):
            return WorkerError(f"{task.group.name(task.rank)} died during {task.what}: {_told(cause)}")
        return own if isinstance(own, HybridFlowError) else WorkerError(f"{task.who} failed: {cause}")

    def _let_finish(self) -> None:
        """Wait for all that is open, whatever becomes of it: what depends on a failed call fails by itself."""
        ray.wait(list(self._open), num_returns=len(self._open), timeout=self.timeout_s, fetch_local=False)
        self._open.clear()

    def _give_up(self, missing: Collection[Any]) -> None:
        tasks = [task for ref, task in self._open.items() if ref in missing]
        lines = [f"nothing was done for {self.timeout_s:g} s (runtime.timeout_s); still missing:"]
        for task in tasks[:8]:
            doing = task.group.ping(task.rank)
            state = "does not answer" if doing is None else f"is at {doing}" if doing else "is waiting for its inputs"
            lines.append(f"{task.who}, which {state}")
            lines += [task.group.stacks(task.rank)] if doing else []
        self.kill()
        raise WorkerError("\n".join(lines))

    def _reporting(self, role: Role[Any], where: str, counts: bool) -> Callable[[Report], None]:
        """Reports are kept by number of the call: means must not depend on who is done first."""
        number = self._number
        self._number += 1

        def keep(report: Report) -> None:
            self._reports[number] = role, where, counts, report

        return keep

    def drain(self) -> Drained:
        """Metrics and spans since the last drain. Waits for all calls but those of members; what no batch refers to any
        more is forgotten."""
        self._wait([reference for reference, task in self._open.items() if not task.alone])
        metrics, spans = Metrics(), list[Span]()
        for _, (_, where, counts, report) in sorted(self._reports.items()):
            if counts:
                metrics.merge(report.metrics)
            for writer, size in report.pulled.items():
                metrics.count(f"moved/{writer}-{where}", size)
            self._driver_bytes += report.inlined_bytes
            metrics.maximum("workers/rss_gb_max", report.rss_bytes / 1e9)
            metrics.maximum("memory/grown_gb", report.grown_bytes / 1e9)
            spans += [replace(span, start_s=span.start_s - self._clock_s) for span in report.spans]
        metrics.count("driver/bytes", self._driver_bytes)
        self._reports.clear()
        self._held.clear()
        self._driver_bytes = 0
        return Drained(metrics, spans)

    # State and end.

    def pause(self, paused: bool) -> None:
        """Stop all workers between two microbatches or tokens, or let them go on; meanwhile no deadline passes."""
        self.paused = paused
        ray.get([process.pause.remote(paused) for process in self.peers.values()])

    def stop(self) -> None:
        """Let the workers close what they hold, then end all processes."""
        closing = [role for role in self.roles.values() if is_control(getattr(role.worker, "close", None))]
        asked = [
            self._group(role.name).processes[rank].control.remote(role.name, "close", False)
            for role in closing
            for rank in range(self.mesh(role).size)
            if self.groups
        ]
        if asked:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(asked, timeout=CLOSE_S)
        self.kill()
        if self._started:
            ray.shutdown()
            self._started = False

    def kill(self) -> None:
        """End all processes at once."""
        for group in self.groups.values():
            group.kill()
        self.groups = {}
        self._methods.clear()
        self._open.clear()
        self.roles.clear()


class _Source:
    """The output of a call, for batches of the driver: reading it waits for the call."""

    def __init__(self, runtime: RayRuntime, refs: OutputRefs, reports: Sequence[Any], known_rows: int | None) -> None:
        self.runtime, self.refs, self.reports, self.known_rows = runtime, refs, reports, known_rows

    @cached_property
    def _output(self) -> Output:
        self.runtime._wait(self.reports)
        manifests: list[Manifest] = ray.get(list(self.refs.manifests))

        def fetch(piece: int, name: str, rows: Rows) -> Loaded:
            return self.runtime.fetch(manifests[piece], self.refs.columns[name][piece], rows)

        return Output(manifests, fetch, self.refs.writer)

    @property
    def num_rows(self) -> int:
        return self._output.num_rows if self.known_rows is None else self.known_rows

    def lengths(self, name: str, rows: Rows | None, /) -> NDArray[Any]:
        return self._output.lengths(name, rows)

    def load(self, name: str, rows: Rows | None, /) -> Loaded:
        return self._output.load(name, rows)


def _reports(batch: Batch) -> list[Any]:
    """Of the calls that make columns of the batch."""
    parts = [source for column in batch.columns.values() if isinstance(column, Lazy) for source, _ in column.parts]
    return [report for source in dict.fromkeys(parts) if isinstance(source, _Source) for report in source.reports]


def _load(sampler: str, last: bool, parts: Sequence[Any], process: Any) -> Any:
    return process.load.remote(sampler, last, *parts)


def _ignore(result: Any) -> None:
    """For tasks that have none."""


def _keeper(results: dict[int, Any], rank: int) -> Callable[[Any], None]:
    def keep(result: Any) -> None:
        results[rank] = result

    return keep


def _own_entries(arguments: tuple[Any, ...], rank: int, mesh: Mesh) -> tuple[Any, ...]:
    """The rank's entry of every argument, as a list of one."""
    for argument in arguments:
        if len(argument) != mesh.size:
            raise ContractError(f"ALL_TO_ALL: an argument has {len(argument)} entries for {mesh.size} ranks")
    return tuple([argument[rank]] for argument in arguments)


def _told(error: Exception) -> str:
    """What Ray knows of a death, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line or "memory" in line or "died" in line), lines[0])
