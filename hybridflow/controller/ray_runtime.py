"""The Ray runtime: every role is a group of SPMD worker processes, and the driver only says who does what.

    program ──verb(batch)──> one task for each rank, with references to its inputs
            <──batch of lazy columns, at once── one reference a rank for the manifest, the report, every column

Columns never pass through the driver unless the program reads them. Calls on different pools run side by side as soon as
their inputs are there; calls on one pool run in the order in which the program makes them. Whatever the driver waits for,
it watches every task that is open: the first that fails is raised here (``ray_tasks.py``). Processes that are lost can be
made anew (``mend``): roles are data, so what they were at first is known. How many processes of its pool a role works in,
and how many threads they have, may change between any two calls (``resize``, ``rethread``).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.util.placement_group import remove_placement_group

from hybridflow.controller.cores import Share
from hybridflow.controller.elastic import hands_over, has_own_workers, home, members_of, obstacle
from hybridflow.controller.handle import Handle, check_reads
from hybridflow.controller.protocols import ALL_TO_ALL, ONE_TO_ALL, THREE_D_PP_ONLY
from hybridflow.controller.ray_columns import Columns, RemoteSource, reports_of
from hybridflow.controller.ray_group import WorkerGroup, connect, homes, reserve, reserve_again, shares
from hybridflow.controller.ray_process import STREAM, OutputRefs, Setup
from hybridflow.controller.ray_reports import Reports
from hybridflow.controller.ray_tasks import OpenTasks, Task
from hybridflow.controller.recovery import NEVER, RecoveryConfig
from hybridflow.controller.state import KeepsState
from hybridflow.core.batch import Batch
from hybridflow.core.columns import Lazy
from hybridflow.core.errors import ContractError, WorkerError
from hybridflow.core.files import Written
from hybridflow.core.placement import Mesh, Placement, ResourcePool
from hybridflow.core.roles import Drained, Role, Verb, begins_early, control_protocol, is_control

__all__ = ["RayRuntime"]

W = TypeVar("W")
INLINE_CALL_BYTES = 128_000
"""what all copies of a call may have together; storing it once costs every rank about half a millisecond"""
CLOSE_S = 10.0


class RayRuntime(KeepsState):
    """A worker group for each pool. ``threads``: of torch in each process, 0 for the cores of
    its machine divided by the workers that this runtime has there. ``gpus``: each
    worker gets one. See ``RuntimeConfig`` for the rest.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        address: str | None,
        threads: int,
        timeout_s: float,
        gpus: bool,
        recovery: RecoveryConfig = NEVER,
    ) -> None:
        self.placement, self.address = placement, address
        self.threads, self.gpus = threads, gpus
        self.tasks = OpenTasks(timeout_s, recovery, self.kill)
        self.columns, self.reports = Columns(self.tasks), Reports()
        self.roles: dict[str, Role[Any]] = {}
        self._links: list[tuple[str, str]] = []
        self._published: set[tuple[str, str]] = set()
        self._buckets: dict[str, int] = {}
        self._workers: dict[str, int] = {}
        self._speeds: dict[str, tuple[float, ...]] = {}
        self._threads: dict[str, int] = {}
        self._members: dict[str, int] = {}
        self._shares: dict[str, list[Share]] = {}
        self._methods: dict[tuple[str, int, int], Any] = {}
        self.groups: dict[str, WorkerGroup] = {}
        self.pids: dict[tuple[str, int], int] = {}
        """of the process of each (pool, rank), on its machine"""
        self._rooms: dict[str, Any] = {}
        self._unready: set[str] = set()
        self._streams: dict[str, list[Any]] = {}
        """of each role whose members' calls begin early: new weights that it has been sent since a group's last call"""
        self._started = False
        self._clock_s = time.time() - time.perf_counter()

    def start(self) -> None:
        """Start the processes of every pool and let them find each other. The first role does it."""
        self._started = connect(self.address, sum(pool.size for pool in self.placement.pools))
        self._rooms = reserve(self.placement.pools, self._resource)
        self._gather({pool.name for pool in self.placement.pools})

    @property
    def _resource(self) -> str:
        return "GPU" if self.gpus else "CPU"

    def _gather(self, pools: Collection[str]) -> None:
        """Start the processes of these pools, let all find each other, and build the roles that there are."""
        self._unready |= set(pools)
        self._shares = shares(self.placement.pools, homes(self._rooms))
        new = [pool for pool in self.placement.pools if pool.name in pools]
        for pool in new:
            setups = [self._setup(pool, rank, share) for rank, share in enumerate(self._shares[pool.name])]
            self.groups[pool.name] = WorkerGroup(pool, self._rooms[pool.name], setups, self.gpus)
        self.peers = {(name, rank): p for name, group in self.groups.items() for rank, p in enumerate(group.processes)}
        self.columns.peers = self.peers
        addresses = {pool.name: self.groups[pool.name].listen() for pool in new}
        for name, group in self.groups.items():
            joining = group.join(addresses[name], self.peers) if name in pools else group.meet(self.peers)
            for rank, reference in enumerate(joining):
                self.tasks.add(reference, Task("start", group, rank, partial(self.pids.__setitem__, (name, rank))))
        self.ready()
        self.tasks.watch.begin(self.peers)
        for role in self.roles.values():
            if self.placement.pool_of(role.name).name in pools:
                self._add(role)
        for learner, sampler in self._links:
            if self.placement.pool_of(sampler).name in pools:
                self._link(learner, sampler)
        self.ready()
        self._unready.clear()

    def _setup(self, pool: ResourcePool, rank: int, share: Share) -> Setup:
        return Setup(
            pool.name,
            rank,
            pool.size,
            threads=self._threads.get(pool.name, self.threads),
            share=share,
            folder=os.getcwd(),
            timeout_s=self.tasks.timeout_s,
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
        self._add(role)
        return cast(W, Handle(self, role))

    def _add(self, role: Role[Any]) -> None:
        widest, mesh, shipped, group = self.widest(role), self.mesh(role), ray.put(role), self._group(role.name)
        for rank, process in enumerate(group.processes):
            self.tasks.add(process.add.remote(shipped, widest, mesh), Task(f"{role.name}: start", group, rank))
        if has_own_workers(role) and role.name in self._workers:
            self.resize(role.name, self._workers[role.name])

    def widest(self, role: Role[Any]) -> Mesh:
        """Of all the processes that the role can use."""
        return self.placement.mesh_of(role.name, role.max_workers)

    def mesh(self, role: Role[Any]) -> Mesh:
        """Of those that it uses now."""
        widest, workers = self.widest(role), self._workers.get(role.name)
        if workers is None or has_own_workers(role):
            return widest
        return replace(widest, dp=workers, speeds=self._speeds.get(role.name, ()))

    def share(self, learner: str, sampler: str, /) -> None:
        """In place where both are in the same processes; otherwise the sampler gets a copy that ``publish`` renews."""
        self._links.append((learner, sampler))
        self._link(learner, sampler)

    def _in_place(self, learner: str, sampler: str) -> bool:
        same_pool = self.placement.pool_of(learner) == self.placement.pool_of(sampler)
        return same_pool and self.widest(self.roles[learner]).by_copies == self.widest(self.roles[sampler])

    def _link(self, learner: str, sampler: str) -> None:
        every = range(self.widest(self.roles[sampler]).size)
        if self._in_place(learner, sampler):
            self._each(sampler, f"{sampler}: start", lambda process: process.share.remote(learner, sampler), every)
        else:
            shipped = ray.put(self.roles[learner])
            self._each(sampler, f"{sampler}: start", lambda process: process.replicate.remote(shipped, sampler), every)

    def publish(self, learner: str, sampler: str, only: int | None = None, /) -> None:
        """Send the learner's weights to the sampler, unless it reads them in place: bucket by bucket, each read while the
        next one is made. They don't pass through the driver. ``only``: to this rank of it."""
        if self._in_place(learner, sampler):
            return
        self._published.add((learner, sampler))
        ranks = range(self.mesh(self.roles[sampler]).size) if only is None else (self._home(sampler, only),)
        self._send_weights(learner, sampler, ranks, alone=only is not None)

    def _send_weights(self, learner: str, sampler: str, ranks: Sequence[int], alone: bool = False) -> None:
        role = self.roles[learner]
        group, mesh = self._group(learner), self.mesh(role)
        if learner not in self._buckets:
            self._buckets[learner] = self.control(role, "num_buckets", cast(Any, role.worker).num_buckets, ())
        for bucket in range(last := self._buckets[learner]):
            # Of every rank, as it may hold but a share of what those of the first copy send.
            asked = [p.weights.options(num_returns=2).remote(learner, bucket) for p in group.processes[: mesh.size]]
            for rank, (done, _) in enumerate(asked):
                self.tasks.add(done, Task(f"{learner}.weights", group, rank))
            parts = [asked[rank][1] for rank in THREE_D_PP_ONLY.collect(mesh)]
            lane = {"concurrency_group": STREAM} if sampler in self._streams else {}
            load = partial(_load, sampler, bucket == last - 1, parts, lane)
            sent = self._each(sampler, f"{sampler}.load", load, ranks, alone)
            if sampler in self._streams:
                self._streams[sampler] = [*filter(self.tasks.__contains__, self._streams[sampler]), *sent]

    def member(self, handle: W, rank: int, /) -> W:
        """The role's process ``rank`` alone; of one whose rows are its own, the process that it is in, see ``resize``."""
        role = cast(Handle, handle).role
        if begins_early(role.worker):
            self._streams.setdefault(role.name, [])
        self._members[role.name] = max(rank + 1, self._members.get(role.name, 0))
        return cast(W, Handle(self, role, rank))

    def ready(self) -> None:
        """Wait until every role is built; WorkerError names who is missing after ``timeout_s``."""
        self.tasks.wait(self.tasks.references)

    def _group(self, role: str) -> WorkerGroup:
        group = self.groups.get(self.placement.pool_of(role).name)
        if group is None:
            raise WorkerError(f"role {role!r} has no workers any more: an error or stop() ended them")
        return group

    def _each(
        self, role: str, what: str, ask: Callable[[Any], Any], ranks: Sequence[int], alone: bool = False
    ) -> list[Any]:
        """Ask processes of a role for something; references that are there when it is done."""
        group, sent = self._group(role), list[Any]()
        for rank in ranks:
            sent.append(ask(group.processes[rank]))
            self.tasks.add(sent[-1], Task(what, group, rank, alone=alone or role in self._streams))
        return sent

    # How many workers and threads.

    def resize(self, name: str, workers: int, speeds: tuple[float, ...] = (), /) -> None:
        """From the next call on, the role works in the first ``workers`` processes of its pool, or its worker has so many
        processes of its own; nobody waits for that. ``speeds``: see ``Mesh``.

        State that goes with rows goes over to who has them from now on, and samplers that join get the learner's weights.
        Members that roll out by themselves keep their rows, and take turns where there are fewer processes.
        ContractError for a role that can't, see ``obstacle``.
        """
        role = self.roles[name]
        if has_own_workers(role):
            self._workers[name] = workers
            self.control(role, "resize", cast(Any, role.worker).resize, (workers,))
            return
        if found := self.obstacle(name):
            raise ContractError(f"role {name!r} can't change its workers: {found}")
        if workers not in range(1, (most := self.widest(role).size) + 1):
            raise ContractError(f"role {name!r} can't have {workers} workers: expected 1 to {most}, as in its pool")
        if self.by_itself(name) and len({*(parts := members_of(workers, self._members[name]))}) > 1:
            speeds = tuple(map(float, parts))
        old, new = self.mesh(role), replace(self.widest(role), dp=workers, speeds=speeds)
        self._workers[name], self._speeds[name] = workers, speeds
        if new != old:
            self._regroup(role, old, new)
        for learner in [learner for learner, sampler in self._published if sampler == name]:
            self._send_weights(learner, name, range(old.size, new.size), alone=name in self._members)

    def by_itself(self, name: str) -> bool:
        """Whether each member of a role rolls out by itself, from rows of its own."""
        return name in self._members and hands_over(self.roles[name])

    def _home(self, name: str, member: int) -> int:
        """The rank of the process in which a role's member is."""
        return home(member, self.mesh(self.roles[name]).size, self._members[name]) if self.by_itself(name) else member

    def obstacle(self, name: str) -> str | None:
        """Why a role can't change its workers; None: it can."""
        if any(sampler == name and self._in_place(learner, sampler) for learner, sampler in self._links):
            return "it reads weights in place; give it a pool of its own"
        return obstacle(self.roles[name], self.widest(self.roles[name]))

    def _regroup(self, role: Role[Any], old: Mesh, new: Mesh) -> None:
        group, what, given, alone = self._group(role.name), f"{role.name}: resize", list[Any](), role.name in self._members
        for rank, process in enumerate(group.processes[: max(old.size, new.size)]):
            done, states = process.resize.options(num_returns=2).remote(role.name, new, rank >= old.size)
            self.tasks.add(done, Task(what, group, rank, alone=alone))
            given.append(states)
        if hands_over(role):
            self._each(role.name, what, lambda process: process.take_over.remote(role.name, given), range(new.size), alone)

    def num_workers(self, name: str, /) -> int:
        """In how many processes a role works, or how many of its own its worker has."""
        role = self.roles[name]
        if not has_own_workers(role):
            return self.mesh(role).size
        workers: int = self.control(role, "num_workers", cast(Any, role.worker).num_workers, ())
        return workers

    def num_threads(self, pool: str) -> int:
        """Of torch in each process of a pool."""
        return self._threads.get(pool) or self.threads or self._shares[pool][0].threads

    @property
    def num_slots(self) -> int:
        """CPU slots of all machines, whoever has them: one a core, or one a worker where these are more."""
        slots = int(ray.cluster_resources()["CPU"])
        return slots if self.address is not None else max(slots, os.cpu_count() or 1)

    def rethread(self, pool: str, threads: int, /) -> None:
        """From the next call on, torch has so many ``threads`` in each process of the pool."""
        self._threads[pool], group = threads, self.groups[pool]
        for rank, process in enumerate(group.processes):
            self.tasks.add(process.rethread.remote(threads), Task(f"{pool}: rethread", group, rank))

    # Verbs.

    def call(
        self, role: Role[Any], name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...], only: int | None = None
    ) -> Batch:
        """Ask every rank for its part, or one for all of it; the result's columns are lazy."""
        reads, writes = role.columns_of(verb, arguments)
        where, group, alone = f"{role.name}.{name}", self._group(role.name), only is not None
        only = None if only is None else self._home(role.name, only)
        mesh = Mesh() if alone else self.mesh(role)
        check_reads(where, reads, batch)
        seen = batch.select(reads)
        call = self.columns.call(role.name, name, seen, arguments, writes, mesh)
        shipped = call if mesh.size * call.num_bytes < INLINE_CALL_BYTES else ray.put(call)
        if role.name in self._streams:
            self._begin(verb, where, group, only, shipped)
        refs = [self._method(group, rank + (only or 0), 2 + len(writes)).remote(shipped) for rank in range(mesh.size)]
        counted = mesh.leaders if verb.protocol.view else verb.protocol.collect(mesh)
        single = self.mesh(role).size == 1
        needs = {refs.writer: list(refs.columns) for refs in call.outputs if refs.writer != "driver"}
        if alone:
            self.reports.begin(refs[0][0], (group.pool.name, cast(int, only)))
        else:
            self.reports.reads(seen)
        for rank, (report, *_) in enumerate(refs):
            done = self.reports.keeper(where, rank in counted)
            self.tasks.add(report, Task(where, group, rank + (only or 0), done, alone, single, needs))
        collected = [refs[rank] for rank in verb.protocol.collect(mesh)]
        names = [role.rename.get(column, column) for column in writes]
        output = OutputRefs(
            where, [ref[1] for ref in collected], {n: [ref[2 + i] for ref in collected] for i, n in enumerate(names)}
        )
        known = batch.known_rows if verb.rows == "same" else None
        source = RemoteSource(self.columns, output, [ref[0] for ref in collected], known)
        new = {column: Lazy(((source, column),)) for column in names}
        return batch.with_columns(**new) if verb.rows == "same" else Batch(new)

    def _begin(self, verb: Verb, where: str, group: WorkerGroup, only: int | None, shipped: Any) -> None:
        """Before a call of a role whose members' calls begin early. One to all of its processes has to wait until they have
        the newest weights, which come on another lane."""
        stream = self._streams[where.partition(".")[0]]
        if only is None:
            self.tasks.wait(stream)
            stream.clear()
        else:
            begin = group.processes[only].begin.options(concurrency_group=STREAM)
            self.tasks.add(begin.remote(shipped, verb.begins), Task(f"{where}: begin", group, only, alone=True))

    def _method(self, group: WorkerGroup, rank: int, num_returns: int) -> Any:
        key = group.pool.name, rank, num_returns
        if key not in self._methods:
            self._methods[key] = group.processes[rank].call.options(num_returns=num_returns)
        return self._methods[key]

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
            keep = _keeper(results, rank)
            self.tasks.add(reference, Task(f"{role.name}.{name}", group, rank, keep, single=mesh.size == 1))
        if inspect.signature(method).return_annotation in (None, "None"):
            return None
        self.tasks.wait(asked)
        return results[0] if protocol is None else [entry for rank in wanted for entry in results[rank]]

    def aside(self, role: str, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Call a method of a role's worker in each process, in the middle of what it is at, with its entries of the
        ``arguments``; what they return."""
        with self.tasks.blaming():
            own = zip(self._group(role).processes, *arguments, strict=True)
            return list(ray.get([process.aside.remote(role, method, *given) for process, *given in own]))

    def wait_any(self, batches: Sequence[Batch], /) -> int:
        """Until all columns of one of ``batches`` are there; its number."""
        return self.tasks.wait_first([reports_of(batch) for batch in batches])

    def pending(self, batches: Sequence[Batch], /) -> list[Batch]:
        """Those of which not all columns are there."""
        self.tasks.settle()
        return [batch for batch in batches if any(report in self.tasks for report in reports_of(batch))]

    def drain(self) -> Drained:
        """Metrics and spans since the last drain. Waits for all calls but those of members, whose metrics come when others
        have read from them; what no batch refers to any more is forgotten."""
        self.tasks.wait()
        self.tasks.wait(self.reports.read)
        drained = self.reports.drain(self._clock_s)
        drained.metrics.count("driver/bytes", self.columns.forget())
        return drained

    # State and end.

    def pause(self, paused: bool) -> None:
        """Stop all workers between two microbatches or tokens, or let them go on; meanwhile no deadline passes."""
        self.tasks.paused = paused
        with self.tasks.blaming():
            ray.get([process.pause.remote(paused) for process in self.peers.values()])

    def load(self, folder: Path, state: Mapping[str, Any], files: Mapping[str, Sequence[Written]], /) -> None:
        """As all runtimes do; samplers that have had weights before get them anew."""
        super().load(folder, state, files)
        for learner, sampler in sorted(self._published):
            self.publish(learner, sampler)
        self.ready()

    def nodes(self, role: str | None = None) -> list[str]:
        """The machines that have processes, or those of a role's pool."""
        there = homes(self._rooms)
        pools = there if role is None else (self.placement.pool_of(role).name,)
        return list(dict.fromkeys(node for pool in pools for node in there[pool]))

    def held_bytes(self) -> dict[str, int]:
        """What the processes of each machine have in memory."""
        held: dict[str, int] = {}
        with self.tasks.blaming():
            for node, size in ray.get([process.held_bytes.remote() for process in self.peers.values()]):
                held[node] = held.get(node, 0) + size
        return held

    def _end(self, pools: set[str]) -> None:
        for pool in pools & self.groups.keys():
            self.groups.pop(pool).end()

    def mend(self, pools: Collection[str]) -> None:
        """Make ``pools`` anew, with their roles as they were at first, and every pool that can't end what it was at. All
        calls are forgotten; the others keep their processes and what these know, so ``load`` has to follow.

        Raises LostWorkersError, and UserError where there is no room within ``timeout_s``.
        """
        broken = {*pools, *self._unready}
        self._end(broken)  # first, so that who waits for what they were to make is told
        unfit = self.tasks.unfit(broken)
        self._end(unfit)
        broken |= unfit
        self._methods.clear()
        self.reports.forget()
        self.columns.forget()
        self._streams = {role: [] for role in self._streams}
        self.tasks.watch.begin({key: process for key, process in self.peers.items() if key[0] in self.groups})
        self._rooms |= reserve_again(
            self._rooms, [p for p in self.placement.pools if p.name in broken], self._resource, self.tasks.timeout_s
        )
        self._gather(broken)

    def stop(self) -> None:
        """Let the workers close what they hold, then end all processes."""
        live = [role for role in self.roles.values() if self.placement.pool_of(role.name).name in self.groups]
        closing = [role for role in live if is_control(getattr(role.worker, "close", None))]
        asked = [
            self._group(role.name).processes[rank].control.remote(role.name, "close", False)
            for role in closing
            for rank in range(self.widest(role).size)
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
            group.end()
        for room in self._rooms.values():
            remove_placement_group(room)
        self.groups, self._rooms = {}, {}
        self._methods.clear()
        self._links.clear()
        self.tasks.clear()
        self.roles.clear()


def _load(sampler: str, last: bool, parts: Sequence[Any], lane: Mapping[str, str], process: Any) -> Any:
    return process.load.options(**lane).remote(sampler, last, *parts)


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
