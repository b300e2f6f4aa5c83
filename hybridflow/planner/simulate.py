"""A device mapping at work: who runs, pulls and waits when, over several steps, as the spans that real runs write.

A task starts when all that it reads is there and its pool is free; a pool takes its tasks stage by stage, in the order of
the program. "sync": a step starts when the one before is done, for rollouts need its weights; "async": when the last but
one is, one step stale. Replicas of a sampler draw responses of different lengths, so they end at different times, and the
pool goes on when the slowest is done, which in the mean of many steps takes what was estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.metrics import Span
from hybridflow.planner.cost import Estimate
from hybridflow.planner.graph import Task, TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Strategy

__all__ = ["Simulation", "simulate"]

STALE = {"sync": 1, "async": 2}
"""of the steps before, the last that must be done"""
DRAWS = 32
DRIVER = ""
WAITS = ("queue", "transfer")
_MOVES = {"transition": "{task.role}.weights", "transfer": "{task.name}"}
"""parts of an estimate in which bytes move, and what their spans are called"""


@dataclass(frozen=True)
class Simulation:
    """``steps``: the spans of each step; ``ends``: seconds at which each is done, from the beginning of the first.

    Of ranks that do the same, which are those of a replica of the sampler, or all of a pool without one, the first stands
    for the others.
    """

    steps: tuple[tuple[Span, ...], ...]
    ends: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Of a step in the mean, without the first, before which nothing runs."""
        if len(self.ends) == 1:
            return self.ends[0]
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)

    def utilisation(self, pool: str) -> float:
        """Share of a pool's time, after the first step, in which its ranks run tasks: they neither wait nor pull."""
        there = [[span for span in step if span.worker.rpartition("/")[0] == pool] for step in self.steps]
        spans = [span for step in there[min(1, len(there) - 1) :] for span in step]
        rows, steps = len({span.worker for span in spans}), max(1, len(there) - 1)
        work = sum(span.duration_s for span in spans if span.kind not in WAITS)
        return work / (rows * steps * self.step_s) if work else 0.0


def simulate(
    graph: TaskGraph, mapping: DeviceMapping, estimates: Mapping[str, Estimate], steps: int = 3, seed: int = 0
) -> Simulation:
    """``estimates`` of every task, by name. The same ``seed`` draws the same lengths of responses."""
    order = sorted(graph.tasks, key=lambda task: graph.stages[task.name])
    reads = {task.name: [edge.writer for edge in graph.edges if edge.reader == task.name] for task in order}
    turns = _turns(graph, mapping)
    slowness = {task.name: _slowness(task, mapping, steps, seed) for task in order}
    told: list[tuple[Span, ...]] = []
    ends: list[float] = []
    for step in range(steps):
        before = step - STALE[mapping.schedule]
        issued, done, spans = (ends[before] if before >= 0 else 0.0), dict[str, float](), list[Span]()
        for task in order:
            ready = max((done[writer] for writer in reads[task.name]), default=issued)
            there = turns.get(task.role, turns[DRIVER])
            spans += there.run(task, estimates[task.name], (issued, ready), slowness[task.name][step])
            done[task.name] = there.free
        told.append(tuple(spans))
        ends.append(max(done.values()))
    return Simulation(tuple(told), tuple(ends))


def _turns(graph: TaskGraph, mapping: DeviceMapping) -> dict[str, _Turns]:
    """Of each role with a model those of its pool, and of the driver."""
    turns = {DRIVER: _Turns([""])}
    for pool in mapping.pools:
        samplers = [mapping.strategies[role.name] for role in graph.roles if role.weights_of and role.name in pool.roles]
        alike = gcd(*(strategy.pp * strategy.tp for strategy in samplers)) or pool.devices
        used = max((strategy.devices for strategy in samplers), default=pool.devices)
        there = _Turns([f"{pool.name}/{rank}" for rank in range(0, used, alike)])
        turns |= dict.fromkeys(pool.roles, there)
    return turns


def _slowness(task: Task, mapping: DeviceMapping, steps: int, seed: int) -> NDArray[np.float64]:
    """[steps, replicas]: decode steps of each replica as a share of those of the slowest one, in the mean of ``DRAWS``. A
    replica runs until its longest response is done, or as long as its ``slots`` are full. Lengths are gamma
    distributed and cut at the ``longest``."""
    replicas = mapping.strategies.get(task.role, Strategy()).dp
    if task.kind != "generate" or not task.deviation:
        return np.ones((steps, 1))
    rng, shape = np.random.default_rng(seed), (task.response / task.deviation) ** 2
    lengths = rng.gamma(shape, task.response / shape, (max(steps, DRAWS), replicas, ceil(task.rows / replicas)))
    lengths = np.minimum(lengths, task.longest or np.inf)
    needed = np.maximum(lengths.max(-1), lengths.sum(-1) / (task.slots or lengths.shape[-1]))
    return np.asarray(needed[:steps] / needed.max(-1).mean())


class _Turns:
    """What the rows of a pool, or of the driver, do, one task after the other. ``free``: since when all of them are."""

    def __init__(self, workers: list[str]) -> None:
        self.workers, self.free, self.ends = workers, 0.0, [0.0] * len(workers)

    def run(self, task: Task, estimate: Estimate, times: tuple[float, float], slowness: NDArray[np.float64]) -> list[Span]:
        """``times``: when the task was issued, and when all that it reads was there. ``slowness`` [replicas]."""
        issued, ready = times
        start, spans = max(ready, self.free), list[Span]()
        moving = _moving(task, estimate)
        work = estimate.seconds - sum(moving.values())
        for row, worker in enumerate(self.workers):
            now = max(issued, self.ends[row])
            if worker and start > now:
                spans.append(Span(task.name, "queue", now, start - now, worker))
            now = start
            for name, seconds in moving.items():
                spans.append(Span(name, "transfer", now, seconds, worker))
                now += seconds
            seconds = work * float(slowness[row * len(slowness) // len(self.workers)])
            spans.append(Span(task.name, task.kind, now, seconds, worker))
            self.ends[row] = now + seconds
        self.free = max(self.ends)
        return spans


def _moving(task: Task, estimate: Estimate) -> dict[str, float]:
    """Seconds of what comes before the task runs, by its name."""
    moving = {name: estimate.parts.get(part, 0.0) for part, name in _MOVES.items()}
    return {name.format(task=task): seconds for name, seconds in moving.items() if seconds}
