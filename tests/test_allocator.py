"""What pools of a run bid, and what becomes of a run whose workers change their number while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CARTPOLE
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker_groups import on_ray

from hybridflow.allocator import EVERY, Allocator, Scaling, Tenant, busy_s, paced
from hybridflow.build_profile import Kept
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError
from hybridflow.core.metrics import Span
from hybridflow.core.state_file import read_state, write_state
from hybridflow.planner.profile_base import Learned, ProfileBase, Sample
from hybridflow.telemetry.records import read_records
from hybridflow.train import Step


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 7, 24]))
def test_scaling_is_learned_from_changes(truly: float, thought: float, before: int, after: int, rows: int) -> None:
    truth, scaling = Scaling(truly, rows), Scaling(thought, rows)
    seconds = {units: truth.seconds(3.0, 1, units) for units in (before, after)}
    if truth._share(before) == truth._share(after):
        return
    scaling.learn((before, seconds[before]), (after, seconds[after]))
    assert scaling.parallel == pytest.approx((truly + thought) / 2, abs=1e-6)


def test_changes_that_deal_rows_as_before_say_nothing() -> None:
    scaling = Scaling(0.5, rows=1)
    scaling.learn((2, 1.0), (1, 3.0))
    assert scaling.parallel == 0.5


def test_units_share_out_whole_rows() -> None:
    scaling = Scaling(1.0, rows=12)
    assert [scaling.seconds(12.0, 1, units) for units in (1, 2, 5, 7, 12, 20)] == pytest.approx([12, 6, 3, 2, 1, 1])
    assert scaling.seconds(3.0, 5, 1) == pytest.approx(12.0)
    assert Scaling(0.5).seconds(8.0, 1, 4) == pytest.approx(4 + 4 / 4)
    worse = Scaling(0.8)
    worse.learn((2, 3.0), (1, 2.0))
    assert worse.parallel == 0.4, "more units made it slower"


def test_waiting_is_no_work() -> None:
    spans = [
        Span("sampler.rollout", "queue", 0.0, 9.0, "envs/0"),
        Span("sampler.rollout", "generate", 0.0, 2.0, "envs/0"),
        Span("sampler.rollout", "transfer", 0.0, 0.5, "envs/1"),
        Span("sampler.rollout", "generate", 0.0, 2.0, "envs/1"),
        Span("actor.update", "train", 0.0, 1.0, "learn/0"),
        Span("estimator.compute", "compute", 0.0, 0.25, "learn/0"),
        Span("evaluation.run", "evaluate", 0.0, 5.0),
    ]
    assert busy_s([spans]) == {"envs": {0: 2.0, 1: 2.5}, "learn": {0: 1.25}}
    assert busy_s([spans, spans[3:4]]) == {"envs": {0: 1.0, 1: 2.25}, "learn": {0: 0.625}}, "of a step"


def test_workers_get_rows_by_their_speeds_where_that_is_faster() -> None:
    assert paced([2.0, 1.0], 0, ()) == (0.5, 1.0)
    assert paced([1.5, 1.5], 0, (0.5, 1.0)) == (0.5, 1.0), "it is even now"
    assert paced([1.0, 1.1], 0, ()) == (), "hardly uneven"
    assert paced([2.0, 1.0, 1.0], 4, ()) == (), "rows are whole: one of three has two"
    assert paced([3.0, 1.0, 1.0], 12, ()) == (0.33, 1.0, 1.0)
    assert paced([3.0, 3.0, 2.0], 3, ()) == (), "each has one row"
    assert paced([0.0, 1.0], 0, ()) == (), "one has not worked"


class World:
    """Stands for a run: seconds of two pools on so many slots, by how much work there is."""

    def __init__(self, work: Callable[[int], Mapping[str, float]], noise: float, path: Path) -> None:
        self.work, self.noise, self.random = work, noise, np.random.default_rng(0)
        self.units, self.speeds = {"envs": 5, "learn": 2}, tuple[float, ...]()
        self.cost_s = self._changed_s = 0.0
        self.laws = {"envs": Scaling(0.98, rows=20), "learn": Scaling(0.8)}
        envs = Tenant("envs", "workers", ["sampler"], 5, 5, 1, "rollout", Scaling(0.95, rows=20))
        learn = Tenant("learn", "threads", ["actor"], 2, 6, 1, "learn", Scaling(0.7))
        self.path, self.took = path, list[float]()
        self.allocator = Allocator(self, [envs, learn], 6, path)  # type: ignore[arg-type]

    def resize(self, role: str, workers: int, speeds: tuple[float, ...]) -> None:
        assert role == "sampler"
        self._changed_s = self.cost_s
        self.units["envs"], self.speeds = workers, speeds

    def rethread(self, pool: str, threads: int) -> None:
        self.units[pool] = threads

    def run(self, steps: int, begun: int = 0) -> None:
        for number in range(begun + 1, steps + 1):
            seconds = {
                pool: self.laws[pool].seconds(work, 1, self.units[pool]) * (1 + self.noise * self.random.uniform(-1, 1))
                for pool, work in self.work(number).items()
            }
            spans = [Span("a.b", "train", 0.0, seconds[pool], f"{pool}/0") for pool in seconds]
            self.took.append(max(seconds.values()) + self._changed_s)
            self._changed_s = 0.0
            self.allocator(Step(number, {"time/step_s": self.took[-1]}, spans, None))


def phases(step: int) -> dict[str, float]:
    return {"envs": 5.0, "learn": 0.8} if step <= 50 else {"envs": 0.5, "learn": 3.0}


def test_units_follow_the_work_and_stay_where_it_stays(tmp_path: Path) -> None:
    world = World(phases, 0.02, tmp_path / "auction.jsonl")
    world.run(100)
    held = [record["units"] for record in read_records(world.path)]
    assert held[0] == {"envs": 5, "learn": 1}, "more than there is can't be kept"
    assert held[9] == {"envs": 5, "learn": 1}
    assert held[-1]["learn"] >= 4 and sum(held[-1].values()) <= 6
    assert held[10:] == sorted(held[10:], key=lambda units: units["learn"]), "one way"
    changes = sum(before != after for before, after in pairwise(held))
    assert 1 <= changes <= 4
    expected = max(world.laws["envs"].seconds(0.5, 1, 1), world.laws["learn"].seconds(3.0, 1, 5))
    assert np.mean(world.took[-10:]) < 1.15 * expected


def test_a_change_that_cost_much_doesn_t_rule_out_another_for_ever(tmp_path: Path) -> None:
    world = World(phases, 0.0, tmp_path / "auction.jsonl")
    world.cost_s, world.units["envs"], world.allocator.tenants[0].units = 40.0, 2, 2
    world.run(100)
    held = {record["step"]: record["units"]["envs"] for record in read_records(world.path)}
    assert held[5] == 5 and held[100] == 1
    (cost,) = (record["switch_s"] for record in read_records(world.path) if record["step"] == 10)
    assert cost == pytest.approx(40.0)


def test_what_more_units_bring_is_learned_from_changes(tmp_path: Path) -> None:
    world = World(lambda step: {"envs": 1.0, "learn": 4.0}, 0.0, tmp_path / "auction.jsonl")
    world.laws["learn"] = Scaling(0.0)
    world.run(6 * EVERY)
    first, second, *_ = (record["units"]["learn"] for record in read_records(world.path))
    assert (first, second) == (5, 5), "as nothing was known"
    (learn,) = (tenant for tenant in world.allocator.tenants if tenant.pool == "learn")
    assert learn.scaling.parallel == pytest.approx(0.7 / 2), "threads have brought nothing"


def test_what_is_done_again_is_measured_again_and_told_once(tmp_path: Path) -> None:
    world = World(phases, 0.0, tmp_path / "auction.jsonl")
    world.run(3 * EVERY - 1)
    world.allocator.rewind(EVERY + 1)
    assert [record["step"] for record in read_records(world.path)] == [EVERY]
    world.allocator(Step(2 * EVERY, {"time/step_s": 7.0}, [], None))
    (_, again) = read_records(world.path)
    assert (again["step"], again["measured_s"]) == (2 * EVERY, 7.0), "of the steps since then alone"


def going_on(world: World, folder: Path, **keys: Any) -> World:
    """Another process, which has begun as every run does, goes on with what this one has saved."""
    write_state(folder, "auction", world.allocator.state_dict())
    other = World(world.work, 0.0, world.path)
    vars(other).update(keys)
    other.allocator.load_state_dict(read_state(folder, "auction"))
    return other


@pytest.mark.parametrize("at", [3, 5, 12, 55])
def test_a_run_that_goes_on_bids_as_if_it_had_never_ended(at: int, tmp_path: Path) -> None:
    """After 5 and 55 steps units have just changed, of which the next round learns."""
    whole = World(phases, 0.0, tmp_path / "whole.jsonl")
    whole.laws["learn"] = Scaling(0.5)
    whole.run(100)
    first = World(phases, 0.0, tmp_path / "halves.jsonl")
    first.laws = whole.laws
    first.run(at)
    second = going_on(first, tmp_path, laws=whole.laws)
    assert second.units == first.units
    second.run(100, begun=at)
    untimed = [
        [{name: value for name, value in record.items() if name != "solve_s"} for record in read_records(world.path)]
        for world in (whole, second)
    ]
    assert untimed[0] == untimed[1] and len({record["units"]["learn"] for record in untimed[0]}) > 1
    assert second.allocator.tenants == whole.allocator.tenants


def test_what_starting_again_costs_is_no_cost_of_changing_units(tmp_path: Path) -> None:
    world = World(phases, 0.0, tmp_path / "auction.jsonl")
    world.run(55)
    other = going_on(world, tmp_path, cost_s=50.0)
    other.run(60, begun=55)
    (record,) = (record for record in read_records(world.path) if record["step"] == 60)
    assert other.took[0] > 50 and record["switch_s"] < 1 and record["before"] == world.units


def test_speeds_go_on_and_units_of_other_pools_do_not(tmp_path: Path) -> None:
    world = World(phases, 0.0, tmp_path / "auction.jsonl")
    envs, _ = world.allocator.tenants
    envs.take(3, (0.5, 1.0, 1.0), world)  # type: ignore[arg-type]
    other = going_on(world, tmp_path)
    assert other.allocator.tenants[0] == envs and other.speeds == (0.5, 1.0, 1.0)
    fewer = World(phases, 0.0, tmp_path / "auction.jsonl")
    fewer.allocator.slots = 5
    fewer.allocator.load_state_dict(read_state(tmp_path, "auction"))
    assert fewer.units == {"envs": 5, "learn": 2} and fewer.speeds == ()


def test_what_a_run_learned_of_its_pools_is_what_the_next_one_begins_with(tmp_path: Path) -> None:
    """Not what it has learned nothing of; and profiles of several numbers of threads are better than nothing."""
    world, path = World(lambda step: {"envs": 1.0, "learn": 4.0}, 0.0, tmp_path / "auction.jsonl"), tmp_path / "base"
    envs, learn = world.allocator.tenants
    envs.work, learn.work = "sampler one", "actor one"
    world.laws["learn"] = Scaling(0.3)
    world.run(4 * EVERY)
    sources = [{bid["name"]: bid["source"] for bid in record["bids"]} for record in read_records(world.path)]
    assert sources[0] == {"envs": "constants", "learn": "constants"} and sources[-1]["learn"] == "this run"
    (kept,) = [one for one in world.allocator.learned() if one.work == "actor one"]
    assert kept == Learned("actor one", "threads", learn.scaling.parallel) and 0.3 < kept.parallel < 0.7
    update = Sample("actor.update", "train", "one", "cpu", 1, 1, 8, 80, 1.0, 1.0, 1e8)
    slow = replace(update, verb="reward.score", model="f")  # in no pool of those
    ProfileBase.add(path, {"cores": 8}, [update] * 4 + [replace(update, threads=4, seconds=0.4)] * 4 + [slow], [kept])
    base, roles = ProfileBase.open(path), {"actor": ("one", "cpu")}

    def begun(work: str, kind: str, roles: Mapping[str, tuple[str, str]]) -> Scaling:
        scaling = Scaling(0.7)
        scaling.begin(work, kind, {name: Kept(*of) for name, of in roles.items()}, base)
        return scaling

    assert begun("actor one", "threads", roles) == Scaling(kept.parallel, source="earlier runs")
    profiled = begun("actor two", "threads", roles)
    assert profiled.source == "profile" and profiled.parallel == pytest.approx(0.8, abs=0.03), "0.4 = 0.2 + 0.8 / 4"
    for unknown in (("actor one", "workers", roles), ("actor two", "threads", {"actor": ("two", "cpu")})):
        assert begun(*unknown) == Scaling(0.7)


def test_an_auction_needs_pools_that_bid() -> None:
    for data in (CARTPOLE, on_ray(CARTPOLE)):
        with pytest.raises(
            ConfigError, match=r'threads = "auction": pools .* bid, and there is only one pool; set runtime'
        ):
            validate({**data, "threads": "auction", "run_dir": "x"}, "test")
    for wrong in (-1, 2.5, "bids", True):
        with pytest.raises(ConfigError, match='threads: expected how many, 0 or more, or "auction", got'):
            validate({**CARTPOLE, "threads": wrong, "run_dir": "x"}, "test")
