"""The search against the paper's plain enumeration: all placements, allocations and strategies, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import comb, inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import ConfigError
from hybridflow.models.spec import DecoderSpec
from hybridflow.planner.cluster import Cluster, Device, Machine
from hybridflow.planner.cost import CostModel, Efficiency, Estimate
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.mapping import Pool, Schedule, Strategy
from hybridflow.planner.search import (
    Objective,
    Result,
    pool_seconds,
    search,
    set_partitions,
    step_seconds,
)
from hybridflow.planner.sizes import ModelSize

SIZE = ModelSize("tiny", DecoderSpec("llama", 1000, 64, 128, 4, 4, 4, 16, 128))
TRAINED = {"gradient_bytes": 4.0, "optimizer_bytes": 8.0}


def machine(devices: int, name: str = "chip", memory: float = 8e10, price: float = 1.0, flops: float = 1e14) -> Machine:
    return Machine(
        Device(name, {"bfloat16": flops, "float32": flops}, memory, 1e12, price), devices, 1e11, 1e10, 1e-6, 1e-5
    )


def cluster(number: int, devices: int, **device: float) -> Cluster:
    return Cluster(((number, machine(devices, **device)),))


def task(name: str, role: str, kind: str = "forward", **more: object) -> Task:
    return Task(name, role, kind, 64, 64.0, 64.0, **more)  # type: ignore[arg-type]


def ppo(
    scorers: Sequence[str] = ("ref", "reward"), critics: Sequence[str] = ("critic",), size: ModelSize = SIZE
) -> TaskGraph:
    """PPO's four models and their sampler; with a cost model beside the reward, Safe-RLHF's five."""
    actor = ModelRole("actor", size, **TRAINED)
    roles = (
        actor,
        ModelRole("sampler", size, weights_of="actor"),
        *(ModelRole(name, size, "value", **TRAINED) for name in critics),
        *(ModelRole(name, size, "score") for name in scorers),
    )
    prepare = [task(f"{name}.forward", name) for name in (*critics, *scorers)]
    learn = [task(f"{name}.update", name, "train", minibatches=2) for name in ("actor", *critics)]
    draw = task("generate", "sampler", "generate")
    edges = [Edge("generate", one.name, 1e6) for one in prepare]
    edges += [Edge(one.name, other.name, 2e6) for one in prepare for other in learn]
    return TaskGraph(roles, (draw, *prepare, *learn), tuple(edges))


def remax() -> TaskGraph:
    """Two drawings, of which one is needed later, and a verb in the driver."""
    plain = ppo(("ref", "reward"), ())
    greedy, script = task("greedy", "sampler", "generate"), Task("advantages", "driver", "compute", 64, 0, 0, seconds=0.7)
    edges = (
        *plain.edges,
        Edge("greedy", "reward.forward"),
        Edge("reward.forward", "advantages"),
        Edge("advantages", "actor.update"),
    )
    return TaskGraph(plain.roles, (greedy, *plain.tasks[:-1], script, plain.tasks[-1]), edges)


class Fake(CostModel):
    """Random costs, with everything that the search must get right: memory that rules ways out, caches that shrink, ways to
    generate that don't follow from ways to train, weights and columns on their way."""

    def __init__(self, graph: TaskGraph, seed: int, memory: float = 3.0) -> None:
        super().__init__(graph, Efficiency())
        self.seed, self.memory = seed, memory
        self.number = cache(self._number)

    def _number(self, *key: object) -> float:
        return Random(f"{self.seed} {key}").random()

    def strategies(self, role: ModelRole, machine: Machine, devices: int) -> list[Strategy]:
        cuts = [(pp, tp) for tp in (1, 2, 3) for pp in (1, 2) if devices % (pp * tp) == 0 and tp <= machine.devices]
        found = [Strategy(pp, tp, devices // pp // tp, recompute=again) for pp, tp in cuts for again in (False, True)]
        kept = [one for one in found if self.number(role.name, one) < 0.5 and not (role.weights_of and one.recompute)]
        return kept[:4]

    def resident_bytes(self, role: ModelRole, strategy: Strategy) -> float:
        if role.weights_of:
            return 0.0
        return (0.5 + self.number(role.name, strategy[:3], "held")) / (strategy.pp * strategy.tp) ** 0.5

    def working_bytes(self, role: ModelRole, strategy: Strategy) -> float:
        return 0.0 if role.weights_of else 0.5 * self.number(role.name, strategy, "works")

    def usable_bytes(self, machine: Machine) -> float:
        return self.memory * machine.device.memory_bytes / 8e10

    def seconds(  # type: ignore[override]
        self, task: Task, strategy: Strategy, machine: Machine, free_bytes: float = 0.0, *system: object
    ) -> Estimate | None:
        if task.role not in self.roles:
            return Estimate({"own": task.seconds})
        work = (5 + 10 * self.number(task.name, strategy, machine.device.name)) / strategy.devices**0.7
        if task.kind != "generate":
            return Estimate({"compute": work})
        cache_bytes = free_bytes - 0.6 / (strategy.pp * strategy.tp)
        return Estimate({"decode": work * max(1.0, 1.5 / cache_bytes)}) if cache_bytes > 0.1 else None

    def shared_bytes(
        self, sampler: ModelRole, training: Strategy, generation: Strategy, reshard: object = "hybridflow"
    ) -> float:
        return 0.3 * self.number("shared", training[:4], generation[:4])

    def transition(
        self, sampler: ModelRole, training: Strategy, generation: Strategy, machine: Machine, reshard: object = "hybridflow"
    ) -> Estimate | None:
        if training.pp * training.tp % (generation.pp * generation.tp):
            return None
        return Estimate({"copy": self.number("transition", training[:4], generation[:4])})

    def publishing(
        self, sampler: ModelRole, generation: Strategy, machine: Machine, reshard: object = "publish"
    ) -> Estimate:
        return Estimate({"copy": 2 * self.number("publishing", generation[:4])})

    def transfer(self, edge: Edge, machine: Machine, devices: int) -> float:
        return 0.2 * self.number("transfer", edge, devices)


# ------------------------------------------------------------------------------------------------------------- enumeration


def counts(total: int, sets: int) -> Iterator[tuple[int, ...]]:
    """All numbers of devices of the sets, from 1 on, up to ``total`` in all."""
    if not sets:
        yield ()
        return
    for first in range(1, total - sets + 2):
        for others in counts(total - first, sets - 1):
            yield first, *others


class Enumeration:
    """Every mapping there is. ``times``: seconds of a pool by stage, of all ways to cut its roles that fit."""

    def __init__(
        self, graph: TaskGraph, cluster: Cluster, cost: CostModel, schedule: Schedule, objective: Objective
    ) -> None:
        self.graph, self.cost, self.schedule, self.objective = graph, cost, schedule, objective
        self.machines = [machine for _, machine in cluster.machines]
        self.totals = [number * machine.devices for number, machine in cluster.machines]
        self.times = cache(self._times)
        tied = schedule == "sync" and len(self.machines) == 1
        names = [role.name for role in graph.roles if not (tied and role.weights_of)]
        samplers = {role.weights_of: role.name for role in graph.roles if tied and role.weights_of}
        units = [(name, samplers[name]) if name in samplers else (name,) for name in names]
        self.placements = [tuple(sum(one, ()) for one in sets) for sets in set_partitions(units)]

    def _times(self, roles: tuple[str, ...], kind: int, devices: int) -> np.ndarray:
        """[ways, stages]: of a mapping that has this pool, and a machine of its own, not counted, for all other roles."""
        machine, by_name = self.machines[kind], {role.name: role for role in self.graph.roles}
        others = tuple(name for name in by_name if name not in roles)
        pool, rest = Pool("here", machine, devices, roles), Pool("there", machine, 1, others)
        options = [self.cost.strategies(by_name[name], machine, devices) for name in roles]
        found = [self._time(dict(zip(roles, ways, strict=True)), pool, rest) for ways in product(*options)]
        return np.array([one for one in found if one is not None]).reshape(-1, 1 + max(self.graph.stages.values()))

    def _time(self, strategies: dict[str, Strategy], pool: Pool, rest: Pool) -> list[float] | None:
        cost, roles = self.cost, self.cost.roles
        held = [cost.resident_bytes(roles[name], one) for name, one in strategies.items()]
        works = [cost.working_bytes(roles[name], one) for name, one in strategies.items()]
        if sum(held) + max(works) > cost.usable_bytes(pool.machine):
            return None
        seconds, stages, seen = [0.0] * (1 + max(self.graph.stages.values())), self.graph.stages, set[str]()
        for task in (task for task in self.graph.tasks if task.role in strategies):
            role, one, moved, shared = roles[task.role], strategies[task.role], 0.0, 0.0
            if role.weights_of in strategies:
                transition = cost.transition(role, strategies[role.weights_of], one, pool.machine)
                if transition is None:
                    return None
                moved, shared = transition.seconds, cost.shared_bytes(role, strategies[role.weights_of], one)
            elif role.weights_of:
                moved = cost.publishing(role, one, pool.machine).seconds
            estimate = cost.seconds(task, one, pool.machine, cost.usable_bytes(pool.machine) - sum(held) + shared)
            if estimate is None:
                return None
            seconds[stages[task.name]] += estimate.seconds + (moved if task.role not in seen else 0.0)
            seen.add(task.role)
        owners = {task.name: task.role for task in self.graph.tasks}
        for edge in self.graph.edges:
            if owners[edge.reader] in pool.roles and owners[edge.writer] in rest.roles:
                seconds[stages[edge.reader]] += cost.transfer(edge, pool.machine, pool.devices)
        return seconds

    @property
    def driver(self) -> np.ndarray:
        seconds = np.zeros(1 + max(self.graph.stages.values()))
        for task in self.graph.tasks:
            if task.role not in self.cost.roles:
                seconds[self.graph.stages[task.name]] += task.seconds
        return seconds

    def best(self, sets: tuple[tuple[str, ...], ...]) -> float:
        """Of a placement."""
        found = inf
        for kinds in product(range(len(self.machines)), repeat=len(sets)):
            for devices in counts(sum(self.totals), len(sets)):
                used = [
                    sum(n for n, one in zip(devices, kinds, strict=True) if one == kind) for kind in range(len(self.totals))
                ]
                if all(n <= total for n, total in zip(used, self.totals, strict=True)):
                    found = min(found, self._cheapest(sets, kinds, devices))
        return found

    def _cheapest(self, sets: tuple[tuple[str, ...], ...], kinds: tuple[int, ...], devices: tuple[int, ...]) -> float:
        slowest = self.driver[None], self.driver.sum()[None]
        for roles, kind, number in zip(sets, kinds, devices, strict=True):
            times = self.times(roles, kind, number)
            slowest = (
                np.maximum(slowest[0][:, None], times[None]).reshape(-1, times.shape[1]),
                np.maximum(slowest[1][:, None], times.sum(axis=1)[None]).reshape(-1),
            )
        stages, longest = slowest[0].sum(axis=1), slowest[1]
        seconds = stages if self.schedule == "sync" else np.maximum(stages / 2, longest)
        prices = [self.machines[kind].device.price * number / 3600 for kind, number in zip(kinds, devices, strict=True)]
        return float(seconds.min(initial=inf)) * (sum(prices) if self.objective == "price" else 1.0)


def assert_same(
    graph: TaskGraph, machines: Cluster, cost: CostModel, schedule: Schedule = "sync", objective: Objective = "throughput"
) -> Result | None:
    """The search finds the optimum of every placement, and the cost model says the same of the mappings that it returns."""
    plain = Enumeration(graph, machines, cost, schedule, objective)
    want = {sets: plain.best(sets) for sets in plain.placements}
    if min(want.values()) == inf:
        with pytest.raises(ConfigError, match="no mapping fits"):
            search(graph, machines, cost, schedule=schedule, objective=objective)
        return None
    result = search(graph, machines, cost, schedule=schedule, objective=objective)
    found = {one.placement: one for one in (result.best, *result.runners_up)}
    assert found.keys() == want.keys()
    for sets, one in found.items():
        assert one.cost == pytest.approx(want[sets], rel=1e-8)
        assert one.cost == inf or one.bound == pytest.approx(one.cost, rel=1e-8)
        if one.mapping is not None:
            assert one.cost == pytest.approx(one.price if objective == "price" else one.seconds, rel=1e-8)
            times = pool_seconds(graph, one.mapping, cost.estimates(one.mapping))
            assert step_seconds(times, schedule) == pytest.approx(one.seconds)
            assert bool(one.loses) == (one is not result.best)
    assert result.optimal
    assert result.best.cost == pytest.approx(min(want.values()))
    return result


@pytest.mark.parametrize("devices", [1, 3, 6, 16])
@pytest.mark.parametrize("graph", [ppo(), remax()], ids=["ppo", "remax"])
def test_finds_the_optimum_of_all_mappings(graph: TaskGraph, devices: int) -> None:
    result = assert_same(graph, cluster(1, devices), Fake(graph, devices, memory=5.0 if devices == 1 else 3.0))
    assert result is not None or devices == 1


@pytest.mark.parametrize("seed", range(3))
def test_five_models(seed: int) -> None:
    graph = ppo(("ref", "reward", "cost"))
    result = assert_same(graph, cluster(2, 4), Fake(graph, seed))
    assert result is None or result.placements == 52


@pytest.mark.parametrize("objective", ["throughput", "price"])
@pytest.mark.parametrize("schedule", ["sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_machines_of_two_kinds(schedule: Schedule, objective: Objective, seed: int) -> None:
    graph = remax()
    both = Cluster(((1, machine(4)), (1, machine(3, "other", 6e10, 0.4))))
    assert_same(graph, both, Fake(graph, seed), schedule, objective)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_price(schedule: Schedule) -> None:
    graph = ppo()
    fast = search(graph, cluster(1, 8), Fake(graph, 1), schedule=schedule)
    cheap = assert_same(graph, cluster(1, 8), Fake(graph, 1), schedule, "price")
    assert cheap is not None
    assert cheap.best.price <= fast.best.price
    assert cheap.best.seconds >= fast.best.seconds


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Up to four roles, some trained, some samplers of those, with tasks that read from earlier ones."""
    learners = [ModelRole(f"learner{n}", SIZE, **TRAINED) for n in range(draw(st.integers(1, 2)))]
    samplers = [
        ModelRole(f"sampler{n}", SIZE, weights_of=f"learner{n}") for n in range(draw(st.integers(0, len(learners))))
    ]
    scorers = [ModelRole(f"scorer{n}", SIZE) for n in range(draw(st.integers(0, 4 - len(learners) - len(samplers))))]
    roles = (*learners, *samplers, *scorers)
    kinds = {role.name: "generate" if role.weights_of else "train" if role.trained else "forward" for role in roles}
    extra = draw(st.lists(st.sampled_from([role.name for role in roles]), max_size=2))
    order = draw(st.permutations([role.name for role in roles] + extra))
    tasks = tuple(task(f"task{n}", role, kinds[role]) for n, role in enumerate(order))
    pairs = [(a.name, b.name) for n, a in enumerate(tasks) for b in tasks[n + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=5)) if pairs else []
    return TaskGraph(tuple(roles), tasks, tuple(Edge(*pair, 1e6) for pair in edges))


@given(
    graphs(), st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([1.2, 2.0, 4.0]), st.sampled_from(["sync", "async"])
)
@settings(max_examples=20, deadline=None)
def test_any_graph(graph: TaskGraph, seed: int, devices: int, memory: float, schedule: Schedule) -> None:
    assert_same(graph, cluster(1, devices), Fake(graph, seed, memory), schedule)


def test_counts_of_the_plain_enumeration() -> None:
    assert [len(list(set_partitions([(str(n),) for n in range(size)]))) for size in (3, 4, 5)] == [5, 15, 52]
    found = [frozenset(frozenset(sum(one, ())) for one in sets) for sets in set_partitions([(name,) for name in "abcd"])]
    assert len(set(found)) == 15
    assert all(frozenset().union(*sets) == {*"abcd"} and sum(map(len, sets)) == 4 for sets in found)
    graph = ppo()
    alone = search(graph, cluster(1, 6), Fake(graph, 6), placements=[STANDALONE])
    assert alone.allocations == comb(5, 3)
    assert alone.placements == 1


STANDALONE = [["actor"], ["critic"], ["ref"], ["reward"]]
SPLIT = [["actor", "ref"], ["critic", "reward"]]


def test_fixed_placements_and_allocations() -> None:
    graph, machines = ppo(), cluster(1, 8)
    cost = Fake(graph, 2)
    plain = Enumeration(graph, machines, cost, "sync", "throughput")
    every = search(graph, machines, cost)
    by_sets = {frozenset(map(frozenset, one.placement)): one for one in (every.best, *every.runners_up)}
    result = search(graph, machines, cost, placements=[SPLIT, STANDALONE])
    assert {len(one.placement) for one in (result.best, *result.runners_up)} == {2, 4}
    for one in (result.best, *result.runners_up):
        assert one.cost == pytest.approx(by_sets[frozenset(map(frozenset, one.placement))].cost)
    fixed = search(graph, machines, cost, placements=[SPLIT], allocations=[[6, 2]])
    assert [pool.roles for pool in fixed.best.mapping.pools] == [("actor", "ref", "sampler"), ("critic", "reward")]  # type: ignore[union-attr]
    sets = (("actor", "sampler", "ref"), ("critic", "reward"))
    pairs = [(a, b) for a in range(1, 7) for b in range(1, 3)]  # some may be idle
    assert fixed.best.cost == pytest.approx(min(plain._cheapest(sets, (0, 0), pair) for pair in pairs))
    assert fixed.best.cost >= by_sets[frozenset(map(frozenset, sets))].cost


def test_a_sampler_may_be_placed_apart_from_its_learner() -> None:
    graph, machines = ppo(), cluster(1, 8)
    sets = (("actor", "critic"), ("sampler", "ref", "reward"))
    cost = Fake(graph, 4, memory=4.0)
    result = search(graph, machines, cost, placements=[sets])
    assert result.best.cost == pytest.approx(Enumeration(graph, machines, cost, "sync", "throughput").best(sets))


@pytest.mark.parametrize(
    ("placement", "allocation", "message"),
    [
        ([["actor"], ["critic", "ref"]], None, "placement actor | critic, ref: expected each of actor, critic"),
        ([["actor", "ref"], ["critic", "ref", "reward"]], None, "in one set"),
        ([["actor", "ref"], ["critic", "reward"], []], None, "in one set"),
        (SPLIT, [8], "expected 2 whole numbers from 1 on, 8 in all at most"),
        (SPLIT, [8, 8], "8 in all at most"),
        (SPLIT, [8, 0], "from 1 on"),
    ],
)
def test_placements_that_are_none(placement: list[list[str]], allocation: list[int] | None, message: str) -> None:
    graph = ppo()
    with pytest.raises(ConfigError) as caught:
        given = None if allocation is None else [allocation]
        search(graph, cluster(1, 8), Fake(graph, 0), placements=[placement], allocations=given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_device_has_a_price() -> None:
    with pytest.raises(ConfigError, match="device chip has no price"):
        search(ppo(), cluster(1, 8, price=0.0), Fake(ppo(), 0), objective="price")


# ------------------------------------------------------------------------------------------------------------- real costs

MODEL = ModelSize("small", DecoderSpec("llama", 32000, 1024, 4096, 8, 8, 8, 128, 4096))


def fixed_batches(graph: TaskGraph, budget: int | None = 512) -> TaskGraph:
    """Microbatches that the planner may not choose: fewer ways to enumerate."""
    return TaskGraph(tuple(replace(role, token_budget=budget) for role in graph.roles), graph.tasks, graph.edges)


@pytest.mark.parametrize("memory", [2e9, 3e9, 8e10])
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_optimum_with_real_costs(memory: float, schedule: Schedule) -> None:
    graph = fixed_batches(ppo(("reward",), (), MODEL))
    assert_same(graph, cluster(2, 4, memory=memory), CostModel(graph, Efficiency()), schedule)


def test_optimum_with_real_costs_of_four_models() -> None:
    graph = fixed_batches(ppo(size=MODEL))
    result = assert_same(graph, cluster(1, 4, memory=6e9), CostModel(graph, Efficiency()))
    assert result is not None


def test_more_devices_are_never_slower() -> None:
    graph = ppo(size=MODEL)
    cost = CostModel(graph, Efficiency())
    times = [search(graph, cluster(number, 2, memory=1.2e10), cost).best.seconds for number in range(1, 6)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_a_deadline_leaves_a_bound() -> None:
    graph = ppo(size=MODEL)
    machines = cluster(3, 8, memory=1.2e10)
    whole = search(graph, machines, CostModel(graph, Efficiency()))
    assert whole.optimal
    for seconds in (0.0, 0.1):
        result = search(graph, machines, CostModel(graph, Efficiency()), deadline_s=seconds)
        assert result.bound <= whole.best.seconds * (1 + 1e-9) <= result.best.seconds * (1 + 2e-9)
        assert result.best.mapping is not None
        assert len(result.runners_up) == 14
        assert seconds or not result.optimal


def test_what_does_not_fit() -> None:
    graph = ppo(size=MODEL)
    cost = CostModel(graph, Efficiency())
    with pytest.raises(ConfigError) as caught:
        search(graph, cluster(1, 2, memory=1.5e9), cost)
    text = str(caught.value)
    assert "no mapping fits into the memory of 1 machines of 2 x chip; the smallest cluster that would do: " in text
    number = int(text.split("do: ")[1].split()[0])
    assert search(graph, cluster(number, 2, memory=1.5e9), cost).best.mapping is not None
    with pytest.raises(ConfigError, match="no mapping fits"):
        search(graph, cluster(number - 1, 2, memory=1.5e9), cost)
    with pytest.raises(ConfigError, match=r"nor of 4096 such devices: actor, critic, .*, even alone"):
        search(graph, cluster(1, 2, memory=1e7), cost)
    with pytest.raises(ConfigError, match=r"the memory of \[1, 1\] devices; the least of each are \d+, \d+"):
        search(graph, cluster(1, 2, memory=1.5e9), cost, placements=[SPLIT], allocations=[[1, 1]])


def test_reasons() -> None:
    graph = ppo(size=MODEL)
    cost = CostModel(graph, Efficiency())
    result = search(graph, cluster(1, 4, memory=2.5e9), cost)
    assert result.best.loses == ""
    slow = [one for one in result.runners_up if one.mapping is not None]
    small = [one for one in result.runners_up if one.mapping is None]
    assert slow
    assert small
    for one in slow:
        assert re.fullmatch(r"\S+ s instead of \S+ in stage [123]: .+ on [1-4] devices", one.loses)
    for one in small:
        assert "devices to fit into memory; there are 4" in one.loses
        assert one.cost == inf
    costs = [result.best.cost, *(one.cost for one in result.runners_up)]
    assert costs == sorted(costs)
