"""Three pools of processes: what moves between them, when they run, and what the driver gets to see."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import ray
from ray._private import internal_api
from ray_workers import Copy, Maker, Marker, Sleeper, role

from hybridflow.controller.actor import LinkedActor
from hybridflow.controller.cores import Share
from hybridflow.controller.ray_group import homes, shares
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.columns import Lazy
from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Placement, ResourcePool
from hybridflow.core.roles import Role


class Pools(NamedTuple):
    runtime: RayRuntime
    a: Any
    b: Any
    one: Any
    sleepers: tuple[Any, Any, Any]


@pytest.fixture(scope="module")
def pools(ray_cluster: None) -> Iterator[Pools]:
    """``a`` and ``b`` on 3 and 2 processes, ``one`` on 1; a sleeper on each."""
    sizes = ResourcePool("three", (3,)), ResourcePool("two", (2,)), ResourcePool("one", (1,))
    three, two = ("a", "s3", "learner", "looked"), ("b", "s2", "copy", "learner2", "copy2")
    homes = dict.fromkeys(three, "three") | dict.fromkeys(two, "two")
    runtime = RayRuntime(Placement(sizes, homes, "one"), address=None, threads=1, timeout_s=60, gpus=False)
    a, b, one = runtime.role(role("a", Maker)), runtime.role(role("b", Maker)), runtime.role(role("one", Maker))
    sleepers = tuple(runtime.role(Role(name, Sleeper, max_workers=1)) for name in ("s1", "s2", "s3"))
    runtime.ready()
    yield Pools(runtime, a, b, one, sleepers)  # type: ignore[arg-type]
    runtime.stop()


def ids(count: int) -> Batch:
    return Batch({"sample_id": np.arange(count)})


def moved(pools: Pools) -> dict[str, float]:
    values = pools.runtime.drain().metrics.values()
    return {name.removeprefix("moved/"): value for name, value in values.items() if name.startswith("moved/")}


def test_workers_of_all_pools_share_the_cores_of_their_machine(pools: Pools) -> None:
    sizes = [group.pool for group in pools.runtime.groups.values()]
    found = homes({group.pool.name: group.room for group in pools.runtime.groups.values()})
    dealt = shares(sizes, found)
    assert {name: len(dealt[name]) for name in dealt} == {"three": 3, "two": 2, "one": 1}
    assert sorted(share for pool in dealt.values() for share in pool) == [Share(number, 6) for number in range(6)]
    spread = [ResourcePool("wide", (2, 1)), ResourcePool("narrow", (1,))]
    dealt = shares(spread, {"wide": ["x", "y"], "narrow": ["y"]})
    assert dealt == {"wide": [(0, 2), (1, 2), (0, 2)], "narrow": [(1, 2)]}


@pytest.mark.parametrize("count", [0, 1, 2, 5, 23])
def test_rows_regroup_from_three_ranks_to_two(pools: Pools, count: int) -> None:
    pools.runtime.drain()
    made = pools.a.make(ids(count))
    out = pools.b.shout(pools.b.double(made))
    rows = [[i] * (i % 4) for i in range(count)]
    assert [row.tolist() for row in out["tokens"]] == rows
    assert [row.tolist() for row in out["values"]] == [[2.0 * i for i in row] for row in rows]
    assert out["response"].tolist() == [f"row {i}" for i in range(count)]
    assert out["prompt_text"].tolist() == [f"ROW {i}" for i in range(count)]
    assert out["scores"].tolist() == [i / 2 for i in range(count)]


def test_a_row_moves_once_to_who_reads_it_and_no_other_column_moves(pools: Pools) -> None:
    pools.runtime.drain()
    made = pools.a.make(ids(23))
    pools.b.double(made)
    num_tokens = sum(i % 4 for i in range(23))
    told = moved(pools)
    assert told == {"driver-a.make": 8 * 23, "driver-b.double": 8 * 23, "a.make-b.double": 8 * num_tokens}
    pools.b.update(made)
    assert moved(pools) == {"a.make-b.update": 4 * 23}, "a view pulls what the verb looks at"
    pools.b.shout(made.rows([3, 4, 4]))
    told = moved(pools)
    assert list(told) == ["a.make-b.shout"]
    assert 3 * 5 < told["a.make-b.shout"] < 3 * 30, "three texts; of objects the size is an estimate"


def test_outputs_stay_lazy_until_someone_looks(pools: Pools) -> None:
    start = time.monotonic()
    out = pools.sleepers[1].score(ids(4), 0.5)
    assert time.monotonic() - start < 0.4
    assert isinstance(out.columns["scores"], Lazy)
    assert len(out) == 4, "known without waiting"
    assert time.monotonic() - start < 0.4
    assert out["scores"].tolist() == [0, 0, 0, 0]
    assert time.monotonic() - start >= 0.5


def test_the_driver_pulls_the_rows_that_it_reads(pools: Pools) -> None:
    made = pools.a.make(ids(23))
    pools.runtime.drain()
    assert made.rows([7, 2, 7])["scores"].tolist() == [3.5, 1, 3.5]
    assert pools.runtime.drain().metrics.values()["driver/bytes"] == 3 * 4
    assert made.rows([7, 4])["tokens"].padded().tolist() == [[7, 7, 7], [0, 0, 0]]
    assert made.lengths.tolist() == [i % 4 for i in range(23)]


def test_rows_of_a_calls_own_come_in_the_order_of_their_ids(pools: Pools) -> None:
    out = pools.a.split(ids(8))
    assert out.known_rows is None
    expected = [n for i in range(8) if i % 3 for n in (10 * i, 10 * i + 1)]
    assert len(out) == len(expected) == 10
    assert out["sample_id"].tolist() == expected
    assert np.allclose(out["scores"], np.array(expected) / 10)
    more = pools.b.make(out)
    assert more["response"].tolist() == [f"row {i}" for i in expected]


def test_no_rows_of_a_calls_own(pools: Pools) -> None:
    assert len(pools.a.split(ids(1))) == 0
    assert len(pools.b.make(pools.a.split(ids(0)))["response"]) == 0


def test_joined_and_repeated_batches_are_read_where_they_are(pools: Pools) -> None:
    first, second = pools.a.make(ids(5)), pools.b.make(Batch({"sample_id": np.arange(10, 14)}))
    here = Batch({"sample_id": np.array([99]), "tokens": Ragged.from_rows([[1, 2]], np.int64)})
    both = Batch.concat([first.select(["sample_id", "tokens"]), here, second.select(["sample_id", "tokens"])])
    pools.runtime.drain()
    out = pools.a.double(both.rows([9, 5, 0, 3]).repeat(2))
    assert [row.tolist() for row in out["values"]][::2] == [[26.0], [2.0, 4.0], [], [6.0, 6.0, 6.0]]
    assert out["sample_id"].tolist() == [13, 13, 99, 99, 0, 0, 3, 3]


def test_metrics_are_merged_in_the_order_of_ranks_whoever_is_first(pools: Pools) -> None:
    for slow in (0, 1, 2):
        pools.runtime.drain()
        pools.a.add_in_order(ids(3), slow)
        assert pools.runtime.drain().metrics.values()["a/sum"] == sum((1e16, 1.0, -1e16)) * 1.0 == 0.0


def test_the_second_call_of_a_verb_is_looked_at_in_every_process(pools: Pools) -> None:
    """Each tells its own rows; of a view, its share."""
    marker = pools.runtime.role(Role("looked", Marker))
    batch = ids(8).with_columns(tokens=Ragged(np.zeros(16, np.int64), np.full(8, 2)))
    for verb in (marker.dp, marker.view):
        pools.runtime.drain()
        for _ in range(2):
            verb(batch)
        spans = [span for span in pools.runtime.drain().spans if span.kind == "forward"]
        efforts = [span.effort for span in spans if span.effort is not None]
        assert len(spans) == 6 and len(efforts) == 3
        assert sum(effort.rows for effort in efforts) == pytest.approx(8)
        assert sum(effort.tokens for effort in efforts) == pytest.approx(16)
        assert {(effort.workers, effort.threads) for effort in efforts} == {(3, 1)}
        assert all(effort.memory_bytes > 0 and effort.written_bytes > 0 for effort in efforts)


def test_stages_on_different_pools_run_side_by_side(pools: Pools) -> None:
    first, second, third = pools.sleepers
    first.score(ids(2), 0.0)
    pools.runtime.drain()
    start, s = time.monotonic(), 0.4
    scored = first.score(ids(2), s)
    judged = second.judge(scored, s)
    third.judge(scored, s)
    second.update(judged, s)
    third.update(judged, s)
    spans = pools.runtime.drain().spans
    took = time.monotonic() - start
    assert took < 0.75 * 5 * s
    ran = {span.name: span for span in spans if span.kind in ("forward", "train")}
    assert ran["s2.judge"].start_s < ran["s3.judge"].start_s + s
    assert ran["s3.judge"].start_s < ran["s2.judge"].start_s + s
    for name in ("s2.judge", "s3.judge"):
        assert ran[name].start_s >= ran["s1.score"].start_s + s
    assert ran["s3.update"].start_s >= ran["s2.judge"].start_s + s, "it reads what s2 wrote"
    assert all(abs(span.start_s - time.perf_counter()) < 60 for span in spans), "on the clock of the driver"
    waited = next(span for span in spans if span.name == "s2.judge" and span.kind == "queue")
    assert waited.duration_s == pytest.approx(s, abs=0.25)


def test_calls_of_one_pool_take_turns_in_the_order_of_the_program(pools: Pools) -> None:
    pools.runtime.drain()
    batch = ids(6)
    for _ in range(3):
        made = pools.a.make(batch)
        pools.b.double(made)
        pools.a.double(made)
    spans = [span for span in pools.runtime.drain().spans if span.kind not in ("queue", "transfer")]
    for rank in range(3):
        own = sorted((span for span in spans if span.worker == f"three/{rank}"), key=lambda span: span.start_s)
        assert [span.name for span in own] == ["a.make", "a.double"] * 3
        assert all(one.start_s + one.duration_s <= next_.start_s for one, next_ in pairwise(own))


@pytest.mark.parametrize("verb", ["spin", "sleep"])
def test_the_second_lane_answers_while_the_first_is_busy(pools: Pools, verb: str) -> None:
    made = pools.one.make(ids(5))
    assert len(made["scores"]) == 5
    group, refs = pools.runtime.groups["one"], made.columns["scores"].parts[0][0].refs  # type: ignore[union-attr]
    getattr(pools.sleepers[0], verb)(ids(1), 1.5)
    while not (doing := group.ping(0)):
        time.sleep(0.01)
    assert doing == f"s1.{verb}"
    assert f"in {verb}" in group.stacks(0)
    rows = ray.get(group.processes[0].fetch.remote([refs.columns["scores"][0]], np.array([4, 1])))
    assert rows.tolist() == [2.0, 0.5]
    assert group.ping(0) == doing, "it has been busy all the time"
    pools.runtime.drain()
    assert group.ping(0) == ""


def test_paused_workers_wait_between_two_pieces_of_work_and_no_deadline_passes(pools: Pools) -> None:
    group = pools.runtime.groups["one"]
    pools.sleepers[0].walk(ids(1), 20)
    while not group.ping(0):
        time.sleep(0.01)
    pools.runtime.pause(True)
    time.sleep(1.0)
    assert group.ping(0) == "s1.walk" and "wait" in group.stacks(0), "20 pieces of 20 ms would be over by now"
    pools.runtime.pause(False)
    [span] = [span for span in pools.runtime.drain().spans if span.kind == "forward"]
    assert span.name == "s1.walk" and span.duration_s > 1.3


def test_a_column_that_nobody_wrote_is_told_before_anything_runs(pools: Pools) -> None:
    with pytest.raises(ContractError, match=r"b\.double reads tokens; the batch has sample_id"):
        pools.b.double(ids(3))
    with pytest.raises(AttributeError, match="role 'b' has no verb 'duoble'"):
        pools.b.duoble(ids(3))
    assert len(pools.b.pids()) == 2, "the processes are fine"


def test_two_roles_of_one_name_are_refused(pools: Pools) -> None:
    with pytest.raises(ContractError, match="two roles are called 'a'"):
        pools.runtime.role(role("a", Maker))


def test_state_is_saved_and_restored_on_every_rank(pools: Pools) -> None:
    pools.a.update(pools.a.make(ids(4)))
    state = pools.runtime.save(Path())
    assert {"a", "b", "one"} <= state.keys()
    assert state["a"]["scale"] == 3.0, "the scores of all ranks' rows"
    pools.a.update(pools.a.make(ids(8)))
    pools.runtime.load(Path(), {**state, "a": {"scale": 5.0}}, {})
    assert [row.tolist() for row in pools.a.double(pools.a.make(ids(4)))["values"]] == [[], [10], [20, 20], [30, 30, 30]]


def test_weights_reach_a_sampler_in_other_processes_once_an_update(pools: Pools) -> None:
    actor = LinkedActor(pools.runtime, Role("learner", Maker, replica=Copy), role("copy", Maker))
    for update in range(1, 4):
        if update > 1:
            actor.update(actor.learner.make(ids(update)), None)
        expected = 1.0 if update == 1 else sum(range(update)) / 2
        first, second = actor.rollout(ids(5)), actor.rollout(ids(5))
        assert first["scores"].tolist() == second["scores"].tolist() == [expected] * 5
        assert second["slot"].tolist() == [update] * 5
        assert actor.sampler.read_version() == update - 1
    moved = [span for span in pools.runtime.drain().spans if span.name.endswith(".weights")]
    assert {(span.name, span.kind) for span in moved} >= {("learner.weights", "transfer"), ("copy.weights", "transfer")}
    assert sum(span.name == "copy.weights" for span in moved) >= 3 and all(span.duration_s >= 0 for span in moved)


def test_a_sampler_in_the_same_processes_reads_the_learner_in_place(pools: Pools) -> None:
    actor = LinkedActor(pools.runtime, role("learner2", Maker, scale=2.5), role("copy2", Maker))
    assert actor.rollout(ids(3))["scores"].tolist() == [2.5] * 3
    assert actor.rollout(ids(3))["slot"].tolist() == [0] * 3, "nothing was published"
    actor.update(actor.learner.make(ids(3)), None)
    assert actor.rollout(ids(3))["scores"].tolist() == [1.5] * 3


def _stored_bytes() -> int:
    state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(internal_api.get_memory_info_reply(state).store_stats.object_store_bytes_used)


def test_what_no_batch_refers_to_is_forgotten(pools: Pools) -> None:
    """20 steps of 5 MB that workers make, and 5 MB of the driver."""
    processes = [psutil.Process(pid) for pid in (os.getpid(), *pools.a.pids(), *pools.b.pids())]
    own = list[list[int]]()
    pools.runtime.drain()
    gc.collect()
    before = _stored_bytes()
    for _ in range(20):
        out = pools.a.fill_memory(ids(10), 125_000)
        summed = pools.b.add_up(out)
        assert summed["scores"].tolist() == [125_000.0 * i for i in range(10)]
        assert _stored_bytes() >= before + 4_900_000
        given = ids(10).with_columns(observations=Ragged(np.ones((10, 125_000), np.float32), np.ones(10, np.int64)))
        assert pools.a.add_up(given)["scores"].tolist() == [125_000.0] * 10
        del out, summed, given
        pools.runtime.drain()
        own.append([p.memory_info().rss - p.memory_info().shared for p in processes])
    _wait_for(lambda: _stored_bytes() <= before)
    assert all(last - early < 8e6 for early, last in zip(own[5], own[-1], strict=True))


def _wait_for(condition: Callable[[], bool]) -> None:
    """Ray frees what nobody refers to a little later."""
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
