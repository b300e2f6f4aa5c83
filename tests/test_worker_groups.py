"""Whole runs on worker processes: they learn what one process learns, wherever the roles are."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CARTPOLE, REVERSE, Outcome, with_keys
from test_runs import ENVIRONMENTS, TEXT, assert_equal, records, run, state

from hybridflow.commands.ledger import balance
from hybridflow.config import resolved, validate
from hybridflow.models.weights import load_decoder

pytestmark = pytest.mark.usefixtures("ray_cluster")

OF_RAY = ("moved/", "driver/", "workers/", "sampler/transition_", "sampler/weights_")
METHODS: dict[str, dict[str, Any]] = {
    "grpo": REVERSE,
    "ppo": TEXT["ppo"],
    "safe-rlhf": TEXT["safe-rlhf"],
    "remax": with_keys(REVERSE, algorithm="remax"),
    "dynamic-sampling": TEXT["dynamic-sampling"],
    "sft": TEXT["sft"],
    "ppo-cartpole": CARTPOLE,
    "ppo-lstm": ENVIRONMENTS["ppo-lstm"],
    "dqn-cartpole": ENVIRONMENTS["dqn-cartpole"],
    "dqn-gru": ENVIRONMENTS["dqn-gru"],
    "sac-pendulum": ENVIRONMENTS["sac-pendulum"],
    "agents": ENVIRONMENTS["agents"],
    **{
        f"{name}, one env worker": with_keys(ENVIRONMENTS[data], environment__workers=1)
        for name, data in (("a3c", "a3c-cartpole"), ("impala", "impala-workers"), ("dqn", "dqn-workers"))
    },
}
ALSO = ("agents", "dqn-gru", "impala, one env worker", "dqn, one env worker")
APART = {"train": 1, "rest": 1}


def on_ray(data: dict[str, Any], pools: dict[str, Any] | None = None, **roles: str) -> dict[str, Any]:
    placement = {"placement": {"pools": pools, "roles": roles}} if pools else {}
    return {**data, "runtime": {"kind": "ray", "timeout_s": 60}, **placement}


def learned(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of the mathematics alone."""
    return [{k: v for k, v in line.items() if not k.startswith(OF_RAY)} for line in records(run_dir)]


def split(data: dict[str, Any]) -> dict[str, Any]:
    """Actor and sampler on one pool, all other roles on another."""
    others = {"critic": ("ppo", "safe_rlhf"), "reward": (), "reference": (), "cost": ("safe_rlhf",)}
    named = {role for role, methods in others.items() if data["algorithm"] in methods}
    named |= {"reward"} if "data" in data else set()
    named |= {"reference"} if "kl" in data else set()
    if data.get("environment", {}).get("workers"):
        critic = {"critic": "train"} if data["algorithm"] == "impala" else {}
        return on_ray(data, APART, actor="train", sampler="rest", **critic)
    return on_ray(data, APART, actor="train", **(dict.fromkeys(named, "rest") or {"sampler": "rest"}))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALSO else []) for name in METHODS])
def test_worker_processes_learn_bit_for_bit_what_one_process_learns(name: str, tmp_path: Path) -> None:
    data = with_keys(METHODS[name], train__steps=3, checkpoint={"every": 3})
    local, processes = run(data, tmp_path / "local"), run(split(data), tmp_path / "ray")
    assert learned(local) == learned(processes)
    assert_equal(state(local), state(processes))
    accounts = balance(processes / "ledger.sqlite")
    assert not accounts.problems and accounts == balance(local / "ledger.sqlite")
    if "data" in data and name != "sft":
        assert (local / "samples.jsonl").read_text() == (processes / "samples.jsonl").read_text()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["ppo", "safe-rlhf", "ppo-cartpole", "agents"])
@pytest.mark.slow
def test_several_workers_of_each_role_change_the_last_digits_alone(name: str, tmp_path: Path) -> None:
    """Of the first optimizer step: AdamW, whose steps have one size whatever the gradient's, makes more of them."""
    data = with_keys(METHODS[name], train={"steps": 1, "minibatches": 1})
    local = learned(run(data, tmp_path / "local"))[-1]
    pools = {"train": 3, "rest": 2}
    many = learned(run({**split(data), "placement": {**split(data)["placement"], "pools": pools}}, tmp_path / "ray"))[-1]
    assert many.keys() == local.keys()
    rounding = {"actor/mismatch", "actor/mismatch_max", "actor/effective_samples"}
    steps = {key: many[key] for key in local if not key.startswith("eval/") and key not in rounding}
    assert steps == pytest.approx({key: local[key] for key in steps}, rel=2e-5, abs=1e-6)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["a2c", "trpo", "reinforce-value", "impala"])
@pytest.mark.slow
def test_two_env_workers_apart_from_the_learner_change_the_last_digits_alone(name: str, tmp_path: Path) -> None:
    """Methods whose env workers roll out together, with the newest weights."""
    data = ENVIRONMENTS[f"{name}-cartpole" if "-" not in name else name]
    data = with_keys(data, actor={"optimizer": CALM}, critic={"optimizer": CALM}, train={"steps": 4})
    apart = on_ray(data, {"learner": 1, "envs": 2}, actor="learner", critic="learner", sampler="envs")
    assert_near(run(data, tmp_path / "local"), run(apart, tmp_path / "ray"), 4)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["a3c-cartpole", pytest.param("impala-workers", marks=pytest.mark.slow)])
def test_env_workers_roll_out_by_themselves_and_nothing_is_lost(name: str, tmp_path: Path) -> None:
    data = with_keys(ENVIRONMENTS[name], environment__workers=2, checkpoint={"every": 12}, evaluation__every=6)
    data = with_keys(data, **{key: {"kind": "gru", "hidden": [8]} for key in ("actor__net", "critic__net")})
    critic = {"critic": "learner"} if "impala" in name else {}
    apart = on_ray(data, {"learner": 1, "envs": 2}, actor="learner", sampler="envs", **critic)
    ray = run(apart, tmp_path / "ray", train__steps=12)
    arrivals = [(line["worker"], line["staleness"]) for line in records(ray)[1:]]
    assert {worker for worker, _ in arrivals} == {0, 1} and len(arrivals) == 12
    if "a3c" in name:
        assert [line["actor/staleness"] for line in records(ray)[1:]] == [staleness for _, staleness in arrivals]
    saved = state(ray)
    (pending,) = saved["trainer"]["schedule"]["pending"]
    assert pending[0] == 1 - arrivals[-1][0]
    taken = sum(slot["state"]["num_steps"] for slot in saved["sampler"])
    rollouts, per_rollout = 12 + 1, data["environment"]["num_envs"] // 2 * data["environment"]["steps_per_rollout"]
    assert taken == rollouts * per_rollout, "rollouts that wait to be learned from have happened, too"
    assert any(slot["memory"].any() for slot in saved["sampler"]), "of running episodes"
    again = run(data, tmp_path / "ray", resume="latest", train__steps=16)  # in one process
    assert records(again)[13]["worker"] == pending[0] and len(records(again)) == 17


@pytest.mark.slow
def test_a_sampler_elsewhere_draws_from_the_newest_weights(tmp_path: Path) -> None:
    data = with_keys(REVERSE, train__steps=3)
    pools = {"learn": 1, "draw": 1}
    apart = on_ray(data, pools, actor="learn", sampler="draw", reward="learn")
    assert learned(run(data, tmp_path / "local")) == learned(run(apart, tmp_path / "ray"))


def test_a_checkpoint_goes_on_with_another_placement(tmp_path: Path) -> None:
    data = with_keys(TEXT["ppo"], checkpoint={"every": 2}, evaluation__every=2)
    whole = run(data, tmp_path / "whole", train__steps=4)
    run(split(data), tmp_path / "parts", train__steps=2)
    parts = run(data, tmp_path / "parts", resume="latest", train__steps=4)
    assert_equal(state(whole), state(parts))
    assert learned(whole) == learned(parts)


@pytest.mark.slow
def test_environments_go_on_in_another_number_of_workers(tmp_path: Path) -> None:
    data = with_keys(CARTPOLE, checkpoint={"every": 2})
    two = {**split(data), "placement": {"pools": {"train": 2, "rest": 1}, "roles": {"actor": "train", "critic": "rest"}}}
    run(two, tmp_path / "run", train__steps=2)
    before = [saved["slot"] for saved in state(tmp_path / "run")["sampler"]]
    run(on_ray(data, {"main": 3}), tmp_path / "run", resume="latest", train__steps=4)
    after = state(tmp_path / "run")["sampler"]
    assert before == [0, 1, 2, 3] and sorted(saved["slot"] for saved in after) == before
    assert records(tmp_path / "run")[-1]["step"] == 4


CALM = {"lr": 1e-3, "eps": 1e-4}
"""AdamW on near-zero gradients is a question of rounding; with this eps it isn't."""
CUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (
        with_keys(REVERSE, kl__coef=0.05, actor__optimizer=CALM),
        {"actor__mesh": {"tp": 2, "pp": 2}, "reference": {"mesh": {"tp": 2}}},
    ),
    "grpo, long": (
        with_keys(REVERSE, kl__coef=0.05, actor__optimizer=CALM),
        {"actor__mesh": {"tp": 2, "cp": 2}, "reference": {"mesh": {"cp": 2}}},
    ),
    "ppo": (
        with_keys(TEXT["ppo"], kl=None, actor__optimizer=CALM, critic={"optimizer": CALM}),
        {
            "actor__mesh": {"tp": 4, "shard": "zero1"},
            "actor__generation_mesh": {"tp": 2},
            "critic": {"optimizer": CALM, "mesh": {"pp": 2}},
        },
    ),
    "grpo, generating in parts": (
        with_keys(REVERSE, kl__coef=0.05, actor__optimizer=CALM),
        {"actor__mesh": {"tp": 2, "pp": 2}, "actor__generation_mesh": {"tp": 2}, "placement__offload": ["actor"]},
    ),
    "grpo, generating in more parts": (
        with_keys(REVERSE, kl__coef=0.05, actor__optimizer=CALM),
        {"actor__mesh": {"pp": 2}, "actor__generation_mesh": {"tp": 2}},
    ),
    "grpo, generating elsewhere": (
        with_keys(REVERSE, kl__coef=0.05, actor__optimizer=CALM),
        {
            "actor__mesh": {"tp": 2, "shard": "fsdp"},
            "actor__generation_mesh": {"pp": 2},
            "placement__roles__sampler": "rest",
        },
    ),
}
FOUR_AND_TWO = {"train": 4, "rest": 2}


def cut(name: str) -> dict[str, Any]:
    data, meshes = CUT[name]
    other = "critic" if name == "ppo" else "reference"
    return with_keys(on_ray(data, FOUR_AND_TWO, **{"actor": "train", "reward": "rest", other: "rest"}), **meshes)


def assert_near(one: Path, other: Path, steps: int) -> None:
    mine, theirs = learned(one), learned(other)
    assert len(mine) == len(theirs) == steps + 1
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys() and b == pytest.approx(a, rel=1e-4, abs=1e-5)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.slow
def test_models_cut_over_meshes_learn_what_whole_ones_learn(name: str, tmp_path: Path) -> None:
    local = run(CUT[name][0], tmp_path / "local", train__steps=3)
    processes = run(cut(name), tmp_path / "ray", train__steps=3)
    assert_near(local, processes, 3)
    assert (local / "samples.jsonl").read_text() == (processes / "samples.jsonl").read_text()
    told = records(processes)[-1]
    if "elsewhere" in name:
        assert "sampler/transition_s" not in told
    elif name != "grpo, long":
        assert told["sampler/transition_received_bytes"] > 0
        assert (told["sampler/weights_redundant_bytes"] > 0) == ("more" in name)


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_checkpoint_of_a_mesh_goes_on_on_others(tmp_path: Path) -> None:
    """From tp 2 x pp 2 to dp 2 x pp 2, and to one process, which write the same model; of a pipeline, a file a stage."""
    data = with_keys(CUT["grpo"][0], checkpoint={"every": 2}, evaluation__every=2)
    meshes = with_keys(cut("grpo"), checkpoint={"every": 2}, evaluation__every=2)
    whole = run(data, tmp_path / "whole", train__steps=4)
    run(meshes, tmp_path / "mesh", train__steps=2)
    shutil.copytree(tmp_path / "mesh", tmp_path / "one")
    mesh = run(meshes, tmp_path / "mesh", resume="latest", train__steps=4, actor__mesh={"pp": 2})
    one = run(data, tmp_path / "one", resume="latest", train__steps=4)
    for other in (mesh, one):
        assert_near(whole, other, 4)
    saved, parts = state(one), state(mesh)
    assert saved["actor"] == parts["actor"]
    saved, parts = saved["tensors"]["actor"], parts["tensors"]["actor"]
    assert saved.keys() == parts.keys()
    for name, x in saved.items():
        torch.testing.assert_close(parts[name], x, rtol=1e-3, atol=1e-5)
    exported = [{file.name for file in (run_dir / "model").iterdir()} for run_dir in (mesh, one)]
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert exported[0] - exported[1] == {*shards, "model.safetensors.index.json"}
    assert exported[1] - exported[0] == {"model.safetensors"} and "tokenizer.json" in exported[1]
    models = [load_decoder(run_dir / "model") for run_dir in (mesh, one)]
    for (name, x), y in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_steps(tmp_path: Path) -> None:
    run(on_ray(REVERSE, {"main": 2}), tmp_path / "run", train__steps=100)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("memory/rss_gb", "workers/rss_gb_max"):
        assert lines[100][name] - lines[20][name] < 0.02, name
    assert max(line["driver/bytes"] for line in lines[1:]) < 100_000


FUNCTIONS = """
import os, signal
def kills(response): os.kill(os.getppid(), signal.SIGKILL)
def raises(response):
    if len(response) > 2: raise ValueError("no score")
    return 0.5
"""


def written(folder: Path, data: dict[str, Any]) -> Path:
    (folder / "functions.py").write_text(FUNCTIONS)
    path = folder / "run.toml"
    path.write_text(resolved(validate({**data, "run_dir": str(folder / "run")}, "test")))
    return path


def test_a_worker_that_dies_ends_the_run_with_its_name(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    data = with_keys(split(REVERSE), reward={"functions": [f"{tmp_path / 'functions.py'}:kills"], "workers": 1})
    code, _, err = hybridflow("train", written(tmp_path, data))
    assert code == 1 and err.startswith("error: worker 0 of pool 'rest' died during reward.score: ")
    assert not (tmp_path / "run").exists()


MORTAL = """
import os, signal
from pathlib import Path
import gymnasium
import numpy as np
from gymnasium import spaces

class Mortal(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2)
    num_steps = 0

    def __init__(self, once):
        self.once = Path(once)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        Mortal.num_steps += 1
        if Mortal.num_steps == 40 and self.once.exists():
            self.once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(2, np.float32), 1.0, False, False, {}

gymnasium.register("Mortal-v0", Mortal)
"""


def test_an_env_worker_that_dies_by_itself_is_made_anew(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    """While the others go on, and nobody waits for just this one."""
    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "once").touch()
    mortal = {"id": f"{tmp_path / 'mortal.py'}:Mortal-v0", "options": {"once": str(tmp_path / "once")}}
    environment = {**ENVIRONMENTS["a3c-cartpole"]["environment"], **mortal, "workers": 2}
    data = {**ENVIRONMENTS["a3c-cartpole"], "environment": environment, "evaluation": {"limit": 1}}
    data = with_keys(data, environment__options={**mortal["options"], "max_episode_steps": 8}, train__steps=100)
    apart = on_ray(data, {"learner": 1, "envs": 2}, actor="learner", sampler="envs")
    assert hybridflow("train", written(tmp_path, apart)).code == 0
    (line,) = (tmp_path / "run" / "recoveries.jsonl").read_text().splitlines()
    assert re.match(r"worker [01] of pool 'envs' died( during sampler\.\w+)?: ", json.loads(line)["lost"])
    assert not (tmp_path / "once").exists()
    assert [record["step"] for record in records(tmp_path / "run")] == [*range(101)]


def test_a_user_s_mistake_in_a_worker_is_told_in_one_line(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    reward = {"functions": [f"{tmp_path / 'functions.py'}:raises"], "workers": 1}
    path = written(tmp_path, with_keys(split(REVERSE), reward=reward))
    in_workers = hybridflow("train", path)
    in_process = hybridflow("train", written(tmp_path, with_keys(REVERSE, reward=reward)))
    assert in_workers.code == in_process.code == 2
    one, other = (re.sub(r"\d+ of", "some of", outcome.err) for outcome in (in_workers, in_process))
    assert one == other and in_workers.err.count("\n") == 1 and "no score" in in_workers.err
    misspelt = {"functions": [f"{tmp_path / 'functions.py'}:rises"]}
    code, _, err = hybridflow("train", written(tmp_path, with_keys(split(REVERSE), reward=misspelt)))
    assert code == 2 and len(err.splitlines()) == 1 and "rises" in err


def test_without_ray_the_extra_is_named(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, find = written(tmp_path, split(REVERSE)), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    code, _, err = hybridflow("train", path)
    assert code == 2 and err.count("\n") == 1 and 'pip install "hybridflow[ray]"' in err


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_two_jobs_on_one_machine_don_t_meet(tmp_path: Path) -> None:
    """The second starts a Ray of its own beside the one that the other tests use."""
    path = written(tmp_path, {**split(REVERSE), "runtime": {"kind": "ray"}})
    command = [sys.executable, "-m", "hybridflow.cli", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert learned(tmp_path / "run") == learned(run(REVERSE, tmp_path / "local"))
