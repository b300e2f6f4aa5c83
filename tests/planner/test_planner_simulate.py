"""The timeline of a mapping: who runs when, against what the search reckons and what a step depends on."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.metrics import Span
from hybridflow.models.spec import DecoderSpec
from hybridflow.planner.cluster import Device, Machine
from hybridflow.planner.cost import Estimate
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.mapping import DeviceMapping, Pool, Schedule, Strategy
from hybridflow.planner.search import pool_seconds, step_seconds
from hybridflow.planner.simulate import Simulation, simulate
from hybridflow.planner.sizes import ModelSize

MACHINE = Machine(Device("chip", {"bfloat16": 1e14}, 8e10, 1e12), 8, 1e11, 1e10, 1e-6, 1e-5)
SIZE = ModelSize("tiny", DecoderSpec("llama", 100, 32, 64, 2, 4, 2, 8, 128))
LEARNS, SAMPLES, JUDGES = "learner", "sampler", "judge"


class Case(NamedTuple):
    graph: TaskGraph
    mapping: DeviceMapping
    estimates: dict[str, Estimate]

    def simulated(self, steps: int = 3, seed: int = 0, **how: Any) -> Simulation:
        return simulate(self.graph, self.mapping, self.estimates, steps, seed, **how)

    @property
    def cost(self) -> float:
        """As the search reckons."""
        return step_seconds(pool_seconds(self.graph, self.mapping, self.estimates), self.mapping.schedule)

    def place(self, task: Task) -> str:
        return next((pool.name for pool in self.mapping.pools if task.role in pool.roles), "")


@st.composite
def cases(draw: st.DrawFn, schedule: Schedule = "sync", pools: int = 3) -> Case:
    """Any graph of up to eight tasks, some of them without a model, on up to ``pools`` pools."""
    roles = [f"role{number}" for number in range(draw(st.integers(1, 5)))]
    where = [draw(st.integers(0, pools - 1)) for _ in roles]
    used = {number: tuple(r for r, there in zip(roles, where, strict=True) if there == number) for number in where}
    tasks = [
        Task(f"task{number}", draw(st.sampled_from([*roles, "script"] if pools > 1 else roles)), "forward", 8, 4.0, 4.0)
        for number in range(draw(st.integers(1, 8)))
    ]
    pairs = list(itertools.combinations([task.name for task in tasks], 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    graph = TaskGraph(tuple(ModelRole(name, SIZE) for name in roles), tuple(tasks), tuple(Edge(*pair) for pair in edges))
    mapping = DeviceMapping(
        tuple(Pool(f"pool{number}", MACHINE, 2, names) for number, names in used.items()),
        {role: Strategy(dp=2) for role in roles},
        schedule,
    )
    seconds = st.floats(0, 10, allow_subnormal=False)
    return Case(graph, mapping, {t.name: Estimate({"compute": draw(seconds), "transfer": draw(seconds)}) for t in tasks})


def rlhf(schedule: Schedule = "sync", apart: bool = False, deviation: float = 0.0) -> Case:
    """Draw, judge, and learn on 4 devices; with ``apart`` the sampler has 4 more."""
    roles = (
        ModelRole(LEARNS, SIZE, gradient_bytes=4.0),
        ModelRole(SAMPLES, SIZE, weights_of=LEARNS),
        ModelRole(JUDGES, SIZE, head="score"),
    )
    tasks = (
        Task("sampler.rollout", SAMPLES, "generate", 32, 8, 64, deviation=deviation, longest=999),
        Task("judge.score", JUDGES, "forward", 32, 8, 64),
        Task("script.advantages", "script", "compute", 32, 8, 64),
        Task("learner.update", LEARNS, "train", 32, 8, 64),
    )
    edges = tuple(Edge(a.name, b.name, 10.0) for a, b in itertools.pairwise(tasks))
    main = (LEARNS, JUDGES) if apart else (LEARNS, SAMPLES, JUDGES)
    pools = (Pool("main", MACHINE, 4, main), *([Pool("rollout", MACHINE, 4, (SAMPLES,))] if apart else []))
    strategies = {LEARNS: Strategy(dp=4), JUDGES: Strategy(dp=4), SAMPLES: Strategy(tp=2, dp=2)}
    moved = {"transition": 0.5}
    estimates = {
        "sampler.rollout": Estimate({**moved, "decode": 4.0}),
        "judge.score": Estimate({"compute": 1.0, "transfer": 0.25} if apart else {"compute": 1.0}),
        "script.advantages": Estimate({"script": 0.125}),
        "learner.update": Estimate({"compute": 3.0}),
    }
    return Case(TaskGraph(roles, tasks, edges), DeviceMapping(pools, strategies, schedule), estimates)


def end(span: Span) -> float:
    return span.start_s + span.duration_s


def rows_of(simulation: Simulation) -> dict[str, list[Span]]:
    rows = defaultdict(list)
    for span in itertools.chain(*simulation.steps):
        rows[span.worker].append(span)
    return rows


@settings(max_examples=30, deadline=None)
@given(cases())
def test_a_step_takes_at_most_what_the_search_reckons(case: Case) -> None:
    simulation = case.simulated()
    assert simulation.step_s <= case.cost * (1 + 1e-9)
    assert simulation.ends[0] == pytest.approx(simulation.step_s)


@settings(max_examples=20, deadline=None)
@given(cases(pools=1))
def test_and_exactly_that_in_one_pool(case: Case) -> None:
    assert case.simulated().step_s == pytest.approx(case.cost)


@settings(max_examples=20, deadline=None)
@given(cases(), cases("async"))
def test_a_pool_does_one_thing_at_a_time_and_all_of_its_work(sync: Case, stale: Case) -> None:
    for case in (sync, stale):
        simulation = case.simulated()
        for spans in rows_of(simulation).values():
            for earlier, later in itertools.pairwise(sorted(spans, key=lambda span: (span.start_s, end(span)))):
                assert end(earlier) <= later.start_s + 1e-9
        done: dict[str, float] = defaultdict(float)
        for span in itertools.chain(*simulation.steps):
            if span.kind != "queue":
                done[span.name if span.worker else "driver"] += span.duration_s
        for task in case.graph.tasks:
            if case.place(task):
                assert done[task.name] == pytest.approx(3 * case.estimates[task.name].seconds)


@settings(max_examples=30, deadline=None)
@given(cases(), cases("async"))
def test_nothing_starts_before_what_it_reads_is_there(sync: Case, stale: Case) -> None:
    for case, behind in ((sync, 1), (stale, 2)):
        simulation = case.simulated(4)
        for step, spans in enumerate(simulation.steps):
            work = [span for span in spans if span.kind != "queue"]
            starts = {name: min(s.start_s for s in work if s.name == name) for name in {s.name for s in work}}
            ends = {name: max(end(s) for s in work if s.name == name) for name in starts}
            assert all(ends[edge.writer] <= starts[edge.reader] + 1e-9 for edge in case.graph.edges)
            assert min(starts.values()) >= (simulation.ends[step - behind] if step >= behind else 0.0)


def test_the_spans_of_a_step_are_those_of_a_real_run() -> None:
    first, second, _ = rlhf(apart=True).simulated().steps
    assert [(s.name, s.kind, s.start_s, s.duration_s, s.worker) for s in first] == [
        ("sampler.weights", "transfer", 0.0, 0.5, "rollout/0"),
        ("sampler.rollout", "generate", 0.5, 4.0, "rollout/0"),
        ("sampler.weights", "transfer", 0.0, 0.5, "rollout/2"),
        ("sampler.rollout", "generate", 0.5, 4.0, "rollout/2"),
        ("judge.score", "queue", 0.0, 4.5, "main/0"),
        ("judge.score", "transfer", 4.5, 0.25, "main/0"),
        ("judge.score", "forward", 4.75, 1.0, "main/0"),
        ("script.advantages", "compute", 5.75, 0.125, ""),
        ("learner.update", "queue", 5.75, 0.125, "main/0"),
        ("learner.update", "train", 5.875, 3.0, "main/0"),
    ]
    assert [replace(span, start_s=span.start_s - 8.875) for span in second] == [*first]


def test_one_step_stale_rollouts_hide_behind_learning() -> None:
    alone, apart, stale = rlhf().simulated(8), rlhf(apart=True).simulated(8), rlhf("async", apart=True).simulated(8)
    assert alone.step_s == pytest.approx(8.625) and apart.step_s == pytest.approx(8.875)
    assert stale.step_s < 0.6 * apart.step_s and stale.step_s >= 4.5
    assert stale.utilisation("rollout") == pytest.approx(4 / 4.5) and apart.utilisation("rollout") == pytest.approx(
        4 / 8.875
    )
    assert alone.utilisation("main") == pytest.approx(8 / 8.625)


@settings(max_examples=30, deadline=None)
@given(cases("async"))
def test_one_step_stale_pools_work_side_by_side(case: Case) -> None:
    """A step takes no less than a pool works for it, and no more than stages that wait for each other."""
    pools = pool_seconds(case.graph, case.mapping, case.estimates)
    simulated = case.simulated(24).step_s
    assert 0.85 * max(map(sum, pools.values())) <= simulated <= step_seconds(pools, "sync") * (1 + 1e-9)


def test_two_steps_are_in_flight_at_most() -> None:
    """Rollout, judging and learning take turns in a chain of three pools: a step can't take less than half of it."""
    case = rlhf("async", apart=True)
    *_, pool = case.mapping.pools
    pools = (Pool("judges", MACHINE, 4, (JUDGES,)), Pool("learners", MACHINE, 4, (LEARNS,)), pool)
    chained = case._replace(mapping=replace(case.mapping, pools=pools))
    assert chained.simulated(12).step_s == pytest.approx(max(4.5, 8.875 / 2))
    slower = chained._replace(estimates={**chained.estimates, "judge.score": Estimate({"compute": 4.0})})
    assert slower.simulated(12).step_s == pytest.approx(11.625 / 2)


def test_more_staleness_lets_more_steps_be_in_flight() -> None:
    """In a chain of three pools a step takes its share of what is in flight, and no less than the slowest pool."""
    case = rlhf("async", apart=True)
    *_, pool = case.mapping.pools
    pools = (Pool("judges", MACHINE, 4, (JUDGES,)), Pool("learners", MACHINE, 4, (LEARNS,)), pool)
    chained = case._replace(
        mapping=replace(case.mapping, pools=pools),
        estimates={**case.estimates, "judge.score": Estimate({"compute": 4.0})},
    )
    found = [
        chained._replace(mapping=replace(chained.mapping, staleness=staleness)).simulated(24).step_s
        for staleness in (0, 1, 2, 5)
    ]
    assert found == pytest.approx([11.625, 11.625 / 2, 4.5, 4.5])
    assert chained.simulated(24).step_s == found[1]


def test_recorded_lengths_replace_those_that_are_assumed() -> None:
    skewed = Lengths.of((1.0,) * 15 + (100.0,))
    alike, uneven = rlhf(), rlhf(deviation=48.0)
    assert alike.simulated(8, lengths=Lengths(64.0)) == alike.simulated(8)
    assert uneven.simulated(8, lengths=Lengths(64.0, 48.0, 999)) == uneven.simulated(8)
    drawn = {s.duration_s for step in alike.simulated(40, lengths=skewed).steps for s in step if s.kind == "generate"}
    assert len(drawn) == 2 and max(drawn) == pytest.approx(100 * min(drawn)), "with a long response among 16, or without"


def test_a_rollout_goes_before_learning_that_waits() -> None:
    """The sampler's pool doesn't stand still while others judge."""
    case = rlhf("async", apart=True)
    pools = (Pool("main", MACHINE, 4, (LEARNS, SAMPLES)), Pool("judges", MACHINE, 4, (JUDGES,)))
    mixed = case._replace(mapping=replace(case.mapping, pools=pools))
    assert mixed.simulated(12).step_s == pytest.approx(7.5) == mixed.cost


def test_replicas_end_at_different_times_and_the_slowest_counts() -> None:
    uneven = rlhf(deviation=48.0)
    steps = uneven.simulated(200)
    drawn = [[span.duration_s for span in step if span.kind == "generate"] for step in steps.steps]
    assert sum(map(max, drawn)) == pytest.approx(4.0 * 200) and max(map(max, drawn)) > 5.0
    waits = [[span for span in step if (span.name, span.kind) == ("judge.score", "queue")] for step in steps.steps]
    for seconds, (wait,) in zip(drawn, waits, strict=True):
        assert wait.duration_s == pytest.approx(max(seconds) - min(seconds))
        assert wait.worker == ("main/2" if seconds[0] > seconds[1] else "main/0")
    assert steps.step_s == pytest.approx(uneven.cost, rel=0.01)
    assert uneven.simulated(5, seed=1) == uneven.simulated(5, seed=1) != uneven.simulated(5, seed=2)


def test_few_slots_make_replicas_alike() -> None:
    def slowest(slots: int) -> float:
        case = rlhf(deviation=48.0)
        first, *others = case.graph.tasks
        graph = TaskGraph(case.graph.roles, (replace(first, slots=slots), *others), case.graph.edges)
        return max(s.duration_s for step in case._replace(graph=graph).simulated(50).steps for s in step)

    assert slowest(0) == slowest(16) > 1.05 * slowest(1) > 4.2
