"""Whole runs in which roles leave memory for each other: the same bits as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import with_keys
from test_runs import TEXT, assert_equal, run, state
from test_worker_groups import learned, on_ray

from hybridflow.config import validate
from hybridflow.core.errors import ConfigError

APART = {
    "pools": {"learn": 1, "draw": 1},
    "roles": {"actor": "learn", "reference": "learn", "sampler": "draw", "reward": "draw"},
}
CASES = {
    "ppo": ("actor", "critic", "reference", {"pools": {"main": 1}}),
    "grpo-bf16-kl": ("actor", "reference", APART),
}


def moves(run_dir: Path) -> set[str]:
    """The roles before whose calls something moved."""
    events = json.loads((run_dir / "timeline.json").read_text())
    return {event["name"].removesuffix(".onload: transfer") for event in events if ".onload" in event["name"]}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_roles_that_leave_memory_learn_bit_for_bit_the_same(name: str, tmp_path: Path) -> None:
    """PPO samples from the actor's weights in place, and is resumed; the sampler of GRPO is elsewhere and gets copies."""
    *roles, placement = CASES[name]
    data = with_keys(TEXT[name], checkpoint={"every": 2}, evaluation__every=2)
    offloading: dict[str, Any] = {**on_ray(data), "placement": {**placement, "offload": roles}}
    whole = run(data, tmp_path / "whole", train__steps=4)
    run(offloading, tmp_path / "left", train__steps=2 if name == "ppo" else 4)
    assert moves(tmp_path / "left") == {*roles, *({"sampler"} if name == "ppo" else ())}
    if name == "ppo":
        run(offloading, tmp_path / "left", resume="latest", train__steps=4)
    assert learned(whole) == learned(tmp_path / "left")
    assert_equal(state(whole), state(tmp_path / "left"))
    for file in ("samples.jsonl", "model/model.safetensors"):
        assert (whole / file).read_bytes() == (tmp_path / "left" / file).read_bytes()


def problems(name: str, *offload: str, **keys: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as told:
        validate(with_keys(on_ray(TEXT[name]), run_dir="unused", placement__offload=list(offload), **keys), "test")
    return told.value.problems


def test_roles_that_are_not_there_or_hold_no_model_can_t_leave() -> None:
    found = problems("ppo", "actor", "critik", "reward", "sampler")
    no_model = "holds no model of its own here; name some of actor, critic, reference"
    assert found == (
        "test: placement.offload: ppo has no role 'critik' here; did you mean critic? The roles are actor, critic, "
        "estimator, reference, sampler, reward, examiner",
        f"test: placement.offload: reward {no_model}",
        f"test: placement.offload: sampler {no_model}",
    )
    (found,) = problems("grpo", "reference")
    assert "grpo has no role 'reference' here" in found


def test_the_placement_knows_who_leaves_and_reward_models_may() -> None:
    offload = ["actor", "critic", "cost_critic", "reference", "reward"]
    keys: dict[str, Any] = {"reward": {"model": "unused"}, "run_dir": "unused", "placement__offload": offload}
    assert validate(with_keys(on_ray(TEXT["safe-rlhf"]), **keys), "test").placed.offload == tuple(offload)
    (found,) = problems("safe-rlhf", "cost")
    assert "cost holds no model" in found
    keys["runtime"] = {"kind": "local"}
    with pytest.raises(ConfigError, match=r'placement: runtime\.kind = "local" runs every role in this process'):
        validate(with_keys(TEXT["safe-rlhf"], **keys), "test")
