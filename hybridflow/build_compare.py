"""A run that is done beside what the planner says about it: its own tasks on its own lengths, placed as it was.

run directory ──measured──> Measured        seconds of every task and of a step, lengths, medians without the first step
              ──observed──> Observation     with the task graph on those lengths and the mapping of its configuration
              ──predicted──> Predicted      estimates and a simulated step, by given constants
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridflow.build_mapping import mapping_of, task_graph
from hybridflow.config import RunConfig, load_config
from hybridflow.core.errors import ConfigError
from hybridflow.planner.calibrate import Observation, as_seen
from hybridflow.planner.cluster import Cluster, machine_here
from hybridflow.planner.cost import CostModel, Efficiency, Estimate
from hybridflow.planner.graph import Task, TaskGraph
from hybridflow.planner.simulate import simulate
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import read_timeline

__all__ = ["Measured", "Predicted", "calls_by_step", "measured", "observed", "predicted", "run_cluster"]

WAIT = "queue"
WEIGHTS = ".weights"
MOVED = ("transition", "transfer")
STEPS = 2
"""how many a run needs after its first"""


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of a run, without the first. ``calls``: seconds by "role.verb", all calls of a step together,
    of the worker that took longest, with what it pulled and without what it waited for. Lengths in tokens."""

    config: RunConfig
    steps: int
    step_s: float
    calls: Mapping[str, float]
    prompt: float | None
    response: float | None
    deviation: float
    longest: float


@dataclass(frozen=True)
class Predicted:
    estimates: Mapping[str, Estimate]
    step_s: float


def measured(path: Path) -> Measured:
    """Of a run directory. ConfigError: it has too few steps."""
    directory = RunDirectory.open(path)
    records = [record for record in read_records(directory.metrics) if record["step"] > 1 and "time/step_s" in record]
    if len(records) < STEPS:
        raise ConfigError([f"{path}: {len(records)} steps after the first; expected {STEPS} or more, to compare with"])
    numbers = [int(record["step"]) for record in records]
    calls = calls_by_step(read_timeline(directory.timeline), set(numbers))
    return Measured(
        load_config(directory.config, []),
        len(records),
        statistics.median(record["time/step_s"] for record in records),
        {name: statistics.median(times.get(step, 0.0) for step in numbers) for name, times in calls.items()},
        _median(records, "prompt_length/mean"),
        _median(records, "response_length/mean"),
        _median(records, "response_length/std") or 0.0,
        _median(records, "response_length/max") or 0.0,
    )


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return float(statistics.median(values)) if values else None


def calls_by_step(events: Sequence[Mapping[str, Any]], steps: set[int]) -> dict[str, dict[int, float]]:
    """Seconds by name and step, of the worker that took longest. Weights are published bucket by bucket, which learners
    hand out while samplers take the ones before: from the first to the last."""
    totals: dict[tuple[str, int], dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    moved: dict[int, list[float]] = defaultdict(list)
    for event in events:
        step = event.get("args", {}).get("step")
        name = event["name"].partition(":")[0]
        if event["ph"] == "X" and step in steps and event["cat"] != WAIT:
            totals[name, step][event["pid"], event["tid"]] += event["dur"] / 1e6
            if name.endswith(WEIGHTS):
                moved[step] += [event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6]
    calls: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, step), workers in totals.items():
        calls[name][step] = max(workers.values()) if not name.endswith(WEIGHTS) else max(moved[step]) - min(moved[step])
    return calls


def run_cluster(config: RunConfig) -> Cluster:
    """This machine, divided as the workers of a run divide it."""
    workers = sum(pool.size for pool in config.placed.pools) if config.runtime.kind == "ray" else 1
    return Cluster(((1, machine_here(workers, config.num_threads)),))


def observed(found: Measured, cluster: Cluster, own: Mapping[str, float] | None = None) -> Observation:
    """``own``: seconds of the tasks that have no model, by name, or those that were measured."""
    graph = task_graph(found.config)
    if found.prompt is not None and found.response is not None:
        graph = graph.with_lengths(found.prompt, found.response, found.deviation, found.longest if found.deviation else 0.0)
    given = found.calls if own is None else own
    known = {role.name for role in graph.roles}
    tasks = tuple(_with_seconds(task, graph, given) if task.role not in known else task for task in graph.tasks)
    graph = replace(graph, tasks=tasks)
    return Observation(graph, mapping_of(found.config, cluster, graph), dict(_tasks(graph, found.calls)), found.step_s)


def _with_seconds(task: Task, graph: TaskGraph, calls: Mapping[str, float]) -> Task:
    return replace(task, seconds=calls.get(_call(task), 0.0) / _number(task, graph) / task.times)


def _call(task: Task) -> str:
    """What its spans are called: several calls of a verb have the same name."""
    return task.name.partition(" ")[0]


def _number(task: Task, graph: TaskGraph) -> int:
    return sum(_call(other) == _call(task) for other in graph.tasks)


def _tasks(graph: TaskGraph, calls: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Seconds of every task that was seen. Nothing tells calls of the same name apart: each has its share by tokens."""
    for task in graph.tasks:
        alike = [other for other in graph.tasks if _call(other) == _call(task)]
        whole = sum(other.tokens * other.times for other in alike)
        share = task.tokens * task.times / whole if whole else 1 / len(alike)
        if calls.get(_call(task), 0.0) > 0:
            yield task.name, calls[_call(task)] * share
    samplers = [f"{role.name}{WEIGHTS}" for role in graph.roles if role.weights_of]
    yield from ((name, calls[name]) for name in samplers if name in calls)


def predicted(observation: Observation, efficiency: Efficiency, known: Mapping[str, float] | None = None) -> Predicted:
    """``known``: seconds of tasks, by name, that are taken instead of estimates, but for what is moved to other processes.
    ConfigError: it doesn't fit the machine's memory."""
    estimates = CostModel(observation.graph, efficiency).estimates(observation.mapping)
    for name, seconds in (known or {}).items():
        moved = {part: moving for part, moving in estimates[name].parts.items() if part in MOVED}
        estimates[name] = Estimate({"profile": seconds, **moved})
    return Predicted(as_seen(observation, estimates), simulate(observation.graph, observation.mapping, estimates).step_s)
