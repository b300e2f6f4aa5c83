"""Bytes of roles, moves of weights and whole mappings against other formulas, and what always holds."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from conftest import REVERSE, with_keys
from costs import (
    A100,
    DRAW,
    EXACT,
    FROZEN,
    GRAPH,
    LEARN,
    LEARNER,
    MACHINE,
    SAMPLER,
    SCORE,
    model,
    of,
    timed,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.build_mapping import task_graph
from hybridflow.build_plan import needs
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError
from hybridflow.core.placement import Mesh
from hybridflow.models.spec import DecoderSpec
from hybridflow.planner.cluster import PRESETS
from hybridflow.planner.cost import Efficiency, Estimate
from hybridflow.planner.graph import Edge, Task
from hybridflow.planner.mapping import DeviceMapping, Pool, Practice, Strategy
from hybridflow.planner.moving import reshard_traffic
from hybridflow.reshard.plan import Strategy as Reshard
from hybridflow.reshard.plan import make_plan, model_size, table2

# ------------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(recompute=True),
        Strategy(1, 2),
        Strategy(2, 1),
        Strategy(1, 1, 4),
        Strategy(1, 1, 4, "zero1"),
        Strategy(1, 1, 4, "fsdp"),
        Strategy(2, 2, 2, "zero1", True),
    ],
    ids=str,
)
def test_a_learner_takes_what_runs_are_told(tmp_path: Any, dtype: str, strategy: Strategy) -> None:
    mesh: dict[str, Any] = {"tp": strategy.tp, "pp": strategy.pp, "shard": strategy.shard}
    if strategy.tp > 1:
        mesh["sequence_parallel"] = True
    keys = {
        "run_dir": str(tmp_path),
        "actor__mesh": mesh,
        "actor__dtype": dtype,
        "actor__activation_checkpointing": strategy.recompute,
        "train__token_budget": 64,
        "runtime": {"kind": "ray"},
        "placement": {"pools": {"main": strategy.devices}},
    }
    config = validate(with_keys(REVERSE, **keys), "test")
    footprint = next(need for need in needs(config) if need.role == "actor").footprint
    costs = model(Efficiency(device="cpu"), task_graph(config))
    assert costs.resident_bytes(costs.roles["actor"], strategy) == pytest.approx(footprint.held, rel=0.01)
    assert costs.working_bytes(costs.roles["actor"], strategy) == pytest.approx(footprint.working, rel=0.02)


def test_samplers_hold_nothing_of_their_own() -> None:
    costs = model()
    assert costs.resident_bytes(SAMPLER, Strategy()) == costs.working_bytes(SAMPLER, Strategy()) == 0
    assert costs.resident_bytes(FROZEN, Strategy(1, 8)) == pytest.approx(FROZEN.parameters * 2 / 8, rel=0.01)
    assert costs.shared_bytes(SAMPLER, Strategy(2, 4), Strategy(1, 2)) == costs.resident_bytes(FROZEN, Strategy(2, 4))
    assert costs.shared_bytes(SAMPLER, Strategy(2, 4), Strategy(1, 8)) == 0  # slices lie elsewhere
    assert costs.shared_bytes(SAMPLER, Strategy(1, 1, 8, "fsdp"), Strategy(1, 1, 8)) == 0  # gathered beside the shards


def test_strategies_fit_and_use_all_devices() -> None:
    costs = model(Efficiency())
    for role in GRAPH.roles:
        for devices in (1, 6, 8, 24, 40):
            found = costs.strategies(role, A100, devices)
            assert len(set(found)) == len(found)
            assert all(s.devices == devices and s.tp <= 8 and (8 % s.tp == 0 or devices < 8) for s in found)
            taken = [costs.resident_bytes(role, s) + costs.working_bytes(role, s) for s in found]
            assert max(taken, default=0) <= costs.usable_bytes(A100) == pytest.approx(72e9)
    assert not costs.strategies(LEARNER, A100, 1)  # 14 bytes a parameter
    assert {s.rows for s in costs.strategies(LEARNER, A100, 8)} == {1, 2, 4, 8}
    assert max(s.pp for s in costs.strategies(FROZEN, A100, 128)) == 16
    budget = model(Efficiency(), replace(GRAPH, roles=(replace(LEARNER, token_budget=4096), SAMPLER, FROZEN)))
    assert {(s.rows, s.recompute) for s in budget.strategies(budget.roles["learner"], A100, 16)} == {(1, False)}
    assert {s.pp for s in model(even_stages=True).strategies(FROZEN, A100, 12)} == {1, 2, 4}
    assert {s.shard for s in model(shards=("zero1",)).strategies(LEARNER, A100, 32)} == {"zero1", "none"}


# ------------------------------------------------------------------------------------------------------------------ moving


SMALL = DecoderSpec("llama", 64, 64, 128, 8, 8, 8, 8, 128, tied=False)


@pytest.mark.parametrize("reshard", ["hybridflow", "vanilla", "gather_all"])
@pytest.mark.parametrize(
    ("mesh", "machine"),
    [
        (Mesh(1, 4, 2, 2, 1), 8),
        (Mesh(2, 4, 2, 2, 1), 8),
        (Mesh(1, 4, 2, 4, 1), 4),
        (Mesh(2, 2, 4, 1, 2), 4),
        (Mesh(1, 2, 8, 2, 2), 4),
        (Mesh(2, 4, 1, 2, 1), 4),
        (Mesh(1, 8, 1, 2, 1), 8),
    ],
    ids=str,
)
def test_weights_move_as_the_plan_of_their_moves_says(reshard: Reshard, mesh: Mesh, machine: int) -> None:
    """In the mean of all ranks: layers divide evenly, but vocabularies are on the first and the last stage alone."""
    links = make_plan(SMALL, mesh, reshard, itemsizes=(2, 2)).links
    sent = [(pair, size.total) for pair, size in links.items() if pair[0] != pair[1]]
    outside = [size for (source, target), size in sent if source // machine != target // machine]
    training = Strategy(mesh.pp, mesh.tp, mesh.dp)
    generation_tp, generation_pp = mesh.generation
    traffic = reshard_traffic(training, Strategy(generation_pp, generation_tp, mesh.num_replicas), reshard, machine)
    whole = model_size(SMALL).total * 2 * mesh.size
    assert traffic.received == pytest.approx(float(table2(reshard, mesh)[0]))
    assert sum(size for _, size in sent) / whole == pytest.approx(traffic.received, rel=0.03)
    if mesh.pp % 2 == 0 or reshard == "gather_all" or mesh.size <= machine:
        assert sum(outside) / whole == pytest.approx(traffic.outside, rel=0.12)


def test_a_transition_puts_weights_together_and_takes_them_over_links() -> None:
    costs, size = model(replace(EXACT, copy=2e9)), LEARNER.parameters * 2
    training = Strategy(1, 8, 2)
    assert costs.transition(SAMPLER, training, Strategy(1, 8, 2), MACHINE) == Estimate({})
    found = costs.transition(SAMPLER, training, Strategy(1, 2, 8), MACHINE)
    assert found == Estimate({"copy": size / 2 / 2e9})  # while that is done, they arrive
    called = model(replace(EXACT, copy=2e9, call_s=0.5)).transition(SAMPLER, training, Strategy(1, 2, 8), MACHINE)
    assert called is not None and called.parts == {"call": 0.5, **found.parts}
    arriving = model(EXACT, without={"copy"})
    assert arriving.transition(SAMPLER, training, Strategy(1, 2, 8), MACHINE) == Estimate(
        {"gather": pytest.approx(size * (1 / 2 - 1 / 8) / 200e9)}
    )
    # the second half of the layers comes from another machine, over its network once: its devices want the same
    apart = arriving.transition(SAMPLER, Strategy(2, 8, 1), Strategy(1, 8, 2), MACHINE)
    assert apart is not None and apart.parts["gather"] == pytest.approx(size * 8 / 16 / 25e9)
    everything = costs.transition(SAMPLER, training, Strategy(1, 2, 8), MACHINE, Practice("gather_all"))
    assert everything is not None and everything.parts["copy"] == size / 2e9
    assert costs.transition(SAMPLER, Strategy(1, 2, 8), Strategy(1, 8, 2), MACHINE) is None
    assert costs.transition(SAMPLER, Strategy(1, 1, 16, "fsdp"), Strategy(1, 8, 2), MACHINE) is not None
    assert model(without={"transition"}).transition(SAMPLER, training, Strategy(1, 2, 8), MACHINE) == Estimate({})


def test_publishing_fills_the_machines_that_draw() -> None:
    costs, size = model(replace(EXACT, copy=2e9)), LEARNER.parameters * 2
    found = costs.publishing(SAMPLER, Strategy(1, 2, 8), MACHINE)
    assert found.parts == {"copy": size / 2 / 2e9}  # which takes longer than their way there
    arriving = model(without={"copy"}).publishing(SAMPLER, Strategy(1, 2, 8), MACHINE)
    assert arriving.parts == {"gather": pytest.approx(8 * size / 2 / 25e9)}
    assert costs.publishing(SAMPLER, Strategy(1, 2, 8), MACHINE, Practice("broadcast")).parts["copy"] == size / 2e9


def test_pools_pull_over_the_networks_of_their_machines() -> None:
    edge = Edge("draw", "score", 50e9)
    assert model().transfer(edge, MACHINE, 8) == 2.0
    assert model().transfer(edge, MACHINE, 12) == 1.0
    assert model(without={"transfer"}).transfer(edge, MACHINE, 8) == 0.0


# ---------------------------------------------------------------------------------------------------------------- mappings


TOGETHER = {"learner": Strategy(1, 8, 2, "zero1"), "sampler": Strategy(1, 2, 8), "frozen": Strategy(1, 8, 2)}


def mapping(*pools: tuple[int, tuple[str, ...]], **strategies: Strategy) -> DeviceMapping:
    made = tuple(Pool(f"p{n}", A100, devices, roles) for n, (devices, roles) in enumerate(pools))
    return DeviceMapping(made, TOGETHER | strategies)


def test_every_task_of_a_mapping_has_an_estimate() -> None:
    costs = model(Efficiency())
    found = costs.estimates(mapping((16, ("learner", "sampler", "frozen"))))
    assert list(found) == ["draw", "score", "learn"]
    moved = costs.transition(SAMPLER, TOGETHER["learner"], TOGETHER["sampler"], A100)
    assert moved is not None and found["draw"].parts["transition"] == pytest.approx(moved.seconds)
    assert all("transfer" not in estimate.parts for estimate in found.values())
    apart = costs.estimates(mapping((16, ("learner", "sampler")), (16, ("frozen",))))
    assert apart["score"].parts["transfer"] == pytest.approx(costs.transfer(GRAPH.edges[0], A100, 16))
    assert apart["draw"].parts["decode"] <= found["draw"].parts["decode"]  # more room for the cache


def test_samplers_on_other_pools_are_published_to() -> None:
    costs = model(Efficiency())
    found = costs.estimates(mapping((16, ("learner", "frozen")), (16, ("sampler",))))
    assert found["draw"].parts["transition"] == costs.publishing(SAMPLER, TOGETHER["sampler"], A100).seconds


def test_roles_without_a_model_take_their_own_seconds() -> None:
    judge = Task("judge", "judge", "reward", 1024, 0.0, 0.0, times=2, seconds=1.5)
    costs = model(graph=of(DRAW, judge, LEARN))
    assert costs.estimates(mapping((16, ("learner", "sampler", "frozen"))))["judge"].parts == {"own": 3.0}


def test_pools_that_are_too_small_say_who_takes_most() -> None:
    alone = {role.name: Strategy() for role in GRAPH.roles}
    with pytest.raises(ConfigError) as caught:
        model().estimates(mapping((1, ("learner", "sampler", "frozen")), **alone))
    (problem,) = caught.value.problems
    assert problem.startswith("pool p0 (1 x a100-80g): needs 1") and "74.5 GiB are usable; learner takes most" in problem
    with pytest.raises(ConfigError, match=r"0\.9 GiB a device are left for sampler, which needs 13\.6 GiB for weights"):
        costs = model(replace(EXACT, memory=0.18))
        costs.estimates(mapping((16, ("learner",)), (1, ("sampler", "frozen")), **alone | {"learner": Strategy(2, 8)}))
    with pytest.raises(ConfigError, match="sampler: pp x tp = 3 x 1 doesn't divide 1 x 8, those of learner"):
        model().estimates(mapping((16, ("learner", "sampler", "frozen")), sampler=Strategy(3)))


def test_short_rows_make_microbatches_of_as_many_tokens() -> None:
    found = {}
    for length in (2000, 500, 7):
        costs = model(graph=GRAPH.with_lengths(length / 2, length / 2).with_rows(4096))
        found[length] = sorted({s.rows for s in costs.strategies(costs.roles["frozen"], MACHINE, 8)})
    assert found == {2000: [1, 2, 4, 8], 500: [1, 2, 4, 8], 7: [73, 146, 292, 584]}


def test_devices_have_to_compute_in_the_type_of_a_model() -> None:
    machine = replace(MACHINE, device=replace(MACHINE.device, flops={"float32": 10e12}))
    with pytest.raises(ConfigError, match="d: no flops of bfloat16, in which frozen computes, but of float32; give them"):
        model().seconds(SCORE, Strategy(), machine)


def test_terms_can_be_left_out() -> None:
    whole = model(Efficiency(), graph=of(LEARN))
    names = timed(whole, LEARN, Strategy(2, 4, 2, "zero1", True), machine=A100).parts
    assert {"compute", "recompute", "bubble", "pipeline", "tensor", "data", "optimizer", "call"} <= set(names)
    for name in names:
        less = timed(model(Efficiency(), without={name}), LEARN, Strategy(2, 4, 2, "zero1", True), machine=A100)
        assert less.parts == {key: value for key, value in names.items() if key != name}
    ideal = timed(
        model(replace(Efficiency(), network=inf)), LEARN, Strategy(1, 8, 2, "zero1"), machine=replace(A100, devices=8)
    )
    assert ideal.parts.get("data", 0.0) <= 1e-3  # all of it is between machines
    assert not [s for s in model(max_pp=1).strategies(LEARNER, A100, 16) if s.pp > 1]


# -------------------------------------------------------------------------------------------------------------- properties


ONE_TWO_EIGHT = st.sampled_from([1, 2, 8])
CUTS = st.builds(lambda pp, tp, dp, rows: Strategy(pp, tp, dp, rows=rows), *[ONE_TWO_EIGHT] * 4)


@settings(max_examples=30, deadline=None)
@given(cut=CUTS, rows=st.integers(1, 2000), response=st.floats(0.1, 4000), spread=st.floats(0, 2))
def test_more_copies_never_slow_down_what_they_do_side_by_side(
    cut: Strategy, rows: int, response: float, spread: float
) -> None:
    draw = replace(DRAW, rows=rows, response=response, deviation=spread * response, longest=3 * response)
    score = replace(SCORE, rows=rows, response=response)
    costs, more = model(Efficiency(), of(draw, score, LEARN)), cut._replace(dp=2 * cut.dp)
    assert timed(costs, score, more).seconds <= timed(costs, score, cut).seconds * (1 + 1e-9)
    slower, faster = (costs.seconds(draw, s, MACHINE, 60e9) for s in (cut, more))
    if slower is not None and faster is not None and not spread:
        assert faster.seconds <= slower.seconds * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(
    cut=CUTS,
    rows=st.integers(1, 2000),
    spread=st.floats(0, 2),
    slots=st.sampled_from([0, 8, 100]),
    room=st.tuples(st.floats(1e9, 1e11), st.floats(1e9, 1e11)),
)
def test_more_room_never_slows_a_sampler_down(
    cut: Strategy, rows: int, spread: float, slots: int, room: tuple[float, float]
) -> None:
    task = replace(DRAW, rows=rows, deviation=1024 * spread, slots=slots)
    less, more = (model(Efficiency(), of(task)).seconds(task, cut, MACHINE, free) for free in sorted(room))
    if less is not None:
        assert more is not None and more.seconds <= less.seconds * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(cut=CUTS, recompute=st.booleans(), shard=st.sampled_from(["none", "zero1", "fsdp"]), rows=st.integers(1, 2000))
def test_faster_hardware_is_never_slower(cut: Strategy, recompute: bool, shard: Any, rows: int) -> None:
    task, strategy = replace(LEARN, rows=rows), cut._replace(recompute=recompute, shard=shard)
    costs = model(Efficiency(), of(task))
    slow, fast = (timed(costs, task, strategy, machine=machine) for machine in (MACHINE, PRESETS["h100"]))
    assert fast.seconds <= slow.seconds and min(slow.parts.values()) > 0
    three = replace(task, name="three", times=3)
    assert timed(costs, three, strategy).seconds == pytest.approx(3 * slow.seconds)
