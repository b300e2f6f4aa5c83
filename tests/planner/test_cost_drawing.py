"""Seconds of drawing responses against what can be counted by hand, and a simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from costs import (
    DRAW,
    EXACT,
    LEARN,
    LEARNER,
    MACHINE,
    SCORE,
    SPEC,
    model,
    of,
    timed,
)

from hybridflow.planner.flops import decode_flops, forward_flops
from hybridflow.planner.mapping import Practice, Strategy
from hybridflow.planner.sizes import MODELS, ModelSize


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
    found = model().seconds(DRAW, Strategy(), MACHINE, 0.0, Practice(kv_cache=False))
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
