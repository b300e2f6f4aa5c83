"""Runs whose env workers change their number while they go on, also when one of them dies meanwhile."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import CARTPOLE, REVERSE, with_keys
from test_runs import ENVIRONMENTS, assert_equal, records, run, state
from test_worker_groups import CALM, assert_near, on_ray
from worker_faults import Fault, spied, striking

from hybridflow.build_profile import base_here
from hybridflow.commands.auction import outcomes
from hybridflow.commands.ledger import balance
from hybridflow.commands.verify_resume import compare
from hybridflow.controller.protocols import blocks
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.planner.auction import Auction, Round
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.timeline import read_timeline

pytestmark = pytest.mark.usefixtures("ray_cluster")
LOST = Fault("sampler.resize", 5, [("envs", 1)])

ELASTIC = {
    **with_keys(CARTPOLE, actor={"optimizer": CALM}, critic={"optimizer": CALM}, environment__num_envs=6),
    "train": {"steps": 8},
    "checkpoint": {"every": 4},
    "evaluation": {"limit": 2},
}
GIVEN = [1, 3, 2, 2, 1, 3, 2, 1]
"""env workers after each step"""


def dictated(auction: Auction, *given: Any) -> Round:
    """Rounds of an auction with another result."""
    round_ = ROUND(auction, *given)
    auction.units = {"envs": [*GIVEN, *[GIVEN[-1]] * 9][round_.step - 1], "learn": 1}
    return replace(round_, units=auction.units)


ROUND = Auction.round


def elastic_run(folder: Path, *faults: Fault, **keys: Any) -> Path:
    """Of three env workers at first."""
    data = on_ray(ELASTIC, {"learn": 1, "envs": 3}, actor="learn", critic="learn", sampler="envs")
    return dictated_run(data, folder, *faults, **keys)


def dictated_run(data: dict[str, Any], folder: Path, *faults: Fault, **keys: Any) -> Path:
    data = with_keys(data, threads="auction", recovery__deadline_s=4.0)
    every, rounds = mock.patch("hybridflow.allocator.EVERY", 1), mock.patch.object(Auction, "round", dictated)
    with every, rounds, striking(*faults) as struck:
        ended = run(data, folder, **keys)
    assert struck == list(faults)
    return ended


def check_same(elastic: Path, still: Path) -> None:
    """It has learned what one process learns, from the same steps of the same episodes, and nothing was lost."""
    assert_near(still, elastic, ELASTIC["train"]["steps"])
    ours, theirs = (sorted(state(path)["sampler"], key=itemgetter("slot")) for path in (elastic, still))
    assert_equal([slot["state"] for slot in ours], [slot["state"] for slot in theirs])
    accounts = balance(elastic / "ledger.sqlite")
    assert not accounts.problems and accounts.counts == balance(still / "ledger.sqlite").counts
    assert [record.get("units", {}).get("envs") for record in read_records(elastic / "auction.jsonl")] == GIVEN


@pytest.mark.timeout(180)
def test_a_worker_that_dies_while_its_group_changes_costs_nothing_but_time(tmp_path: Path) -> None:
    still = run(ELASTIC, tmp_path / "still")
    elastic = elastic_run(tmp_path / "elastic", Fault("sampler.resize", 5, [("envs", 1)]))
    check_same(elastic, still)
    (event,) = read_records(elastic / "recoveries.jsonl")
    assert event["lost"].startswith("worker 1 of pool 'envs' died")
    rounds = outcomes(elastic / "auction.jsonl")
    assert [outcome.round.step for outcome in rounds] == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_whose_workers_change_learns_what_one_process_learns_and_goes_on_anywhere(tmp_path: Path) -> None:
    still, elastic = run(ELASTIC, tmp_path / "still"), elastic_run(tmp_path / "elastic")
    check_same(elastic, still)
    longer = {"train__steps": 10, "resume": "latest"}
    assert_near(run(ELASTIC, still, **longer), run(ELASTIC, elastic, **longer), 10)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_that_is_cut_goes_on_with_its_units_and_is_the_whole_one_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speeds are measured, and a forward of other rows may differ in its last digits."""
    monkeypatch.setattr("hybridflow.allocator.paced", lambda busy, rows, speeds: speeds)
    whole = elastic_run(tmp_path / "whole", evaluation__every=4)
    halves = elastic_run(tmp_path / "halves", evaluation__every=4, train__steps=4)
    taken, resize = list[Any](), RayRuntime.resize
    with mock.patch.object(RayRuntime, "resize", lambda runtime, *given: (taken.append(given), resize(runtime, *given))[1]):
        elastic_run(tmp_path / "halves", evaluation__every=4, resume="latest")
    assert taken[0][:2] == ("sampler", GIVEN[3]), "before any round"
    assert [found for found in compare(whole, halves) if found.differs] == []
    rounds = [[one.round for one in outcomes(path / "auction.jsonl")] for path in (whole, halves)]
    assert [one.before for one in rounds[0]] == [one.before for one in rounds[1]]
    assert [one.units["envs"] for one in rounds[1]] == GIVEN
    assert state(halves)["auction"]["auction"]["units"] == {"envs": GIVEN[7], "learn": 1}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_second_run_begins_with_what_the_first_has_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(tmp_path / "home"))
    known = []
    for name in ("first", "second"):
        ended = elastic_run(tmp_path / name)
        sources = [{bid.name: bid.source for bid in one.round.bids} for one in outcomes(ended / "auction.jsonl")]
        learned = state(ended)["auction"]["held"]["envs"]["scaling"][0]
        (kept,) = [one for one in base_here().scalings if one.work.startswith("sampler ")]
        assert kept.parallel == learned and kept.units == "workers" and sources[-1]["envs"] == "this run"
        known.append(sources[0]["envs"])
    assert known == ["constants", "earlier runs"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_samplers_that_are_never_done_become_more_and_fewer(tmp_path: Path) -> None:
    """Those that leave end what they are at; those that join have the weights."""
    data = with_keys(REVERSE, train__steps=8, schedule={"kind": "async", "max_staleness": 2})
    data = on_ray(data, {"learn": 1, "envs": 3}, actor="learn", reward="learn", sampler="envs")
    ended = dictated_run(data, tmp_path / "run")
    accounts = balance(ended / "ledger.sqlite")
    assert not accounts.problems and accounts.counts["trained"] == 8 * 16
    assert max(line["staleness"] for line in records(ended)[1:]) <= 2
    spans = [event for event in read_timeline(ended / "timeline.json") if event.get("name") == "sampler.rollout"]
    workers = {step: {event["tid"] for event in spans if event["args"]["step"] == step} for step in range(1, 9)}
    assert len(workers[1]) == 3 and any(len(tids) == 1 for tids in workers.values())


BY_THEMSELVES = {"environment__workers": 3, "environment__num_envs": 5, "environment__steps_per_rollout": 6}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("a3c-cartpole", None),
        ("impala-workers", LOST),
        pytest.param("a3c-cartpole", LOST, marks=pytest.mark.long),
        pytest.param("impala-workers", None, marks=pytest.mark.long),
        pytest.param("dqn-workers", None, marks=pytest.mark.long),
        pytest.param("dqn-workers", LOST, marks=pytest.mark.long),
    ],
)
def test_env_workers_that_roll_out_by_themselves_share_fewer_processes(
    name: str, fault: Fault | None, tmp_path: Path
) -> None:
    """Whose rollouts stay as large as they are; in one process their turns are those of a run without Ray, bit for bit."""
    keys = {"train__steps": 8, "checkpoint": {"every": 8}, **BY_THEMSELVES}
    alone = with_keys(ENVIRONMENTS[name], **keys)
    critic = {"critic": "learn"} if "impala" in name else {}
    apart = on_ray(alone, {"learn": 1, "envs": 3}, actor="learn", sampler="envs", **critic)
    ended = dictated_run(apart, tmp_path / "run", *([fault] if fault else []))
    arrivals = [(line["worker"], line["staleness"]) for line in records(ended)[1:]]
    assert len(arrivals) == 8 and {worker for worker, _ in arrivals} == {0, 1, 2}
    pending = [worker for worker, *_ in state(ended)["trainer"]["schedule"]["pending"]]
    rollouts = Counter([worker for worker, _ in arrivals] + pending)
    shares = blocks(np.ones(5, np.int64), 3)
    taken = {slot: 6 * rollouts[worker] for worker, share in enumerate(shares) for slot in share.tolist()}
    assert {slot["slot"]: slot["state"]["num_steps"] for slot in state(ended)["sampler"]} == taken
    assert not balance(ended / "ledger.sqlite").problems
    spans = [event for event in read_timeline(ended / "timeline.json") if event.get("name") == "sampler.rollout"]
    assert len({event["tid"] for event in spans}) == 3
    assert len(read_records(ended / "recoveries.jsonl")) == 1 if fault else not (ended / "recoveries.jsonl").exists()
    shutil.copytree(ended, tmp_path / "local")
    more = {"train__steps": 14, "checkpoint__every": 14}
    ray = dictated_run(apart, ended, resume="latest", **more)
    local = run(alone, tmp_path / "local", resume="latest", **more)
    turns = [
        [(line["worker"], line["staleness"], line["policy_version"]) for line in records(path)[9:]] for path in (ray, local)
    ]
    assert turns[0] == turns[1] and len(turns[0]) == 6
    assert_equal(*({part: state(path)[part] for part in ("trainer", "sampler", "tensors")} for path in (ray, local)))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_reward_workers_become_more_and_fewer_also_in_a_process_that_was_made_anew(tmp_path: Path) -> None:
    data = with_keys(REVERSE, train__steps=8, reward={"workers": 2}, actor__optimizer=CALM)
    still = run(data, tmp_path / "still")
    asked = list[tuple[str, int]]()
    spy = spied("resize", lambda _, what: asked.append(what), lambda role, workers, *_: (role, workers))
    apart = on_ray(data, {"learn": 1, "envs": 1}, actor="learn", reward="envs")
    with spy:
        elastic = dictated_run(apart, tmp_path / "elastic", Fault("reward.score", 4, [("envs", 0)]))
    assert_near(still, elastic, 8)
    assert (still / "samples.jsonl").read_text() == (elastic / "samples.jsonl").read_text()
    assert ("reward", 3) in asked and {role for role, _ in asked} == {"reward"}
    assert len(read_records(elastic / "recoveries.jsonl")) == 1
    assert not balance(elastic / "ledger.sqlite").problems
