"""Dynamic sampling: which prompts are dealt, which groups are learned from, and when it gives up."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.batch import Batch
from hybridflow.core.roles import Algorithm
from hybridflow.rollout.buffer import Fifo, InformativeGroups
from hybridflow.rollout.schedule import Ahead, Asynchronous, DynamicSampling


def draw(first: int, num_prompts: int) -> Batch:
    groups = np.repeat(np.arange(first, first + num_prompts), 2)
    return Batch({"group_id": groups, "sample_id": 2 * first + np.arange(2 * num_prompts)})


class Recorder(Algorithm):
    """Rolls out scores that differ in every ``period``-th group; remembers what it saw."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.dealt: list[int] = []
        self.learned: list[list[int]] = []

    def rollout(self, source: Batch) -> Batch:
        groups, last = source["group_id"], source["sample_id"] % 2
        self.dealt += groups[::2].tolist()
        scores = (last * (groups % self.period == 0)).astype(np.float32)
        return source.with_columns(scores=scores, score_failed=np.zeros(len(groups), bool))

    def learn(self, batch: Batch) -> Batch:
        self.learned.append(batch["group_id"][::2].tolist())
        return batch


def sampling(num_prompts: int, max_refills: int) -> DynamicSampling:
    return DynamicSampling(draw, InformativeGroups(), num_prompts, max_refills)


def steps(schedule: DynamicSampling, algorithm: Recorder, count: int) -> list[Batch | None]:
    return [schedule.step(number, algorithm, lambda step: draw(step, 1), schedule.buffer) for number in range(count)]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    period=st.integers(1, 5), num_prompts=st.integers(1, 6), max_refills=st.integers(1, 4), resumed_after=st.integers(0, 4)
)
def test_no_prompt_is_skipped_or_repeated(period: int, num_prompts: int, max_refills: int, resumed_after: int) -> None:
    schedule, algorithm = sampling(num_prompts, max_refills), Recorder(period)
    steps(schedule, algorithm, resumed_after)
    other = sampling(num_prompts, max_refills)
    other.load_state_dict(schedule.state_dict())
    steps(other, algorithm, 5 - resumed_after)
    assert algorithm.dealt == list(range(len(algorithm.dealt))) and len(algorithm.dealt) == other.num_drawn
    assert [group for batch in algorithm.learned for group in batch] == [g for g in algorithm.dealt if g % period == 0]
    assert all(len(batch) <= num_prompts for batch in algorithm.learned) and other.version == len(algorithm.learned)


def test_what_is_missing_is_refilled_and_counted() -> None:
    schedule, algorithm = sampling(num_prompts=4, max_refills=9), Recorder(2)
    steps(schedule, algorithm, 1)
    assert algorithm.learned == [[0, 2, 4, 6]]  # 0 to 3 gave two, 4 and 5 one more, 6 the last
    assert schedule.metrics() == {"refills": 2, "groups_drawn": 7, "groups_dropped": 3}


def test_refills_end_and_a_step_without_a_signal_learns_nothing() -> None:
    schedule, algorithm = sampling(num_prompts=4, max_refills=1), Recorder(10**6)
    schedule.num_drawn = 1
    assert steps(schedule, algorithm, 1) == [None]
    assert algorithm.learned == [] and schedule.version == 0
    assert schedule.metrics() == {"refills": 1, "groups_drawn": 8, "groups_dropped": 8}


def test_groups_with_a_failed_or_with_equal_scores_are_dropped() -> None:
    failed = np.array([0, 0, 0, 0, 0, 1, 1, 1], bool)
    scores = np.array([1, 0, 2, 2, 1, 5, 1, 0], np.float32)
    groups = np.array(["a", "a", "b", "b", "c", "c", "d", "d"])
    buffer = InformativeGroups()
    buffer.add(Batch({"group_id": groups, "scores": scores, "score_failed": failed}), 0)
    assert buffer.num_groups == 1
    kept = buffer.sample(0)
    assert kept is not None and kept["group_id"].tolist() == ["a", "a"]
    assert buffer.num_groups == 0 and buffer.sample(0) is None


@pytest.mark.parametrize("state", [{"version": 3, "num_drawn": 7}])
def test_the_state_is_all_that_resuming_needs(state: dict[str, int]) -> None:
    schedule = sampling(2, 1)
    schedule.load_state_dict(state)
    assert schedule.state_dict() == state
    algorithm = Recorder(1)
    steps(schedule, algorithm, 1)
    assert algorithm.dealt == [7, 8] and schedule.version == 4


class Sampler:
    """Begins rollouts; remembers which, and after how many updates."""

    def __init__(self, learned: list[list[int]]) -> None:
        self.begun, self.learned, self.told = deque[Batch](), learned, list[tuple[int, int]]()

    def begin(self, batch: Batch) -> None:
        self.told.append((int(batch["group_id"][0]), len(self.learned)))
        self.begun.append(batch.with_columns(scores=np.full(len(batch), len(self.learned), np.float32)))


class Early(Recorder):
    """Takes what has begun, which has to be of the prompts that are asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.actor = Sampler(self.learned)

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.begun.popleft()
        assert np.array_equal(batch["sample_id"], source["sample_id"])
        return batch


@settings(max_examples=20, deadline=None, derandomize=True)
@given(ahead=st.integers(0, 4), steps=st.integers(1, 8), resumed=st.integers(0, 8))
def test_rollouts_begin_so_many_updates_before_they_are_learned_from(ahead: int, steps: int, resumed: int) -> None:
    def going_on(algorithm: Early, schedule: Ahead, buffer: Fifo, first: int, last: int) -> None:
        for number in range(first, last + 1):
            batch = schedule.step(number, algorithm, lambda step: draw(step, 1), buffer)
            assert batch is not None and set(batch["scores"].tolist()) == {max(0, number - 1 - ahead)}
            assert schedule.metrics() == {"staleness": min(number - 1, ahead)}

    algorithm, buffer = Early(), Fifo(ahead)
    schedule, half = Ahead(algorithm.actor, ahead), min(resumed, steps)
    going_on(algorithm, schedule, buffer, 1, half)
    state, algorithm = schedule.state_dict(), Early()
    algorithm.learned += [[number] for number in range(1, half + 1)]
    again = Ahead(algorithm.actor, ahead)
    again.load_state_dict(state)
    going_on(algorithm, again, buffer, half + 1, steps)
    assert algorithm.learned == [[number] for number in range(1, steps + 1)] and again.version == steps
    begun = [group for group, _ in algorithm.actor.told]
    assert begun == list(range(half + ahead + 1 if half else 1, steps + ahead + 1)), "nothing begins twice"
    assert buffer.num_dropped == 0


SHARES = [np.arange(0, 3), np.arange(3, 4), np.arange(4, 6)]


class Team(Algorithm):
    """Env workers that say in ``sample_id`` on which rows they were, and in ``scores`` how often they had been asked."""

    def __init__(self) -> None:
        self.turn, self.asked, self.learned = 0, list[int](), list[list[int]]()

    def turn_to(self, worker: int) -> None:
        self.turn = worker

    def rollout(self, source: Batch) -> Batch:
        self.asked.append(self.turn)
        return source.with_columns(scores=np.full(len(source), len(self.asked), np.float32))

    def learn(self, batch: Batch) -> Batch:
        self.learned.append(batch["sample_id"].tolist())
        return batch


def asynchronous(team: Team, arrivals: Sequence[int], shares: Any = SHARES) -> Asynchronous:
    """``arrivals``: which of the pending batches is there first, each time."""
    order = iter(arrivals)
    return Asynchronous(lambda batches: next(order) if len(batches) == len(shares) else 9, team.turn_to, shares)


def slots(step: int) -> Batch:
    return Batch({"sample_id": np.arange(6)})


def test_whoever_arrives_is_learned_from_and_asked_again() -> None:
    team, buffer = Team(), Fifo(sys.maxsize)
    schedule = asynchronous(team, [1, 0, 2, 2, 0])
    told = []
    for step in range(1, 6):
        schedule.step(step, team, slots, buffer)
        told.append((schedule.metrics()["worker"], schedule.metrics()["staleness"]))
    assert team.asked == [0, 1, 2, 1, 0, 0, 0]  # all, then each that came
    assert told == [(1, 0), (0, 1), (0, 0), (0, 0), (2, 4)]
    assert team.learned == [SHARES[worker].tolist() for worker, _ in told] and schedule.version == 5


def test_in_one_process_workers_take_turns() -> None:
    team, schedule = Team(), asynchronous(team := Team(), [0] * 9)
    for step in range(1, 10):
        schedule.step(step, team, slots, Fifo(sys.maxsize))
        assert schedule.metrics() == {"worker": (step - 1) % 3, "staleness": min(step - 1, 2)}


@pytest.mark.parametrize("num_shares", [3, 1, 6])
def test_what_is_pending_is_kept_whoever_goes_on(num_shares: int) -> None:
    team, schedule = Team(), asynchronous(team := Team(), [0, 0])
    for step in (1, 2):
        schedule.step(step, team, slots, Fifo(sys.maxsize))
    state = schedule.state_dict()
    assert [(worker, version) for worker, _, version in state["pending"]] == [(2, 0), (0, 1)]
    other = Team()
    again = Asynchronous(lambda batches: 0, other.turn_to, np.array_split(np.arange(6), num_shares))
    again.load_state_dict(state)
    for step in range(3, 3 + 2):
        again.step(step, other, slots, Fifo(sys.maxsize))
    assert other.learned == [[4, 5], [0, 1, 2]] and again.version == 4, "nothing is lost or done twice"
    assert set(other.asked) <= set(range(num_shares))


def test_replays_learn_several_times_from_each_arrival_and_wait_until_there_is_enough() -> None:
    class Slow(Fifo):
        def sample(self, version: int, /) -> Batch | None:
            return None

    team = Team()
    schedule = Asynchronous(lambda batches: 0, team.turn_to, SHARES, updates=2)
    assert schedule.step(1, team, slots, Slow()) is None and schedule.version == 0
