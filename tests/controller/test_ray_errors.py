"""What becomes of a run when a worker fails, dies or hangs, and of one for which there is no room."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from ray_workers import Maker, Troubled, role

from hybridflow.controller import ray_group
from hybridflow.controller.cores import Share
from hybridflow.controller.manifest import describe
from hybridflow.controller.ray_process import Call, OutputRefs, Process, Setup
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.columns import Places
from hybridflow.core.errors import ConfigError, ContractError, RewardError, UserError, WorkerError
from hybridflow.core.placement import Mesh, Placement, ResourcePool

IDS = Batch({"sample_id": np.arange(100, 104)})


@contextmanager
def running(*nodes: int) -> Iterator[RayRuntime]:
    runtime = make_runtime(*nodes)
    try:
        yield runtime
    finally:
        runtime.stop()


def make_runtime(*nodes: int) -> RayRuntime:
    """One pool for each number, of so many processes; role ``p<i>`` lives on pool ``p<i>``."""
    pools = tuple(ResourcePool(f"p{i}", (size,)) for i, size in enumerate(nodes))
    placement = Placement(pools, {pool.name: pool.name for pool in pools}, "p0")
    return RayRuntime(placement, address=None, threads=1, timeout_s=60, gpus=False)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int]) -> bool:
    """Whether these processes end within two seconds."""
    end = time.monotonic() + 2
    while any(lives(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.usefixtures("ray_cluster")
def test_an_error_on_one_rank_ends_the_run_with_its_place_and_traceback() -> None:
    with running(2) as runtime:
        handle = runtime.role(role("p0", Troubled))
        pids = handle.pids()
        handle.raise_alone(IDS)
        start = time.monotonic()
        with pytest.raises(WorkerError) as told:
            runtime.drain()
        assert time.monotonic() - start < 2
        message = str(told.value)
        assert message.startswith(
            "p0.raise_alone failed in worker 1 of pool 'p0', samples 101, 102: ValueError: invalid literal"
        )
        assert "in raise_alone" in message
        assert "ray_workers.py" in message
        assert len(pids) == 2
        assert gone(pids)


@pytest.mark.usefixtures("ray_cluster")
def test_a_process_that_dies_is_named_and_not_those_who_waited_for_it() -> None:
    with running(2) as runtime:
        handle = runtime.role(role("p0", Troubled))
        pids = handle.pids()
        handle.die_alone(IDS)
        with pytest.raises(WorkerError, match=r"^worker 1 of pool 'p0' died during p0\.die_alone: .*"):
            runtime.drain()
        assert gone(pids)
        with pytest.raises(WorkerError, match=r"^role 'p0' has no workers any more"):
            handle.pids()


@pytest.mark.usefixtures("ray_cluster")
def test_a_users_mistake_in_a_single_process_leaves_the_others_alive() -> None:
    with running(1, 1) as runtime:
        troubled, maker = runtime.role(role("p0", Troubled)), runtime.role(role("p1", Maker))
        with pytest.raises(RewardError, match=r"^reward\.function: 'nobody' is not defined$"):
            maker.copy_scores(troubled.refuse(IDS))["costs"]
        with pytest.raises(ConfigError) as told:
            troubled.configure()
        assert told.value.problems == ("a.b: first", "c: second")
        assert maker.double(maker.make(IDS))["values"].lengths.tolist() == [0, 1, 2, 3]
        assert runtime.save(Path())["p1"]["scale"] == 1.0


@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_hang_are_named_with_their_stacks() -> None:
    with running(2) as runtime:
        handle = runtime.role(role("p0", Troubled))
        pids = handle.pids()
        patience_s = min(handle.patience_s())
        assert patience_s > runtime.tasks.timeout_s + 30, "the driver gives up before those who wait for a rank"
        runtime.tasks.timeout_s = 1.0
        handle.hang_alone(IDS)
        with pytest.raises(WorkerError) as told:
            runtime.drain()
        first, *rest = str(told.value).splitlines()
        assert first == "nothing was done for 1 s (runtime.timeout_s); still missing:"
        at = [rest.index(f"p0.hang_alone in worker {r} of pool 'p0', which is at p0.hang_alone") for r in range(2)]
        assert any("all_reduce" in line for line in rest[at[0] : at[1]])
        assert any("time.sleep(1000)" in line for line in rest[at[1] :])
        assert gone(pids)


@pytest.mark.usefixtures("ray_cluster")
def test_a_users_mistake_on_one_of_several_ranks_arrives_as_itself_and_ends_all() -> None:
    with running(2) as runtime:
        handle = runtime.role(role("p0", Troubled))
        pids = handle.pids()
        handle.refuse_alone(IDS)
        with pytest.raises(RewardError, match=r"^reward\.function: 'nobody' is not defined$"):
            runtime.drain()
        assert gone(pids)


@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_that_never_gets_ready_is_named() -> None:
    with running(1) as runtime:
        runtime.start()
        runtime.tasks.timeout_s = 0.5
        runtime.role(role("p0", Troubled, start_s=1000.0))
        with pytest.raises(WorkerError, match="still missing:\np0: start in worker 0 of pool 'p0', which is at p0: start"):
            runtime.ready()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("verb", "writes", "message"),
    [
        ("undeclared", ("scores",), r"p0\.undeclared wrote \['scores', 'slot'\], but declares \['scores'\]"),
        ("incomplete", ("scores", "slot"), r"p0\.incomplete wrote \['slot'\], but declares \['scores', 'slot'\]"),
        ("shorter", ("slot",), r"p0\.shorter returned 3 rows, expected 4"),
        ("change", ("slot",), r"p0\.change failed in worker 0 of pool 'p', samples 100, .*ValueError: .*read-only"),
    ],
)
def test_workers_are_held_to_what_they_declare(verb: str, writes: tuple[str, ...], message: str) -> None:
    process = Process(Setup("p", 0, 1, threads=1, share=Share(0, 1), folder=os.getcwd(), timeout_s=5, loopback=False))
    process.add(role("p0", Troubled), Mesh(), Mesh())
    refs = OutputRefs("driver", [describe(IDS, np.arange(4), 4, "", ("", 0))], {"sample_id": [IDS["sample_id"]]})
    places = Places(np.zeros(4, np.int32), np.arange(4))
    call = Call("p0", verb, (), writes, [refs], {"sample_id": (((0, "sample_id"),), places)}, 4, Mesh())
    with pytest.raises((ContractError, WorkerError), match=message):
        process.call(call)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("nodes", "gpus", "message"),
    [
        (
            (9,),
            False,
            r"^placement\.pools ask for 9 workers, but Ray has 8 CPU slots \(8\); add machines, or ask",
        ),
        ((2, 2), False, r"^placement\.pools: wide = \[2, 2\] needs 2 machines .*; Ray has machines with 8 CPU slots$"),
        ((1,), True, r"^placement\.pools ask for 1 workers, but Ray has 0 GPU slots"),
    ],
)
def test_pools_that_ask_for_too_much_are_told_in_one_line(nodes: tuple[int, ...], gpus: bool, message: str) -> None:
    placement = Placement((ResourcePool("wide", nodes),), {}, "wide")
    with pytest.raises(UserError, match=message):
        RayRuntime(placement, address=None, threads=1, timeout_s=5, gpus=gpus).start()


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_run_that_finds_the_slots_taken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    room = ray_group.reserve([ResourcePool("other", (5,))], "CPU")
    with monkeypatch.context() as patch, pytest.raises(UserError) as told:
        patch.setattr(ray_group, "RESERVE_S", 1)
        make_runtime(1, 3).start()
    assert str(told.value).startswith("placement.pools: no room for p1 = [3], ")
    assert "CPU slots are free; another job may be using the rest: wait for it, or ask for fewer workers" in str(told.value)
    ray_group.remove_placement_group(room["other"])
    everything = ray_group.reserve([ResourcePool("all", (8,))], "CPU")  # what the run had got is free again
    ray_group.remove_placement_group(everything["all"])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:6379"])
def test_an_address_where_nobody_answers_is_told_in_one_line(address: str) -> None:
    """In a process of its own, which is not connected yet."""
    code = f"from hybridflow.controller.ray_group import connect; connect({address!r}, 0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    told = ran.stderr.splitlines()[-1]
    start = f"hybridflow.core.errors.UserError: runtime.address = '{address}': no Ray cluster answers there ("
    assert told.startswith(start)
    assert told.endswith('start one with "ray start --head", or leave runtime.address out')
