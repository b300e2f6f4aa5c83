"""Which roles share devices, how many each pool gets, and how each role is cut: the paper's Algorithm 1, exact and pruned.

The paper enumerates set partitions of the models ("placements"), all allocations of devices to the sets, and for each model
the cheapest strategy. Here a pool's ways are Pareto fronts (``fronts``), and allocations are looked at in boxes (``boxes``)
of which those that can't beat what was found are never opened. The result is that of the enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, isinf
from time import monotonic
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.errors import ConfigError
from hybridflow.planner.boxes import Limits, Placement
from hybridflow.planner.cluster import Cluster, Machine
from hybridflow.planner.cost import CostModel, Estimate
from hybridflow.planner.fronts import Fronts
from hybridflow.planner.graph import TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Pool, Schedule, Strategy
from hybridflow.planner.stepping import Columns
from hybridflow.planner.ways import Ways

__all__ = ["Candidate", "Objective", "Result", "pool_seconds", "search", "set_partitions", "stage_seconds", "step_seconds"]

Array = NDArray[np.float64]
Sets = tuple[tuple[str, ...], ...]
Objective = Literal["throughput", "price"]
"""price: of a step, of the devices that work"""
LARGEST = 4096  # devices that are thought of when nothing fits


@dataclass(frozen=True)
class Candidate:
    """The best mapping of a placement; None where nothing fits, or where there was no time to look.

    ``pools``: seconds by pool and stage; ``seconds`` and ``price`` of a step. ``cost``: which of the two is minimised;
    ``bound``: no mapping of this placement costs less. ``loses``: why another placement is better.
    """

    placement: Sets
    mapping: DeviceMapping | None = None
    pools: Mapping[str, Sequence[float]] | None = None
    seconds: float = inf
    price: float = inf
    cost: float = inf
    bound: float = inf
    loses: str = ""

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds of the slowest pool in each."""
        return () if self.pools is None else stage_seconds(self.pools)


@dataclass(frozen=True)
class Result:
    """``runners_up``: of all other placements, the best first. ``bound``: no mapping costs less; ``optimal``: it is
    reached. ``placements`` and ``allocations``: as many as an enumeration looks at, of which ``evaluated`` were looked at
    in full. ``tokens`` of a step."""

    best: Candidate
    runners_up: tuple[Candidate, ...]
    bound: float
    optimal: bool
    tokens: float
    placements: int
    allocations: int
    evaluated: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.best.seconds


# --------------------------------------------------------------------------------------------------- cost of one mapping


def pool_seconds(graph: TaskGraph, mapping: DeviceMapping, estimates: Mapping[str, Estimate]) -> dict[str, list[float]]:
    """By name of the pool, seconds in each stage; those of the driver, if any role has no model, under ""."""
    pools = {role: pool.name for pool in mapping.pools for role in pool.roles}
    stages = 1 + max(graph.stages.values())
    found = {name: [0.0] * stages for name in pools.values()}
    for task in graph.tasks:
        seconds = found.setdefault(pools.get(task.role, ""), [0.0] * stages)
        seconds[graph.stages[task.name]] += estimates[task.name].seconds
    return found


def stage_seconds(pools: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
    """Of the slowest pool in each stage (the paper's d_cost)."""
    return tuple(max(times) for times in zip(*pools.values(), strict=True))


def step_seconds(pools: Mapping[str, Sequence[float]], schedule: Schedule) -> float:
    """ "sync": stages follow each other. "async": two steps are in flight, so that a step takes half of that, but no less
    than a pool works in all stages. Simulated steps take as long, or longer where pools wait for each other in turns."""
    every = sum(stage_seconds(pools))
    return every if schedule == "sync" else max(every / 2, *(sum(times) for times in pools.values()))


# ---------------------------------------------------------------------------------------------------------------- search


def search(
    graph: TaskGraph,
    cluster: Cluster,
    cost: CostModel,
    *,
    schedule: Schedule = "sync",
    objective: Objective = "throughput",
    deadline_s: float = inf,
    placements: Sequence[Sequence[Sequence[str]]] | None = None,
    allocations: Sequence[Sequence[int]] | None = None,
) -> Result:
    """The mapping that costs least, over all placements, allocations and strategies.

    A pool may leave devices idle that are hard to divide by. ``placements``: only these, sets of role names; a sampler that
    is left out goes with its learner. ``allocations``: devices of the sets, for each of the ``placements``. After
    ``deadline_s`` the best so far is returned, with a lower bound. ConfigError: nothing fits into memory, or a placement
    isn't one.
    """
    space = _Space(graph, cluster, cost, schedule, objective, monotonic() + deadline_s)
    units = _units(graph, schedule == "sync" and len(space.machines) == 1)
    every = [tuple(tuple(sum(one, ())) for one in sets) for sets in set_partitions(units)]
    sets = every if placements is None else [_completed(graph, one) for one in placements]
    given = space.checked(sets, allocations) if allocations is not None else [None] * len(sets)
    options = [space.options(*pair) for pair in zip(sets, given, strict=True)]
    order = sorted(range(len(sets)), key=lambda number: min(one.bound for one in options[number]))
    solved = {number: space.solve(options[number]) for number in order}
    candidates = sorted((space.candidate(sets[n], *solved[n]) for n in order), key=lambda one: (one.cost, one.bound))
    best, *others = candidates
    if best.mapping is None:
        pairs = zip(sets, allocations or [], strict=False)
        raise ConfigError([space.tight(*pair) for pair in pairs] or [space.misfit(sets)])
    bound = min(one.bound for one in candidates)
    return Result(
        best=best,
        runners_up=tuple(space.explained(one, best) for one in others),
        bound=bound,
        optimal=best.cost <= bound * (1 + 1e-6),
        tokens=graph.tokens,
        placements=len(sets),
        allocations=sum(one.allocations for several in options for one in several),
        evaluated=sum(one.best.evaluated for several in options for one in several),
    )


def set_partitions(items: Sequence[tuple[str, ...]]) -> Iterator[list[list[tuple[str, ...]]]]:
    """All ways to put the items into sets: 15 of 4, 52 of 5 (Algorithm 1's get_placements)."""
    if not items:
        yield []
        return
    first, *others = items
    for sets in set_partitions(others):
        yield [[first], *sets]
        for number, one in enumerate(sets):
            yield [*sets[:number], [first, *one], *sets[number + 1 :]]


# ------------------------------------------------------------------------------------------------------------- the space


class _Space:
    """Everything that can be chosen, and what was worked out about it."""

    def __init__(
        self, graph: TaskGraph, cluster: Cluster, cost: CostModel, schedule: Schedule, objective: Objective, until: float
    ) -> None:
        self.graph, self.cost, self.schedule, self.objective = graph, cost, schedule, objective
        self.machines: list[Machine] = []
        for _, machine in cluster.machines:
            self.machines += [] if machine in self.machines else [machine]
        self.devices = [sum(n * one.devices for n, one in cluster.machines if one == machine) for machine in self.machines]
        columns = Columns.of(graph, schedule)
        half = monotonic() + (until - monotonic()) / 2
        self.fronts = Fronts(Ways(graph, cost, columns, self.machines), half)
        self.any = False  # mapping was found
        self.limits = Limits(np.array(self.devices), self._prices(), self._driver(columns), until)

    def _prices(self) -> Array:
        if self.objective != "price":
            return np.empty(0)
        free = [machine.device.name for machine in self.machines if not machine.device.price]
        if free:
            raise ConfigError([f"cluster: device {free[0]} has no price; give it one, or plan for throughput"])
        return np.array([machine.device.price for machine in self.machines])

    def _driver(self, columns: Columns) -> Array:
        """What has no model runs in the driver, beside the pools."""
        seconds, names = np.zeros(len(columns)), {role.name for role in self.graph.roles}
        for task in self.graph.tasks:
            if task.role not in names:
                seconds += columns.shares[task.name] * task.seconds * task.times
        return seconds

    def options(self, sets: Sets, given: tuple[int, ...] | None) -> list[Placement]:
        """A placement on every choice of machines for its pools."""
        kinds = product(range(len(self.machines)), repeat=len(sets))
        return [Placement(self.fronts, self.limits, sets, one, given) for one in kinds]

    def solve(self, options: Sequence[Placement]) -> tuple[Placement, float]:
        """The one that costs least, and what none costs less than."""
        cost = inf
        for one in sorted(options, key=lambda one: one.bound):
            cost = min(cost, one.solve(cost, not self.any).cost)
            self.any = self.any or cost < inf
        return min(options, key=lambda one: one.best.cost), min(one.bound for one in options)

    def checked(self, placements: Sequence[Sets], allocations: Sequence[Sequence[int]]) -> list[tuple[int, ...] | None]:
        """ConfigError: an allocation that isn't one of its placement, or has more devices than there are."""
        if len(placements) != len(allocations):
            raise ConfigError([f"{len(allocations)} allocations for {len(placements)} placements; expected one for each"])
        for sets, given in zip(placements, allocations, strict=True):
            if len(given) != len(sets) or min(given) < 1 or sum(given) > sum(self.devices):
                have = f"allocation {list(given)} of placement {_text(sets)}"
                raise ConfigError(
                    [f"{have}: expected {len(sets)} whole numbers from 1 on, {sum(self.devices)} in all at most"]
                )
        return [tuple(one) for one in allocations]

    def candidate(self, placement: Sets, chosen: Placement, bound: float) -> Candidate:
        found, bound = chosen.best, 0.0 if self.fronts.skipped else bound
        if not found.picks:
            return Candidate(placement, bound=bound)
        ways = [
            (front.strategies[pick], int(front.devices[pick]))
            for front, pick in zip(found.fronts, found.picks, strict=True)
        ]
        pools = tuple(
            Pool(self._name(roles) if len(placement) > 1 else "main", self.machines[kind], devices, roles)
            for roles, kind, (_, devices) in zip(chosen.sets, chosen.kinds, ways, strict=True)
        )
        strategies: dict[str, Strategy] = {}
        for one, _ in ways:
            strategies |= one
        mapping = DeviceMapping(pools, strategies, self.schedule)
        times = pool_seconds(self.graph, mapping, self.cost.estimates(mapping))
        seconds = step_seconds(times, self.schedule)
        price = seconds / 3600 * sum(pool.devices * pool.machine.device.price for pool in pools)
        return Candidate(placement, mapping, times, seconds, price, found.cost, bound)

    def _name(self, roles: tuple[str, ...]) -> str:
        """Of a pool: its first role that is trained, if any is."""
        return next((role.name for role in self.graph.roles if role.name in roles and role.trained), roles[0])

    # ------------------------------------------------------------------------------------------------------------- words

    def explained(self, one: Candidate, best: Candidate) -> Candidate:
        """Why it isn't the best."""
        if one.mapping is None:
            late = f"there was no time to look at it; it costs {one.bound:.4g} or more"
            return replace(one, loses=self._too_small(one.placement) if isinf(one.bound) else late)
        if self.objective == "price":
            mine, its = (f"{_working(c.mapping.pools)} for {c.seconds:.4g} s" for c in (one, best) if c.mapping)
            return replace(one, loses=f"costs {one.price:.4g} a step instead of {best.price:.4g}: {mine}, not {its}")
        return replace(one, loses=self._slower(one, best))

    def _slower(self, one: Candidate, best: Candidate) -> str:
        """What makes it slow: the stage that loses most, or the pool that takes longest if stages don't wait."""
        assert one.pools is not None and one.mapping is not None
        times = one.pools
        if self.schedule == "async":
            name = max(times, key=lambda name: sum(times[name]))
            where, stages = f"{sum(times[name]):.4g} s in each step", range(len(times[name]))
            if (chain := sum(one.stages)) / 2 > sum(times[name]):
                return f"{chain:.4g} s from prompts to update, and two steps in flight"
        else:
            stage = int(np.argmax(np.subtract(one.stages, best.stages)))
            name = max(times, key=lambda name: times[name][stage])
            where = f"{one.stages[stage]:.4g} s instead of {best.stages[stage]:.4g} in stage {stage + 1}"
            stages = range(stage, stage + 1)
        pool = next((pool for pool in one.mapping.pools if pool.name == name), None)
        roles = [role.name for role in self.graph.roles]
        there = [
            task.name
            for task in self.graph.tasks
            if self.graph.stages[task.name] in stages and (task.role in pool.roles if pool else task.role not in roles)
        ]
        return f"{where}: {', '.join(there)} on {_working([pool]) if pool else 'the driver'}"

    def _too_small(self, sets: Sets) -> str:
        total = sum(self.devices)
        if len(self.machines) > 1:
            return f"doesn't fit into the memory of {total} devices"
        least = [self._first(roles, 0, total) for roles in sets]
        for roles, number in zip(sets, least, strict=True):
            if number is None:
                return f"{', '.join(roles)} together don't fit into the memory of all {total} devices"
        known = [number for number in least if number is not None]
        return f"its pools need {' + '.join(map(str, known))} = {sum(known)} devices to fit into memory; there are {total}"

    def tight(self, sets: Sets, given: Sequence[int]) -> str:
        """What to say when a fixed allocation doesn't fit."""
        least = ", ".join(f"{min(self._least(roles, kind) for kind in range(len(self.machines))):g}" for roles in sets)
        return (
            f"placement {_text(sets)} doesn't fit into the memory of {list(given)} devices; the least of each are {least}"
        )

    def misfit(self, placements: Sequence[Sets]) -> str:
        """What to say when nothing fits: the fewest machines of a kind that would do, or which roles never fit."""
        counts = zip(self.devices, self.machines, strict=True)
        have = f"{' + '.join(f'{total // m.devices} machines of {m.devices} x {m.device.name}' for total, m in counts)}"
        enough, never = [], set[str]()
        for kind, machine in enumerate(self.machines):
            least = {roles: self._least(roles, kind) for roles in {roles for sets in placements for roles in sets}}
            sums = [sum(least[roles] for roles in sets) for sets in placements]
            if min(sums) < inf:
                enough.append(f"{ceil(min(sums) / machine.devices)} machines of {machine.devices} x {machine.device.name}")
            else:
                never |= {role.name for role in self.graph.roles if self._least((role.name,), kind) == inf}
        if enough:
            return f"no mapping fits into the memory of {have}; the smallest cluster that would do: {' or '.join(enough)}"
        who = f"{', '.join(sorted(never))}, even alone" if never else "the roles together"
        return f"no mapping fits into the memory of {have}, nor of {LARGEST} such devices: {who}; take larger devices"

    def _first(self, roles: tuple[str, ...], kind: int, limit: int, start: int = 1) -> int | None:
        """The smallest number of devices that the roles fit on, up to a limit (Algorithm 1's get_min_alloc)."""
        return next((n for n in range(start, limit + 1) if self.fronts.fits(roles, kind, n)), None)

    def _least(self, roles: tuple[str, ...], kind: int) -> float:
        """How many devices they need, on any number of machines."""
        total = self.machines[kind].devices
        while total <= LARGEST:
            if (least := self._first(roles, kind, total, total // 2 + 1)) is not None:
                return least
            total *= 2
        return inf


# ------------------------------------------------------------------------------------------------------------ placements


def _units(graph: TaskGraph, tied: bool) -> list[tuple[str, ...]]:
    """What is placed: roles with a model; samplers with their learners if ``tied``: on equal machines, when neither works
    while the other does, apart they could only lose."""
    learners = {role.name for role in graph.roles}
    apart = [role.name for role in graph.roles if not (tied and role.weights_of in learners)]
    return [
        (name, *(role.name for role in graph.roles if role.name not in apart and role.weights_of == name)) for name in apart
    ]


def _completed(graph: TaskGraph, sets: Sequence[Sequence[str]]) -> Sets:
    """With samplers that were left out. ConfigError: roles that are missing, unknown or placed twice."""
    placed = [name for one in sets for name in one]
    full = tuple(
        (*one, *(role.name for role in graph.roles if role.name not in placed and role.weights_of in one)) for one in sets
    )
    have, want = sorted(name for one in full for name in one), sorted(role.name for role in graph.roles)
    if have != want or not all(full):
        raise ConfigError([f"placement {_text(sets)}: expected each of {', '.join(want)} in one set"])
    return full


def _text(sets: Sequence[Sequence[str]]) -> str:
    return " | ".join(", ".join(one) for one in sets)


def _working(pools: Sequence[Pool]) -> str:
    devices = sum(pool.devices for pool in pools)
    return f"{devices} device{'s' if devices > 1 else ''}"
