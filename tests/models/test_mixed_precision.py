"""Mixed precision for environments: what is learned from is bfloat16, what acts and what is kept is float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CARTPOLE, PENDULUM, with_keys

from hybridflow.build import build
from hybridflow.build_networks import actor_networks, critic_networks
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError
from hybridflow.data.envs import spaces_of

HALF = with_keys(CARTPOLE, run_dir="unused", actor__dtype="bfloat16", environment__num_envs=8)


@pytest.mark.parametrize("kind", ["mlp", "gru", "lstm", "attention"])
def test_gradients_are_near_those_of_float32_and_acting_is_the_same(kind: str) -> None:
    config = validate(with_keys(HALF, actor__net={"kind": kind}, critic__net={"kind": kind}, train__minibatches=1), "test")
    assert config.environment is not None
    spaces = spaces_of(config.environment)
    made = build(config)
    rolled = made.trainer.algorithm.rollout(made.parts.source(1))
    made.runtime.stop()
    gradients: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        policy: Any = actor_networks(spaces, config)["policy"]
        value: Any = critic_networks(spaces[0], "observations", config)["value"]
        assert policy.dtype == value.dtype == torch.bfloat16
        policy.dtype = value.dtype = dtype
        seen: Any = rolled
        if policy.unit == "step":
            seen = {name: torch.tensor(rolled.ragged(name).values) for name in ("observations", "actions")}
        with torch.no_grad():
            acted = policy.outputs(seen)["log_probs"]
        learned = policy.outputs(seen)["log_probs"]
        assert learned.dtype == acted.dtype == torch.float32
        torch.testing.assert_close(learned.detach(), acted, atol=2e-3, rtol=0)
        assert torch.equal(learned.detach(), acted) == (dtype == torch.float32)
        weights = torch.arange(len(learned)) % 3 - 1.0
        (learned @ weights + value.outputs(seen)["values"].sum()).backward()
        parameters = [*policy.parameters(), *value.parameters()]
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        assert all(p.dtype == torch.float32 for p in parameters)
    full, half = gradients
    assert 1e-5 < float((full - half).norm() / full.norm()) < 0.05


def test_it_learns() -> None:
    data = with_keys(HALF, train__steps=20, train__epochs=6, evaluation__limit=20, ppo={"gamma": 0.98, "lam": 0.8})
    made = build(validate(with_keys(data, actor__optimizer__lr=2e-3, critic__optimizer__lr=2e-3), "test"))
    seen: list[Any] = []
    made.trainer.hooks = [lambda step: seen.append(step.metrics)]
    try:
        made.trainer.train(20)
        evaluation = made.parts.evaluate
        assert evaluation is not None and evaluation().score > 60
    finally:
        made.runtime.stop()
    assert 0 < seen[0]["actor/mismatch"] < 1e-2


@pytest.mark.parametrize("data", [PENDULUM, with_keys(CARTPOLE, algorithm="trpo", ppo=None)], ids=["sac", "trpo"])
def test_methods_that_learn_in_float32_say_so(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'actor\.dtype = "bfloat16": \w+ learns in float32; leave it out'):
        validate(with_keys(data, run_dir=str(tmp_path), actor__dtype="bfloat16"), "test")
