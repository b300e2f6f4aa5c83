"""Mistakes in the configuration of off-policy methods are told in one line."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CARTPOLE, PENDULUM, with_keys

from hybridflow.build import build
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError, DataError

DQN = with_keys(CARTPOLE, algorithm="dqn", ppo=None, critic=None, train={"steps": 1}, run_dir="unused")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_keys(DQN, exploration__noise=0.3), "exploration.noise: dqn has no use for it"),
        (with_keys(PENDULUM, algorithm="td3", exploration__epsilon_end=0.3), "exploration.epsilon_end: td3 has no use"),
        (with_keys(PENDULUM, exploration__noise=0.3), r"\[exploration\] is set, but sac"),
        (with_keys(DQN, dqn__atoms=51), "atoms = 51 lie between v_min and v_max; set both"),
        (with_keys(DQN, dqn={"atoms": 5, "v_min": 2.0, "v_max": 1.0}), "v_min = 2.0 is not below v_max = 1.0"),
        (with_keys(DQN, dqn={"v_min": 2.0}), "no effect without atoms"),
        (
            with_keys(DQN, dqn={"atoms": 5, "v_min": 0.0, "v_max": 1.0, "huber_delta": 1.0}),
            "huber_delta = 1.0 has no effect",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(with_keys(data, run_dir="unused"), "test")


def test_td3_needs_bounded_continuous_actions() -> None:
    config = validate(with_keys(PENDULUM, algorithm="td3", environment__id="CartPole-v1", run_dir="unused"), "test")
    with pytest.raises(DataError, match=r"action space Discrete\(2\): not supported here; supported is Box with finite"):
        build(config)
