"""Whole runs through the real loop: what they leave behind, resuming, invariances."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CARTPOLE, PENDULUM, REVERSE, saved_tensors, with_keys

from hybridflow import checkpoint
from hybridflow.build import build
from hybridflow.commands.ledger import balance
from hybridflow.config import resolved, validate
from hybridflow.core.batch import Batch, Ragged
from hybridflow.launch import train

TIMED = ("time/", "tokens_per_s", "env_steps_per_s", "replay/inserted_per_s", "replay/drawn_per_s", "memory/")


def run(data: dict[str, Any], run_dir: Path, resume: str | None = None, **keys: Any) -> Path:
    assert train(validate(with_keys(data, run_dir=str(run_dir), **keys), "test"), resume) == 0
    return run_dir


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without those that measure time."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def state(run_dir: Path) -> dict[str, Any]:
    """Of the newest checkpoint; "tensors" are those of roles."""
    saved = checkpoint.load(checkpoint.latest(run_dir / "checkpoints"))
    tensors = {role: saved_tensors(saved.path / role) for role in saved.files if role != "replay"}
    return {**saved.state, "tensors": tensors, "rows": saved.files.get("replay")}


def assert_equal(a: Any, b: Any, where: str = "state") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    elif isinstance(a, Batch):
        assert_equal(a.columns, b.columns, where)
    elif isinstance(a, Ragged):
        assert_equal([a.values, a.lengths], [b.values, b.lengths], where)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), where
    else:
        assert a == b, where


def test_a_run_leaves_a_complete_directory(tmp_path: Path) -> None:
    out = run(REVERSE, tmp_path / "run")
    lines = records(out)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert set(lines[0]) == {"step", "eval/score", "eval/low", "eval/high", "eval/count"}
    keys = {"reward/mean", "reward/failed", "entropy", "response_length/mean", "policy_version", "grad_norm", "loss/policy"}
    assert keys <= set(lines[1])
    assert lines[1]["policy_version"] == 1 and lines[2]["policy_version"] == 2
    timed = json.loads((out / "metrics.jsonl").read_text().splitlines()[1])
    assert {"time/generate_s", "time/reward_s", "time/learn_s", "time/step_s", "tokens_per_s", "memory/rss_gb"} <= set(
        timed
    )
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["prompt"].endswith(">") and samples[0]["score"] is not None
    events = json.loads((out / "timeline.json").read_text())
    assert {"sampler.rollout", "reward.score", "estimator.compute", "actor.update"} <= {event["name"] for event in events}
    assert (out / "model" / "model.safetensors").is_file() and (out / "model" / "tokenizer.json").is_file()
    assert json.loads((out / "result.json").read_text())["evaluations"][-1]["step"] == 2
    assert list((out / "tensorboard").glob("events*"))


def test_lengths_are_expected_as_they_were(tmp_path: Path) -> None:
    """Of a prompt of the last step as many tokens as its responses had; checkpoints keep it."""
    data = with_keys(REVERSE, checkpoint__every=2, generation__max_new_tokens=9)
    out = run(data, tmp_path / "run")
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    last = [sample for sample in samples if sample["step"] == 2]
    assert len(last) == 4 and len({sample["group_id"] for sample in last}) == 1
    made = build(validate(with_keys(data, run_dir=str(tmp_path / "other")), "test"))
    try:
        assert made.trainer.source(2)["expected_length"].tolist() == [0] * 16
        made.load(checkpoint.load(checkpoint.latest(out / "checkpoints")))
        expected = made.trainer.source(2)["expected_length"]
    finally:
        made.runtime.stop()
    assert expected[0] == round(np.mean([sample["tokens"] for sample in last])) and len(set(expected.tolist())) > 1
    assert all(len(set(group.tolist())) == 1 for group in expected.reshape(4, 4)), "of a prompt, not of a row"


TEXT = {
    "grpo": REVERSE,
    "grpo-bf16-kl": with_keys(REVERSE, kl__coef=0.01, actor__dtype="bfloat16"),
    "ppo": with_keys(REVERSE, algorithm="ppo", kl={"coef": 0.05, "target": 0.01}, train__group_size=1),
    "sft": with_keys(REVERSE, algorithm="sft", train__group_size=None),
    "adaptive-kl-in-the-loss": with_keys(REVERSE, kl={"coef": 0.1, "target": 0.01, "horizon": 100}),
    "running-scores": with_keys(REVERSE, algorithm="remax", shaping={"normalise": "running"}),
    "dynamic-sampling": with_keys(REVERSE, train__max_refills=2, loss={"correction": "truncate"}),
    "safe-rlhf": with_keys(
        REVERSE,
        algorithm="safe_rlhf",
        safe_rlhf={"budget": 0.2, "ptx_coef": 0.1},
        kl={"coef": 0.1},
        cost={"functions": ["hybridflow.data.task_rewards:exact"]},
    ),
}
PRIORITISED = {"priority": 0.6, "importance": 1.0}
ENVIRONMENTS = {
    "ppo-cartpole": CARTPOLE,
    "dqn-cartpole": with_keys(
        CARTPOLE,
        algorithm="dqn",
        ppo=None,
        critic=None,
        dqn={"target_update_every": 3},
        environment__steps_per_rollout=4,
        train={"steps": 2, "updates_per_step": 3},
        replay={"capacity": 100, "batch_size": 8, "warmup": 20},
    ),
    "dqn-workers": with_keys(
        CARTPOLE,
        algorithm="dqn",
        ppo=None,
        critic=None,
        environment={"id": "CartPole-v1", "num_envs": 4, "workers": 2, "steps_per_rollout": 4},
        train={"steps": 2, "updates_per_step": 2},
        replay={"capacity": 100, "batch_size": 8, "warmup": 20},
    ),
    "dqn-switches": with_keys(
        CARTPOLE,
        algorithm="dqn",
        ppo=None,
        critic=None,
        dqn={"duelling": True, "atoms": 11, "v_min": 0.0, "v_max": 50.0},
        environment__steps_per_rollout=4,
        train={"steps": 2, "updates_per_step": 3},
        replay={"capacity": 100, "batch_size": 8, "warmup": 20, "n_steps": 3, **PRIORITISED},
    ),
    "dqn-gru": with_keys(
        CARTPOLE,
        algorithm="dqn",
        ppo=None,
        critic=None,
        dqn={"duelling": True},
        actor__net={"kind": "gru", "hidden": [8, 8]},
        environment__steps_per_rollout=9,
        train={"steps": 2, "updates_per_step": 2},
        replay={"capacity": 200, "batch_size": 4, "warmup": 20, "sequence": 4, "n_steps": 2, **PRIORITISED},
    ),
    "normalised": with_keys(
        CARTPOLE,
        environment__id="Pendulum-v1",
        environment__wrappers=[{"name": "FrameStackObservation", "stack_size": 2}],
        actor__net__normalise=True,
        critic__net={"normalise": True, "normalise_returns": True},
    ),
    "ppo-lstm": with_keys(
        CARTPOLE,
        actor__net={"kind": "lstm", "hidden": [8, 8], "normalise": True},
        critic__net={"kind": "lstm", "hidden": [8]},
        environment__steps_per_rollout=9,
    ),
    "a2c-attention": with_keys(
        CARTPOLE,
        algorithm="a2c",
        ppo=None,
        actor__net={"kind": "attention", "hidden": [8], "context": 4},
        critic__net={"kind": "attention", "hidden": [8], "context": 4},
        environment={"id": "FrozenLake-v1", "num_envs": 2, "steps_per_rollout": 5},
    ),
    "a2c-cartpole": with_keys(CARTPOLE, algorithm="a2c", ppo=None, train={"steps": 2}),
    "reinforce-cartpole": with_keys(CARTPOLE, algorithm="reinforce", ppo=None, critic=None),
    "reinforce-value": with_keys(CARTPOLE, algorithm="reinforce", ppo=None, reinforce={"baseline": "value"}),
    "trpo-cartpole": with_keys(CARTPOLE, algorithm="trpo", ppo=None),
    "trpo-pendulum": with_keys(CARTPOLE, algorithm="trpo", ppo=None, environment__id="Pendulum-v1"),
    "a3c-cartpole": with_keys(CARTPOLE, algorithm="a3c", ppo=None, critic=None, environment__workers=3, train={"steps": 2}),
    "impala-workers": with_keys(CARTPOLE, algorithm="impala", ppo=None, environment__workers=3),
    "impala-cartpole": with_keys(CARTPOLE, algorithm="impala", ppo=None, schedule={"kind": "async", "max_staleness": 3}),
    "q-learning": with_keys(
        CARTPOLE,
        algorithm="q_learning",
        ppo=None,
        critic=None,
        actor=None,
        train={"steps": 2},
        environment={"id": "FrozenLake-v1", "num_envs": 4, "steps_per_rollout": 1},
        exploration={"epsilon_decay_steps": 100},
    ),
    "sac-pendulum": PENDULUM,
    "td3-pendulum": with_keys(PENDULUM, algorithm="td3", exploration={"noise": 0.2}),
    "ddpg-pendulum": with_keys(PENDULUM, algorithm="ddpg"),
    "sac-cartpole": with_keys(PENDULUM, environment__id="CartPole-v1"),
    "agents": with_keys(
        CARTPOLE,
        environment={"id": "pettingzoo:mpe2.simple_spread_v3", "num_envs": 2, "steps_per_rollout": 8, "agent_id": True},
        critic__input="state",
    ),
}


@pytest.mark.parametrize("name", [*TEXT, *ENVIRONMENTS])
def test_twenty_and_twenty_steps_are_forty_bit_for_bit(name: str, tmp_path: Path) -> None:
    data = with_keys({**TEXT, **ENVIRONMENTS}[name], checkpoint={"every": 20}, evaluation__every=20)
    whole = run(data, tmp_path / "whole", train__steps=40)
    run(data, tmp_path / "halves", train__steps=20)
    halves = run(data, tmp_path / "halves", resume="latest", train__steps=40)
    assert_equal(state(whole), state(halves))
    assert records(whole) == records(halves)
    accounts = balance(halves / "ledger.sqlite")
    assert not accounts.problems and accounts.counts == balance(whole / "ledger.sqlite").counts
    assert (whole / "samples.jsonl").read_bytes() == (halves / "samples.jsonl").read_bytes() if name in TEXT else True


def test_interrupting_finishes_the_step_and_resuming_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    data = with_keys(REVERSE, train__steps=300, checkpoint={"every": 300}, run_dir=str(tmp_path / "cut"))
    (tmp_path / "run.toml").write_text(resolved(validate(data, "test")))
    command = [sys.executable, "-m", "hybridflow.cli", "train", str(tmp_path / "run.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        metrics = tmp_path / "cut" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 3):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with --resume" in out and "Traceback" not in out
    reached = records(tmp_path / "cut")[-1]["step"]
    assert 3 <= reached < 300
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=100, check=False)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    whole = run(with_keys(data, run_dir=None), tmp_path / "whole")
    assert_equal(state(whole), state(tmp_path / "cut"))
    assert records(whole) == records(tmp_path / "cut")


def learned(data: dict[str, Any], **keys: Any) -> dict[str, torch.Tensor]:
    """Weights of the actor after the run's steps, in memory."""
    made = build(validate(with_keys(data, run_dir="unused", **keys), "test"))
    try:
        made.trainer.train(made.config.train.steps)
        weights = made.parts.actor.learner.weights(0).arrays  # type: ignore[attr-defined]
        return {name.removeprefix("policy/"): torch.tensor(array) for name, array in weights.items()}
    finally:
        made.runtime.stop()


@pytest.mark.parametrize(
    "keys",
    [
        {"train__token_budget": 8},
        {"train__token_budget": 50},
        {"generation__max_slots": 3},
        {"generation__kv_cache_gb": 6.5e-5},
    ],
)
def test_how_work_is_split_does_not_change_what_is_learned(keys: dict[str, Any]) -> None:
    """Small budgets make many microbatches, few slots or a small cache another generation order. A large eps keeps Adam
    from turning the sign of a gradient that is nothing but rounding into a whole step."""
    data = with_keys(REVERSE, actor__optimizer__eps=1e-3)
    first, whole, split = learned(data, train__steps=1), learned(data), learned(data, **keys)
    assert max(float((tensor - first[name]).abs().max()) for name, tensor in whole.items()) > 1e-4
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, split[name], rtol=0, atol=1e-6)


def test_distilling_needs_no_reward(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12>"}\n{"prompt": "34>"}\n')
    data = with_keys(REVERSE, algorithm="distill", actor={"model": str(tiny_model)}, teacher={"model": str(tiny_model)})
    out = run(with_keys(data, data={"prompts": str(tmp_path / "prompts.jsonl")}, evaluation=None), tmp_path / "run")
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [sample["score"] for sample in samples] == [None] * len(samples) != []
    assert records(out)[0]["teacher/kl"] == pytest.approx(0, abs=1e-6)


def test_the_seed_decides() -> None:
    one, same, other = learned(REVERSE), learned(REVERSE), learned(REVERSE, seed=2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["decoder.embed.weight"], other["decoder.embed.weight"])


GRPO_FAMILY = {
    "rloo": {"algorithm": "rloo", "loss": {"kind": "reinforce"}},
    "dr_grpo": {"grpo": {"scale": "none"}, "loss": {"aggregation": "constant"}},
    "dapo": {"loss": {"clip_high": 0.28}, "shaping": {"overlong_buffer": 2}},
    "gspo": {"loss": {"kind": "gspo"}},
    "cispo": {"loss": {"kind": "cispo"}},
    "kl_in_loss": {"kl": {"coef": 0.1}},
    "kl_in_reward": {"kl": {"coef": 0.1, "where": "reward"}},
    "dual_clip": {"loss": {"dual_clip": 3.0, "aggregation": "sequence_mean", "entropy_coef": 0.01}},
}


@pytest.mark.parametrize("name", GRPO_FAMILY)
def test_every_member_of_the_grpo_family_learns(name: str) -> None:
    before, after = learned(REVERSE, train__steps=1), learned(with_keys(REVERSE, **GRPO_FAMILY[name]), train__steps=2)
    moved = [float((after[key] - tensor).abs().max()) for key, tensor in before.items()]
    assert all(np.isfinite(moved)) and max(moved) > 1e-4
