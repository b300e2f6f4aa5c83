"""The bench-policy command: how long a policy takes from an observation to its action, and whether that is in time."""

from __future__ import annotations

import importlib.util
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hybridflow.commands.export import needs_onnx, run_onnx, write_onnx
from hybridflow.core.batch import Array
from hybridflow.policy import Policy
from hybridflow.telemetry.records import to_json

__all__ = ["Latency", "bench_policy"]

Act = Callable[[Array, Any], tuple[Array, Any]]
"""(one observation, of several agents one of each, the memory or None) -> (action or actions, the memory afterwards)"""
WARM_UP = 200
MOST_OBSERVATIONS = 1000


@dataclass(frozen=True)
class Latency:
    """Milliseconds of wall time from one observation to its action (of several agents, from theirs to all actions), over
    ``steps`` of them one after another. Meanwhile the process lost its core ``preempted`` times to others, which each of
    those steps had to wait for."""

    engine: str
    steps: int
    p50: float
    p99: float
    p99_9: float
    max: float
    preempted: int


def bench_policy(run: Path, budget_ms: float, steps: int, as_json: bool) -> int:
    """Measure what ``run`` has trained on one thread, in torch and (if it is installed) ONNX Runtime; the exit code: 1 if
    the 99.9th percentile of any of them is over the budget."""
    policy = Policy.load(run)
    observations = [moment.observation for moment in islice(policy.episode(0), MOST_OBSERVATIONS)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = [_measured("torch", _torch(policy), observations, steps)]
        if importlib.util.find_spec("onnxruntime") is not None:
            measured.append(_measured("onnxruntime", _onnx(policy), observations, steps))
    finally:
        torch.set_num_threads(threads)
    over = [latency.engine for latency in measured if latency.p99_9 > budget_ms]
    if as_json:
        print(to_json({"budget_ms": budget_ms, "within": not over, "latencies": [asdict(one) for one in measured]}))
    else:
        _show(measured, budget_ms, over)
    return 1 if over else 0


def _torch(policy: Policy) -> Act:
    if policy.memory_size:
        return policy.step
    return lambda observation, memory: (policy.act(observation), memory)


def _onnx(policy: Policy) -> Act:
    """By the exported file."""
    needs_onnx("bench-policy")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.onnx"
        write_onnx(policy, file, {})
        run = run_onnx(file)
    begun = np.zeros((1 if policy.agents is None else len(policy.agents.names), policy.memory_size), np.float32)

    def act(observation: Array, memory: Array | None) -> tuple[Array, Array]:
        return run(policy.rows(observation), begun if memory is None else memory)

    return act


def _measured(engine: str, act: Act, observations: list[Array], steps: int) -> Latency:
    taken, switches, memory = np.zeros(steps), _switches(), None
    for step in range(-WARM_UP, steps):
        observation = observations[step % len(observations)]
        start = time.perf_counter_ns()
        _, memory = act(observation, memory)
        taken[step] = time.perf_counter_ns() - start  # warming up writes what is overwritten
    p50, p99, p99_9, longest = np.quantile(taken, [0.5, 0.99, 0.999, 1.0]) / 1e6
    return Latency(engine, steps, float(p50), float(p99), float(p99_9), float(longest), _switches() - switches)


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _show(measured: list[Latency], budget_ms: float, over: list[str]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms a step")
    for name in ("p50", "p99", "p99.9", "max", "preempted"):
        table.add_column(name, justify="right")
    for one in measured:
        values = (f"{value:.4f}" for value in (one.p50, one.p99, one.p99_9, one.max))
        table.add_row(one.engine, *values, f"{one.preempted} times")
    Console().print(table)
    verdict = f"over budget: {', '.join(over)}" if over else "within budget"
    print(f"{verdict}: p99.9 against {budget_ms:g} ms, {measured[0].steps} steps on one thread, observation to action")
