"""Roles and their verbs: how an algorithm speaks with models, wherever they run.

A *verb* is a method ``Batch -> Batch`` of a worker class that declares the columns it reads and writes. A *role* says
which worker class to build, with which arguments, under which name. ``runtime.role(role)`` gives a handle of the
worker's own type: an algorithm calls ``critic.compute_values(batch)`` and can't tell a worker in this process from a group
of processes elsewhere. Functions that travel to workers (losses, estimators) are *declared* in the same way:

    @columns(reads=("rewards", "response_mask"), writes=("advantages", "returns"))
    def discounted_returns(batch, gamma): ...

    fn = discounted_returns.bind(gamma=0.99)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
from torch import Tensor

from hybridflow.core.batch import Batch
from hybridflow.core.files import Written
from hybridflow.core.metrics import Metrics, Span
from hybridflow.core.placement import Mesh, TransferProtocol

__all__ = [
    "ActionSpace",
    "Actor",
    "Algorithm",
    "Critic",
    "Declared",
    "Drained",
    "Estimator",
    "Fn",
    "HandsOver",
    "Loss",
    "MemoryPart",
    "Offloadable",
    "Role",
    "Runtime",
    "Saving",
    "Scorer",
    "Streaming",
    "Verb",
    "WorkerContext",
    "WorkingActor",
    "begins_early",
    "chain",
    "columns",
    "control",
    "control_protocol",
    "is_control",
    "remote",
    "renamed",
    "update",
    "verb_of",
]

W = TypeVar("W")
Method = TypeVar("Method", bound=Callable[..., Any])
MemoryPart = Literal["weights", "optimizer"]
Kind = Literal["generate", "reward", "forward", "train", "compute"]
Names = tuple[str, ...]
RowsOf = Literal["same", "new", "one"]
NamesOf = Names | Callable[[Mapping[str, Any]], Names]
Per = Literal["step", "row", "group"]
On = Literal["outputs", "networks", "step", "weights"]
PerOf = Per | Callable[[Mapping[str, Any]], Per]


@dataclass(frozen=True)
class Verb:
    """What a method declares. ``reads`` and ``writes`` may be functions of the role's arguments.

    ``protocol``: how rows reach the ranks of a worker group, and whose outputs make the result.
    ``rows``: "same" (one output row for each input row), "new" (the verb makes rows of its own, as environments do, and
    writes ``sample_id``, which orders them) or "one" (a new row, of all input rows together). ``kind`` sorts the verb's
    time into the split of a step. ``makes``: columns that the verb makes for declared functions among its arguments; no
    batch has to bring them, and they are no output. ``begins``: the worker's method that gets the rows of a member's call
    at once, before the calls that come first are done, so that work on them can begin.
    """

    protocol: TransferProtocol
    reads: NamesOf
    writes: NamesOf
    rows: RowsOf
    kind: Kind
    makes: Names
    begins: str


def remote(
    protocol: TransferProtocol,
    *,
    reads: NamesOf = (),
    writes: NamesOf = (),
    rows: RowsOf = "same",
    kind: Kind = "forward",
    makes: Names = (),
    begins: str = "",
) -> Callable[[Method], Method]:
    """Declare a method as a verb: it moves rows, ``Batch -> Batch``."""
    protocol.distribute(np.zeros(0, np.int64), Mesh())  # refuses here what is for control methods only

    def declare(method: Method) -> Method:
        method.verb = Verb(protocol, reads, writes, rows, kind, makes, begins)  # type: ignore[attr-defined]
        return method

    return declare


@overload
def control(method: Method, /) -> Method: ...
@overload
def control(method: TransferProtocol, /) -> Callable[[Method], Method]: ...
def control(method: Any, /) -> Any:
    """Declare a method that moves no rows (save, export, names ...): every rank calls it with the same arguments.

    Its result is that of rank 0. With a protocol it returns a list, and the result is the lists of several ranks, one
    behind the other: of the protocol's ``collect`` ranks (THREE_D_PP_ONLY: one of each pipeline stage), or of all ranks
    (ONE_TO_ALL and ALL_TO_ALL); with ALL_TO_ALL its arguments are lists with one entry for each rank, which gets its own.
    """
    if isinstance(method, TransferProtocol):
        return lambda function: _declare_control(function, method)
    return _declare_control(method, None)


def _declare_control(method: Any, protocol: TransferProtocol | None) -> Any:
    method.control = True
    method.control_protocol = protocol
    return method


def verb_of(method: Any) -> Verb | None:
    """The declaration of a method, None if it is no verb."""
    return getattr(method, "verb", None)


def begins_early(worker: Any) -> bool:
    """Whether a worker's class has a verb that a member may begin before its turn."""
    verbs = (verb_of(method) for method in vars(worker).values()) if isinstance(worker, type) else ()
    return any(verb is not None and verb.begins for verb in verbs)


def is_control(method: Any) -> bool:
    return getattr(method, "control", False)


def control_protocol(method: Any) -> TransferProtocol | None:
    """The protocol that a control method declares, None for the result of rank 0."""
    protocol: TransferProtocol | None = getattr(method, "control_protocol", None)
    return protocol


@dataclass
class WorkerContext:
    """What a worker gets from its runtime. Metrics added here reach the driver under ``<role>/<name>``.

    ``rank`` in ``mesh``: who it is among the workers of its role. ``reduce`` sums a contiguous tensor over the
    data-parallel blocks, in place; None where there is one. ``going`` is cleared while the driver has paused the worker.
    ``lines``: the ``ProcessMesh`` of the worker, None where it is alone. ``processes``: child processes that have shared
    out the rows of the last call, or this one.
    """

    metrics: Metrics = field(default_factory=Metrics)
    mesh: Mesh = field(default_factory=Mesh)
    rank: int = 0
    reduce: Callable[[Tensor], Any] | None = None
    going: Event | None = None
    lines: Any = None
    processes: int = 1

    @property
    def block(self) -> int:
        """Which data-parallel block the worker belongs to."""
        return self.mesh.coordinates(self.rank)[0]

    def breathe(self) -> None:
        """For long work, between two pieces of it: waits as long as the worker is paused."""
        if self.going is not None:
            self.going.wait()

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor``, summed in place over the data-parallel blocks."""
        if self.reduce is not None:
            self.reduce(tensor)
        return tensor


@dataclass(frozen=True)
class Role(Generic[W]):
    """What to build: ``worker(context, **args)``, called ``name``. ``rename`` maps written columns to other names.

    ``max_workers``: the most processes of a pool that it can use, None for any number. ``replica``, of a learner: makes
    what a sampler reads instead of it where the two are in different processes.
    """

    name: str
    worker: Callable[..., W]
    args: Mapping[str, Any] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    max_workers: int | None = None
    replica: Callable[[WorkerContext], Any] | None = None

    def columns_of(self, verb: Verb, arguments: Sequence[Any]) -> tuple[Names, Names]:
        """(reads, writes) of a call: the verb's own plus those of declared functions among its arguments."""
        functions = [argument for argument in arguments if isinstance(argument, Fn)]
        reads = [*_names(verb.reads, self.args), *(name for fn in functions for name in fn.reads)]
        writes = [*_names(verb.writes, self.args), *(name for fn in functions for name in fn.writes)]
        return _without(verb.makes, reads), _without(verb.makes, writes)


def _without(left_out: Names, names: Sequence[str]) -> Names:
    return tuple(name for name in dict.fromkeys(names) if name not in left_out)


def _names(names: NamesOf, args: Mapping[str, Any]) -> Names:
    return names(args) if callable(names) else names


class Loss(NamedTuple):
    """What a loss returns: ``terms`` unreduced ([N] steps or [R] rows), metrics with one value a step or row, columns.

    ``drift`` [N]: log-probability under the learner minus that under the sampling policy, of steps that were sampled.
    """

    terms: Tensor
    metrics: Mapping[str, Tensor]
    columns: Mapping[str, Tensor] = {}
    drift: Tensor | None = None


class Declared:
    """A top-level pure function with declared columns. Call it directly, or bind its parameters to make an ``Fn``."""

    def __init__(
        self,
        function: Callable[..., Any],
        reads: NamesOf,
        writes: Names,
        per: PerOf,
        min_group: int,
        on: On,
        trains: NamesOf,
        noise: bool,
    ) -> None:
        self.function, self.reads, self.writes, self.per, self.min_group = function, reads, writes, per, min_group
        self.on, self.trains, self.noise = on, trains, noise
        signature = inspect.signature(function).parameters.values()
        self.defaults = {param.name: param.default for param in signature if param.default is not param.empty}
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self.function(*args, **params)

    def bind(self, **params: Any) -> Fn:
        """Fix the parameters; the result is plain data that pickles by the function's name."""
        return Fn(self, params, _names(self.reads, self.defaults | params), self.writes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self.function.__module__, self.function.__qualname__)


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def columns(
    reads: NamesOf,
    writes: Names = (),
    *,
    per: PerOf = "step",
    min_group: int = 1,
    on: On = "outputs",
    trains: NamesOf = (),
    noise: bool = False,
) -> Callable[[Callable[..., Any]], Declared]:
    """Declare an estimator (``Batch -> {name: column}``) or a loss (``(outputs, columns) -> Loss``).

    ``reads``, ``per`` and ``trains`` may be functions of the parameters (the bound ones and the defaults of the others).
    ``per``: what a loss's terms are divided by, the number of steps, rows or groups of the minibatch; a loss per group
    reads ``group_id`` and always sees whole groups, their rows side by side in the order of the batch. ``min_group``: the
    smallest number of responses to a prompt that an estimator needs. ``on``: what a loss is given first, the outputs of
    the model or, for losses that evaluate several networks (Q-learning), the learner's networks by name. ``trains``: which
    of them get gradients and take a step, the main one if none is named. ``noise``: the loss is given a column "noise" of
    standard normal numbers like ``actions``, which derive from the seed, the optimizer step and the place in the minibatch.

    A function ``on`` "step" moves what it trains by itself, once an update: it is given the networks, the columns of all
    steps, and what sums a tensor over all ranks that have some of them. One ``on`` "weights" moves networks without
    data: it is given the parameters of each by its name.
    """

    def declare(function: Callable[..., Any]) -> Declared:
        return Declared(function, reads, writes, per, min_group, on, trains, noise)

    return declare


@dataclass(frozen=True)
class Fn:
    """A declared function with its parameters: what is shipped to a worker.

    ``every``: an update leaves it out but in every so many-th minibatch, counted over the life of the learner by the
    optimizer steps of its first loss.
    """

    declared: Declared
    params: Mapping[str, Any]
    reads: Names
    writes: Names
    every: int = 1

    def __call__(self, *args: Any) -> Any:
        return self.declared(*args, **self.params)

    @cached_property
    def name(self) -> str:
        if self.declared is _chain:
            return " > ".join(fn.name for fn in self.params["functions"])
        return self.params["functions"][0].name if self.declared is _renamed else self.declared.__name__

    @cached_property
    def per(self) -> Per:
        per = self.declared.per
        return per({**self.declared.defaults, **self.params}) if callable(per) else per

    @property
    def on(self) -> On:
        return self.declared.on

    @cached_property
    def trains(self) -> Names:
        return _names(self.declared.trains, {**self.declared.defaults, **self.params})

    @property
    def noise(self) -> bool:
        return self.declared.noise

    @property
    def min_group(self) -> int:
        parts: Sequence[Fn] = self.params.get("functions", ())
        return max([self.declared.min_group, *(fn.min_group for fn in parts)])


@columns(())
def _chain(batch: Batch, functions: Sequence[Fn], keep: Names) -> dict[str, Any]:
    for fn in functions:
        batch = batch.with_columns(**fn(batch))
    return {name: batch[name] for name in keep}


def chain(*functions: Fn, keep: Names | None = None) -> Fn:
    """Estimators one after another; what an earlier one writes, a later one may read.

    ``keep``: those of the written columns that are the result, by default all of them.
    """
    reads: list[str] = []
    written: list[str] = []
    for fn in functions:
        reads += [name for name in fn.reads if name not in written]
        written += fn.writes
    result = tuple(name for name in dict.fromkeys(written) if keep is None or name in keep)
    return Fn(_chain, {"functions": functions, "keep": result}, tuple(dict.fromkeys(reads)), result)


@columns((), per=lambda params: params["functions"][0].per)
def _renamed(*args: Any, functions: tuple[Fn], names: Mapping[str, str]) -> Any:
    (fn,) = functions
    *outputs, given = args
    known = {name: given[names.get(name, name)] for name in fn.reads}
    if isinstance(given, Batch):
        return {names.get(name, name): column for name, column in fn(Batch(known, len(given))).items()}
    result: Loss = fn(*outputs, {**given, **known})
    return result._replace(columns={names.get(name, name): column for name, column in result.columns.items()})


def renamed(fn: Fn, names: Mapping[str, str]) -> Fn:
    """``fn`` on other columns: wherever it reads or writes ``name``, it now reads or writes ``names[name]``.

    The same estimator and loss then serve a second stream: ``renamed(gae.bind(...), {"values": "cost_values", ...})``.
    """
    reads, writes = (tuple(names.get(name, name) for name in part) for part in (fn.reads, fn.writes))
    return Fn(_renamed, {"functions": (fn,), "names": names}, reads, writes)


class Actor(Protocol):
    """The trained policy: samples and learns. ``compute_log_probs`` writes ``learner_log_probs``. Every minibatch of an
    ``update`` is a step on each of the losses, in their order."""

    def rollout(self, batch: Batch, /) -> Batch: ...
    def compute_log_probs(self, batch: Batch, /) -> Batch: ...
    def update(self, batch: Batch, loss: Fn, /, *others: Fn) -> Batch: ...


class WorkingActor(Actor, Protocol):
    """An actor whose env workers turn their own rollouts into gradients, each with the weights that it has; ``apply`` takes
    steps on them. ``estimate`` makes the advantages and returns that the losses read."""

    def gradients(self, batch: Batch, estimate: Fn, /, *losses: Fn) -> Batch: ...
    def apply(self, batch: Batch, /) -> Batch: ...


class ActionSpace(NamedTuple):
    """``size``: how many discrete actions there are, or numbers in a continuous one."""

    discrete: bool
    size: int


class Critic(Protocol):
    """A trained value model; writes ``values`` and ``bootstrap_values``."""

    def compute_values(self, batch: Batch, /) -> Batch: ...
    def update(self, batch: Batch, loss: Fn, /) -> Batch: ...


class Scorer(Protocol):
    """Judges rows: reward functions write ``scores``, a reference model writes ``ref_log_probs``."""

    def score(self, batch: Batch, /) -> Batch: ...


class Estimator(Protocol):
    """Runs declared estimators over whole batches."""

    def compute(self, batch: Batch, fn: Fn, /) -> Batch: ...


@runtime_checkable
class Offloadable(Protocol):
    """A worker with a model, which can leave memory while other roles of its process work; the runtime says when.

    ``offload`` puts away all parts but those to ``keep``, ``onload`` takes back what a verb or control method works on.
    Both return the bytes that moved. Tensors keep their identity.
    """

    def offload(self, keep: Collection[MemoryPart] = ()) -> int: ...
    def onload(self, method: str) -> int: ...


@runtime_checkable
class Streaming(Protocol):
    """A worker with a verb that ``begins`` early. ``abandon``: of what has begun nothing will be asked for."""

    def abandon(self) -> None: ...


@runtime_checkable
class HandsOver(Protocol):
    """A worker with state of its own for some rows, such as environments, which goes with them when another number of
    workers shares them out.

    ``hand_over``: be a rank of ``mesh`` in its context from now on, or none; the states of those rows that others have
    then, which are forgotten. ``take_over``: go on with those of ``states`` that are this rank's.
    """

    def hand_over(self, mesh: Mesh, /) -> Sequence[Any]: ...
    def take_over(self, states: Sequence[Any], /) -> None: ...
    def load_state_dict(self, state: Any, /) -> None: ...


class Saving(Protocol):
    """A worker that keeps tensors: its ranks write them to a folder by themselves, and read them there. By control methods.

    ``save`` returns, and then the files are written while the worker goes on: ``saved`` tells of every rank which they are,
    None if it isn't done. ``sees`` raises a CheckpointError if a file of the driver isn't there for a rank.
    """

    def save(self, folder: Path, /) -> dict[str, Any]: ...
    def saved(self, wait: bool, /) -> list[list[Written] | None]: ...
    def sees(self, file: Path, /) -> None: ...
    def load(self, folder: Path, state: Mapping[str, Any], files: Sequence[Written], /) -> None: ...


class Drained(NamedTuple):
    """What happened since the last drain: metrics by name, and the spans of verbs that ran."""

    metrics: Metrics
    spans: Sequence[Span]


class Runtime(Protocol):
    """Connects handles to workers.

    ``share``: let the sampler use the learner's networks, both named by role: in place where it can, otherwise as a copy
    that ``publish`` renews, in all of its processes or in one. ``ready`` waits until every role is built.

    ``member``: the handle of a role's process ``rank`` alone, which works as a group of one. ``drain`` doesn't wait for its
    calls, ``wait_any`` does: until one of the ``batches`` is there, which is the answer. ``pending``: who isn't yet.
    ``num_workers``: in how many processes a role works now.

    ``save``: the state of every role that has one, by role; those that are ``Saving`` begin to write to ``folder``/<role>,
    until ``saved``: their files by role, None if they aren't done. ``sees``: all of them see a file of the driver.
    """

    def role(self, role: Role[W], /) -> W: ...
    def share(self, learner: str, sampler: str, /) -> None: ...
    def publish(self, learner: str, sampler: str, rank: int | None = None, /) -> None: ...
    def member(self, handle: W, rank: int, /) -> W: ...
    def wait_any(self, batches: Sequence[Batch], /) -> int: ...
    def pending(self, batches: Sequence[Batch], /) -> list[Batch]: ...
    def num_workers(self, role: str, /) -> int: ...
    def ready(self) -> None: ...
    def drain(self) -> Drained: ...
    def save(self, folder: Path, /) -> dict[str, Any]: ...
    def saved(self, wait: bool, /) -> dict[str, list[Written]] | None: ...
    def sees(self, file: Path, /) -> None: ...
    def load(self, folder: Path, state: Mapping[str, Any], files: Mapping[str, Sequence[Written]], /) -> None: ...
    def stop(self) -> None: ...


class Algorithm(Protocol):
    """One step is ``learn(rollout(source))``. Neither may branch on values.

    Subclass it: ``observe`` sees the step's metrics (for adaptive coefficients), the state is what such coefficients need
    to resume; by default there is none.
    """

    def rollout(self, source: Batch, /) -> Batch: ...
    def learn(self, batch: Batch, /) -> Batch: ...

    @classmethod
    def smallest_group(cls, config: Any, /) -> int:
        """Responses to a prompt that the method needs at least."""
        return 1

    @classmethod
    def needs_reference(cls, config: Any, /) -> bool:
        """Whether a frozen copy of the first policy has to score the responses."""
        return False

    @classmethod
    def needs_critic(cls, config: Any, /) -> bool:
        """Whether a critic that the constructor can do without has to be there."""
        return True

    def metrics(self) -> dict[str, float]:
        """The method's own numbers for the record of a step: coefficients that adapt, as they were in it."""
        return {}

    def observe(self, metrics: Mapping[str, float], /) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        return None


def update(batch: Batch, *pairs: tuple[Actor | Critic, Fn]) -> None:
    """Update each role with its loss, on the same batch; the updates are independent of each other."""
    for role, loss in pairs:
        role.update(batch, loss)
