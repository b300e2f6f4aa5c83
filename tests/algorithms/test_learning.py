"""Methods learn toy tasks, with three seeds each: a response of two digits, and a bandit whose optimum is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from conftest import with_keys

from hybridflow.build import build
from hybridflow.config import validate

Record = Mapping[str, float]

SEEDS = (1, 2, 3)
TOY: dict[str, Any] = {
    "threads": 1,
    "run_dir": "unused",
    "actor": {"fresh": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}, "optimizer": {"lr": 3e-3}},
    "data": {"task": "reverse", "options": {"length": 2}},
    "generation": {"max_new_tokens": 2},
    "train": {"steps": 70, "prompts_per_step": 16, "group_size": 4},
}


def records_of(keys: Mapping[str, Any], export: Path | None = None) -> list[Record]:
    """The metrics of every step of a run, in memory."""
    made, seen = build(validate(keys, "test")), list[Record]()
    made.trainer.hooks = [lambda step: seen.append(step.metrics)]
    try:
        made.trainer.train(made.config.train.steps)
        if export is not None:
            made.parts.export(export)
        return seen
    finally:
        made.runtime.stop()


def mean_of(records: list[Record], name: str) -> float:
    return fmean(record[name] for record in records)


METHODS: dict[str, Any] = {
    "grpo": {},
    "rloo": {"loss": {"kind": "reinforce"}},
    "reinforce_pp": {},
    "remax": {},
    "ppo": {"critic": {"optimizer": {"lr": 3e-3}}},
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", METHODS)
def test_methods_learn_to_reverse(algorithm: str, seed: int) -> None:
    """Digits drawn uniformly score 0.1; after 70 steps at least one of the two digits is right."""
    records = records_of({**TOY, **METHODS[algorithm], "algorithm": algorithm, "seed": seed})
    assert mean_of(records[:5], "reward/mean") < 0.2
    assert mean_of(records[-10:], "reward/mean") > 0.4
    assert all(record["actor/mismatch_max"] < 1e-4 for record in records)  # one policy, twice the same numbers
    assert all(record["actor/effective_samples"] > 0.999999 for record in records)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that has been taught to reverse two digits."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    train = {"steps": 120, "prompts_per_step": 32}
    records = records_of(
        {**with_keys(TOY, actor__optimizer__lr=1e-2), "algorithm": "sft", "train": train, "seed": 9}, folder
    )
    assert records[-1]["actor/nll"] < 0.05
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_distillation_brings_the_student_to_the_teacher(teacher: Path, seed: int) -> None:
    """No reward is learned from; it shows that the student can do what the teacher can."""
    keys = {"algorithm": "distill", "teacher": {"model": str(teacher)}, "seed": seed}
    records = records_of({**with_keys(TOY, train__steps=240), **keys})
    assert mean_of(records[:5], "teacher/kl") > 4
    assert mean_of(records[-10:], "teacher/kl") < 0.5
    assert mean_of(records[:5], "reward/mean") < 0.2 and mean_of(records[-10:], "reward/mean") > 0.85


BANDIT = """
def reward(response): return {"0": 1.0, "1": 0.4}.get(response, 0.0)
def cost(response): return {"0": 1.0}.get(response, 0.0)
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_safe_rlhf_finds_the_constrained_optimum(tmp_path: Path, seed: int) -> None:
    """One token: "0" pays 1 and costs 1, "1" pays 0.4 and costs nothing, no other pays. With a budget of 0.5 the best
    policy mixes both evenly: reward 0.7, cost 0.5, and the multiplier is the slope between them, 0.6. A little entropy
    makes the saddle point attract (without it, policy and multiplier circle around it)."""
    (tmp_path / "bandit.py").write_text(BANDIT)
    reward, cost = ({"functions": [f"{tmp_path / 'bandit.py'}:{name}"]} for name in ("reward", "cost"))
    method = {"budget": 0.5, "lambda_lr": 0.05, "lambda_init": 0.5}
    data = {**TOY, "algorithm": "safe_rlhf", "seed": seed, "safe_rlhf": method, "reward": reward, "cost": cost}
    data |= {"critic": {"optimizer": {"lr": 1e-2}}, "loss": {"entropy_coef": 0.05}, "generation": {"max_new_tokens": 1}}
    data["train"] = {"steps": 200, "prompts_per_step": 64}
    records = records_of(with_keys(data, data__options__length=1))[-120:]
    assert mean_of(records, "reward/mean") == pytest.approx(0.7, rel=0.05)
    assert mean_of(records, "cost/mean") == pytest.approx(0.5, rel=0.05)
    assert mean_of(records, "lambda") == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_adaptive_coefficient_holds_the_kl_near_its_target(where: str) -> None:
    """With next to no pull the KL per token passes 1; one that adapts holds it near 0.1, in the reward and in the loss."""
    kl = {"coef": 0.1, "where": where, "target": 0.1, "horizon": 300}
    records = records_of({**with_keys(TOY, train__steps=120), "algorithm": "rloo", "kl": kl})
    assert mean_of(records[-40:], "reference/kl") == pytest.approx(0.1, rel=0.35)
    assert records[-1]["kl_coef"] > 0.2 and mean_of(records[-10:], "reward/mean") > mean_of(records[:5], "reward/mean")


def test_dynamic_sampling_learns_from_groups_that_differ(tmp_path: Path) -> None:
    """The reward is all or nothing, so most groups have equal scores at first: they are replaced."""
    (tmp_path / "exact.py").write_text("def second(response, answer): return float(response[1:2] == answer[1:2])\n")
    data = {**TOY, "algorithm": "grpo", "reward": {"functions": [f"{tmp_path / 'exact.py'}:second"]}}
    records = records_of(with_keys(data, train__steps=60, train__prompts_per_step=8, train__max_refills=3))
    assert all(record["estimator/groups_with_equal_scores"] == 0 for record in records)
    dropped, refills = (sum(record[name] for record in records) for name in ("groups_dropped", "refills"))
    assert dropped > 100 and 60 < refills <= 180
    assert all(record["estimator/groups"] == record["groups_drawn"] - record["groups_dropped"] <= 8 for record in records)
    assert mean_of(records[-10:], "reward/mean") > mean_of(records[:10], "reward/mean") + 0.2
