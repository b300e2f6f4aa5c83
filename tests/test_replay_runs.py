"""Whole runs that replay: over rows elsewhere, from datasets, overlapping; they are the runs in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PENDULUM, Outcome, with_keys, written
from test_runs import ENVIRONMENTS, assert_equal, records, run, state
from test_worker_groups import learned

from hybridflow.config import validate
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.data.envs import spaces_of
from hybridflow.data.recorded import open_recorded

DQN = with_keys(ENVIRONMENTS["dqn-cartpole"], train__steps=6, checkpoint={"every": 3}, evaluation__every=3)
POOLS = {"pools": {"learn": 1, "act": 1, "rows": 2}, "roles": {"actor": "learn", "sampler": "act", "replay": "rows"}}


def on_shards(data: dict[str, Any]) -> dict[str, Any]:
    spread = {"runtime": {"kind": "ray", "timeout_s": 180}, "placement": POOLS}
    return with_keys({**data, **spread}, replay__shards=2)


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_rows_in_two_processes_and_overlap_are_one_process(tmp_path: Path) -> None:
    data = with_keys(
        DQN, replay={"capacity": 150, "batch_size": 16, "warmup": 30, "n_steps": 3, "priority": 0.6, "importance": 1.0}
    )
    data = with_keys(data, schedule={"kind": "one_step_off"})
    local = run(data, tmp_path / "local")
    run(on_shards(data), tmp_path / "ray", train__steps=3)
    spread = run(on_shards(data), tmp_path / "ray", resume="latest", train__steps=6)
    assert learned(local) == learned(spread)
    ours, theirs = state(local), state(spread)
    for both in (ours, theirs):
        assert len(both.pop("rows")) == (1 if both is ours else 2)
    assert_equal(ours, theirs)
    moved = {key: value for line in records(spread) for key, value in line.items() if key.startswith(("moved/", "driver/"))}
    assert moved["moved/replay.steps-actor.update"] > 0 and moved["moved/sampler.rollout-replay.insert"] > 0
    # And on in one process again, from what two have saved.
    run(data, tmp_path / "ray", resume="latest", train__steps=8)
    assert learned(run(data, tmp_path / "whole", train__steps=8))[-2:] == learned(tmp_path / "ray")[-2:]


def test_overlapping_learns_from_what_older_weights_collected(tmp_path: Path) -> None:
    together = run(DQN, tmp_path / "together")
    data = with_keys(DQN, schedule={"kind": "one_step_off"})
    whole = run(data, tmp_path / "whole")
    run(data, tmp_path / "halves", train__steps=3)
    halves = run(data, tmp_path / "halves", resume="latest", train__steps=6)
    assert_equal(state(whole), state(halves))
    assert records(whole) == records(halves) != records(together)
    ages = [
        [line["replay/age_updates"] for line in records(path)[1:] if "replay/age_updates" in line]
        for path in (whole, together)
    ]
    assert ages[0][-1] > ages[1][-1]


def test_updates_follow_samples_per_insert(tmp_path: Path) -> None:
    data = with_keys(DQN, train__steps=20, train__updates_per_step=None, replay__samples_per_insert=2.5)
    lines = records(run(data, tmp_path / "run"))
    environment, replay = data["environment"], data["replay"]
    inserted = 20 * environment["num_envs"] * environment["steps_per_rollout"] - replay["warmup"]
    drawn = int(2.5 * inserted / replay["batch_size"]) * replay["batch_size"]
    assert lines[-1]["replay/samples_per_insert"] == drawn / inserted
    assert lines[-1]["policy_version"] < drawn / replay["batch_size"], "several draws are learned from in one call"


def test_impossible_settings_are_told(tmp_path: Path) -> None:
    def problems(**keys: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            validate(with_keys({**DQN, "run_dir": "x"}, **keys), "test")
        return str(caught.value)

    assert "leave one out" in problems(replay__samples_per_insert=1.0, train__updates_per_step=2)
    less = problems(replay__samples_per_insert=1e-4, train__updates_per_step=None)
    assert "the whole run draws less than one replay.batch_size" in less
    assert 'needs worker processes; set runtime.kind = "ray"' in problems(replay__shards=2)
    assert "replay.shards = 2, but pool 'main' of role replay has 1 workers" in problems(
        replay__shards=2, runtime={"kind": "ray"}
    )
    assert "has to be in replay.dataset" in problems(environment__steps_per_rollout=0)
    ahead = {"kind": "one_step_off"}
    off = problems(environment__steps_per_rollout=0, replay__dataset="x", schedule=ahead)
    assert "environment.steps_per_rollout = 0 collects nothing; remove [schedule]" in off
    assert "environment.workers collect by themselves" in problems(schedule=ahead, environment__workers=2)
    with pytest.raises(ConfigError, match="ppo learns from what it collects"):
        validate({"algorithm": "ppo", "environment": {"id": "CartPole-v1", "steps_per_rollout": 0}, "run_dir": "x"}, "test")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A short run, and a folder for datasets of its policy."""
    folder = tmp_path_factory.mktemp("recorded")
    return run(with_keys(DQN, checkpoint=None), folder / "run"), folder


def test_record_writes_what_minari_reads(
    recorded: tuple[Path, Path], hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    import minari

    source, folder = recorded
    told = hybridflow("record", str(source), "--out", str(folder / "cartpole-v0"), "--steps", "300", "--random", "0.5")
    assert told.code == 0, told
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    dataset = minari.load_dataset("cartpole-v0")
    assert 300 <= dataset.total_steps < 900 and str(dataset.total_steps) in told.out
    config = validate({**DQN, "run_dir": "x"}, "test").environment
    assert config is not None
    environment = dataset.recover_environment()
    assert environment.spec.id == config.id
    opened = open_recorded(str(folder / "cartpole-v0"), config.id, spaces_of(config))
    rows = list(opened.batches())
    assert sum(len(batch["rewards"].values) for batch in rows) == opened.num_steps == dataset.total_steps
    for row, episode in enumerate(dataset.iterate_episodes()):
        assert_equal(rows[0]["observations"][row], episode.observations[:-1])
        assert_equal(rows[0]["final_observations"][row], episode.observations[-1])
        assert_equal(rows[0]["actions"][row], episode.actions)
        assert rows[0]["terminated"][row] == episode.terminations[-1] != rows[0]["truncated"][row]
        environment.reset()
        environment.unwrapped.state = episode.observations[0]
        followed = [environment.step(action)[0] for action in episode.actions[:5]]
        assert episode.observations[1:6] == pytest.approx(np.stack(followed), abs=1e-5), (
            "the actions are those that led there"
        )
    assert "it is there already" in hybridflow("record", str(source), "--out", str(folder / "cartpole-v0")).err
    assert "such as cartpole-v0" in hybridflow("record", str(source), "--out", str(folder / "cartpole")).err


def test_a_dataset_that_does_not_fit_is_refused(
    recorded: tuple[Path, Path], hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    source, folder = recorded
    assert hybridflow("record", str(source), "--out", str(folder / "few-v0"), "--steps", "60").code == 0
    pendulum = validate({**PENDULUM, "run_dir": "x"}, "test").environment
    assert pendulum is not None
    with pytest.raises(DataError, match=r"its observations are Box\(.*, but those of 'Pendulum-v1' are Box"):
        open_recorded(str(folder / "few-v0"), pendulum.id, spaces_of(pendulum))
    with pytest.raises(DataError, match="expected a Minari dataset's folder or id"):
        open_recorded(str(folder / "none-v0"), pendulum.id, spaces_of(pendulum))
    dataset = str(folder / "few-v0")
    for keys, line in (
        ({"replay__capacity": 50, "replay__warmup": 50}, "but replay.capacity = 50; raise it"),
        (
            {"replay__capacity": 500, "replay__warmup": 500, "environment__steps_per_rollout": 0},
            "steps and none is added, but replay.warmup = 500",
        ),
    ):
        path = written(tmp_path, with_keys(DQN, replay__dataset=dataset, **keys))
        assert line in hybridflow("train", str(path)).err
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_dqn_learns_from_a_dataset_alone(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    examples = Path(__file__).parent.parent / "examples"
    short = ["--evaluation.limit", "10"]
    train = ["train", str(examples / "dqn_cartpole.toml"), *short]
    assert hybridflow(*train, "--run_dir", str(tmp_path / "first"), "--train.steps", "50").code == 0
    folder = tmp_path / "cartpole-v0"
    assert (
        hybridflow("record", str(tmp_path / "first"), "--out", str(folder), "--random", "0.5", "--steps", "8000").code == 0
    )
    offline = ["--environment.steps_per_rollout", "0", "--replay.dataset", str(folder), "--train.steps", "40"]
    assert hybridflow(*train, "--run_dir", str(tmp_path / "offline"), *offline).code == 0
    result = json.loads((tmp_path / "offline" / "result.json").read_text())
    assert result["before"]["eval/score"] < 60 < 100 < result["after"]["eval/low"]
    line = records(tmp_path / "offline")[-1]
    assert "env_steps_per_s" not in line and "sampler/episode_return" not in line and line["replay/size"] >= 8000
