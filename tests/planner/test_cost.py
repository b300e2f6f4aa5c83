"""Costs of tasks against what can be counted by hand, by other formulas and by simulation."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log2
from typing import Any

import numpy as np
import pytest
from conftest import REVERSE, with_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.build_mapping import task_graph
from hybridflow.build_plan import needs
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError
from hybridflow.core.placement import Mesh
from hybridflow.models.spec import DecoderSpec
from hybridflow.planner.cluster import PRESETS, Device, Machine
from hybridflow.planner.cost import CostModel, Efficiency, Estimate
from hybridflow.planner.flops import backward_flops, decode_flops, forward_flops
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Pool, Strategy
from hybridflow.planner.moving import reshard_traffic
from hybridflow.planner.sizes import MODELS, ModelSize
from hybridflow.reshard.plan import Strategy as Reshard
from hybridflow.reshard.plan import make_plan, model_size, table2

BILLION = 1e9
EXACT = Efficiency(1.0, 0.0, 0.0, 0.0, 1.0, inf, 1.0, 1.0, 0.0, 0.0, 1.0)
"""peaks reached, and nothing besides"""
MACHINE = Machine(Device("d", {"bfloat16": 100e12, "float32": 10e12}, 80 * BILLION, 2e12), 8, 200e9, 25e9, 0.0, 0.0)
A100 = PRESETS["a100-80g"]
SPEC = MODELS["llama-7b"].spec
LEARNER = ModelRole("learner", MODELS["llama-7b"], "policy", 2, 4.0, 8.0)
SAMPLER = ModelRole("sampler", MODELS["llama-7b"], "policy", 2, weights_of="learner")
FROZEN = ModelRole("frozen", MODELS["llama-7b"], "policy", 2)
DRAW = Task("draw", "sampler", "generate", 1024, 1024.0, 1024.0)
SCORE = Task("score", "frozen", "forward", 1024, 1024.0, 1024.0)
LEARN = Task("learn", "learner", "train", 1024, 1024.0, 1024.0, minibatches=8)
GRAPH = TaskGraph(
    (LEARNER, SAMPLER, FROZEN), (DRAW, SCORE, LEARN), (Edge("draw", "score", 1e9), Edge("score", "learn", 1e9))
)
WORK = SPEC, 1024 * 2048, 1024 * 1024, 2048, True
"""of a pass over all rows"""


def model(efficiency: Efficiency = EXACT, graph: TaskGraph = GRAPH, **keys: Any) -> CostModel:
    return CostModel(graph, efficiency, **keys)


def timed(
    costs: CostModel, task: Task, strategy: Strategy, free: float = 64 * BILLION, machine: Machine = MACHINE
) -> Estimate:
    found = costs.seconds(task, strategy, machine, free)
    assert found is not None
    return found


def of(task: Task, *others: Task) -> TaskGraph:
    return TaskGraph(GRAPH.roles, (task, *others), ())


# ------------------------------------------------------------------------------------------------------------------ passes


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_passes_take_the_flops_that_are_counted_elsewhere(tp: int, dp: int) -> None:
    forward, backward = forward_flops(*WORK), backward_flops(*WORK, 0, True)
    peak, strategy = 100e12 * tp * dp, Strategy(1, tp, dp, rows=4)
    assert timed(model(), SCORE, strategy).parts["compute"] == pytest.approx(forward / peak, rel=1e-6)
    parts = timed(model(), LEARN, strategy).parts
    assert parts["compute"] == pytest.approx((forward + backward) / peak, rel=1e-6)
    assert "recompute" not in parts and "bubble" not in parts
    recomputed = timed(model(), LEARN, strategy._replace(recompute=True)).parts
    assert recomputed["recompute"] == pytest.approx(forward / peak, rel=1e-6)
    assert recomputed["tensor"] / parts["tensor"] == pytest.approx(1.5) if tp > 1 else "tensor" not in recomputed


def test_frozen_layers_have_no_way_back() -> None:
    learner = replace(LEARNER, frozen=24, trains_head=False)
    costs = model(graph=replace(GRAPH, roles=(learner, SAMPLER, FROZEN)))
    flops = forward_flops(*WORK) + backward_flops(*WORK, 24, False)
    assert timed(costs, LEARN, Strategy()).parts["compute"] == pytest.approx(flops / 100e12, rel=1e-6)
    share = learner.trained_parameters / learner.parameters
    held = model().resident_bytes(LEARNER, Strategy()) - 2 * LEARNER.parameters
    assert costs.resident_bytes(learner, Strategy()) - 2 * LEARNER.parameters == pytest.approx(held * share)


def test_a_pipeline_waits_for_its_stages_and_for_the_slowest() -> None:
    whole, piped = (timed(model(), LEARN, Strategy(pp, rows=2)).parts for pp in (1, 5))
    assert piped["compute"] == pytest.approx(whole["compute"] / 5)
    slowest = piped["compute"] + piped["imbalance"]
    head = 3 * 2 * SPEC.hidden_size * SPEC.vocab_size * 1024 * 1024 / 100e12
    layer = (whole["compute"] - head) / 31.6  # the last one does less
    assert slowest == pytest.approx(max(7 * layer, 6.6 * layer + head), rel=0.01)  # of 32 layers the last stages have 7
    assert piped["bubble"] == pytest.approx(slowest * 4 / 64, rel=1e-6)  # of 64 microbatches
    # forward and back, 68 slots of 8 updates, 2 rows of hidden states over the links: 5 stages are in one machine
    assert piped["pipeline"] == pytest.approx(8 * 68 * 2 * 2 * 2048 * 4096 * 2 / 200e9)
    over_network = timed(model(), LEARN, Strategy(5, 2, rows=2)).parts["pipeline"]
    assert over_network == pytest.approx(8 * 68 * 2 * 2 * 2048 * 4096 * 2 / 25e9)


def test_layers_of_short_microbatches_wait_for_weights_or_launches() -> None:
    task = Task("score", "frozen", "forward", 4, 1.0, 1.0)
    weights = 32 * MODELS["llama-7b"].layer * 2 / 2e12
    costs = model(graph=of(task))
    assert timed(costs, task, Strategy(rows=1)).seconds == pytest.approx(4 * weights, rel=0.01)
    assert timed(costs, task, Strategy(rows=4)).seconds == pytest.approx(weights, rel=0.01)
    slow = model(replace(EXACT, launch_s=1e-3), of(task, LEARN, DRAW))
    assert timed(slow, task, Strategy(rows=1)).parts["launch"] == pytest.approx(4 * 32e-3)
    recomputed, chunks = Strategy(rows=2, recompute=True), 1024 * 1024 / 2048
    assert timed(slow, LEARN, recomputed).parts["launch"] == pytest.approx(512 * 32 * 4e-3)  # backward is two of forward
    assert timed(slow, DRAW, Strategy()).parts["launch"] == pytest.approx(chunks * 32e-3)


def test_tensor_parallel_lines_reduce_twice_a_layer_and_way() -> None:
    slow = replace(MACHINE, link_latency_s=1e-5)
    for tp in (2, 8):
        each = 2 * (tp - 1) / tp * 2 * 2048 * 4096 * 2 / 200e9 + 2 * log2(tp) * 1e-5
        microbatches = 1024 / 2
        found = timed(model(), SCORE, Strategy(1, tp, rows=2), machine=slow).parts["tensor"]
        assert found == pytest.approx(microbatches * 32 * 2 * each)
        found = timed(model(), LEARN, Strategy(1, tp, rows=2), machine=slow).parts["tensor"]
        assert found == pytest.approx(microbatches * 32 * 4 * each)


@pytest.mark.parametrize(
    ("tp", "dp", "inside", "outside"),
    [
        (1, 8, 7 / 8, 0.0),  # in one machine
        (8, 2, 0.0, 1 / 2 * 8),  # a machine each, all of its 8 slices over its network
        (2, 8, 3 / 4, 1 / 2 * 2),  # four copies in each of two machines, then two slices between them
    ],
)
def test_gradients_share_the_network_of_a_machine(tp: int, dp: int, inside: float, outside: float) -> None:
    numbers = LEARNER.parameters / tp
    moved = (inside / 200e9 + outside / 25e9) * numbers
    for shard, size in (("none", 2 * 4), ("zero1", 4 + 2)):
        found = timed(model(), LEARN, Strategy(1, tp, dp, shard)).parts["data"]  # type: ignore[arg-type]  # a Literal
        assert found == pytest.approx(8 * moved * size, rel=1e-3)
    # weights come for both ways of 8 microbatches of 2 rows, gradients go once
    found = timed(model(), LEARN, Strategy(1, tp, dp, "fsdp", rows=2)).parts["data"]
    assert found == pytest.approx(8 * moved * (4 + 2 * 2 * (128 // dp // 2)), rel=1e-3)


def test_fsdp_hides_weights_behind_computing() -> None:
    shown, hidden = (
        timed(model(replace(EXACT, overlap=overlap)), LEARN, Strategy(1, 1, 8, "fsdp")).parts for overlap in (0.0, 0.5)
    )
    assert shown["data"] - hidden["data"] == pytest.approx(min(shown["compute"] / 2, shown["data"]), rel=0.2)


def test_an_optimizer_goes_through_its_own_states() -> None:
    size = LEARNER.parameters * (2 * 4 + 2 * 8 + 2)
    for strategy, share in ((Strategy(1, 2), 2), (Strategy(1, 2, 4, "none"), 2), (Strategy(1, 2, 4, "zero1"), 8)):
        found = timed(model(), LEARN, strategy).parts["optimizer"]
        assert found == pytest.approx(8 * size / share / 2e12, rel=1e-3)


def test_calls_are_counted_by_update() -> None:
    costs = model(replace(EXACT, call_s=0.25))
    assert timed(costs, LEARN, Strategy()).parts["call"] == 2.0
    assert timed(costs, SCORE, Strategy()).parts["call"] == 0.25
    twice = replace(LEARN, epochs=2, times=3)
    assert timed(model(replace(EXACT, call_s=0.25), of(twice)), twice, Strategy()).parts["call"] == 12.0


# ----------------------------------------------------------------------------------------------------------------- drawing


def test_a_decode_step_reads_weights_and_caches() -> None:
    parts = timed(model(), replace(DRAW, rows=16), Strategy()).parts
    weights = (32 * MODELS["llama-7b"].layer + 4096 * 32000) * 2
    cache = 2 * 32 * 4096 * 2 * (1024 + 512)
    assert parts["decode"] == pytest.approx(1023 * (weights + 16 * cache) / 2e12, rel=1e-3)
    prefill = forward_flops(SPEC, 16 * 1024, 16, 1024, True)
    assert parts["prefill"] == pytest.approx(prefill / 100e12, rel=1e-6)


def test_many_rows_of_short_contexts_are_computed_for_longer_than_read() -> None:
    short = replace(DRAW, rows=4096, prompt=8.0, response=9.0)
    parts = timed(model(graph=of(short)), short, Strategy()).parts
    assert parts["decode"] == pytest.approx(decode_flops(SPEC, 8.5, 8, 4096) / 100e12, rel=0.01)


@pytest.mark.parametrize(("rows", "waves"), [(32, 1), (64, 2), (128, 4)])
def test_rows_that_do_not_fit_wait(rows: int, waves: int) -> None:
    position = 2 * 32 * 4096 * 2
    free = LEARNER.parameters * 2 + 32 * 2048 * position
    costs = model(replace(EXACT, decode_step_s=1.0, decode_row_s=0.01))
    parts = timed(costs, replace(DRAW, name=str(rows), rows=rows), Strategy(), free).parts
    assert parts["steps"] == pytest.approx(1023 * waves)
    assert parts["rows"] == pytest.approx(1023 * rows * 0.01)
    unlimited = model(replace(EXACT, decode_step_s=1.0, cache_limit=False))
    assert timed(unlimited, replace(DRAW, rows=rows), Strategy(), 0.0).parts["steps"] == pytest.approx(1023)


def test_a_sampler_needs_room_for_its_weights_and_the_longest_response() -> None:
    position = 2 * 32 * 4096 * 2
    for longest in (1024, 3000):
        task = replace(DRAW, longest=float(longest), deviation=10.0)
        least = LEARNER.parameters * 2 + (1024 + longest) * position
        assert model().seconds(task, Strategy(), MACHINE, least * 0.999) is None
        assert model().seconds(task, Strategy(), MACHINE, least * 1.001) is not None
        cut = Strategy(2, 4)  # 16 layers and 8 heads on each
        assert model().seconds(task, cut, MACHINE, least / 8 * 1.05) is not None


def test_slots_limit_a_replica_and_equal_rows_end_together() -> None:
    costs = model(replace(EXACT, decode_step_s=1.0))
    for rows, rounds in ((8, 1), (9, 2), (16, 2), (17, 3)):
        task = replace(DRAW, name=str(rows), rows=rows, slots=8, response=11.0)
        assert timed(costs, task, Strategy()).parts["steps"] == 10 * rounds
    assert timed(costs, replace(task, name="cut"), Strategy(1, 1, 3)).parts["steps"] == 10  # six rows each


def scheduled(lengths: Any, slots: int) -> float:
    """Steps of continuous batching: the next row takes the first slot that is free."""
    ends = [0.0] * slots
    for length in lengths:
        first = int(np.argmin(ends))
        ends[first] += length
    return max(ends)


@pytest.mark.parametrize(("rows", "slots"), [(64, 64), (256, 32), (100, 64)])
def test_lengths_that_differ_take_as_long_as_in_a_simulation(rows: int, slots: int) -> None:
    rng, costs = np.random.default_rng(0), model(replace(EXACT, decode_step_s=1.0))
    drawn = np.clip(rng.normal(300, 100, (20, rows)), 1, 512)
    mean = np.mean([scheduled(lengths, slots) for lengths in drawn])
    task = replace(DRAW, rows=rows, response=300.0, deviation=100.0, longest=512.0, slots=slots)
    assert timed(costs, task, Strategy()).parts["steps"] == pytest.approx(mean, rel=0.12)


def test_a_shared_prompt_is_read_once_and_kept_once() -> None:
    alone, shared = (replace(DRAW, name=f"{group}", rows=64, group=group) for group in (1, 8))
    parts = [timed(model(), task, Strategy()).parts["prefill"] for task in (alone, shared)]
    assert parts[0] / parts[1] == pytest.approx(8, rel=0.05)
    free = LEARNER.parameters * 2 + 40 * 2048 * 2 * 32 * 4096 * 2
    costs = model(replace(EXACT, decode_step_s=1.0))
    waits = [timed(costs, task, Strategy(), free).parts["steps"] for task in (alone, shared)]
    assert waits[0] / waits[1] == pytest.approx(64 / 40)


@pytest.mark.parametrize(("prompt", "response"), [(1024.0, 1.0), (1024.0, 0.0), (0.0, 0.0), (8.0, 0.5)])
def test_the_first_token_of_a_response_costs_its_prompt(prompt: float, response: float) -> None:
    task = replace(DRAW, prompt=prompt, response=response, deviation=0.0)
    found = timed(model(replace(EXACT, decode_step_s=1.0)), task, Strategy())
    assert set(found.parts) == {"prefill"}
    assert found.seconds >= forward_flops(SPEC, 1024 * prompt, 1024, prompt, True) / 100e12


def test_without_a_cache_every_token_costs_all_before_it() -> None:
    found = model().seconds(DRAW, Strategy(), MACHINE, 0.0, kv_cache=False)
    assert found is not None
    flops = 1024 * 1024 * forward_flops(SPEC, 1536, 1, 1536, True)
    assert found.parts["decode"] == pytest.approx(flops / 100e12, rel=1e-6)
    assert found.seconds > 100 * timed(model(), DRAW, Strategy(1, 1, 8)).seconds


def test_experts_are_computed_by_those_that_work_and_read_by_those_that_are_asked() -> None:
    size = MODELS["mixtral-8x7b"]
    dense = ModelSize("dense", replace(size.spec, intermediate_size=2 * size.spec.intermediate_size))
    graph = of(SCORE, DRAW, LEARN)
    costs, others = model(graph=graph.with_model(size)), model(graph=graph.with_model(dense))
    mine, theirs = (timed(c, SCORE, Strategy(rows=4)).parts["compute"] for c in (costs, others))
    assert mine == pytest.approx(theirs)
    one, many = (
        timed(costs, replace(DRAW, name=f"{n}", rows=n, prompt=1.0, response=11.0), Strategy(1, 8)).parts["decode"]
        for n in (1, 64)
    )
    weights = 10 * 2 / 2e12 / 8
    attention = size.active_layer - 2 * size.expert
    assert one == pytest.approx(weights * (32 * size.active_layer + 4096 * 32000), rel=0.01)
    assert many == pytest.approx(weights * (32 * (attention + 8 * size.expert) + 4096 * 32000), rel=0.02)
    learner = costs.roles["learner"]
    assert costs.resident_bytes(learner, Strategy()) == pytest.approx(14 * size.parameters())


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
        "runtime": {"kind": "ray", "slots": 8},
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
    assert found == Estimate({"copy": size / 2 / 2e9, "gather": pytest.approx(size * (1 / 2 - 1 / 8) / 200e9)})
    # the second half of the layers comes from another machine, over its network once: its devices want the same
    apart = costs.transition(SAMPLER, Strategy(2, 8, 1), Strategy(1, 8, 2), MACHINE)
    assert apart is not None and apart.parts["gather"] == pytest.approx(size * 8 / 16 / 25e9)
    everything = costs.transition(SAMPLER, training, Strategy(1, 2, 8), MACHINE, "gather_all")
    assert everything is not None and everything.parts["copy"] == size / 2e9
    assert costs.transition(SAMPLER, Strategy(1, 2, 8), Strategy(1, 8, 2), MACHINE) is None
    assert costs.transition(SAMPLER, Strategy(1, 1, 16, "fsdp"), Strategy(1, 8, 2), MACHINE) is not None
    assert model(without={"transition"}).transition(SAMPLER, training, Strategy(1, 2, 8), MACHINE) == Estimate({})


def test_publishing_fills_the_machines_that_draw() -> None:
    costs, size = model(replace(EXACT, copy=2e9)), LEARNER.parameters * 2
    found = costs.publishing(SAMPLER, Strategy(1, 2, 8), MACHINE)
    assert found.parts == {"copy": size / 2 / 2e9, "gather": pytest.approx(8 * size / 2 / 25e9)}
    assert costs.publishing(SAMPLER, Strategy(1, 2, 8), MACHINE, "broadcast").parts["copy"] == size / 2e9


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
