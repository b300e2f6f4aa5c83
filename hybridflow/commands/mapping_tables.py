"""What a planned device mapping says, in tables and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridflow.core.graph import DRIVER
from hybridflow.core.placement import Mesh
from hybridflow.planner.cluster import Cluster
from hybridflow.planner.cost import CostModel, Estimate
from hybridflow.planner.graph import ModelRole, Task, TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Pool, Strategy
from hybridflow.planner.search import Candidate, Result, pool_seconds, step_seconds
from hybridflow.planner.simulate import Simulation
from hybridflow.telemetry.gantt import Lane
from hybridflow.telemetry.graph_tables import memory

__all__ = ["Picked", "data", "headline", "lanes", "tables", "told_cost", "told_pools", "verdict"]

Rows = list[tuple[str, ...]]
DTYPES = {2: "bfloat16", 4: "float32"}
RUNNERS = 5
"""that are shown"""


@dataclass(frozen=True)
class Picked:
    """The best mapping, and what is reckoned of it."""

    graph: TaskGraph
    cost: CostModel
    result: Result
    mapping: DeviceMapping
    estimates: Mapping[str, Estimate]
    simulation: Simulation
    systems: Mapping[str, DeviceMapping | str]
    """how others would run it, or why they can't"""

    def roles(self, pool: Pool) -> list[ModelRole]:
        return [role for role in self.graph.roles if role.name in pool.roles]

    def held(self, role: ModelRole) -> float:
        """Bytes of a device, whoever works."""
        return self.cost.resident_bytes(role, self.mapping.strategies[role.name])

    def working(self, role: ModelRole) -> float:
        """The most that it takes on top."""
        return self.cost.working_bytes(role, self.mapping.strategies[role.name])

    def place(self, task: Task) -> str:
        return next((pool.name for pool in self.mapping.pools if task.role in pool.roles), DRIVER)


def headline(algorithm: str, graph: TaskGraph, cluster: Cluster) -> str:
    """What is planned, for which devices."""
    drawn = [task for task in graph.tasks if task.kind == "generate"]
    task = (drawn or [max(graph.tasks, key=lambda task: task.tokens)])[0]
    lengths = f"{task.prompt:,.0f} + {task.response:,.0f} tokens" if drawn else f"{task.prompt + task.response:,.0f} tokens"
    vary = f", responses deviating by {task.deviation:,.0f}" if task.deviation else ""
    models = ", ".join(dict.fromkeys(f"{role.size.name} in {DTYPES[role.itemsize]}" for role in graph.roles))
    machines = " and ".join(f"{number} x {machine.devices} {machine.device.name}" for number, machine in cluster.machines)
    return f"{algorithm} with {models} on {machines}. A step is {task.rows:,} rows of {lengths}{vary}."


def verdict(picked: Picked) -> Iterator[str]:
    """How good the best is, and whether there could be better."""
    result = picked.result
    used = sum(pool.devices for pool in picked.mapping.pools)
    speed = f"{result.best.seconds:.4g} s a step, {result.tokens_per_second:,.0f} tokens/s"
    cost = f", {told_cost(result)} for a million tokens" if told_cost(result) else ""
    yield f"{speed}, {result.tokens_per_second / used:,.0f} on each of {used} devices{cost}."
    simulated = picked.simulation.step_s
    if abs(simulated / result.best.seconds - 1) > 0.01:
        yield f"Simulated over several steps, with waits and with lengths that are drawn: {simulated:.4g} s a step."
    if result.placements == result.allocations == 1:
        yield "There is no other placement."
    elif result.optimal:
        yield f"The best of {result.placements:,} placements with {result.allocations:,} allocations."
    else:
        yield f"Not all of {result.placements:,} placements were looked at; none saves more than {_gap(result):.0%}."


def _gap(result: Result) -> float:
    return 1 - result.bound / result.best.cost


def told_cost(result: Result) -> str:
    """Of a million tokens; empty if a device that works has no price."""
    pools = result.best.mapping.pools if result.best.mapping else ()
    priced = all(pool.machine.device.price for pool in pools)
    return f"{result.best.price / result.tokens * 1e6:.3g}" if priced else ""


class Told(NamedTuple):
    """A table with its header, what is said above it, and its columns of numbers."""

    title: str
    note: str
    rows: Rows
    right: tuple[str, ...] = ()


def tables(picked: Picked) -> Iterator[Told]:
    yield _pools(picked)
    yield _roles(picked)
    yield _tasks(picked)
    if any(one.mapping is not None for one in picked.result.runners_up):
        yield _runners(picked.result)
    if picked.systems:
        yield _systems(picked)


def _pools(picked: Picked) -> Told:
    rows: Rows = [("pool", "devices", "holds", "at work", "usable", "busy", "roles")]
    for pool in picked.mapping.pools:
        held = sum(map(picked.held, picked.roles(pool)))
        sizes = held, max(map(picked.working, picked.roles(pool))), picked.cost.usable_bytes(pool.machine)
        busy = f"{picked.simulation.utilisation(pool.name):.0%}"
        rows.append((pool.name, _devices(pool), *(memory(round(size)) for size in sizes), busy, ", ".join(pool.roles)))
    note = (
        "They work side by side; the roles of a pool take turns. Bytes are those of a device; rollouts take what is left."
    )
    return Told("Pools", note, rows, ("holds", "at work", "usable", "busy"))


def _devices(pool: Pool) -> str:
    return f"{pool.devices} {pool.machine.device.name}"


def _roles(picked: Picked) -> Told:
    rows: Rows = [("role", "pool", "model", "layout", "microbatch", "holds", "at work")]
    for pool in picked.mapping.pools:
        for role in picked.roles(pool):
            strategy = picked.mapping.strategies[role.name]
            told = (role.name, pool.name, role.size.name, _layout(strategy), _microbatch(role, strategy))
            rows.append((*told, *(memory(round(size)) for size in (picked.held(role), picked.working(role)))))
    return Told("Roles", "How each is cut, and what it takes of a device.", rows, ("holds", "at work"))


def _layout(strategy: Strategy) -> str:
    mesh = str(Mesh(dp=strategy.dp, tp=strategy.tp, pp=strategy.pp))
    more = [strategy.shard] * (strategy.shard != "none") + ["recomputing"] * strategy.recompute
    return ", ".join(["one device" if mesh == "1" else mesh, *more])


def _microbatch(role: ModelRole, strategy: Strategy) -> str:
    if role.weights_of:
        return ""
    if role.token_budget is not None:
        return f"{role.token_budget:,} tokens"
    return f"{strategy.rows} row{'s' * (strategy.rows > 1)}"


def _tasks(picked: Picked) -> Told:
    rows: Rows = [("stage", "pool", "task", "seconds", "made of")]
    stages = picked.graph.stages
    for task in sorted(picked.graph.tasks, key=lambda task: stages[task.name]):
        estimate = picked.estimates[task.name]
        rows.append(
            (str(stages[task.name] + 1), picked.place(task), task.name, f"{estimate.seconds:.3g}", _made_of(estimate))
        )
    if picked.mapping.schedule == "sync":
        note = "A stage takes as long as its slowest pool, and the next one waits for that."
    else:
        note = "Two steps are in flight: a step takes half of all stages, or all tasks of a pool if that is longer."
    return Told("Tasks", note, rows, ("seconds",))


def _made_of(estimate: Estimate) -> str:
    """Its largest parts: all of a twentieth or more."""
    parts = sorted(estimate.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {value:.3g}" for name, value in parts if value and value >= 0.05 * estimate.seconds)


def _runners(result: Result) -> Told:
    rows: Rows = [("placement", "devices", "seconds", "worse", "why")]
    for candidate in [one for one in result.runners_up if one.mapping is not None][:RUNNERS]:
        worse = f"{candidate.cost / result.best.cost - 1:+.1%}"
        rows.append((*told_pools(candidate), f"{candidate.seconds:.4g}", worse, candidate.loses))
    note = "The next best placements, each with its best devices and cuts."
    return Told("Runners-up", note, rows, ("seconds", "worse"))


def _systems(picked: Picked) -> Told:
    rows: Rows = [("system", "devices", "seconds", "speed-up", "why not")]
    for name, one in picked.systems.items():
        if isinstance(one, str):
            rows.append((name, "", "", "", one))
            continue
        seconds = _seconds(picked, one)
        devices = " | ".join(str(pool.devices) for pool in one.pools)
        rows.append((name, devices, f"{seconds:.4g}", f"{seconds / picked.result.best.seconds:.1f}", ""))
    note = (
        "How they would run it at their best, by the same formulas, which say 0.9 to 2.1 times the published tokens/s "
        "of the first two, but a tenth to a quarter of the third's."
    )
    return Told("Other systems", note, rows, ("seconds", "speed-up"))


def _seconds(picked: Picked, mapping: DeviceMapping) -> float:
    """Of a step."""
    return step_seconds(pool_seconds(picked.graph, mapping, picked.cost.estimates(mapping)), mapping.schedule)


def told_pools(candidate: Candidate) -> tuple[str, str]:
    """Roles that share, and the devices of each pool."""
    if candidate.mapping is None:
        return " | ".join("+".join(roles) for roles in candidate.placement), ""
    pools = candidate.mapping.pools
    return " | ".join("+".join(pool.roles) for pool in pools), " | ".join(str(pool.devices) for pool in pools)


def lanes(picked: Picked) -> Iterator[Lane]:
    """For the picture."""
    for pool in picked.mapping.pools:
        parts = {role.name: size for role in picked.roles(pool) if (size := picked.held(role))}
        if most := max(map(picked.working, picked.roles(pool))):
            parts["the role at work"] = most
        if any(role.weights_of for role in picked.roles(pool)):
            parts["left for rollouts"] = picked.cost.usable_bytes(pool.machine) - sum(parts.values())
        text = f"{_devices(pool)}, busy {picked.simulation.utilisation(pool.name):.0%} of the time"
        yield Lane(pool.name, text, parts, pool.machine.device.memory_bytes)


def data(picked: Picked) -> dict[str, Any]:
    """Everything, sizes in bytes."""
    result, stages = picked.result, picked.graph.stages
    pools = [
        {
            "name": pool.name,
            "device": pool.machine.device.name,
            "devices": pool.devices,
            "roles": pool.roles,
            "usable_bytes": picked.cost.usable_bytes(pool.machine),
            "busy": picked.simulation.utilisation(pool.name),
        }
        for pool in picked.mapping.pools
    ]
    roles = {
        role.name: {
            "pool": picked.mapping.pool_of(role.name).name,
            "model": role.size.name,
            **picked.mapping.strategies[role.name]._asdict(),
            "held_bytes": picked.held(role),
            "working_bytes": picked.working(role),
        }
        for role in picked.graph.roles
    }
    tasks = [
        {
            "name": task.name,
            "stage": stages[task.name] + 1,
            "pool": picked.place(task),
            "seconds": picked.estimates[task.name].seconds,
            "parts": picked.estimates[task.name].parts,
        }
        for task in picked.graph.tasks
    ]
    return {
        "seconds": result.best.seconds,
        "simulated_seconds": picked.simulation.step_s,
        "tokens": result.tokens,
        "tokens_per_second": result.tokens_per_second,
        "price": result.best.price,
        "optimal": result.optimal,
        "placements": result.placements,
        "allocations": result.allocations,
        "pools": pools,
        "roles": roles,
        "tasks": tasks,
        "runners_up": [_runner(one) for one in result.runners_up],
        "systems": {name: _system(picked, one) for name, one in picked.systems.items()},
    }


def _system(picked: Picked, one: DeviceMapping | str) -> dict[str, Any]:
    if isinstance(one, str):
        return {"seconds": None, "why_not": one}
    return {"seconds": _seconds(picked, one), "devices": [pool.devices for pool in one.pools]}


def _runner(candidate: Candidate) -> dict[str, Any]:
    pools = [] if candidate.mapping is None else candidate.mapping.pools
    return {
        "placement": candidate.placement,
        "devices": [pool.devices for pool in pools],
        "seconds": candidate.seconds if pools else None,
        "loses": candidate.loses,
    }
