"""Seconds of training and inference against what can be counted by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest
from costs import (
    DRAW,
    EXACT,
    FROZEN,
    GRAPH,
    LEARN,
    LEARNER,
    MACHINE,
    SAMPLER,
    SCORE,
    SPEC,
    WORK,
    model,
    of,
    timed,
)

from hybridflow.planner.cost import CostModel
from hybridflow.planner.flops import backward_flops, forward_flops
from hybridflow.planner.graph import Task
from hybridflow.planner.mapping import Strategy
from hybridflow.planner.passes import ACTIVATIONS, REORDERS
from hybridflow.planner.sizes import MODELS


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
    others = 5 * piped["compute"] - slowest
    assert piped["bubble"] == pytest.approx(others / 64, rel=1e-6)  # of 64 microbatches
    # forward and back, 68 slots of 8 updates, 2 rows of hidden states over the links: 5 stages are in one machine
    assert piped["pipeline"] == pytest.approx(8 * 68 * 2 * 2 * 2048 * 4096 * 2 / 200e9)
    over_network = timed(model(), LEARN, Strategy(5, 2, rows=2)).parts["pipeline"]
    assert over_network == pytest.approx(8 * 68 * 2 * 2 * 2048 * 4096 * 2 / 25e9)


def test_a_stage_of_frozen_layers_only_goes_forward() -> None:
    half = replace(GRAPH, roles=(replace(LEARNER, frozen=16), SAMPLER, FROZEN))
    full, piped = (timed(model(graph=graph), LEARN, Strategy(2, rows=2)).parts for graph in (GRAPH, half))
    assert piped["bubble"] == pytest.approx(full["bubble"] / 3, rel=0.01), "one of its three ways is left"
    assert piped["compute"] == pytest.approx(full["compute"] * 4 / 6, rel=0.01)
    assert piped["compute"] + piped["imbalance"] == pytest.approx(full["compute"] + full["imbalance"], rel=0.01)


def test_layers_of_short_microbatches_wait_for_weights_or_launches() -> None:
    task = Task("score", "frozen", "forward", 4, 1.0, 1.0)
    weights = 32 * MODELS["llama-7b"].layer * 2 / 2e12
    costs = model(graph=of(task))
    assert timed(costs, task, Strategy(rows=1)).seconds == pytest.approx(4 * weights, rel=0.01)
    assert timed(costs, task, Strategy(rows=4)).seconds == pytest.approx(weights, rel=0.01)
    slow = replace(MACHINE, device=replace(MACHINE.device, launch_s=1e-3))

    def launch(task: Task, strategy: Strategy, costs: CostModel = costs) -> float:
        return timed(costs, task, strategy, machine=slow).parts["launch"]

    assert launch(task, Strategy(rows=1)) == pytest.approx(4 * 32e-3)
    recomputed, chunks = Strategy(rows=2, recompute=True), 1024 * 1024 / 2048
    assert launch(LEARN, recomputed) == pytest.approx(512 * 32 * 4e-3)  # backward is two of forward
    assert launch(DRAW, Strategy()) == pytest.approx(chunks * 32e-3)
    half = model(graph=replace(GRAPH, roles=(replace(LEARNER, frozen=16), SAMPLER, FROZEN)))
    assert launch(LEARN, recomputed, half) == pytest.approx(512 * (32 * 2 + 16 * 2) * 1e-3)


def test_cpus_read_and_compute_in_turns() -> None:
    gpu, cpu = (timed(model(replace(EXACT, device=device)), SCORE, Strategy(rows=1)).parts for device in ("cuda", "cpu"))
    read = 1024 * 32 * (REORDERS * MODELS["llama-7b"].layer + ACTIVATIONS * 2048 * 4096) * 2 / 2e12
    assert cpu["compute"] == pytest.approx(gpu["compute"] + read, rel=1e-3)


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
    # weights come for both ways of each microbatch of 2 rows, and its gradients go
    found = timed(model(), LEARN, Strategy(1, tp, dp, "fsdp", rows=2)).parts["data"]
    assert found == pytest.approx(8 * moved * (4 + 2 * 2) * (128 // dp // 2), rel=1e-3)


def test_fsdp_hides_weights_behind_computing() -> None:
    shown, hidden = (
        timed(model(replace(EXACT, overlap=overlap)), LEARN, Strategy(1, 1, 8, "fsdp")).parts for overlap in (0.0, 0.5)
    )
    moved = 8 * 128 * (LEARNER.parameters * 2 * 2 * 7 / 8) / 8 / 200e9  # weights of both ways; gradients can not hide
    assert shown["data"] - hidden["data"] == pytest.approx(min(shown["compute"] / 2, moved), rel=0.2)


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
