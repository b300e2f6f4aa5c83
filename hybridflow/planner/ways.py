"""What each role can do by itself on some devices of a pool: ways of cutting it, with their seconds and bytes.

Arrays of costs have columns of seconds (``stepping``: mostly one for each stage), then bytes held and bytes taken on top
while the role works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.cluster import Machine
from hybridflow.planner.cost import CostModel, Estimate
from hybridflow.planner.graph import ModelRole, TaskGraph
from hybridflow.planner.mapping import Strategy
from hybridflow.planner.stepping import Columns

__all__ = ["Array", "Indices", "Options", "Roles", "Ways", "layouts", "pareto", "unbeaten"]

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Roles = tuple[str, ...]


class Options(NamedTuple):
    """Ways of cutting a role, and their costs."""

    strategies: list[Strategy]
    costs: Array


def pareto(costs: Array, key: Indices | None = None) -> Indices:
    """Rows that no other one (of the same key) equals or beats in every column, the least sum first."""
    order = np.argsort(costs.sum(axis=1), kind="stable")
    columns = np.ascontiguousarray(costs[order].T)
    keys = np.zeros(len(order), np.int64) if key is None else key[order]
    kept = []
    while order.size:
        kept.append(order[0])
        other = unbeaten(columns, columns[:, 0])
        if key is not None:
            other |= keys != keys[0]
        columns, keys, order = columns[:, other], keys[other], order[other]
    return np.array(kept, dtype=np.int64)


def unbeaten(columns: Array, costs: Array) -> NDArray[np.bool_]:
    """Which columns are below ``costs`` anywhere. A loop over rows, as there are few of them and many columns."""
    below: NDArray[np.bool_] = columns[0] < costs[0]
    for row, value in zip(columns[1:], costs[1:], strict=True):
        below |= row < value
    return below


def layouts(strategies: Sequence[Strategy]) -> Indices:
    """Numbers of the ways that weights are cut: what a sampler beside them depends on."""
    found = [strategy._replace(recompute=False, rows=1) for strategy in strategies]
    numbers = {layout: number for number, layout in enumerate(dict.fromkeys(found))}
    return np.array([numbers[layout] for layout in found], dtype=np.int64)


class Ways:
    """Everything is worked out when it is first asked for."""

    def __init__(self, graph: TaskGraph, cost: CostModel, columns: Columns, machines: Sequence[Machine]) -> None:
        self.graph, self.cost, self.columns, self.machines = graph, cost, columns, machines
        self.num_stages = len(columns)
        self.usable = [cost.usable_bytes(machine) for machine in machines]
        self.roles = {role.name: role for role in graph.roles}
        self.tasks = {name: [task for task in graph.tasks if task.role == name] for name in self.roles}
        self._role_of = {task.name: task.role for task in graph.tasks}
        self._options: dict[tuple[str, int, int], Options] = {}
        self._generation: dict[tuple[str, int, int], list[Strategy]] = {}
        self._drawing: dict[tuple[str, int, Strategy, float], Array | None] = {}
        self._beside: dict[tuple[str, int, int, int, str, Strategy, int], tuple[Array, float]] = {}
        self._fastest: dict[tuple[str, int, int, bool], Array] = {}

    def options(self, name: str, kind: int, devices: int) -> Options:
        """Of a role that is no sampler: those that no other one with the same layout of weights beats."""
        key = name, kind, devices
        if key not in self._options:
            role, machine = self.roles[name], self.machines[kind]
            every = [(one, self._costs(role, one, kind)) for one in self.cost.strategies(role, machine, devices)]
            fitting = [(strategy, costs) for strategy, costs in every if costs is not None]
            costs = np.array([costs for _, costs in fitting]).reshape(-1, self.num_stages + 2)
            kept = pareto(costs, layouts([strategy for strategy, _ in fitting]))
            self._options[key] = Options([fitting[number][0] for number in kept], costs[kept])
        return self._options[key]

    def _costs(self, role: ModelRole, strategy: Strategy, kind: int) -> Array | None:
        held, works = self.cost.resident_bytes(role, strategy), self.cost.working_bytes(role, strategy)
        if held + works > self.usable[kind]:
            return None
        estimates = {task.name: self.cost.seconds(task, strategy, self.machines[kind]) for task in self.tasks[role.name]}
        seconds = self._by_stage(estimates)
        return None if seconds is None else np.append(seconds, (held, works))

    def _by_stage(self, estimates: Mapping[str, Estimate | None]) -> Array | None:
        seconds = np.zeros(self.num_stages)
        for task, estimate in estimates.items():
            if estimate is None:
                return None
            seconds += self.columns.shares[task] * estimate.seconds
        return seconds

    # --------------------------------------------------------------------------------------------------------- samplers

    def generation(self, name: str, kind: int, devices: int) -> list[Strategy]:
        """Ways of cutting a sampler."""
        key = name, kind, devices
        if key not in self._generation:
            self._generation[key] = self.cost.strategies(self.roles[name], self.machines[kind], devices)
        return self._generation[key]

    def drawing(self, name: str, kind: int, strategy: Strategy, free: float) -> Array | None:
        """Seconds by stage of a sampler that may take so many bytes; None if it needs more."""
        key = name, kind, strategy, free
        if key not in self._drawing:
            machine = self.machines[kind]
            estimates = {task.name: self.cost.seconds(task, strategy, machine, free) for task in self.tasks[name]}
            self._drawing[key] = self._by_stage(estimates)
        return self._drawing[key]

    def publishing(self, name: str, strategy: Strategy, kind: int) -> Array:
        """Of a sampler's weights to its pool, by stage."""
        return self._first(name, self.cost.publishing(self.roles[name], strategy, self.machines[kind]))

    def beside(self, name: str, training: Strategy, generation: Strategy, kind: int) -> tuple[Array, float]:
        """Of a sampler's weights beside its learner: seconds by stage, infinite if they can't be cut from the one to the
        other, and bytes that both share."""
        key = name, training.pp, training.tp, training.dp, training.shard, generation, kind
        if key not in self._beside:
            role = self.roles[name]
            estimate = self.cost.transition(role, training, generation, self.machines[kind])
            if estimate is None:
                self._beside[key] = np.full(self.num_stages, np.inf), 0.0
            else:
                shared = self.cost.shared_bytes(role, training, generation)
                self._beside[key] = self._first(name, estimate), shared
        return self._beside[key]

    def _first(self, sampler: str, estimate: Estimate) -> Array:
        """Weights come before a sampler's first task."""
        return self.columns.shares[self.tasks[sampler][0].name] * estimate.seconds

    def fastest(self, name: str, kind: int, devices: int, beside: bool) -> Array:
        """No way to generate is faster in a stage. ``beside``: its learner."""
        key = name, kind, devices, beside
        if key not in self._fastest:
            found = [np.full(self.num_stages, np.inf)]
            for strategy in self.generation(name, kind, devices):
                seconds = self.drawing(name, kind, strategy, self.usable[kind])
                if seconds is not None:
                    found.append(seconds if beside else seconds + self.publishing(name, strategy, kind))
            self._fastest[key] = np.min(found, axis=0)
        return self._fastest[key]

    # ------------------------------------------------------------------------------------------------------------ pools

    def transfers(self, roles: Roles, kind: int, devices: int) -> Array:
        """By stage, of what the roles of a pool read from other pools."""
        seconds = np.zeros(self.num_stages)
        for edge in self.graph.edges:
            writer, reader = self._role_of[edge.writer], self._role_of[edge.reader]
            if reader in roles and writer not in roles and writer in self.roles:
                seconds += self.columns.shares[edge.reader] * self.cost.transfer(edge, self.machines[kind], devices)
        return seconds

    def lower(self, roles: Roles, kind: int, devices: int) -> Array:
        """No way of cutting the roles of a pool is faster in a stage: each takes the fastest of its own, and all the
        memory. Infinite if they can't fit."""
        total, held, most = self.transfers(roles, kind, devices), 0.0, 0.0
        for role in roles:
            if self.roles[role].weights_of:
                total = total + self.fastest(role, kind, devices, self.roles[role].weights_of in roles)
                continue
            costs = self.options(role, kind, devices).costs
            if not len(costs):
                return np.full(self.num_stages, np.inf)
            least = costs.min(axis=0)
            total, held, most = total + least[:-2], held + least[-2], max(most, least[-1])
        return total if held + most <= self.usable[kind] else np.full(self.num_stages, np.inf)
