"""Three and three steps are six, bit for bit: methods, buffers and places in the data that other tests leave out.

``tests/test_runs.py`` has most methods, ``tests/test_preferences.py`` those on pairs, ``tests/test_replay_runs.py`` overlap
and shards, ``tests/test_worker_groups.py`` other placements.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, PENDULUM, REVERSE, with_keys
from test_runs import ENVIRONMENTS, assert_equal, records, run, state

from hybridflow.commands.ledger import balance

DQN = ENVIRONMENTS["dqn-cartpole"]
SEQUENCES = {"capacity": 90, "batch_size": 4, "warmup": 10, "sequence": 4, "priority": 0.6, "importance": 1.0}
RUNS: dict[str, dict[str, Any]] = {
    "rloo": with_keys(REVERSE, algorithm="rloo"),
    "reinforce_pp": with_keys(REVERSE, algorithm="reinforce_pp"),
    "remax": with_keys(REVERSE, algorithm="remax"),
    "sac-workers": with_keys(
        PENDULUM, environment={"id": "Pendulum-v1", "num_envs": 2, "workers": 2, "steps_per_rollout": 9}
    ),
    "prioritised-sequences": with_keys(DQN, actor={"net": {"kind": "gru", "hidden": [8]}}, replay=SEQUENCES),
    "samples-per-insert": with_keys(DQN, train__updates_per_step=None, replay__samples_per_insert=2.5),
    "full-ring": with_keys(DQN, replay={"capacity": 20, "batch_size": 8, "warmup": 16}),
}


def six_are_three_and_three(data: dict[str, Any], folder: Path, at: int = 3) -> None:
    data = with_keys(data, checkpoint={"every": at}, evaluation__every=at)
    whole = run(data, folder / "whole", train__steps=6)
    run(data, folder / "halves", train__steps=at)
    halves = run(data, folder / "halves", "latest", train__steps=6)
    assert_equal(state(whole), state(halves))
    assert records(whole) == records(halves)
    versions = {record["step"]: record.get("policy_version", 0) for record in records(whole)}
    assert versions[6] > versions[at] > 0
    accounts = balance(halves / "ledger.sqlite")
    assert not accounts.problems and accounts.counts == balance(whole / "ledger.sqlite").counts


@pytest.mark.parametrize("name", RUNS)
def test_methods_and_buffers(name: str, tmp_path: Path) -> None:
    six_are_three_and_three(RUNS[name], tmp_path)


def test_rows_on_disk(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    six_are_three_and_three(with_keys(DQN, replay__spill=str(tmp_path / "spill")), tmp_path)


def test_a_recorded_dataset_alone(tmp_path: Path, hybridflow: Any) -> None:
    source = run(DQN, tmp_path / "source")
    recorded = tmp_path / "cartpole-v0"
    assert hybridflow("record", source, "--out", recorded, "--steps", 100).code == 0
    data = with_keys(DQN, replay__dataset=str(recorded), replay__capacity=2000)
    six_are_three_and_three(data, tmp_path / "and more")
    six_are_three_and_three(with_keys(data, environment__steps_per_rollout=0), tmp_path / "alone")


def test_distillation(tmp_path: Path, tiny_model: Path) -> None:
    data = with_keys(REVERSE, algorithm="distill", train__group_size=None, data={"prompts": prompts(tmp_path, 6)})
    data = {**data, "actor": {"model": str(tiny_model)}, "teacher": {"model": str(tiny_model)}}
    six_are_three_and_three(data, tmp_path)


@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_at_the_end_of_an_epoch_and_within_one(algorithm: str, at: int, tmp_path: Path, tiny_model: Path) -> None:
    """Of 6 prompts 4 are taken a step: two epochs end with step 3, the third within step 5."""
    data = with_keys(REVERSE, algorithm=algorithm, data={"prompts": prompts(tmp_path, 6), "template": "plain"})
    data = with_keys({**data, "actor": {"model": str(tiny_model), "optimizer": {"lr": 1e-3}}})
    if algorithm == "sft":
        data = with_keys(data, train__group_size=None, data__completion_field="answer")
    else:
        (tmp_path / "rewards.py").write_text("def length(response: str) -> float:\n    return float(len(response))\n")
        data["reward"] = {"functions": [f"{tmp_path}/rewards.py:length"]}
    six_are_three_and_three(data, tmp_path, at)
    counts = balance(tmp_path / "whole" / "ledger.sqlite").counts
    assert counts["trained"] == 24 * (1 if algorithm == "sft" else 4)


def prompts(folder: Path, count: int) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(count)))
    return str(path)


def test_several_passes_over_a_rollout_that_is_cut_anywhere(tmp_path: Path) -> None:
    data = with_keys(CARTPOLE, train={"minibatches": 3, "epochs": 2}, environment__steps_per_rollout=7)
    for at in (1, 5):
        six_are_three_and_three(data, tmp_path / str(at), at)
