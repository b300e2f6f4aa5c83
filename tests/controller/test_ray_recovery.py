"""A runtime that is to go on: who is lost, what is made anew, and what stays."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from ray_workers import Maker, Sleeper, Troubled, role
from test_ray_errors import gone

from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.controller.ray_shelves import Shelves, _lives
from hybridflow.controller.recovery import RecoveryConfig
from hybridflow.core.batch import Batch
from hybridflow.core.errors import LostWorkersError
from hybridflow.core.placement import Placement, ResourcePool

IDS = Batch({"sample_id": np.arange(100, 104)})


class Started:
    """Two pools: on ``pair`` the roles troubled and sleeper, on ``one`` maker."""

    def __init__(self) -> None:
        pools = ResourcePool("pair", (2,)), ResourcePool("one", (1,))
        placement = Placement(pools, {"troubled": "pair", "sleeper": "pair", "maker": "one"}, "pair")
        given = {"address": None, "threads": 1, "timeout_s": 60, "gpus": False}
        self.runtime = RayRuntime(placement, recovery=RecoveryConfig(deadline_s=3.0), **given)
        self.troubled = self.runtime.role(role("troubled", Troubled))
        self.sleeper = self.runtime.role(role("sleeper", Sleeper))
        self.maker = self.runtime.role(role("maker", Maker))
        self.runtime.ready()

    def lost(self) -> LostWorkersError:
        with pytest.raises(LostWorkersError) as told:
            self.runtime.drain()
        return told.value


@pytest.fixture(scope="module")
def started(ray_cluster: None) -> Iterator[Started]:
    it = Started()
    yield it
    it.runtime.stop()


def test_of_a_pool_with_a_dead_process_all_are_made_anew_and_of_others_none(started: Started) -> None:
    runtime, before = started.runtime, dict(started.runtime.pids)
    started.maker.update(started.maker.make(IDS))
    runtime.drain()
    learned = runtime.save(None)["maker"]["scale"]  # type: ignore[arg-type]
    started.troubled.die_alone(IDS)
    started.maker.copy_scores(started.sleeper.score(IDS, 0.0))
    lost = started.lost()
    assert str(lost).startswith("worker 1 of pool 'pair' died during troubled.die_alone: ")
    assert lost.pools == ("pair",)
    assert 0 <= lost.seen_s < 30
    assert not gone([before["pair", 0]]), "nobody is ended before it is known how to go on"
    runtime.mend(lost.pools)
    after = runtime.pids
    assert gone([before["pair", 0], before["pair", 1]])
    assert after["one", 0] == before["one", 0]
    assert {after["pair", 0], after["pair", 1]}.isdisjoint(before.values())
    assert started.troubled.pids() == [after["pair", 0], after["pair", 1]]
    assert learned != Maker(None).scale  # type: ignore[arg-type]
    assert runtime.save(None)["maker"]["scale"] == learned  # type: ignore[arg-type]
    assert started.maker.copy_scores(started.sleeper.score(IDS, 0.0))["costs"].shape == (4,)
    runtime.drain()


@pytest.mark.slow
def test_a_stopped_process_is_lost_after_the_deadline_and_its_pool_is_ended(started: Started) -> None:
    runtime, before = started.runtime, dict(started.runtime.pids)
    os.kill(before["pair", 1], signal.SIGSTOP)
    started.troubled.hang_alone(IDS)
    lost = started.lost()
    assert str(lost).startswith("worker 1 of pool 'pair' has not answered for ")
    assert "(recovery.deadline_s) during troubled.hang_alone" in str(lost)
    assert 3 <= lost.seen_s < 30
    runtime.mend(lost.pools)
    assert gone([before["pair", 0], before["pair", 1]])
    assert len(started.troubled.pids()) == 2


@pytest.mark.slow
def test_a_stall_tells_who_waits_for_whom_and_loses_the_late(started: Started) -> None:
    runtime, before = started.runtime, dict(started.runtime.pids)
    runtime.tasks.timeout_s = 1.0
    started.maker.copy_scores(started.sleeper.score(IDS, 1000.0))
    lost = started.lost()
    runtime.tasks.timeout_s = 60.0
    first, *rest = str(lost).splitlines()
    assert first == "nothing was done for 1 s (runtime.timeout_s); still missing:"
    assert "sleeper.score in worker 0 of pool 'pair', which is at sleeper.score" in rest
    assert "maker.copy_scores in worker 0 of pool 'one', which is waiting for its inputs (scores of sleeper.score)" in rest
    assert any("time.sleep" in line for line in rest)
    assert rest[-1] == "open tasks: 1 in worker 0 of 'one', 1 in worker 0 of 'pair', 1 in worker 1 of 'pair'"
    assert lost.pools == ("pair",)
    runtime.mend(lost.pools)
    assert runtime.pids["one", 0] == before["one", 0], "what waited for them was never begun"
    assert gone([before["pair", 0], before["pair", 1]])


@pytest.mark.slow
def test_a_pool_that_is_in_the_middle_of_something_for_too_long_is_made_anew_too(started: Started) -> None:
    runtime, before = started.runtime, dict(started.runtime.pids)
    os.kill(before["one", 0], signal.SIGKILL)
    started.sleeper.score(IDS, 1000.0)
    lost = started.lost()
    assert lost.pools == ("one",)
    runtime.mend(lost.pools)
    assert set(runtime.pids.values()).isdisjoint(before.values())
    assert started.maker.make(IDS)["scores"].tolist() == [50.0, 50.5, 51.0, 51.5]


def test_a_machine_that_loses_its_shelf_counts_as_lost_and_gets_it_again(ray_cluster: None) -> None:
    here = ray.get_runtime_context().get_node_id()
    with contextlib.closing(Shelves("@memory", "unanswering")) as shelves:
        shelves._nodes = {here: shelves._elsewhere(here)}
        shelves.make("before")
        ray.kill(shelves._nodes[here])  # returns before the process is gone
        while _lives(shelves._nodes[here]):
            time.sleep(0.01)
        with pytest.raises(LostWorkersError, match="a machine that holds snapshots doesn't answer"):
            shelves.make("snapshot")
        shelves.open([here])
        shelves.make("snapshot")
        assert shelves.room_bytes()[here] > 0
