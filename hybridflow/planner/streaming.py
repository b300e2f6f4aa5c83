"""Rollouts group by group, beside learning: replicas that draw token by token, and a learner that takes whole steps.

A step's groups are dealt to replicas as soon as it may begin: step s when the learner has done step s - 1 - ``staleness``.
A replica grows at most ``slots`` rows; a decode step takes ``step_s`` and ``row_s`` for each of them, so the last rows of a
step are drawn faster than the first. The learner learns from a step when all of its rows are there, in order, and
publishes.

    dealing    "even"         as many groups to each replica, as they come
               "outstanding"  to the replica that needs least time for what it still has, by the mean length
               "expected"     ... by the mean length of responses to each prompt, and the longest first
               "stealing"     ... and a replica with nothing left to begin takes the last group that another hasn't begun
    partial    whether new weights are put in place at a token boundary, in the middle of rows, which then begin anew with
               what they have; else a replica begins no rows until those that it draws are done, and takes them then

With ``staleness`` 0 that is the synchronous schedule, with 1 and even dealing rollouts one step ahead.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridflow.core.errors import ConfigError
from hybridflow.planner.cluster import Machine
from hybridflow.planner.cost import CostModel
from hybridflow.planner.graph import Task
from hybridflow.planner.mapping import Strategy

__all__ = ["Engine", "Order", "Stream", "engine_of", "stream"]

Array = NDArray[np.float64]
BEGINS, ONCE = ("prefill", "launch"), ("copy", "call")
"""parts of an estimate that are of rows that begin, and of a call"""


class Engine(NamedTuple):
    """A replica. Seconds: of a decode step, of each row in it, of what a row takes to begin (its prompt)."""

    slots: int
    step_s: float
    row_s: float = 0.0
    begin_s: float = 0.0

    def token_s(self, rows: int) -> float:
        return self.step_s + rows * self.row_s


def engine_of(costs: CostModel, task: Task, cut: Strategy, machine: Machine, slots: int) -> Engine:
    """A replica of a sampler as the planner reckons: from ``task`` with one row and with full slots, all of the mean
    length. ConfigError: so many rows don't fit its memory."""
    tokens, found = max(1.0, task.response - 1), []
    for rows in (1, slots):
        alike = replace(task, name=f"{task.name} of {rows}", rows=rows, deviation=0.0, longest=0.0, slots=rows, times=1)
        estimate = costs.seconds(alike, cut._replace(dp=1), machine, costs.usable_bytes(machine))
        if estimate is None:
            raise ConfigError([f"{task.name}: {rows} rows don't fit {cut.pp * cut.tp} x {machine.device.name}"])
        begins = sum(estimate.parts.get(part, 0.0) for part in BEGINS)
        once = sum(estimate.parts.get(part, 0.0) for part in ONCE)
        found.append((rows, begins / rows, (estimate.seconds - begins - once) / tokens))
    (_, _, one), (_, begin_s, full) = found
    row_s = max(0.0, (full - one) / max(1, slots - 1))
    return Engine(slots, max(0.0, full - slots * row_s), row_s, begin_s)


class Order(NamedTuple):
    staleness: int = 0
    dealing: Literal["even", "outstanding", "expected", "stealing"] = "outstanding"
    partial: bool = False


@dataclass(frozen=True)
class Stream:
    """``ends`` [steps]: seconds at which the learner was done. ``drawing_s`` [replicas]: in which a replica drew rows;
    ``learning_s``: of the learner. ``staleness`` [steps]: mean versions between a step's rows, as they began, and its
    update."""

    ends: Array
    drawing_s: Array
    learning_s: float
    staleness: Array

    @property
    def step_s(self) -> float:
        """In the mean of the later half of steps, of all but the first if there are few."""
        late = len(self.ends) // 2
        return float((self.ends[-1] - self.ends[late - 1]) / (len(self.ends) - late)) if late else float(self.ends[-1])

    @property
    def drawing(self) -> float:
        """Share of the time in which replicas draw."""
        return float(self.drawing_s.mean() / self.ends[-1])

    @property
    def learning(self) -> float:
        return float(self.learning_s / self.ends[-1])


def stream(
    lengths: ArrayLike,
    engines: Sequence[Engine],
    learn_s: ArrayLike,
    order: Order,
    publish_s: float = 0.0,
    expected: ArrayLike | None = None,
) -> Stream:
    """``lengths`` [steps, groups, rows] in tokens; ``learn_s``: of a step, or of each step; ``publish_s``: in which a
    replica takes weights. ``expected`` [steps, groups]: what is known beforehand of each prompt's responses, for dealing by
    it; left out: the mean of its rows."""
    drawn = np.asarray(lengths, np.float64)
    if order.dealing != "expected":
        known = np.full(drawn.shape[:2], drawn.mean())
    else:
        known = drawn.mean(2) if expected is None else np.asarray(expected, np.float64)
    play = _Play(drawn, known, [_Replica(engine) for engine in engines], order, publish_s)
    learning = np.broadcast_to(np.asarray(learn_s, np.float64), (len(drawn),))
    return play.run(learning)


class _Group(NamedTuple):
    step: int
    lengths: Array
    expected: float
    """tokens of a row"""


@dataclass
class _Replica:
    """Rows are known by the decode step of the replica at which they end. ``clock``: until when all is accounted for."""

    engine: Engine
    clock: float = 0.0
    count: float = 0.0
    drawing_s: float = 0.0
    version: int = 0
    waiting: deque[_Group] = field(default_factory=deque)
    rows: deque[tuple[int, float]] = field(default_factory=deque)
    """step and length of those that are begun next, of one group"""
    of_rows: float = 0.0
    """tokens that each of these was expected to have"""
    ends: list[tuple[float, int]] = field(default_factory=list)
    """decode step, and step of the run"""
    new: int | None = None
    """version of the weights that it waits to take"""

    def advance(self, now: float) -> None:
        if now > self.clock:
            if self.ends:
                self.count += (now - self.clock) / self.engine.token_s(len(self.ends))
                self.drawing_s += now - self.clock
            self.clock = now

    def next_s(self) -> float:
        """When its next row ends; infinite without one."""
        if not self.ends:
            return np.inf
        return self.clock + max(0.0, self.ends[0][0] - self.count) * self.engine.token_s(len(self.ends))

    def pause(self, seconds: float) -> None:
        """It draws nothing meanwhile."""
        self.clock += seconds

    def begin(self) -> Iterator[int]:
        """Fill the slots; the versions with which rows begin, and their steps."""
        while self.new is None and len(self.ends) < self.engine.slots and (self.rows or self.waiting):
            if not self.rows:
                group = self.waiting.popleft()
                self.rows.extend((group.step, length) for length in group.lengths)
                self.of_rows = group.expected
            step, length = self.rows.popleft()
            self.pause(self.engine.begin_s)
            self.drawing_s += self.engine.begin_s
            heapq.heappush(self.ends, (self.count + length, step))
            yield step

    def outstanding_s(self, mean: float) -> float:
        """That it needs for what it has, by the lengths that are expected, with full slots."""
        waiting = sum(len(group.lengths) * group.expected for group in self.waiting)
        return self.drawing_of_s(waiting + len(self.rows) * self.of_rows + len(self.ends) / 2 * mean)

    def drawing_of_s(self, tokens: float) -> float:
        return tokens * self.engine.token_s(self.engine.slots) / self.engine.slots


class _Play:
    def __init__(self, lengths: Array, expected: Array, replicas: list[_Replica], order: Order, publish_s: float) -> None:
        self.lengths, self.expected, self.replicas = lengths, expected, replicas
        self.order, self.publish_s = order, publish_s
        self.mean = float(lengths.mean())
        self.missing = [step.size for step in lengths]
        self.begun = 0
        self.versions = np.zeros(len(lengths))
        self.next_s = np.full(len(replicas), np.inf)

    def run(self, learning: Array) -> Stream:
        ends: list[float] = []
        self._release(0, 0.0)
        learned_s, now = np.inf, 0.0
        while len(ends) < len(self.lengths):
            if learned_s == np.inf and not self.missing[len(ends)]:
                learned_s = now + learning[len(ends)]
            first = int(self.next_s.argmin())
            now = float(min(learned_s, self.next_s[first]))
            if now == learned_s:
                ends.append(now)
                learned_s = np.inf
                self._publish(len(ends), now)
                self._release(len(ends), now)
            else:
                self._end_rows(self.replicas[first], now)
                self._begin(first)
        rows = self.lengths[0].size
        stale = np.arange(len(ends)) - self.versions / rows
        drawing_s = np.array([replica.drawing_s for replica in self.replicas])
        return Stream(np.array(ends), drawing_s, float(learning.sum()), stale)

    def _release(self, done: int, now: float) -> None:
        """Deal the steps that may begin when so many are learned from."""
        while self.begun < min(len(self.lengths), done + 1 + self.order.staleness):
            for replica in self.replicas:
                replica.advance(now)
            of_step = self.lengths[self.begun], self.expected[self.begun].tolist()
            groups = [_Group(self.begun, *group) for group in zip(*of_step, strict=True)]
            for group, place in self._dealt(groups):
                self.replicas[place].waiting.append(group)
            self.begun += 1
            for place in range(len(self.replicas)):
                self._begin(place)

    def _dealt(self, groups: list[_Group]) -> Iterator[tuple[_Group, int]]:
        """A step's groups, the longest first, each with its replica."""
        if self.order.dealing == "even":
            yield from ((group, number * len(self.replicas) // len(groups)) for number, group in enumerate(groups))
            return
        queue = [(replica.outstanding_s(self.mean), place) for place, replica in enumerate(self.replicas)]
        heapq.heapify(queue)
        for group in sorted(groups, key=lambda group: -group.expected):
            seconds, place = queue[0]
            more = self.replicas[place].drawing_of_s(len(group.lengths) * group.expected)
            heapq.heapreplace(queue, (seconds + more, place))
            yield group, place

    def _publish(self, version: int, now: float) -> None:
        for place, replica in enumerate(self.replicas):
            replica.advance(now)
            replica.new = version
            if self.order.partial or not replica.ends:
                self._take(replica)
            self._begin(place)

    def _take(self, replica: _Replica) -> None:
        """The weights that it waits for."""
        again_s = len(replica.ends) * replica.engine.begin_s
        replica.pause(self.publish_s + again_s)
        replica.drawing_s += again_s
        replica.version, replica.new = replica.new or replica.version, None

    def _end_rows(self, replica: _Replica, now: float) -> None:
        replica.advance(now)
        first, _ = replica.ends[0]
        while replica.ends and replica.ends[0][0] <= first:
            self.missing[heapq.heappop(replica.ends)[1]] -= 1
        replica.count = first
        if not replica.ends and replica.new is not None:
            self._take(replica)

    def _begin(self, place: int) -> None:
        replica = self.replicas[place]
        while True:
            for step in replica.begin():
                self.versions[step] += replica.version
            idle = replica.new is None and len(replica.ends) < replica.engine.slots
            if self.order.dealing != "stealing" or not idle or not self._steal(replica):
                break
        self.next_s[place] = replica.next_s()

    def _steal(self, replica: _Replica) -> bool:
        """If it needs less time for a group than another replica for all that it has."""
        others = [other for other in self.replicas if other.waiting and other is not replica]
        if not others:
            return False
        busiest = max(others, key=lambda other: other.outstanding_s(self.mean))
        if busiest.outstanding_s(self.mean) <= self.mean * replica.engine.token_s(replica.engine.slots):
            return False
        replica.waiting.append(busiest.waiting.pop())
        return True
