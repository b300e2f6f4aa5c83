"""What a pool can do: for a set of roles on some devices of one kind, the ways of cutting them that no other way beats.

A pool's roles take turns, so its seconds in a stage are the sum over them, and what crosses pools depends only on which
roles are not in it: a pool is a function of (roles, machine, devices). Memory ties its roles together (what all of them
hold and the most that one takes while it works must fit), and ties a sampler's seconds to what is left for its cache.
Hence a Pareto front: no way in it is as slow as another one in every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.cluster import Machine
from hybridflow.planner.cost import CostModel, Estimate
from hybridflow.planner.graph import ModelRole, TaskGraph
from hybridflow.planner.mapping import Strategy

__all__ = ["Front", "Fronts", "pareto"]

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Roles = tuple[str, ...]


class Front(NamedTuple):
    """F ways: seconds in each stage, how many devices work, and how each role is cut."""

    seconds: Array
    devices: Indices
    strategies: tuple[Mapping[str, Strategy], ...]


class _Options(NamedTuple):
    """Ways of cutting a role: costs has a column for each stage, bytes held and bytes taken on top while working."""

    strategies: list[Strategy]
    costs: Array


class _Partial(NamedTuple):
    """Ways of cutting some roles of a pool. key: how those are cut that have a sampler; picks: the options taken."""

    costs: Array
    key: Indices
    picks: Indices


def pareto(costs: Array, key: Indices | None = None) -> Indices:
    """Rows that no other one (of the same key) equals or beats in every column, the least sum first."""
    order = np.argsort(costs.sum(axis=1), kind="stable")
    columns = np.ascontiguousarray(costs[order].T)
    keys = np.zeros(len(order), np.int64) if key is None else key[order]
    kept = []
    while order.size:
        kept.append(order[0])
        other = _unbeaten(columns, columns[:, 0])
        if key is not None:
            other |= keys != keys[0]
        columns, keys, order = columns[:, other], keys[other], order[other]
    return np.array(kept, dtype=np.int64)


def _unbeaten(columns: Array, costs: Array) -> NDArray[np.bool_]:
    """Which columns are below ``costs`` anywhere. A loop over rows, as there are few of them and many columns."""
    below: NDArray[np.bool_] = columns[0] < costs[0]
    for row, value in zip(columns[1:], costs[1:], strict=True):
        below |= row < value
    return below


class Fronts:
    """Fronts and their lower bounds, each worked out when it is first asked for. ``stages``: of every task, 0 to
    ``num_stages`` - 1."""

    def __init__(self, graph: TaskGraph, cost: CostModel, stages: Mapping[str, int], machines: Sequence[Machine]) -> None:
        self.graph, self.cost, self.stages, self.machines = graph, cost, stages, machines
        self.num_stages = 1 + max(stages.values())
        self.roles = {role.name: role for role in graph.roles}
        self.tasks = {name: [task for task in graph.tasks if task.role == name] for name in self.roles}
        self._role_of = {task.name: task.role for task in graph.tasks}
        self._options: dict[tuple[str, int, int], _Options] = {}
        self._samplers: dict[tuple[str, int, int], list[Strategy]] = {}
        self._seconds: dict[tuple[str, int, Strategy, float], Array | None] = {}
        self._exact: dict[tuple[Roles, int, int], Front] = {}
        self._upto: dict[tuple[Roles, int, int], Front] = {}
        self._bounds: dict[tuple[Roles, int], tuple[Array, Array]] = {}

    # ------------------------------------------------------------------------------------------------------------ bounds

    def bounds(self, roles: Roles, kind: int, limit: int) -> tuple[Array, Array]:
        """Two arrays [limit + 1, S]: no way that uses exactly n devices, and none that uses at most n, is faster in a
        stage. Infinite where nothing fits. They grow in place as fronts become known."""
        key = roles, kind
        if key not in self._bounds:
            exactly = np.full((limit + 1, self.num_stages), np.inf)
            for devices in range(1, limit + 1):
                exactly[devices] = self._lower(roles, kind, devices)
            self._bounds[key] = exactly, np.minimum.accumulate(exactly, axis=0)
        return self._bounds[key]

    def _lower(self, roles: Roles, kind: int, devices: int) -> Array:
        """As if each role could take the fastest of its ways in every stage, and all the memory."""
        total, held, most = self._transfers(roles, kind, devices), 0.0, 0.0
        for role in roles:
            if self.roles[role].weights_of:
                total = total + self._fastest(role, roles, kind, devices)
                continue
            costs = self._role(role, kind, devices).costs
            if not len(costs):
                return np.full(self.num_stages, np.inf)
            least = costs.min(axis=0)
            total, held, most = total + least[:-2], held + least[-2], max(most, least[-1])
        fits = held + most <= self.cost.usable_bytes(self.machines[kind])
        return total if fits else np.full(self.num_stages, np.inf)

    def _fastest(self, sampler: str, roles: Roles, kind: int, devices: int) -> Array:
        free = self.cost.usable_bytes(self.machines[kind])
        found = [
            seconds + self._publishing(sampler, strategy, roles, kind)
            for strategy in self._generation(sampler, kind, devices)
            if (seconds := self._sampling(sampler, kind, strategy, free)) is not None
        ]
        return np.min(found, axis=0) if found else np.full(self.num_stages, np.inf)

    def fits(self, roles: Roles, kind: int, devices: int) -> bool:
        """Whether there is any way that uses all of the devices."""
        return bool(np.isfinite(self._lower(roles, kind, devices)).all()) and bool(
            self._made(roles, kind, devices).strategies
        )

    def least(self, roles: Roles, kind: int, limit: int, start: int = 1) -> int | None:
        """The smallest number of devices that the roles fit on, up to a limit (Algorithm 1's get_min_alloc)."""
        return next((devices for devices in range(start, limit + 1) if self.fits(roles, kind, devices)), None)

    # ------------------------------------------------------------------------------------------------------------ fronts

    def upto(self, roles: Roles, kind: int, devices: int) -> Front:
        """The front of all ways that use at most so many devices: some may stay idle, where a number is hard to divide."""
        key = roles, kind, devices
        if key not in self._upto:
            exactly, atmost = self._bounds[roles, kind]
            seconds, parts = np.empty((0, self.num_stages)), []
            for n in range(devices, 0, -1):
                if np.isinf(exactly[n]).any() or (seconds <= exactly[n]).all(axis=1).any():
                    continue
                parts.append(self.exact(roles, kind, n))
                seconds = np.concatenate([seconds, parts[-1].seconds])
            front = self._upto[key] = _merged(parts, self.num_stages)
            np.maximum(atmost[: devices + 1], _least(front), out=atmost[: devices + 1])
        return self._upto[key]

    def exact(self, roles: Roles, kind: int, devices: int) -> Front:
        """The front of all ways that use all of the devices."""
        key = roles, kind, devices
        if key not in self._exact:
            front = self._exact[key] = self._made(roles, kind, devices)
            exactly, _ = self._bounds[roles, kind]
            np.maximum(exactly[devices], _least(front), out=exactly[devices])
        return self._exact[key]

    def _made(self, roles: Roles, kind: int, devices: int) -> Front:
        samplers = [role for role in roles if self.roles[role].weights_of]
        learners = {self.roles[sampler].weights_of for sampler in samplers} & {*roles}
        plain = sorted((role for role in roles if role not in samplers), key=lambda role: role in learners)
        options = [self._role(role, kind, devices) for role in plain]
        partial = self._joined(plain, learners, options, kind)
        partial.costs[:, : self.num_stages] += self._transfers(roles, kind, devices)
        picked = [dict(zip(plain, row, strict=True)) for row in partial.picks]
        rows = [{role: options[plain.index(role)].strategies[pick] for role, pick in one.items()} for one in picked]
        if not samplers:
            kept = pareto(partial.costs[:, : self.num_stages])
            found = [(partial.costs[row, : self.num_stages], rows[row]) for row in kept]
        else:
            found = self._sampled(samplers, roles, partial, rows, kind, devices)
        seconds = np.array([seconds for seconds, _ in found]).reshape(-1, self.num_stages)
        return Front(seconds, np.full(len(found), devices), tuple(strategies for _, strategies in found))

    def _joined(self, plain: Sequence[str], learners: set[str], options: Sequence[_Options], kind: int) -> _Partial:
        """All ways of cutting the roles that fit, less those that are beaten."""
        usable = self.cost.usable_bytes(self.machines[kind])
        least = [one.costs[:, -2].min(initial=np.inf) for one in options]
        partial = _Partial(np.zeros((1, self.num_stages + 2)), np.zeros(1, np.int64), np.empty((1, 0), np.int64))
        for number, (role, one) in enumerate(zip(plain, options, strict=True)):
            layouts = _layouts(one.strategies) if role in learners else np.zeros(len(one.strategies), np.int64)
            partial = _join(partial, one.costs, layouts, usable - sum(least[number + 1 :]))
        return partial

    def _sampled(
        self,
        samplers: Sequence[str],
        roles: Roles,
        partial: _Partial,
        rows: Sequence[Mapping[str, Strategy]],
        kind: int,
        devices: int,
    ) -> list[tuple[Array, Mapping[str, Strategy]]]:
        """With a way to generate for each sampler. What is left for caches differs from row to row, and asking for seconds
        is dear: the most promising way is asked first, and what can't beat it isn't asked at all."""
        usable, stages = self.cost.usable_bytes(self.machines[kind]), self.num_stages
        ways = [self._generation(sampler, kind, devices) for sampler in samplers]
        combos = list(product(*ways))
        moves = {  # by (key, combo): seconds of weights on their way, bytes shared by each sampler
            (key, number): self._weights(samplers, combo, rows[int(first)], roles, kind)
            for key, first in zip(*np.unique(partial.key, return_index=True), strict=True)
            for number, combo in enumerate(combos)
        }
        found: list[tuple[Array, Mapping[str, Strategy]]] = []
        least = [self._all(samplers, combo, kind, [usable] * len(samplers)) for combo in combos]
        bounds, places = [], []
        for row, (costs, key) in enumerate(zip(partial.costs, partial.key, strict=True)):
            for number in range(len(combos)):
                move, fastest = moves[key, number], least[number]
                if move is not None and fastest is not None:
                    bounds.append(costs[:stages] + move[0] + fastest)
                    places.append((row, number))
        rest = np.array(bounds).reshape(-1, stages).T.copy()
        order = np.arange(rest.shape[1])
        while order.size:
            first = int(np.argmin(rest.sum(axis=0)))
            row, number = places[order[first]]
            move, costs = moves[partial.key[row], number], partial.costs[row]
            assert move is not None
            took = self._all(samplers, combos[number], kind, [usable - costs[-2] + shared for shared in move[1]])
            keep = np.ones(len(order), bool)
            if took is not None:
                seconds = costs[:stages] + move[0] + took
                found.append((seconds, {**rows[row], **dict(zip(samplers, combos[number], strict=True))}))
                keep = _unbeaten(rest, seconds)
            keep[first] = False
            rest, order = rest[:, keep], order[keep]
        kept = pareto(np.array([seconds for seconds, _ in found]).reshape(-1, stages))
        return [found[number] for number in kept]

    def _all(self, samplers: Sequence[str], combo: Sequence[Strategy], kind: int, free: Sequence[float]) -> Array | None:
        total = np.zeros(self.num_stages)
        for sampler, strategy, left in zip(samplers, combo, free, strict=True):
            seconds = self._sampling(sampler, kind, strategy, float(left))
            if seconds is None:
                return None
            total = total + seconds
        return total

    def _weights(
        self, samplers: Sequence[str], combo: Sequence[Strategy], row: Mapping[str, Strategy], roles: Roles, kind: int
    ) -> tuple[Array, list[float]] | None:
        seconds, shared = np.zeros(self.num_stages), []
        for sampler, strategy in zip(samplers, combo, strict=True):
            role = self.roles[sampler]
            if role.weights_of not in roles:
                seconds = seconds + self._publishing(sampler, strategy, roles, kind)
                shared.append(0.0)
                continue
            training = row[role.weights_of]
            transition = self.cost.transition(role, training, strategy, self.machines[kind])
            if transition is None:
                return None
            seconds[self._first_stage(sampler)] += transition.seconds
            shared.append(self.cost.shared_bytes(role, training, strategy))
        return seconds, shared

    # ------------------------------------------------------------------------------------------------------ single roles

    def _role(self, name: str, kind: int, devices: int) -> _Options:
        key = name, kind, devices
        if key not in self._options:
            role, machine = self.roles[name], self.machines[kind]
            strategies = self.cost.strategies(role, machine, devices)
            every = [(strategy, self._costs(role, strategy, machine)) for strategy in strategies]
            fitting = [(strategy, one) for strategy, one in every if one is not None]
            costs = np.array([one for _, one in fitting]).reshape(-1, self.num_stages + 2)
            kept = pareto(costs, _layouts([strategy for strategy, _ in fitting]))
            self._options[key] = _Options([fitting[number][0] for number in kept], costs[kept])
        return self._options[key]

    def _costs(self, role: ModelRole, strategy: Strategy, machine: Machine) -> Array | None:
        costs = np.zeros(self.num_stages + 2)
        costs[-2:] = self.cost.resident_bytes(role, strategy), self.cost.working_bytes(role, strategy)
        if costs[-2:].sum() > self.cost.usable_bytes(machine):
            return None
        for task in self.tasks[role.name]:
            estimate = self.cost.seconds(task, strategy, machine)
            if estimate is None:
                return None
            costs[self.stages[task.name]] += estimate.seconds
        return costs

    def _generation(self, name: str, kind: int, devices: int) -> list[Strategy]:
        key = name, kind, devices
        if key not in self._samplers:
            self._samplers[key] = self.cost.strategies(self.roles[name], self.machines[kind], devices)
        return self._samplers[key]

    def _sampling(self, name: str, kind: int, strategy: Strategy, free: float) -> Array | None:
        key = name, kind, strategy, free
        if key not in self._seconds:
            estimates = {
                task.name: self.cost.seconds(task, strategy, self.machines[kind], free) for task in self.tasks[name]
            }
            self._seconds[key] = self._by_stage(estimates)
        return self._seconds[key]

    def _by_stage(self, estimates: Mapping[str, Estimate | None]) -> Array | None:
        seconds = np.zeros(self.num_stages)
        for task, estimate in estimates.items():
            if estimate is None:
                return None
            seconds[self.stages[task]] += estimate.seconds
        return seconds

    def _publishing(self, sampler: str, strategy: Strategy, roles: Roles, kind: int) -> Array:
        role, seconds = self.roles[sampler], np.zeros(self.num_stages)
        if role.weights_of not in roles:
            seconds[self._first_stage(sampler)] = self.cost.publishing(role, strategy, self.machines[kind]).seconds
        return seconds

    def _first_stage(self, sampler: str) -> int:
        return self.stages[self.tasks[sampler][0].name]

    def _transfers(self, roles: Roles, kind: int, devices: int) -> Array:
        """What the pool takes from other ones."""
        seconds = np.zeros(self.num_stages)
        for edge in self.graph.edges:
            writer, reader = self._role_of[edge.writer], self._role_of[edge.reader]
            if reader in roles and writer not in roles and writer in self.roles:
                seconds[self.stages[edge.reader]] += self.cost.transfer(edge, self.machines[kind], devices)
        return seconds


def _least(front: Front) -> Array:
    return np.asarray(front.seconds.min(axis=0, initial=np.inf))


def _merged(parts: Sequence[Front], stages: int) -> Front:
    seconds = np.concatenate([np.empty((0, stages)), *(part.seconds for part in parts)])
    devices = np.concatenate([np.empty(0, np.int64), *(part.devices for part in parts)])
    strategies = [one for part in parts for one in part.strategies]
    kept = pareto(seconds)
    return Front(seconds[kept], devices[kept], tuple(strategies[number] for number in kept))


def _layouts(strategies: Sequence[Strategy]) -> Indices:
    """Numbers of the ways that weights are cut: what a sampler beside them depends on."""
    layouts = [strategy._replace(recompute=False, rows=1) for strategy in strategies]
    numbers = {layout: number for number, layout in enumerate(dict.fromkeys(layouts))}
    return np.array([numbers[layout] for layout in layouts], dtype=np.int64)


def _join(partial: _Partial, options: Array, layouts: Indices, limit: float) -> _Partial:
    """Each way of the roles so far with each of the next role, as far as both fit in ``limit`` bytes."""
    m, k = len(partial.costs), len(options)
    left, right = np.repeat(np.arange(m), k), np.tile(np.arange(k), m)
    costs = partial.costs[left] + options[right]
    costs[:, -1] = np.maximum(partial.costs[left, -1], options[right, -1])
    fits = costs[:, -2] + costs[:, -1] <= limit
    costs, left, right = costs[fits], left[fits], right[fits]
    key = partial.key[left] * (layouts.max(initial=0) + 1) + layouts[right]
    kept = pareto(costs, key)
    picks = np.concatenate([partial.picks[left[kept]], right[kept, None]], axis=1)
    return _Partial(costs[kept], key[kept], picks)
