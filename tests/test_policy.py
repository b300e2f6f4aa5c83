"""A trained policy by itself: its actions are those that its run's sampler takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from conftest import CARTPOLE, REVERSE, Outcome, with_keys, written
from gymnasium import spaces

from hybridflow.config import resolved, validate
from hybridflow.core.errors import CheckpointError, DataError, ModelError
from hybridflow.data.envs import EnvironmentConfig, native_action
from hybridflow.models.multi_discrete import MultiCategoricalPolicy
from hybridflow.models.nets import NetConfig, make_policy
from hybridflow.policy import Policy

SEEN = spaces.Box(-1, 1, (3,), np.float32)


def policy(observed: Any = SEEN, done: Any = None, seed: int = 0, **net: Any) -> Policy:
    """A random policy over the spaces."""
    done = spaces.Discrete(4) if done is None else done
    several = isinstance(done, spaces.MultiDiscrete)
    make: Callable[..., Any] = MultiCategoricalPolicy if several else make_policy
    network = make(observed, done, NetConfig(**net), torch.Generator().manual_seed(seed))
    for parameter in network.parameters():
        parameter.data.mul_(4)  # first actions would all be nearly equal
    config = validate(with_keys(CARTPOLE, run_dir="unused"), "test")
    return Policy(network.eval().requires_grad_(False), EnvironmentConfig(id="CartPole-v1"), (observed, done), config, 0)


ACTIONS = [
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 5], start=np.array([1, -3])),
    spaces.Box(np.array([-0.01, -np.inf], np.float32), np.array([0.02, 0.01], np.float32)),
    spaces.Box(-0.05, 0.1, (2, 2), np.float64),
]


@pytest.mark.parametrize("done", ACTIONS, ids=str)
def test_actions_are_what_the_environment_takes(done: Any) -> None:
    acting = policy(done=done)
    observations = np.random.default_rng(0).uniform(-1, 1, (50, 3)).astype(np.float32)
    raw = acting.network.distribution(torch.from_numpy(observations)).mode.numpy()
    actions = acting.act(observations)
    assert actions.dtype == done.dtype and len(np.unique(actions)) > 1
    for observation, number, action in zip(observations, raw, actions, strict=True):
        assert done.contains(action) and np.array_equal(native_action(done)(number), action)
        assert np.allclose(acting.act(observation), action, rtol=1e-5, atol=1e-6)


def test_observations_that_do_not_fit_are_told() -> None:
    acting = policy()
    assert acting.act([0.5, 0.5, -0.5]).shape == () and acting.act(np.zeros((0, 3), np.float32)).shape == (0,)
    with pytest.raises(DataError, match=r"observations of shape \(4,\): expected \(3,\), or \(B, 3\) for several"):
        acting.act(np.zeros(4))
    with pytest.raises(DataError, match=r"shape \(\): expected \(3,\)"):
        acting.act(1.0)
    with pytest.raises(DataError, match="type complex128: expected float32"):
        acting.act(np.zeros(3, complex))
    numbered = policy(spaces.Discrete(5, start=2))
    assert numbered.act(3).shape == () and numbered.act([3, 6]).tolist() == [numbered.act(3), numbered.act(6)]
    with pytest.raises(DataError, match="type float64: expected int64"):
        numbered.act(3.0)


def test_its_episodes_are_those_of_evaluations(cartpole_run: Path, hybridflow: Callable[..., Outcome]) -> None:
    loaded = Policy.load(cartpole_run)
    ends = [list(loaded.episode(number))[-1] for number in range(4)]
    record = json.loads(hybridflow("eval", cartpole_run, "--episodes", 4, "--json").out)
    assert np.mean([end.episode_return for end in ends]) == record["score"]
    assert max(end.episode_return for end in ends) == record["return_max"] > record["return_min"]
    assert all(end.ended and end.episode_return == end.num_steps for end in ends)


def test_a_policy_that_remembers_is_given_its_memory(tmp_path: Path, hybridflow: Callable[..., Outcome]) -> None:
    path = written(tmp_path, with_keys(CARTPOLE, actor__net={"kind": "gru", "hidden": [8]}))
    assert hybridflow("train", path, "--train.minibatches", 1).code == 0
    loaded = Policy.load(tmp_path / "run")
    for parameter in loaded.network.parameters():
        parameter.data.mul_(5)
    with pytest.raises(DataError, match=r"this policy remembers: call step\(observation, memory\)"):
        loaded.act(np.zeros(4))
    seen = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    action, memory = loaded.step(seen[0])
    assert action.shape == () and memory.shape == (8,) and memory.any()
    actions, after = loaded.step(seen, np.tile(memory, (6, 1)))
    one, alone = loaded.step(seen[3], memory)
    assert actions[3] == one and np.allclose(after[3], alone, atol=1e-6)
    assert not np.allclose(after[3], loaded.step(seen[3])[1], atol=1e-3)
    plays = [list(Policy.load(tmp_path / "run").episode(number))[-1].episode_return for number in range(3)]
    assert np.mean(plays) == json.loads(hybridflow("eval", tmp_path / "run", "--episodes", 3, "--json").out)["score"]


def test_it_acts_in_gymnasium(cartpole_run: Path) -> None:
    acting, environment = Policy.load(cartpole_run), gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=1)
    for _ in range(5):
        observation, *_ = environment.step(acting.act(observation))
    assert acting.network.features.normalise and float(acting.network.features.moments.count) > 100


def test_what_is_no_policy_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such run directory"):
        Policy.load(tmp_path / "missing")
    (tmp_path / "model").mkdir()
    (tmp_path / "config.toml").write_text(resolved(validate(with_keys(REVERSE, run_dir="unused"), "test")))
    with pytest.raises(ModelError, match=r"a run on \[data\]; expected one in an \[environment\]"):
        Policy.load(tmp_path)
