"""Latency of a policy, and whether it is in time."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from hybridflow.commands import bench_policy

Program = Callable[..., Outcome]


def test_both_engines_are_measured(cartpole_run: Path, hybridflow: Program) -> None:
    outcome = hybridflow("bench-policy", cartpole_run, "--budget-ms", 10_000, "--steps", 1000, "--json")
    told = json.loads(outcome.out)
    assert outcome.code == 0 and told["within"] and [one["engine"] for one in told["latencies"]] == ["torch", "onnxruntime"]
    for one in told["latencies"]:
        assert 0.001 < one["p50"] <= one["p99"] <= one["p99_9"] <= one["max"] and one["steps"] == 1000


def test_over_budget_is_exit_code_1(cartpole_run: Path, hybridflow: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if "onnx" in name else real(name, *rest))
    outcome = hybridflow("bench-policy", cartpole_run, "--budget-ms", 0.001, "--steps", 1000)
    assert outcome.code == 1 and "over budget: torch: p99.9 against 0.001 ms, 1000 steps" in outcome.out
    assert "onnxruntime" not in outcome.out.splitlines()[-1]
    outcome = hybridflow("bench-policy", cartpole_run, "--budget-ms", 10_000, "--steps", 1000)
    assert outcome.code == 0 and "within budget: p99.9 against 10000 ms" in outcome.out


def test_rare_slow_steps_are_seen() -> None:
    calls: list[Any] = []

    def act(observation: Any, memory: int | None) -> Any:
        calls.append(observation)
        time.sleep(0.01 if len(calls) % 500 == 0 else 0)
        return observation, (memory or 0) + 1

    measured: Any = bench_policy._measured("torch", act, ["a", "b", "c"], 2000)
    assert len(calls) == 2000 + bench_policy.WARM_UP and set(calls) == {"a", "b", "c"}
    assert measured.p50 < 5 and 10 <= measured.p99_9 <= measured.max


def test_too_few_steps_are_refused(cartpole_run: Path, hybridflow: Program) -> None:
    assert "expected at least 1000" in hybridflow("bench-policy", cartpole_run, "--steps", 10).err
