"""Roles that work in more or fewer processes of their pool than before, between two calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray_workers import Copy, Counter, Drawer, Maker, Roamer, role

from hybridflow.allocator import tenants
from hybridflow.controller.actor import LinkedActor
from hybridflow.controller.elastic import home, members_of, obstacle
from hybridflow.controller.protocols import THREE_D_ALL_MICRO_DP, blocks
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.controller.recovery import RecoveryConfig
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError, LostWorkersError
from hybridflow.core.placement import Mesh, Placement, ResourcePool
from hybridflow.core.roles import Role

ROWS = Batch({"sample_id": np.arange(6)})


class Started(NamedTuple):
    runtime: RayRuntime
    counter: Any
    actor: LinkedActor
    roamers: list[Any]


@pytest.fixture(scope="module")
def started(ray_cluster: None) -> Iterator[Started]:
    """A counter and a drawer on three processes, the drawer's learner on one; roamers that count by themselves on three."""
    pools = ResourcePool("three", (3,)), ResourcePool("one", (1,)), ResourcePool("apart", (3,))
    homes = {"counter": "three", "drawer": "three", "learner": "one", "roamer": "apart"}
    given = {"address": None, "threads": 1, "timeout_s": 60, "gpus": False}
    runtime = RayRuntime(Placement(pools, homes, "one"), recovery=RecoveryConfig(deadline_s=3.0), **given)  # type: ignore[arg-type]
    counter = runtime.role(role("counter", Counter))
    actor = LinkedActor(runtime, Role("learner", Maker, replica=Copy), role("drawer", Drawer))
    roamer = runtime.role(role("roamer", Roamer))
    roamers = [runtime.member(roamer, rank) for rank in range(3)]
    runtime.ready()
    yield Started(runtime, counter, actor, [*roamers, roamer])
    runtime.stop()


def ranks(out: Batch) -> set[int]:
    return {int(rank) for rank in out["scores"]}


def test_rows_go_to_the_first_processes_from_the_next_call_on_and_their_state_with_them(started: Started) -> None:
    runtime, counter = started.runtime, started.counter
    for number, workers in enumerate((3, 1, 2, 3, 2, 2, 1, 3), start=1):
        runtime.resize("counter", workers)
        out = counter.count(ROWS)
        assert ranks(out) == set(range(workers))
        assert out["slot"].tolist() == [number] * 6, "each row has been counted every time, wherever"
        assert len(counter.state_dict()) == 6
    runtime.drain()
    assert len(counter.pids()) == 3


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_whoever_has_a_member_has_all_of_its_rows(rows: int, members: int, workers: int) -> None:
    members = min(rows, members)
    workers = min(members, workers)
    weights, speeds = np.ones(rows, np.int64), tuple(map(float, members_of(workers, members)))
    for dealt in (speeds, *([()] if len({*speeds}) == 1 else [])):
        processes = THREE_D_ALL_MICRO_DP.distribute(weights, Mesh(dp=workers, speeds=dealt))
        for member, share in enumerate(blocks(weights, members)):
            assert {*share} <= {*processes[home(member, workers, members)]}
    assert {home(member, workers, members) for member in range(members)} == {*range(workers)}


def test_members_keep_their_rows_and_take_turns_in_fewer_processes(started: Started) -> None:
    """Nobody waits: what a member was at comes before its rows move."""
    runtime, (*members, roamer) = started.runtime, started.roamers
    start, outs, homes = time.monotonic(), list[Batch](), [(0, 1, 2), (0, 1, 1), (0, 0, 0), (0, 1, 2), (0, 1, 1)]
    for workers in (3, 2, 1, 3, 2):
        runtime.resize("roamer", workers)
        outs += [member.count(ROWS.rows([2 * number, 2 * number + 1]), 0.05) for number, member in enumerate(members)]
    assert time.monotonic() - start < 0.3, "the driver goes on"
    for round_, places in enumerate(homes):
        for out, place in zip(outs[3 * round_ :], places, strict=False):
            assert out["slot"].tolist() == [round_ + 1] * 2 and out["scores"].tolist() == [place] * 2
    assert roamer.state_dict() == [(row, 5) for row in range(6)]
    start = time.monotonic()
    late = members[2].count(ROWS.rows([4, 5]), 0.5)
    runtime.resize("roamer", 1)
    runtime.drain()
    assert time.monotonic() - start < 0.5, "the end of a step waits for no member"
    assert late["slot"].tolist() == [6, 6] and roamer.state_dict() == [*((row, 5) for row in range(4)), (4, 6), (5, 6)]
    runtime.drain()


def test_members_calls_are_told_of_when_others_read_from_them_however_early_they_were_done(started: Started) -> None:
    runtime, (*members, _), learner = started.runtime, started.roamers, started.actor.learner
    runtime.resize("roamer", 3)
    for member in range(3):  # of each process, what nobody has read from before
        learner.copy_scores(members[member].count(ROWS.rows([2 * member, 2 * member + 1])))
    runtime.drain()
    outs = [members[member].count(ROWS.rows([2 * member, 2 * member + 1])) for member in (0, 0, 1)]
    assert all(len(out["slot"]) == 2 for out in outs), "all of them are done"
    assert "roamer/rows" not in runtime.drain().metrics.values()
    learner.copy_scores(outs[1])
    assert runtime.drain().metrics.values()["roamer/rows"] == 4, "the earlier one of that process, too"
    learner.copy_scores(outs[0])
    assert "roamer/rows" not in runtime.drain().metrics.values(), "once"
    learner.copy_scores(outs[2])
    assert runtime.drain().metrics.values()["roamer/rows"] == 2


def test_nobody_waits_while_state_moves_and_what_is_asked_meanwhile_sees_it(started: Started) -> None:
    runtime, counter = started.runtime, started.counter
    runtime.resize("counter", 3)
    before = counter.count(ROWS)["slot"].tolist()
    start = time.monotonic()
    counter.count(ROWS, 0.3)  # two rows each
    runtime.resize("counter", 1)
    last = counter.count(ROWS)
    runtime.resize("counter", 2)
    assert time.monotonic() - start < 0.5, "the driver goes on"
    assert (last["slot"] - before).tolist() == [2] * 6
    assert (counter.count(ROWS)["slot"] - before).tolist() == [3] * 6
    runtime.drain()


def test_a_sampler_that_joins_has_the_newest_weights_before_its_first_call(started: Started) -> None:
    runtime, actor = started.runtime, started.actor
    runtime.resize("drawer", 1)
    assert set(actor.rollout(ROWS)["slot"]) == {0}
    for count in (5, 7):
        actor.update(actor.learner.make(Batch({"sample_id": np.arange(count)})), None)
        runtime.resize("drawer", 1)
        assert set(actor.rollout(ROWS)["scores"]) == {sum(range(count)) / 2}
        runtime.resize("drawer", 3)
        out = actor.rollout(ROWS)  # the actor has published, so it doesn't do so again
        assert set(out["slot"]) == {0, 1, 2}
        assert set(out["scores"]) == {sum(range(count)) / 2}
    runtime.drain()


def test_a_faster_sampler_is_dealt_more_rows(started: Started) -> None:
    runtime, actor = started.runtime, started.actor
    runtime.resize("drawer", 3, (1.0, 4.0, 1.0))
    assert actor.rollout(ROWS)["slot"].tolist() == [0, 1, 1, 1, 1, 2]
    with pytest.raises(ContractError, match="expected one above 0 for each of 2 replicas"):
        runtime.resize("drawer", 2, (1.0, 4.0, 1.0))
    assert runtime.num_workers("drawer") == 3
    runtime.resize("drawer", 3)
    assert actor.rollout(ROWS)["slot"].tolist() == [0, 0, 1, 1, 2, 2]
    runtime.drain()


def test_what_cannot_be_done_is_told_before_anything_changes(started: Started) -> None:
    runtime = started.runtime
    with pytest.raises(ContractError, match=r"role 'counter' can't have 4 workers: expected 1 to 3, as in its pool"):
        runtime.resize("counter", 4)
    with pytest.raises(ContractError, match=r"expected 1 to 3"):
        runtime.resize("counter", 0)
    with pytest.raises(ContractError, match=r"role 'learner' can't .*: its workers share out what they learn or keep"):
        runtime.resize("learner", 1)
    assert obstacle(role("drawer", Drawer), Mesh(dp=2, tp=2)) == "its model is cut (dp 2 x tp 2)"

    class Forgetful(Drawer):
        state_dict = Counter.state_dict

    assert obstacle(role("forgetful", Forgetful), Mesh(dp=2)) == "its state has no hand_over and take_over"


def test_pools_bid_with_what_they_have(started: Started) -> None:
    runtime = started.runtime
    runtime.resize("counter", 2)
    runtime.resize("roamer", 2)
    runtime.rethread("one", 3)
    three, one, apart = tenants(runtime, 8, ["learner"], False, 6)
    assert (three.pool, three.kind, three.units, three.most, three.slots, three.lane) == (
        "three",
        "workers",
        2,
        3,
        1,
        "rollout",
    )
    assert (one.pool, one.kind, one.units, one.most, one.slots, one.lane) == ("one", "threads", 3, 8, 1, "one")
    assert (apart.kind, apart.units, apart.most, apart.paced, apart.scaling.rows) == ("workers", 2, 3, False, 0)
    assert three.paced and three.scaling.rows == 6
    three.take(3, (), runtime)
    one.take(1, (), runtime)
    assert runtime.num_workers("counter") == runtime.num_workers("drawer") == 3 and runtime.num_threads("one") == 1
    assert {tenant.lane for tenant in tenants(runtime, 8, ["learner"], True, 6)} == {"step"}
    runtime.drain()


def test_threads_of_running_processes_change(started: Started) -> None:
    runtime, counter = started.runtime, started.counter
    runtime.resize("counter", 3)
    assert counter.threads() == [1, 1, 1]
    runtime.rethread("three", 2)
    assert counter.threads() == [2, 2, 2]
    runtime.rethread("three", 1)
    assert counter.threads() == [1, 1, 1]
    runtime.drain()


def test_a_worker_that_dies_while_state_moves_loses_nothing(started: Started) -> None:
    """What the last snapshot has is loaded into as many workers as there are meant to be now."""
    runtime, counter = started.runtime, started.counter
    runtime.resize("counter", 3)
    counter.count(ROWS)
    runtime.rethread("three", 2)
    state = runtime.save(Path())
    expected = dict(state["counter"])
    before = dict(runtime.pids)
    counter.count(ROWS, 0.2)
    runtime.resize("counter", 2)
    os.kill(before["three", 2], signal.SIGKILL)
    with pytest.raises(LostWorkersError) as lost:
        counter.count(ROWS)
        runtime.drain()
    assert lost.value.pools == ("three",)
    runtime.mend(lost.value.pools)
    runtime.load(Path(), state, {})
    assert dict(counter.state_dict()) == expected and len(expected) == 6
    out = counter.count(ROWS)
    assert ranks(out) == {0, 1}
    assert out["slot"].tolist() == [expected[row] + 1 for row in range(6)]
    assert counter.threads() == [2, 2]
    runtime.rethread("three", 1)
    runtime.resize("counter", 3)
    assert counter.count(ROWS)["slot"].tolist() == [expected[row] + 2 for row in range(6)]
    runtime.drain()
