"""A device mapping at work: who runs, pulls and waits when, over several steps, as the spans that real runs write.

A task starts when all that it reads is there and its pool is free. "sync": a step starts when the one before is done, for
rollouts need its weights, and a pool takes its tasks stage by stage, in the order of the program. "async": it starts
``staleness`` steps earlier, and a pool takes what is ready, of the oldest step first. Calls take whole steps; where they
are groups of responses, see ``streaming``.

Replicas of a sampler draw responses of different lengths, so they end at different times, and the pool goes on when the
slowest is done, which in the mean of many steps takes what was estimated.
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
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.mapping import DeviceMapping, Strategy

__all__ = ["Simulation", "simulate"]

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
    def late(self) -> int:
        """The first step that counts: in half of them, what runs side by side has found its rhythm."""
        return len(self.ends) // 2 if len(self.ends) > 1 else 0

    @property
    def step_s(self) -> float:
        """Of a step, in the mean of the later half."""
        start = self.ends[self.late - 1] if self.late else 0.0
        return (self.ends[-1] - start) / (len(self.ends) - self.late)

    def utilisation(self, pool: str) -> float:
        """Share of a pool's time in which its ranks run tasks, and neither wait nor pull, in the later half of steps."""
        steps = [[span for span in step if span.worker.rpartition("/")[0] == pool] for step in self.steps[self.late :]]
        rows = len({span.worker for step in steps for span in step})
        work = sum(span.duration_s for step in steps for span in step if span.kind not in WAITS)
        return work / (rows * len(steps) * self.step_s) if work else 0.0


def simulate(
    graph: TaskGraph,
    mapping: DeviceMapping,
    estimates: Mapping[str, Estimate],
    steps: int = 3,
    seed: int = 0,
    lengths: Lengths | None = None,
) -> Simulation:
    """``estimates`` of every task, by name. The same ``seed`` draws the same lengths of responses: by their tasks, or of
    ``lengths``."""
    behind = 1 + (mapping.staleness if mapping.schedule == "async" else 0)
    calls, turns = _Calls(graph, mapping, steps, behind), _turns(graph, mapping)
    slowness = {task.name: _slowness(task, mapping, steps, seed, lengths) for task in graph.tasks}
    told: list[list[Span]] = [[] for _ in range(steps)]
    while calls.waiting:
        step, task, times = calls.next(turns)
        there = turns.get(task.role, turns[DRIVER])
        told[step] += there.run(task, estimates[task.name], times, slowness[task.name][step])
        calls.done[step, task.name] = there.free
    return Simulation(tuple(map(tuple, told)), tuple(calls.end(step) for step in range(steps)))


class _Calls:
    """Tasks of all steps. ``waiting``: in the program's order; ``done``: when those that ran were, by step and name. A step
    starts when the one ``behind`` before it is done."""

    def __init__(self, graph: TaskGraph, mapping: DeviceMapping, steps: int, behind: int) -> None:
        self.in_order, self.behind = mapping.schedule == "sync", behind
        self.tasks = sorted(graph.tasks, key=lambda task: graph.stages[task.name])
        self.reads = {task.name: [edge.writer for edge in graph.edges if edge.reader == task.name] for task in self.tasks}
        self.waiting = [(step, task) for step in range(steps) for task in self.tasks]
        self.done: dict[tuple[int, str], float] = {}

    def next(self, turns: Mapping[str, _Turns]) -> tuple[int, Task, tuple[float, float]]:
        """The call that starts first, so that none that isn't known yet could start before it, and of several the one that
        the program makes first; with when it was issued and when all that it reads was there."""
        found, taken = [], set[int]()
        for step, task in self.waiting:
            there = turns.get(task.role, turns[DRIVER])
            if step >= self.waiting[0][0] + self.behind:
                break
            if id(there) not in taken and (times := self._times(step, task)) is not None:
                found.append((max(times[1], there.free), step, task, times))
            if self.in_order:
                taken.add(id(there))
        _, step, task, times = min(found, key=lambda call: call[0])
        self.waiting.remove((step, task))
        return step, task, times

    def _times(self, step: int, task: Task) -> tuple[float, float] | None:
        inputs = [self.done.get((step, writer)) for writer in self.reads[task.name]]
        known = [seconds for seconds in inputs if seconds is not None]
        issued = self.end(step - self.behind)
        return (issued, max(known, default=issued)) if len(known) == len(inputs) else None

    def end(self, step: int) -> float:
        return max((self.done[step, task.name] for task in self.tasks), default=0.0) if step >= 0 else 0.0


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


def _slowness(task: Task, mapping: DeviceMapping, steps: int, seed: int, given: Lengths | None) -> NDArray[np.float64]:
    """[steps, replicas]: decode steps of each replica as a share of those of the slowest one, in the mean of ``DRAWS``. A
    replica runs until its longest response is done, or as long as its ``slots`` are full."""
    replicas = mapping.strategies.get(task.role, Strategy()).dp
    if task.kind != "generate" or not (given or task.deviation):
        return np.ones((steps, 1))
    drawn = given or Lengths(task.response, task.deviation, task.longest)
    lengths = drawn.draw(np.random.default_rng(seed), (max(steps, DRAWS), replicas, ceil(task.rows / replicas)))
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
