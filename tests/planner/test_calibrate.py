"""Fitted constants are those that made the measurements, and say how sure they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridflow.planner.calibrate as calibrate_module
from hybridflow.models.spec import DecoderSpec
from hybridflow.planner import hardware
from hybridflow.planner.calibrate import CONSTANTS, Fitted, Observation, calibrate, efficiency_of, fit, here_start, keep
from hybridflow.planner.cluster import PRESETS, parse_cluster
from hybridflow.planner.cost import CostModel, Efficiency
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.hardware import Probe, fingerprint, save_probe
from hybridflow.planner.mapping import DeviceMapping, Pool, Strategy
from hybridflow.planner.simulate import simulate
from hybridflow.planner.sizes import ModelSize

WORK, STEPS = np.geomspace(1, 1e4, 12), np.tile([10.0, 100.0, 1000.0], 4)
START = {"rate": 10.0, "step": 1e-2}


def seconds(constants: Mapping[str, float]) -> np.ndarray:
    return WORK / constants["rate"] + STEPS * constants["step"]


@given(st.floats(2, 200), st.floats(1e-2, 0.5))
@settings(max_examples=20, deadline=None)
def test_constants_are_those_that_made_the_measurements(rate: float, step: float) -> None:
    found = fit(seconds, seconds({"rate": rate, "step": step}), START)
    assert found.values == pytest.approx({"rate": rate, "step": step}, rel=0.04)
    assert found.median_error < 0.02
    assert all(1 <= spread < 1.1 for spread in found.spread.values())
    assert found.determined == ("rate", "step")


def test_one_wild_measurement_changes_little_and_shows_as_the_worst_error() -> None:
    observed = seconds({"rate": 40.0, "step": 2e-2})
    observed[4] *= 5
    found = fit(seconds, observed, START)
    assert found.values == pytest.approx({"rate": 40.0, "step": 2e-2}, rel=0.08)
    assert found.worst_error == pytest.approx(0.8, abs=0.05)
    assert found.median_error < 0.05


def test_noise_shows_in_the_spread() -> None:
    noise = np.random.default_rng(0).normal(size=len(WORK))
    exact = seconds({"rate": 40.0, "step": 2e-2})
    little, much = (fit(seconds, exact * np.exp(size * noise), START) for size in (0.01, 0.08))
    for name in START:
        assert 1 < little.spread[name] < much.spread[name] < 1.3
        assert abs(np.log(much.values[name] / {"rate": 40.0, "step": 2e-2}[name])) < 4 * np.log(much.spread[name])


def test_a_constant_on_which_nothing_depends_stays_and_says_so() -> None:
    found = fit(seconds, seconds({"rate": 40.0, "step": 2e-2}), {**START, "network": 0.7})
    assert found.values["network"] == pytest.approx(0.7, rel=1e-3)
    assert found.determined == ("rate", "step")
    assert found.spread["network"] >= 10 * 0.999


def test_bounds_hold() -> None:
    found = fit(seconds, seconds({"rate": 40.0, "step": 2e-2}), START, bounds={"rate": (1.0, 20.0)})
    assert found.values["rate"] == pytest.approx(20.0)


def test_kinks_do_not_stop_a_fit() -> None:
    def slower(constants: Mapping[str, float]) -> np.ndarray:
        return np.maximum(WORK / constants["rate"], STEPS * constants["step"])

    found = fit(slower, slower({"rate": 3.0, "step": 0.1}), {"rate": 100.0, "step": 1.0})
    assert found.values == pytest.approx({"rate": 3.0, "step": 0.1}, rel=0.03)


def test_missing_predictions_are_far_off_but_no_error() -> None:
    def some(constants: Mapping[str, float]) -> np.ndarray:
        return np.where(np.arange(len(WORK)) == 0, np.nan, seconds(constants))

    found = fit(some, seconds({"rate": 40.0, "step": 2e-2}), START)
    assert found.values == pytest.approx({"rate": 40.0, "step": 2e-2}, rel=0.05)
    assert found.errors[0] == 3.0


def test_weights_say_what_counts() -> None:
    observed = np.where(
        np.arange(len(WORK)) % 2, seconds({"rate": 40.0, "step": 2e-2}), seconds({"rate": 20.0, "step": 2e-2})
    )
    weights = np.where(np.arange(len(WORK)) % 2, 1.0, 1e-3)
    assert fit(seconds, observed, START, weights=weights).values["rate"] == pytest.approx(40.0, rel=0.05)


def test_a_run_gives_back_the_constants_that_made_it() -> None:
    """Of a run on one device, whose tasks say nothing about the network."""
    size = ModelSize("toy", DecoderSpec("llama", 32000, 2048, 5632, 16, 16, 16, 128, 4096))
    roles = (
        ModelRole("actor", size, gradient_bytes=4, optimizer_bytes=8, token_budget=4096),
        ModelRole("sampler", size, weights_of="actor"),
        ModelRole("reference", size, token_budget=4096),
    )
    tasks = (
        Task("sampler.rollout", "sampler", "generate", 64, 300, 700),
        Task("reward.score", "reward", "reward", 64, 300, 700, seconds=0.5),
        Task("reference.score", "reference", "forward", 64, 300, 700),
        Task("actor.update", "actor", "train", 64, 300, 700, minibatches=4),
    )
    names = [task.name for task in tasks]
    graph = TaskGraph(roles, tasks, tuple(Edge(*pair, 1e6) for pair in pairwise(names)))
    machine = replace(PRESETS["l40s"], devices=1)
    strategies = {"actor": Strategy(rows=8), "sampler": Strategy(), "reference": Strategy(rows=8)}
    mapping = DeviceMapping((Pool("main", machine, 1, ("actor", "sampler", "reference")),), strategies)
    true = replace(Efficiency(), compute=0.3, decode_step_s=2e-2, decode_row_s=2e-4, call_s=0.1)
    sizes = ((64, 300, 700), (256, 900, 100), (16, 50, 100))
    runs = [_run(graph.with_rows(rows).with_lengths(*lengths), mapping, true) for rows, *lengths in sizes]
    found, fitted = calibrate(runs, Efficiency())
    assert fitted.worst_error < 0.03
    constants = (found.compute, found.decode_step_s, found.decode_row_s, found.call_s)
    assert constants == pytest.approx((0.3, 2e-2, 2e-4, 0.1), rel=0.15)
    assert {"network", "copy"}.isdisjoint(fitted.determined)
    assert (found.network, found.copy) == pytest.approx((Efficiency().network, Efficiency().copy), rel=1e-3)


def _run(graph: TaskGraph, mapping: DeviceMapping, true: Efficiency) -> Observation:
    estimates = CostModel(graph, true).estimates(mapping)
    seconds = {name: estimate.seconds for name, estimate in estimates.items()}
    return Observation(graph, mapping, seconds, simulate(graph, mapping, estimates).step_s)


def test_constants_are_kept_for_this_machine_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(tmp_path))
    machine = replace(fingerprint(), gpus=())
    monkeypatch.setattr(hardware, "fingerprint", lambda: machine)
    monkeypatch.setattr(calibrate_module, "fingerprint", lambda: machine)
    rates = {1: 1e11, machine.cores: 2e11}
    probe = Probe(
        machine, {"float32": rates, "bfloat16": rates}, rates, 2e11, 1e10, 1e9, 1e-4, {1: 2e-4, machine.cores: 5e-4}
    )
    save_probe(probe)
    here = parse_cluster("here:1x1")
    assert efficiency_of(here) == here_start(probe)
    assert here_start(probe).device == "cpu" and here.machines[0][1].device.launch_s == 5e-4
    values = dict.fromkeys(CONSTANTS, 0.5)
    keep(Fitted(values, dict.fromkeys(CONSTANTS, 1.1), CONSTANTS, np.zeros(1)), "runs/x")
    assert efficiency_of(here) == replace(here_start(probe), **values)
    assert efficiency_of(parse_cluster("h100:1x8")) == Efficiency()
