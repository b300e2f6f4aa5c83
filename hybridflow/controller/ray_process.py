"""A worker process on Ray: hosts the workers of every role that is placed on its pool, and runs their calls in order.

It has three lanes. The main one runs calls, one after another. The second serves the others while the first one computes:
rows of columns that this process made, for readers on other machines; health; stack traces. The third one is for samplers
that are never done: it takes in what later calls will ask for, and new weights, in the order in which they were sent.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError
from torch._C._distributed_c10d import TCPStore

from hybridflow.controller.cores import Share, stay
from hybridflow.controller.manifest import Manifest, Output, describe, weights
from hybridflow.controller.shelf import located
from hybridflow.core.batch import Batch
from hybridflow.core.columns import Lazy, Loaded, Places, Ragged, num_bytes, take
from hybridflow.core.effort import Meter
from hybridflow.core.errors import ContractError, HybridFlowError, WorkerError
from hybridflow.core.metrics import Effort, Metrics, Span
from hybridflow.core.placement import Mesh, Rows
from hybridflow.core.resident import resident_bytes
from hybridflow.core.roles import HandsOver, MemoryPart, Offloadable, Role, Streaming, WorkerContext, verb_of
from hybridflow.parallel.mesh import ProcessMesh

__all__ = [
    "RAY_INLINES",
    "STREAM",
    "Call",
    "OutputRefs",
    "Process",
    "Report",
    "Setup",
    "local_fetch",
    "ship",
    "unship",
]

RAY_INLINES = 10 * 1024
"""Smaller results pass through the driver, to each of their readers; with Ray's own limit, 100 KB, megabytes a step do."""
STREAM = "stream"
"""the lane of samplers that are never done"""
NEED_NO_MODEL = ("saved", "sees", "close")
Shipped = Any
"""a column as it is stored: an array, or (values, lengths) of a ragged one"""


Method = TypeVar("Method", bound=Callable[..., Any])


def lane(method: Method) -> Method:
    """Run a method of ``Process`` on its second lane."""
    return cast(Method, ray.method(concurrency_group="lane")(method))


@dataclass(frozen=True)
class Setup:
    """What a process needs to know of the run and of itself. ``share``: of its machine's cores, unless ``threads`` says how
    many threads it has."""

    pool: str
    rank: int
    size: int
    threads: int
    share: Share
    folder: str
    timeout_s: float
    loopback: bool
    offload: tuple[str, ...] = ()

    @property
    def patience(self) -> timedelta:
        """How long processes wait for each other: longer than the driver does, who can tell which of them hangs."""
        return timedelta(seconds=self.timeout_s + 60)


@dataclass(frozen=True)
class OutputRefs:
    """An output that may not be there yet: references to its manifests and columns, or the values themselves."""

    writer: str
    manifests: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]

    def only(self, names: Sequence[str]) -> OutputRefs:
        return replace(self, columns={name: self.columns[name] for name in names})

    @property
    def num_bytes(self) -> int:
        """Of what is here itself: its manifests, with rows and lengths, and columns."""
        manifests = sum(16 * m.num_rows for m in self.manifests if isinstance(m, Manifest))
        here = [value for pieces in self.columns.values() for value in pieces if not isinstance(value, ray.ObjectRef)]
        return manifests + sum(num_bytes(unship(value)) for value in here)


@dataclass(frozen=True)
class Call:
    """A verb to run. ``columns``: of each column that it reads, (number of the output, its name there) of every part, and
    its places (None: all rows). ``mesh``: of the ranks that are called."""

    role: str
    verb: str
    arguments: tuple[Any, ...]
    writes: tuple[str, ...]
    outputs: Sequence[OutputRefs]
    columns: Mapping[str, tuple[tuple[tuple[int, str], ...], Places | None]]
    num_rows: int | None
    mesh: Mesh

    @property
    def num_bytes(self) -> int:
        """Of the values that it carries itself: columns that are no references, their manifests, and places."""
        places = {id(places): 12 * len(places) for _, places in self.columns.values() if places is not None}
        return sum(places.values()) + sum(refs.num_bytes for refs in self.outputs)


@dataclass
class Report:
    """What a call tells the driver: metrics, its spans (wall-clock seconds), and bytes pulled by the call that wrote them.

    ``inlined_bytes``: of what it returned, what is so small that Ray sends it to the driver at once. ``grown_bytes``: see
    ``MemoryMeter``.
    """

    metrics: Metrics
    spans: Sequence[Span]
    pulled: Mapping[str, int]
    inlined_bytes: int
    rss_bytes: int
    grown_bytes: int


def ship(column: Loaded) -> Shipped:
    """A column as it is stored. numpy arrays are read back in place, without a copy."""
    return (column.values, column.lengths) if isinstance(column, Ragged) else column


def unship(stored: Shipped) -> Loaded:
    return Ragged(*stored) if isinstance(stored, tuple) else stored


def local_fetch(reference: Any, rows: Rows) -> Loaded:
    """Rows of a column whose values are in this machine's object store, or come there as a whole."""
    stored = ray.get(reference) if isinstance(reference, ray.ObjectRef) else reference
    return take(unship(stored), rows)


class Process:
    """One operating-system process of a pool; the driver calls its methods through Ray."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        if setup.loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if os.path.isdir(setup.folder):
            os.chdir(setup.folder)
            sys.path.insert(0, setup.folder)
        self.node = ray.get_runtime_context().get_node_id()
        self.peers: Mapping[tuple[str, int], Any] = {}
        self.roles: dict[str, tuple[Role[Any], Any, WorkerContext]] = {}
        self.replicas: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.shelved: dict[str, Offloadable] = {}
        self.line_groups: dict[tuple[int, ...], Any] = {}
        self.moved: list[Span] = []
        self.begun: set[str] = set()
        self.busy, self.going = dict[int, str](), threading.Event()
        self.going.set()
        self.meter = Meter()

    def listen(self) -> tuple[str, int]:
        """Rank 0 opens the store over which the pool's processes find each other, on a port that the system chooses."""
        host = "127.0.0.1" if self.setup.loopback else ray.util.get_node_ip_address()
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.bind((host, 0))
        self.socket.listen()
        port = self.socket.getsockname()[1]
        fd, timeout = self.socket.detach(), self.setup.patience
        self.store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)
        return host, port

    def join(self, address: tuple[str, int] | None, peers: Mapping[tuple[str, int], Any]) -> int:
        """Meet the other processes of the pool, if there are any; the process's id."""
        stay(self.setup.share)  # before the first thread of a kernel starts
        torch.set_num_threads(self.setup.threads or self.setup.share.threads)
        self.peers = peers
        if address is not None:
            timeout = self.setup.patience
            if self.setup.rank:
                self.store = TCPStore(*address, is_master=False, timeout=timeout)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            size = self.setup.size
            dist.init_process_group(backend, store=self.store, rank=self.setup.rank, world_size=size, timeout=timeout)
        return os.getpid()

    def meet(self, peers: Mapping[tuple[str, int], Any]) -> int:
        """Others are there than before; the process's id. What roles have measured of calls that failed is forgotten."""
        self.peers = peers
        for _, worker, context in self.roles.values():
            context.metrics.clear()
            if isinstance(worker, Streaming):
                worker.abandon()
        for replica in self.replicas.values():
            replica.forget()
        return os.getpid()

    def add(self, role: Role[Any], widest: Mesh, mesh: Mesh) -> None:
        """Build the worker of a role, which works on ``mesh`` now, on ``widest`` at most. Processes of the pool that the
        role has no use for join in making its groups."""
        with self._working(f"{role.name}: start"):
            if not self.roles:
                self.meter = Meter()  # by now what roles import has been imported
            lines = ProcessMesh(widest, self.setup.rank, self.setup.patience, self.line_groups)
            if self.setup.rank < widest.size:
                self._offload_others(role.name)
                reduce = lines.dp.all_reduce if widest.dp > 1 else None
                context = WorkerContext(mesh=mesh, rank=self.setup.rank, reduce=reduce, going=self.going, lines=lines)
                worker = role.worker(context, **role.args)
                self.roles[role.name] = role, worker, context
                if role.name in self.setup.offload:
                    if not isinstance(worker, Offloadable):
                        raise ContractError(f"role {role.name!r}: {type(worker).__name__} has nothing to offload")
                    self.shelved[role.name] = worker

    def share(self, learner: str, sampler: str) -> None:
        """Let a sampler read the networks of a learner in this process."""
        with self._working(f"{sampler}: start"):
            self.sources[sampler] = learner
            self._make_room(sampler, "attach")
            self.roles[sampler][1].attach(self.roles[learner][1])

    def replicate(self, learner: Role[Any], sampler: str) -> None:
        """Let a sampler read a copy of the networks of a learner that lives elsewhere."""
        with self._working(f"{sampler}: start"):
            assert learner.replica is not None, f"role {learner.name!r} has no replica"
            self.sources[sampler] = sampler
            self._make_room(sampler, "attach")
            _, worker, context = self.roles[sampler]
            self.replicas[sampler] = learner.replica(context)
            worker.attach(self.replicas[sampler])

    def weights(self, learner: str, bucket: int) -> Any:
        """(None, a bucket of a learner's weights); the second is for ``load``."""
        with self._working(f"{learner}.weights"), self._moving(f"{learner}.weights"):
            self._make_room(learner, "weights")
            return None, self.roles[learner][1].weights(bucket)

    def begin(self, call: Call, method: str) -> None:
        """A call that will come on the main lane: the worker's ``method`` may begin with its rows."""
        self.begun.add(call.role)
        with self._working(f"{call.role}.{call.verb}: begin"):
            getattr(self.roles[call.role][1], method)(self._batch(call, {}).load())

    def load(self, sampler: str, last: bool, *parts: Any) -> None:
        """Renew the copy that a sampler reads by a bucket from every pipeline stage of its learner."""
        with self._working(f"{sampler}.load"), self._moving(f"{sampler}.weights"):
            self.replicas[sampler].load(parts, last)

    def resize(self, role: str, mesh: Mesh, joins: bool) -> Any:
        """Let the worker of a role be a rank of ``mesh`` from now on, or none: (None, what others get of its state). One
        that ``joins`` forgets what it may have of earlier times."""
        with self._working(f"{role}.resize"):
            _, worker, context = self.roles[role]
            if not isinstance(worker, HandsOver):
                context.mesh = mesh
                return None, ()
            if joins:
                worker.load_state_dict(())
            return None, worker.hand_over(mesh)

    def take_over(self, role: str, given: Sequence[Any]) -> None:
        """Go on with what is this rank's now of what others have given away: ``given`` are references."""
        with self._working(f"{role}.take_over"):
            self.roles[role][1].take_over([state for states in _get(given) for state in states])

    def rethread(self, threads: int) -> None:
        """Let torch have so many threads from now on."""
        torch.set_num_threads(threads)

    def control(self, role: str, method: str, wanted: bool, *arguments: Any) -> Any:
        """Call a method that moves no rows; its result, if it is ``wanted``."""
        arguments = tuple(located(a, self.node) if isinstance(a, Path) else a for a in arguments)
        with self._working(f"{role}.{method}"):
            if role not in self.sources and method not in NEED_NO_MODEL:  # a sampler's own affairs need no weights
                self._make_room(role, method)
            result = getattr(self.roles[role][1], method)(*arguments)
        return result if wanted else None

    def call(self, call: Call) -> Any:
        """Run a verb: (report, manifest, one value for each column that it writes)."""
        role, worker, context = self.roles[call.role]
        verb = verb_of(getattr(type(worker), call.verb))
        assert verb is not None, "the driver has checked"
        where = f"{call.role}.{call.verb}"
        clock = self._clock(where)
        pulled: dict[str, int] = {}
        batch = self._batch(call, pulled)
        weighed = weights(batch)  # waits for all inputs
        clock.lap("queue")
        with self._working(where):
            if self._make_room(call.role, call.verb):
                clock.lap("transfer", f"{call.role}.onload")
        rows = verb.protocol.distribute(weighed, call.mesh)[context.rank if call.mesh.size > 1 else 0]
        own = batch if verb.protocol.view else batch.rows(rows).load().freeze()
        clock.lap("transfer")
        with self._working(where, own):
            with self.meter.call(where) as measured:
                new = getattr(worker, call.verb)(own, *call.arguments)
            if set(new.columns) != set(call.writes):
                raise ContractError(f"{where} wrote {sorted(new.columns)}, but declares {sorted(call.writes)}")
            if verb.rows == "same" and len(new) != len(own):
                raise ContractError(f"{where} returned {len(new)} rows, expected {len(own)}")
        workers = call.mesh.dp if verb.protocol.view else len(verb.protocol.collect(call.mesh))
        effort = measured.effort(own, new, context.processes, workers, verb.protocol.view, sum(pulled.values()))
        clock.lap(verb.kind, effort=None if call.role in self.begun else effort)  # of which some was done before
        me = self.setup.pool, self.setup.rank
        manifest = describe(new, rows if verb.rows == "same" else None, len(weighed), self.node, me)
        metrics = Metrics()
        metrics.merge(context.metrics, prefix=f"{role.name}/")
        context.metrics.clear()
        sizes = [num_bytes(new[name]) for name in call.writes]
        inlined = sum(size for size in sizes if size < RAY_INLINES)
        spans, self.moved = [*self.moved, *clock.spans], []
        report = Report(metrics, spans, pulled, inlined, resident_bytes(), self.meter.memory.grown)
        return report, manifest, *(ship(new[name]) for name in call.writes)

    def _make_room(self, role: str, method: str) -> int:
        """Before ``method`` of ``role`` runs: others put away what it doesn't need, and what it needs comes back; the bytes
        that moved. A sampler needs the weights of its learner. Roles without a model need no room."""
        source = self.sources.get(role, role)
        if role not in self.sources and not isinstance(self.roles[role][1], Offloadable):
            return 0
        moved = self._offload_others(role, source)
        if source in self.shelved:
            moved += self.shelved[source].onload(method if source == role else "weights")
        return moved

    def _offload_others(self, role: str, source: str = "") -> int:
        """All roles but ``role`` put away what they hold, the ``source`` keeps its weights; the bytes that moved."""
        moved = 0
        for name, worker in self.shelved.items():
            keep: tuple[MemoryPart, ...] = ("weights",) if name == source else ()
            moved += worker.offload(keep) if name != role else 0
        return moved

    def _batch(self, call: Call, pulled: dict[str, int]) -> Batch:
        """The call's whole batch, of which nothing has been pulled yet."""
        told = iter(_get([manifest for refs in call.outputs for manifest in refs.manifests]))
        outputs = [self._output(refs, list(islice(told, len(refs.manifests))), pulled) for refs in call.outputs]
        columns = {
            name: Lazy(tuple((outputs[number], column) for number, column in parts), places)
            for name, (parts, places) in call.columns.items()
        }
        return Batch(columns, call.num_rows if columns else call.num_rows or 0)

    def _output(self, refs: OutputRefs, manifests: list[Manifest], pulled: dict[str, int]) -> Output:
        here = [piece for piece, manifest in enumerate(manifests) if manifest.node in ("", self.node)]
        mapped: dict[tuple[str, int], Shipped] = {}

        def fetch(piece: int, name: str, rows: Rows) -> Loaded:
            if not mapped and here:  # all at once: one request to Ray is much cheaper than many
                wanted = [(column, other) for column in refs.columns for other in here]
                mapped.update(zip(wanted, _get([refs.columns[column][other] for column, other in wanted]), strict=True))
            if (name, piece) in mapped:
                column = take(unship(mapped[name, piece]), rows)
            else:
                column = self._fetch(manifests[piece], refs.columns[name][piece], rows)
            pulled[refs.writer] = pulled.get(refs.writer, 0) + num_bytes(column)
            return column

        return Output(manifests, fetch, refs.writer)

    def _fetch(self, manifest: Manifest, reference: Any, rows: Rows) -> Loaded:
        """Rows of a column: mapped from this machine's store, or sent by who made them, and then only these."""
        elsewhere = manifest.node != self.node and manifest.worker in self.peers
        if elsewhere and isinstance(reference, ray.ObjectRef) and len(rows) < manifest.num_rows:
            try:
                return unship(ray.get(self.peers[manifest.worker].fetch.remote([reference], rows)))
            except RayActorError:
                pass  # it has died, but the machine's object store still has what it made
        return local_fetch(reference, rows)

    def _working(self, what: str, batch: Batch | None = None) -> _Working:
        return _Working(self, what, batch)

    def _clock(self, what: str) -> _Clock:
        return _Clock(what, f"{self.setup.pool}/{self.setup.rank}")

    @contextmanager
    def _moving(self, what: str) -> Iterator[None]:
        """Weights on their way to samplers: their spans go with the report of the next call."""
        clock = self._clock(what)
        yield
        clock.lap("transfer")
        self.moved += clock.spans

    # The second lane.

    @lane
    def fetch(self, reference: Sequence[Any], rows: Rows) -> Shipped:
        """Rows of a column that is in this machine's store."""
        return ship(local_fetch(reference[0], rows))

    @lane
    def ping(self) -> str:
        """What the process is doing; empty if it waits for work."""
        return ", ".join([*self.busy.values()])

    @lane
    def pause(self, paused: bool) -> None:
        """Stop the main lane before its next piece of work, or let it go on."""
        self.going.clear() if paused else self.going.set()

    @lane
    def held_bytes(self) -> tuple[str, int]:
        """This machine's node, and what the process has in memory; on a GPU, there."""
        gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        return self.node, max(resident_bytes(), gpu)

    @lane
    def aside(self, role: str, method: str, *arguments: Any) -> Any:
        """A method of a role's worker that may come while it is at something else."""
        return getattr(self.roles[role][1], method)(*arguments)

    @lane
    def stacks(self) -> str:
        """Where every thread stands that runs code of the product or below it."""
        frames, own = sys._current_frames(), threading.get_ident()
        told = ["".join(traceback.format_stack(frame)[-8:]) for thread, frame in frames.items() if thread != own]
        return "\n".join(stack for stack in told if "hybridflow" in stack)


def _get(values: Sequence[Any]) -> list[Any]:
    """Values some of which are references; where the call that makes one has failed, its own error."""
    try:
        got = iter(ray.get([value for value in values if isinstance(value, ray.ObjectRef)]))
    except RayTaskError as error:
        raise error.cause from None
    return [next(got) if isinstance(value, ray.ObjectRef) else value for value in values]


class _Clock:
    """Spans of one call, one behind the other, in wall-clock seconds, which other machines share."""

    def __init__(self, name: str, worker: str) -> None:
        self.name, self.worker, self.last_s = name, worker, time.time()
        self.spans: list[Span] = []

    def lap(self, kind: str, name: str = "", effort: Effort | None = None) -> None:
        now = time.time()
        self.spans.append(Span(name or self.name, kind, self.last_s, now - self.last_s, self.worker, effort))
        self.last_s = now


class _Working:
    """While a worker runs: says so to who asks on the second lane, and adds to an error where and on what it happened."""

    def __init__(self, process: Process, what: str, batch: Batch | None) -> None:
        self.process, self.what, self.batch = process, what, batch

    def __enter__(self) -> None:
        self.process.busy[threading.get_ident()] = self.what

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.process.busy.pop(threading.get_ident(), None)
        if not isinstance(error, Exception) or isinstance(error, HybridFlowError):
            return
        setup, told = self.process.setup, "".join(traceback.format_exception(error))
        where = f"{self.what} failed in worker {setup.rank} of pool {setup.pool!r}{_samples(self.batch)}"
        raise WorkerError(f"{where}: {type(error).__name__}: {error}\n{told}") from None


def _samples(batch: Batch | None) -> str:
    if batch is None or "sample_id" not in batch or not len(batch):
        return ""
    ids = batch["sample_id"].tolist()
    return f", samples {', '.join(map(str, ids[:8]))}{' ...' if len(ids) > 8 else ''}"
