"""The allocator: every few steps the pools of a run bid for its CPU slots, and get what the auction gives them.

    spans of the last steps ──> seconds of each pool ──> what they would be on other units ──> planner/auction.py
    resize, rethread        <── units of each pool   <──────────────────────────────────────────┘

Units are what a pool can have more or fewer of while the run goes on: worker processes that share rows out, processes that
call reward functions, or threads of torch in processes that learn. What seconds would be on another number of units is
known from how changes turned out (``Scaling``), of this run and before it of earlier ones on this machine, whose profiles
keep that; or from profiles of several numbers of units. Workers of a pool that aren't equally fast get rows in proportion.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from hybridflow.build import Run
from hybridflow.build_profile import Kept, base_if_any, kept_roles
from hybridflow.controller.elastic import has_own_workers
from hybridflow.controller.protocols import blocks
from hybridflow.core.errors import UserError
from hybridflow.core.metrics import Span
from hybridflow.planner.allocation import Bidder, allocate
from hybridflow.planner.auction import Auction, ending
from hybridflow.planner.profile_base import Learned, ProfileBase
from hybridflow.rollout.schedule import Ahead, Asynchronous
from hybridflow.telemetry.records import append_record, keep_until
from hybridflow.train import Step

if TYPE_CHECKING:
    from hybridflow.controller.ray_runtime import RayRuntime

__all__ = ["Allocator", "Scaling", "Tenant", "busy_s", "make_allocator", "paced", "tenants"]

EVERY = 5
"""steps between two auctions"""
PARALLEL = {"workers": 0.95, "processes": 0.95, "threads": 0.7}
"""of a pool's work, what more units are thought to divide as long as nothing is known"""
UNEVEN = 0.9
"""of the seconds of a pool's slowest worker: that much dealing by measured speeds has to save"""

Source = Literal["constants", "profile", "earlier runs", "this run"]


@dataclass
class Scaling:
    """How seconds depend on units: those on one unit times 1 - parallel + parallel x the largest share of a unit.

    ``rows``: that units share out, whole ones; 0: so many that it doesn't matter. ``source``: where ``parallel`` is from.
    """

    parallel: float
    rows: int = 0
    source: Source = "constants"

    def seconds(self, measured_s: float, now: int, units: int) -> float:
        """On ``units``, if they were ``measured_s`` on as many as ``now``."""
        return measured_s * self._factor(units) / self._factor(now)

    def learn(self, before: tuple[int, float], after: tuple[int, float]) -> None:
        """From (units, seconds) before and after a change of units. Half of what they say is taken: the work may have
        changed as well."""
        self.parallel, self.source = (self.parallel + self._parallel(before, after)) / 2, "this run"

    def begin(self, work: str, kind: str, roles: Mapping[str, Kept], base: ProfileBase) -> None:
        """From what ``base`` knows of a pool's ``work``, which is that of ``roles``, if it knows anything."""
        if (learned := base.scaling(work, kind)) is not None:
            self.parallel, self.source = learned, "earlier runs"
        elif ends := base.ends(roles, "threads" if kind == "threads" else "workers"):
            self.parallel, self.source = self._parallel(*ends), "profile"

    def _parallel(self, one: tuple[int, float], other: tuple[int, float]) -> float:
        """What (units, seconds) of the same work come of; as it is where both share rows out alike."""
        (few, few_s), (many, many_s) = sorted((one, other))
        if self._share(few) == self._share(many):
            return self.parallel
        ratio = many_s / few_s if few_s else 1.0
        gain = 1.0 - ratio
        return min(1.0, gain / (gain + ratio * self._share(few) - self._share(many))) if gain > 0 else 0.0

    def _factor(self, units: int) -> float:
        return 1.0 - self.parallel + self.parallel * self._share(units)

    def _share(self, units: int) -> float:
        return math.ceil(self.rows / units) / self.rows if self.rows else 1.0 / units


@dataclass
class Tenant:
    """A pool that bids. ``kind`` of its ``units``, of which it has 1 to ``most``; each needs so many ``slots``. Tenants of
    one ``lane`` run one after another. ``work``: what its roles are, for profiles. ``paced``: rows follow the speeds of its
    workers."""

    pool: str
    kind: Literal["workers", "processes", "threads"]
    roles: Sequence[str]
    units: int
    most: int
    slots: int
    lane: str
    scaling: Scaling
    speeds: tuple[float, ...] = ()
    work: str = ""
    paced: bool = True

    def bidder(self, measured_s: float) -> Bidder:
        levels = range(1, self.most + 1)
        seconds = {units: self.scaling.seconds(measured_s, self.units, units) for units in levels}
        return Bidder(self.pool, seconds, self.lane, needs={"slots": float(self.slots)}, source=self.scaling.source)

    def take(self, units: int, speeds: tuple[float, ...], runtime: RayRuntime) -> None:
        """Have so many from the next call on; ``speeds`` of workers, as far as they are known."""
        known = (*speeds, *[fmean(speeds)] * (units - len(speeds)))[:units] if speeds else ()
        if (units, known) == (self.units, self.speeds):
            return
        self.units, self.speeds = units, known
        if self.kind == "threads":
            runtime.rethread(self.pool, units)
        else:
            for role in self.roles:
                runtime.resize(role, units, known)

    def pace(self, busy: Mapping[int, float]) -> tuple[float, ...]:
        """Of its workers, which were so ``busy``; only what a sampler's are dealt follows speeds."""
        if not self.paced or self.kind != "workers" or self.roles != ["sampler"] or not busy.keys() >= {*range(self.units)}:
            return self.speeds
        return paced([busy[rank] for rank in range(self.units)], self.scaling.rows, self.speeds)


def tenants(runtime: RayRuntime, slots: int, trained: Sequence[str], in_turns: bool, rows: int) -> list[Tenant]:
    """The pools of a run that has so many ``slots``. Those of ``trained`` roles work side by side; all others work on one
    batch in turns, and with ``in_turns`` trained ones wait for them. ``rows``: that a sampler's workers share out, 0: many.
    """
    found = []
    for pool in runtime.placement.pools:
        roles = [name for name in runtime.roles if runtime.placement.pool_of(name) == pool]
        learns = any(role in trained for role in roles)
        lane = "step" if in_turns else pool.name if learns else "rollout"
        found.append(_tenant(runtime, pool.name, roles, lane, slots, rows))
    return found


def _tenant(runtime: RayRuntime, pool: str, roles: Sequence[str], lane: str, slots: int, rows: int) -> Tenant:
    size, known = len(runtime.groups[pool].processes), runtime.roles
    own = [runtime.num_workers(role) for role in roles if has_own_workers(known[role])]
    if len(own) == len(roles) and min(own) > 0:
        return Tenant(pool, "processes", roles, min(own), slots, 1, lane, Scaling(PARALLEL["processes"]))
    if size > 1 and all(not runtime.obstacle(role) and runtime.widest(known[role]).size == size for role in roles):
        units, apart = min(map(runtime.num_workers, roles)), any(map(runtime.by_itself, roles))
        workers = Scaling(PARALLEL["workers"], 0 if apart else rows)
        return Tenant(pool, "workers", roles, units, size, 1, lane, workers, paced=not apart)
    threads = Scaling(PARALLEL["threads"])
    return Tenant(pool, "threads", roles, runtime.num_threads(pool), max(1, slots // size), size, lane, threads)


def busy_s(steps: Sequence[Sequence[Span]]) -> dict[str, dict[int, float]]:
    """By pool and rank: the seconds of a step that a worker worked, without those that it waited for its inputs."""
    busy: dict[str, dict[int, float]] = {}
    for span in [span for spans in steps for span in spans]:
        if span.worker and span.kind != "queue":
            pool, _, rank = span.worker.rpartition("/")
            ranks = busy.setdefault(pool, {})
            ranks[int(rank)] = ranks.get(int(rank), 0.0) + span.duration_s / len(steps)
    return busy


def paced(busy: Sequence[float], rows: int, speeds: tuple[float, ...]) -> tuple[float, ...]:
    """Relative speeds of workers that took ``busy`` seconds each for what they were dealt by ``speeds``, of ``rows`` (0:
    many); as before, unless dealing by them makes the slowest clearly faster."""
    if min(busy) <= 0:
        return speeds
    dealt = _dealt(len(busy), rows, speeds)
    rates = [share / seconds for share, seconds in zip(dealt, busy, strict=True)]
    new = tuple(max(0.01, round(rate / max(rates), 2)) for rate in rates)
    slowest = max(share / rate for share, rate in zip(_dealt(len(busy), rows, new), rates, strict=True) if share)
    return new if slowest < UNEVEN * max(busy) else speeds


def _dealt(workers: int, rows: int, speeds: Sequence[float]) -> list[float]:
    """The share of each worker."""
    if rows:
        return [len(part) / rows for part in blocks(np.ones(rows, np.int64), workers, speeds)]
    known = speeds or [1.0] * workers
    return [speed / sum(known) for speed in known]


def make_allocator(run: Run, path: Path) -> Allocator:
    """That of a run, whose rounds are told in the file ``path``."""
    runtime, trained = cast("RayRuntime", run.runtime), [*run.config.trained_sections]
    in_turns = not isinstance(run.trainer.schedule, Ahead | Asynchronous)
    rows = 0 if run.config.environment is None else run.config.environment.num_envs
    pools = tenants(runtime, runtime.num_slots, trained, in_turns, rows)
    _begin(pools, kept_roles(run.config))
    return Allocator(runtime, pools, runtime.num_slots, path)


def _begin(pools: Sequence[Tenant], roles: Mapping[str, Kept]) -> None:
    """From what is known on this machine; a base of profiles that can't be read is as good as none."""
    base = None
    with contextlib.suppress(UserError):
        base = base_if_any()
    for tenant in pools:
        own = {name: roles[name] for name in sorted(roles.keys() & {*tenant.roles})}
        tenant.work = " + ".join(f"{name} {model} {device}" for name, (model, device) in own.items())
        if base is not None:
            tenant.scaling.begin(tenant.work, tenant.kind, own, base)


@dataclass
class Allocator:
    """A hook. Every round of the auction becomes a line of the file ``path``."""

    runtime: RayRuntime
    tenants: Sequence[Tenant]
    slots: int
    path: Path
    auction: Auction = field(init=False)
    _steps: list[tuple[float, Sequence[Span]]] = field(default_factory=list, init=False)
    _before: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)
    _switch_s: float = field(default=0.0, init=False)
    _loaded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        held, capacity = {tenant.pool: tenant.units for tenant in self.tenants}, {"slots": float(self.slots)}
        self.auction = Auction(capacity, units=held)
        allocate([tenant.bidder(0.0) for tenant in self.tenants], capacity)  # what is missing is told before the first step

    def __call__(self, step: Step) -> None:
        self._steps.append((step.metrics["time/step_s"], step.spans))
        if step.number % EVERY == 0:
            self._decide(step.number)
            self._steps.clear()

    def rewind(self, step: int) -> None:
        """The run goes on after ``step`` again."""
        keep_until(self.path, step)
        self._steps.clear()

    def state_dict(self) -> dict[str, Any]:
        held = {
            one.pool: {"units": one.units, "speeds": one.speeds, "scaling": (one.scaling.parallel, one.scaling.source)}
            for one in self.tenants
        }
        own = {"held": held, "before": self._before, "switch_s": self._switch_s}
        return {"pools": self._pools, "auction": self.auction.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on with it, from the next call on with its units, too; or begin anew where pools or slots are others now."""
        if state["pools"] != self._pools:
            return
        self.auction.load_state_dict(state["auction"])
        self._before = {pool: (units, seconds) for pool, (units, seconds) in state["before"].items()}
        self._switch_s, self._loaded = state["switch_s"], True
        self._steps.clear()
        for tenant in self.tenants:
            held = state["held"][tenant.pool]
            tenant.scaling.parallel, tenant.scaling.source = held["scaling"]
            tenant.take(held["units"], tuple(held["speeds"]), self.runtime)

    @property
    def _pools(self) -> dict[str, Any]:
        return {one.pool: [one.kind, one.most, one.slots, self.slots] for one in self.tenants}

    def _decide(self, step: int) -> None:
        (first_s, _), *others = self._steps
        steady = others or self._steps  # a change of units costs the first step after it
        step_s = fmean(seconds for seconds, _ in steady)
        workers = busy_s([spans for _, spans in steady])
        busy = {one.pool: max(workers.get(one.pool, {}).values(), default=0.0) for one in self.tenants}
        self._switch_s /= 2  # the first change, to workers that have yet to make environments, costs most
        if self._before:
            if not self._loaded:  # or the first step has started the run as well
                self._switch_s = max(0.0, first_s - step_s)
            self._learn(busy)
        self._loaded = False
        round_ = self.auction.round(step, [one.bidder(busy[one.pool]) for one in self.tenants], self._switch_s, step_s)
        self._write(round_.record())
        changed = [one for one in self.tenants if one.units != round_.units[one.pool]]
        self._before = {one.pool: (one.units, busy[one.pool]) for one in changed}
        for tenant in self.tenants:
            speeds = tenant.pace(workers.get(tenant.pool, {}))
            tenant.take(round_.units[tenant.pool], speeds, self.runtime)

    def learned(self) -> list[Learned]:
        """For the next runs: of the pools that changed their units in this one."""
        own = [one for one in self.tenants if one.scaling.source == "this run"]
        return [Learned(one.work, one.kind, one.scaling.parallel) for one in own]

    def finish(self, step: int) -> None:
        """The run has ended with ``step``: what the last allocation came to."""
        if self._steps:
            self._write(ending(step, fmean(seconds for seconds, _ in self._steps)))

    def _write(self, record: dict[str, Any]) -> None:
        append_record(self.path, record)

    def _learn(self, busy: dict[str, float]) -> None:
        for tenant in self.tenants:
            if tenant.pool in self._before:
                tenant.scaling.learn(self._before[tenant.pool], (tenant.units, busy[tenant.pool]))
