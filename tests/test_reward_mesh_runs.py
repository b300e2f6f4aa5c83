"""Reward models cut over processes, in whole runs: they score as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import REVERSE, with_keys
from test_preferences import PAIRS, pairs_file
from test_runs import run
from test_worker_groups import learned, on_ray

from hybridflow.build_trace import trace
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError, UserError

RUNS: dict[str, dict[str, Any]] = {
    "safe_rlhf": {"reward": {"tp": 2, "pp": 2}, "cost": {"pp": 2, "cp": 2}},
    "remax": {"reward": {"tp": 2, "cp": 2}},
}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that has seen pairs of the digits."""
    folder = tmp_path_factory.mktemp("reward")
    rows = [{"prompt": f"{i}{j}>", "chosen": f"7{i}7", "rejected": f"{j}"} for i in range(10) for j in range(3)]
    data = {**PAIRS, "algorithm": "reward_model", "data": {"pairs": pairs_file(folder, *rows)}}
    return str(run(with_keys(data, train={"steps": 5, "prompts_per_step": 16}), folder / "run") / "model")


def of_models(algorithm: str, model: str, cut: bool) -> dict[str, Any]:
    sections = {name: {"model": model, **({"mesh": mesh} if cut else {})} for name, mesh in RUNS[algorithm].items()}
    data = {**with_keys(REVERSE, actor__optimizer={"lr": 1e-3, "eps": 1e-4}), "algorithm": algorithm, **sections}
    return on_ray(data, {"main": 4}) if cut else data


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("algorithm", RUNS)
@pytest.mark.slow
def test_cut_reward_models_score_what_whole_ones_score(algorithm: str, reward_model: str, tmp_path: Path) -> None:
    """Of the first step: after it the actor's copies, which saw other microbatches, differ in the last digits."""
    steps = {"steps": 1, "minibatches": 1}
    whole, cut = (
        learned(run(with_keys(of_models(algorithm, reward_model, c), train=steps), tmp_path / f"cut {c}"))
        for c in (False, True)
    )
    others = {"safe_rlhf": ("cost/mean", "critic/grad_norm"), "remax": ("baseline/mean", "grad_norm")}[algorithm]
    for name in ("reward/mean", "reward/std", *others):
        assert cut[-1][name] == pytest.approx(whole[-1][name], rel=1e-4), name
    assert whole[-1]["reward/std"] > 0


def test_the_call_graph_tells_what_a_process_holds_of_a_reward_model(reward_model: str) -> None:
    found = []
    for cut in (False, True):
        data = of_models("safe_rlhf", reward_model, cut)
        found.append({role.name: role for role in trace(validate({**data, "run_dir": "unused"}, "test")).roles})
    whole, cut_up = found
    for name, mesh in (("reward", "tp 2 x pp 2"), ("cost", "cp 2 x pp 2")):
        assert cut_up[name].parameters == whole[name].parameters
        assert cut_up[name].mesh == mesh
        assert cut_up[name].weight_bytes < 0.7 * whole[name].weight_bytes


def test_what_cannot_be_cut_is_told(reward_model: str) -> None:
    ray = on_ray(with_keys(REVERSE, run_dir="unused"), {"main": 8})
    for reward, message in (
        ({"mesh": {"tp": 2}}, "reward.mesh: functions aren't cut; remove it, or set reward.model to a reward model"),
        (
            {"model": reward_model, "mesh": {"tp": 3}},
            "reward.mesh: tp 3 x pp 1 = 3 processes hold one model, but pool 'main'",
        ),
        ({"model": reward_model, "mesh": {"pp": 8}}, "reward.mesh: pp = 8, but the model has 2 layers; lower pp to 2"),
        ({"model": reward_model, "mesh": {"tp": 8}}, "reward.mesh: tp = 8, but the model has 4 attention heads"),
    ):
        with pytest.raises((ConfigError, UserError)) as error:
            trace(validate(with_keys(ray, reward=reward), "test"))
        assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r'reward\.mesh: a cut model needs several processes; set runtime\.kind = "ray"'):
        validate(with_keys(REVERSE, run_dir="unused", reward={"model": reward_model, "mesh": {"tp": 2}}), "test")
