"""Methods for environments besides PPO and those with a replay: what each learns from, and that it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import CARTPOLE, with_keys

from hybridflow.build import build
from hybridflow.config import validate
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ConfigError
from hybridflow.ops.advantages import drop_cut
from hybridflow.train import Step

LAKE: dict[str, Any] = {
    "algorithm": "q_learning",
    "run_dir": "unused",
    "threads": 1,
    "q_learning": {"alpha": 0.5},
    "environment": {"id": "FrozenLake-v1", "num_envs": 16, "steps_per_rollout": 1, "options": {"is_slippery": False}},
    "exploration": {"epsilon_end": 0.1, "epsilon_decay_steps": 10_000},
    "train": {"steps": 1500},
    "evaluation": {"limit": 3},
}


def steps_of(data: dict[str, Any], count: int) -> list[Step]:
    made, seen = build(validate(with_keys(data, run_dir="unused"), "test")), list[Step]()
    made.trainer.hooks = [seen.append]
    try:
        made.trainer.train(count)
    finally:
        made.runtime.stop()
    return seen


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_q_learning_finds_the_way_over_a_lake(seed: int) -> None:
    made = build(validate({**LAKE, "seed": seed}, "test"))
    try:
        made.trainer.train(1500)
        evaluation = made.parts.evaluate
        assert evaluation is not None and evaluation().score == 1.0
    finally:
        made.runtime.stop()


def test_q_learning_learns_from_each_step_by_itself() -> None:
    with pytest.raises(ConfigError, match=r"environment\.steps_per_rollout = 4: q_learning .* set it to 1"):
        validate(with_keys(LAKE, environment__steps_per_rollout=4), "test")


def test_impala_learns_from_rollouts_of_older_policies() -> None:
    schedule = {"kind": "async", "max_staleness": 2}
    steps = steps_of(with_keys(CARTPOLE, algorithm="impala", ppo=None, schedule=schedule, train__steps=9), 9)
    for number, step in enumerate(steps, 1):
        assert step.batch is not None
        assert set(step.batch.ragged("policy_version").values.tolist()) == {max(0, number - 1 - 2)}
        assert step.metrics["staleness"] == min(number - 1, 2)
    assert steps[0].metrics["actor/mismatch"] < 1e-6
    assert all(step.metrics["actor/mismatch"] > 1e-4 for step in steps[3:])


def test_returns_that_the_limit_cuts_are_not_learned_from() -> None:
    ones = Ragged(np.ones(6, bool), np.array([1, 2, 3]))
    batch = Batch({"response_mask": ones, "terminated": np.array([1, 0, 0], bool), "truncated": np.array([0, 1, 0], bool)})
    assert drop_cut(batch)["response_mask"].values.tolist() == [True] * 3 + [False] * 3


def test_reinforce_has_a_critic_only_where_it_needs_one() -> None:
    without = validate(with_keys(CARTPOLE, algorithm="reinforce", ppo=None, critic=None, run_dir="unused"), "test")
    assert "critic" not in without.sections() and "critic" not in without.roles()
    with_values = with_keys(CARTPOLE, algorithm="reinforce", ppo=None, reinforce={"baseline": "value"}, run_dir="unused")
    assert "critic" in validate(with_values, "test").roles()


def test_trpo_stays_within_its_region() -> None:
    steps = steps_of(with_keys(CARTPOLE, algorithm="trpo", ppo=None, trpo={"max_kl": 0.005}, train__steps=6), 6)
    moved = [step.metrics["actor/policy_kl"] for step in steps]
    assert max(moved) > 0 and all(kl <= 0.005 * (1 + 1e-5) for kl in moved)
    assert {step.metrics["actor/step_scale"] for step in steps} <= {0.0, *(0.5**number for number in range(10))}
