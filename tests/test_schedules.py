"""Runs by ``[schedule]``: who works when changes what is learned from in one way only, by how old it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import CARTPOLE, REVERSE, with_keys
from test_runs import assert_equal, records, run, state
from test_worker_groups import learned

from hybridflow.algorithms.policy_gradient import Objective
from hybridflow.commands.ledger import balance
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.hooks import Reporter
from hybridflow.telemetry.timeline import read_timeline
from hybridflow.train import Step

PPO = with_keys(REVERSE, algorithm="ppo", kl={"coef": 0.1})
AHEAD: dict[str, Any] = {"kind": "one_step_off"}
ASYNC: dict[str, Any] = {"kind": "async", "max_staleness": 2}


def on_pools(data: dict[str, Any], samplers: int) -> dict[str, Any]:
    """The sampler alone, all others together."""
    roles = dict.fromkeys(("actor", "critic", "reference", "reward"), "train")
    placement = {"pools": {"train": 1, "draw": samplers}, "roles": {**roles, "sampler": "draw"}}
    return {**data, "runtime": {"kind": "ray", "timeout_s": 60}, "placement": placement}


def without_schedule(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("staleness",)} for line in lines]


def test_no_staleness_is_the_synchronous_run(tmp_path: Path) -> None:
    data = with_keys(PPO, train__steps=3, checkpoint={"every": 3}, loss={"correction": "truncate"})
    sync = run(data, tmp_path / "sync")
    ahead = run(with_keys(data, schedule={"kind": "async", "max_staleness": 0}), tmp_path / "async")
    assert without_schedule(records(sync)) == without_schedule(records(ahead))
    one, other = state(sync), state(ahead)
    for both in (one, other):
        both["trainer"].pop("schedule")
    assert_equal(one, other)


@pytest.mark.parametrize("schedule", [AHEAD, ASYNC], ids=["one-step-off", "async"])
def test_rollouts_that_wait_are_part_of_the_state(schedule: dict[str, Any], tmp_path: Path) -> None:
    data = with_keys(PPO, schedule=schedule, train__steps=6, checkpoint={"every": 3}, evaluation={"every": 3, "limit": 8})
    whole = run(data, tmp_path / "whole")
    run(data, tmp_path / "halves", train__steps=3)
    halves = run(data, tmp_path / "halves", resume="latest", train__steps=6)
    assert records(whole) == records(halves)
    assert_equal(state(whole), state(halves))
    ages = [line["staleness"] for line in records(whole) if "staleness" in line]
    most = schedule.get("max_staleness", 1)
    assert ages == [min(step, most) for step in range(6)]
    assert records(whole)[-1]["actor/weight"] != 1.0, "what is older is corrected, without being asked to"
    accounts = balance(halves / "ledger.sqlite")
    assert not accounts.problems and accounts.counts == balance(whole / "ledger.sqlite").counts


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("data", [PPO, CARTPOLE], ids=["text", "environment"])
def test_one_step_off_on_pools_learns_bit_for_bit_what_one_process_learns(data: dict[str, Any], tmp_path: Path) -> None:
    data = with_keys(data, schedule=AHEAD, train__steps=4, checkpoint={"every": 4})
    apart = on_pools(data, 1)
    if "environment" in data:
        placement = {"pools": {"train": 1, "draw": 1}, "roles": {"actor": "train", "critic": "train", "sampler": "draw"}}
        apart = {**data, "runtime": {"kind": "ray", "timeout_s": 60}, "placement": placement}
    local, processes = run(data, tmp_path / "local"), run(apart, tmp_path / "ray")
    assert learned(local) == learned(processes)
    assert_equal(state(local), state(processes))
    assert balance(processes / "ledger.sqlite") == balance(local / "ledger.sqlite")


def failing_reward(folder: Path) -> Path:
    """A file with a reward function; it fails while "flag" lies beside it."""
    source = "import pathlib\nFLAG = pathlib.Path(__file__).with_name('flag')\n"
    source += "def f(response):\n    if FLAG.exists(): raise ValueError('gone')\n    return float(len(set(response)))\n"
    (folder / "rewards.py").write_text(source)
    return folder / "rewards.py"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("ray", [False, True], ids=["local", "ray"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"schedule": AHEAD}, {"schedule": {**ASYNC, "partial_rollouts": False}}, {"train__max_refills": 3}],
    ids=["sync", "one-step-off", "async", "refills"],
)
def test_a_step_whose_reward_fails_is_made_again(keys: dict[str, Any], ray: bool, tmp_path: Path) -> None:
    """What had begun for it is learned from when the run goes on, and nothing is learned from twice."""
    reward = {"functions": [f"{failing_reward(tmp_path)}:f"]}
    data = with_keys(REVERSE, reward=reward, train__steps=5, checkpoint={"every": 5}, evaluation__every=0, **keys)
    data = {**data, "runtime": {**RAY, "timeout_s": 60}, "placement": APART} if ray else data
    whole, reporting = run(data, tmp_path / "whole"), Reporter.__call__

    def fail_after_two(reporter: Reporter, step: Step) -> None:
        reporting(reporter, step)
        if step.number == 2:
            (tmp_path / "flag").touch()

    with mock.patch.object(Reporter, "__call__", fail_after_two), pytest.raises(RewardError, match="gone"):
        run(data, tmp_path / "cut")
    (tmp_path / "flag").unlink()
    cut = run(data, tmp_path / "cut", resume="latest")
    prompts = [[(line["step"], line["prompt"]) for line in sampled(path)] for path in (whole, cut)]
    assert prompts[0] == prompts[1]
    found = [[line.get("policy_version") for line in records(path)] for path in (whole, cut)]
    assert found[0] == found[1]
    accounts = balance(cut / "ledger.sqlite")
    assert not accounts.problems and accounts.counts["trained"] == balance(whole / "ledger.sqlite").counts["trained"]
    if not ray or keys.get("schedule", AHEAD) == AHEAD:
        assert_equal(state(whole)["tensors"], state(cut)["tensors"])


def test_a_correction_needs_no_forward_pass_of_its_own_where_a_batch_is_one_step(tmp_path: Path) -> None:
    """What is learned is what a run with such a pass learns, but for rounding."""
    data = with_keys(REVERSE, schedule=AHEAD, train__steps=4, train__minibatches=1)
    alone = run(data, tmp_path / "alone")
    with mock.patch("hybridflow.build.Objective", lambda *args, **keys: Objective(*args, **keys | {"one_update": False})):
        other = run(data, tmp_path / "other")
    lines = [records(path)[-1] for path in (alone, other)]
    for name in ("actor/weight", "loss/policy", "grad_norm"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-4)
    assert lines[0]["actor/weight"] != 1.0
    spans = [{event["name"] for event in read_timeline(path / "timeline.json")} for path in (alone, other)]
    assert ["actor.compute_log_probs" in names for names in spans] == [False, True]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("partial", [True, False], ids=["partial", "whole"])
def test_samplers_stay_ahead_and_go_on_with_new_weights(partial: bool, tmp_path: Path) -> None:
    """Two of them; the prompts and their order are those of the synchronous run, and nothing is older than it may be."""
    schedule = {**ASYNC, "partial_rollouts": partial}
    data = with_keys(PPO, schedule=schedule, train__steps=6, checkpoint={"every": 3}, evaluation={"every": 2, "limit": 8})
    sync = run(with_keys(PPO, train__steps=6, checkpoint={"every": 3}), tmp_path / "sync")
    run(on_pools(data, 2), tmp_path / "ray", train__steps=3)
    path = run(on_pools(data, 2), tmp_path / "ray", resume="latest", train__steps=6)
    lines = records(path)
    assert [line["staleness"] for line in lines if "staleness" in line] == [0, 1, 2, 2, 2, 2]
    assert lines[-1]["actor/mismatch"] > 1e-4 and lines[-1]["actor/weight"] > 0
    dealt = [[line["prompt"] for line in sampled(run_dir)] for run_dir in (sync, path)]
    assert dealt[0] == dealt[1]
    accounts = balance(path / "ledger.sqlite")
    assert not accounts.problems and accounts.counts["trained"] == balance(sync / "ledger.sqlite").counts["trained"]


def sampled(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


RAY: dict[str, Any] = {"kind": "ray"}
APART = {"pools": {"train": 1, "draw": 1}, "roles": {"actor": "train", "reward": "train", "sampler": "draw"}}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"schedule": {"max_staleness": 2}}, 'schedule: max_staleness has no effect with kind = "sync"'),
        ({"schedule": {**AHEAD, "partial_rollouts": False}}, 'partial_rollouts has no effect with kind = "one_step_off"'),
        ({"schedule": {"kind": "async", "max_staleness": -1}}, "schedule.max_staleness = -1: input should be greater than"),
        ({"schedule": AHEAD, "algorithm": "sft"}, 'schedule.kind = "one_step_off": sft has no rollouts; remove [schedule]'),
        (
            {"schedule": ASYNC, "train__max_refills": 2},
            "train.max_refills rolls out again until enough prompts say something",
        ),
        ({"schedule": AHEAD, "runtime": RAY}, "actor, estimator, reward, examiner would wait for rollouts on pool 'main'"),
        (
            {"schedule": ASYNC, "runtime": RAY, "placement": APART, "generation__engine": "vllm"},
            'generation.engine = "vllm" serves call after call; use "hybridflow"',
        ),
        (
            {
                "schedule": ASYNC,
                "runtime": RAY,
                "placement": {**APART, "pools": {"train": 1, "draw": 2}},
                "actor__generation_mesh": {"tp": 2},
            },
            'actor.generation_mesh: each process serves its own calls; remove it, or use "one_step_off"',
        ),
        ({"loss": {"correction_cap": 3.0}}, "loss.correction_cap has no effect without loss.correction"),
    ],
)
def test_what_makes_no_sense_is_told(keys: dict[str, Any], told: str) -> None:
    data = with_keys({**REVERSE, "run_dir": "x"}, **keys)
    with pytest.raises(ConfigError) as caught:
        validate(data, "test")
    assert told in str(caught.value)


def test_methods_that_need_the_newest_policy_say_so() -> None:
    for algorithm in ("a2c", "trpo", "reinforce"):
        data = {**with_keys(CARTPOLE, algorithm=algorithm, ppo=None), "run_dir": "x", "schedule": AHEAD}
        with pytest.raises(ConfigError, match=f"{algorithm} learns from its newest policy's rollouts alone"):
            validate(data, "test")
