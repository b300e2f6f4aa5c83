"""What the policy-gradient methods bind, by hand: losses, shaping, advantages, adaptive coefficients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from hybridflow.algorithms.distill import Distill, DistillConfig
from hybridflow.algorithms.policy_gradient import KLConfig, LossConfig, Objective, ShapingConfig
from hybridflow.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.algorithms.rloo import RLOO, RLOOConfig
from hybridflow.algorithms.safe_rlhf import SafeRLHF, SafeRLHFConfig
from hybridflow.core.batch import Batch, Ragged
from hybridflow.ops.advantages import score_rewards

NOBODY: Any = SimpleNamespace()


def objective(
    loss: dict[str, Any] | None = None, kl: dict[str, Any] | None = None, shaping: dict[str, Any] | None = None
) -> Objective:
    sections = LossConfig(**loss or {}), KLConfig(**kl or {}), ShapingConfig(**shaping or {})
    return Objective(*sections, kl_where="reward", max_new_tokens=4, samples_per_step=50)


def batch() -> Batch:
    """Two groups of two responses, of two and one tokens behind a prompt's token."""
    lengths = np.array([3, 2, 3, 2], np.int64)
    mask = Ragged(np.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 1], bool), lengths)
    acting = mask.values.astype(np.float32)
    return Batch(
        {
            "response_mask": mask,
            "log_probs": mask.like(-acting),
            "ref_log_probs": mask.like(-1.5 * acting),
            "teacher_log_probs": mask.like(-0.75 * acting),
            "values": mask.like(0 * acting),
            "cost_values": mask.like(0 * acting),
            "bootstrap_values": np.zeros(4, np.float32),
            "cost_bootstrap_values": np.zeros(4, np.float32),
            "terminated": np.ones(4, bool),
            "scores": np.array([1, 0, 3, 1], np.float32),
            "costs": np.array([2, 0, 0, 4], np.float32),
            "group_id": np.array([0, 0, 1, 1]),
        }
    )


def rows(column: Ragged) -> list[list[float]]:
    return [row[1:].tolist() for row in column]


def test_left_out_keys_take_the_kind_s_own_values() -> None:
    assert objective().policy_loss().params.items() >= {"clip": 0.2, "clip_high": None, "aggregation": "token_mean"}.items()
    assert objective({"kind": "gspo"}).policy_loss().params.items() >= {"clip": 3e-4, "clip_high": 4e-4}.items()
    assert objective({"kind": "gspo", "clip": 0.1}).policy_loss().params["clip_high"] == 0.1
    constant = objective({"aggregation": "constant"}).policy_loss()
    assert constant.params["max_tokens"] == 4 and constant.per == "row"
    assert "kl_coef" not in objective(kl={"coef": 0.5}).policy_loss().params
    in_loss = objective(kl={"coef": 0.5, "where": "loss"}).policy_loss()
    assert in_loss.params.items() >= {"kl_coef": 0.5, "kl_kind": "k3"}.items()


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (LossConfig, {"kind": "cispo", "clip": 0.1}),
        (LossConfig, {"kind": "gspo", "dual_clip": 3.0}),
        (LossConfig, {"kind": "gspo", "aggregation": "token_mean"}),
        (LossConfig, {"kind": "reinforce", "clip_high": 0.1}),
        (LossConfig, {"correction": "none", "correction_cap": 2.0}),
        (KLConfig, {"where": "loss"}),
        (KLConfig, {"kind": "k2"}),
    ],
)
def test_keys_without_an_effect_are_refused(section: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(reversed(keys))):
        section(**keys)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_adaptive_coefficient_is_used_and_kept(where: str) -> None:
    one = objective(kl={"coef": 0.1, "where": where, "target": 1.0, "horizon": 100})
    one.observe({"reference/kl": 9.0})
    one.observe({})  # nothing was measured
    used = one.policy_loss() if where == "loss" else one.token_kl()[0]
    assert used.params["kl_coef" if where == "loss" else "coef"] == pytest.approx(0.1 * 1.1)
    other = objective(kl={"coef": 0.1, "where": where, "target": 1.0, "horizon": 100})
    other.load_state_dict(one.state_dict())
    assert other.metrics() == one.metrics() == {"kl_coef": pytest.approx(0.11)}


def test_running_scores_are_normalised_by_the_steps_before() -> None:
    one = objective(shaping={"normalise": "running"})
    assert one.shaped_scores()[0].params == {}  # the first step by itself
    one.observe({"reward/mean": 1.0, "reward/std": 1.0})
    one.observe({"reward/mean": 3.0, "reward/std": 1.0})
    assert one.shaped_scores()[0].params == {"mean": 2.0, "std": pytest.approx(math.sqrt(2))}
    other = objective(shaping={"normalise": "running"})
    other.load_state_dict(one.state_dict())
    assert other.shaped_scores()[0].params == one.shaped_scores()[0].params


def test_running_scores_that_were_all_equal_give_no_scale() -> None:
    one = objective(shaping={"normalise": "running"})
    for _ in range(3):
        one.observe({"reward/mean": 0.7, "reward/std": 0.0})
    assert one.shaped_scores()[0].params == {}
    one.observe({"reward/mean": 0.3, "reward/std": 0.1})
    assert one.shaped_scores()[0].params == {"mean": pytest.approx(0.6), "std": pytest.approx(math.sqrt(0.0325))}


def test_scores_are_shaped_before_the_kl_is_taken_off() -> None:
    one = objective(kl={"coef": 0.5}, shaping={"overlong_buffer": 4, "normalise": "batch"})
    assert [fn.name for fn in one.shaped_scores()] == ["overlong_penalty", "normalise_scores", "kl_into_scores"]
    assert [fn.name for fn in one.token_rewards()][2:] == ["score_rewards", "kl_penalty"]


def test_rloo_compares_scores_with_the_kl_of_the_whole_response() -> None:
    method = RLOO(RLOOConfig(), objective(kl={"coef": 0.5}), NOBODY, NOBODY, ())
    out = method.advantages()(batch())
    assert set(out) == {"advantages"}  # 1 - 0.5 against 0 - 0.25; 3 - 0.5 against 1 - 0.25
    assert rows(out["advantages"]) == [[0.75, 0.75], [-0.75], [1.75, 1.75], [-1.75]]


def test_reinforce_pp_whitens_returns_to_go_and_its_variant_takes_the_group_s_mean_off_first() -> None:
    plain = ReinforcePP(ReinforcePPConfig(), objective(kl={"coef": 0.5}), NOBODY, NOBODY, ()).advantages()(batch())
    to_go = np.array([0.5, 0.75, -0.25, 2.5, 2.75, 0.75])
    packed = np.concatenate(rows(plain["advantages"]))
    np.testing.assert_allclose(packed, (to_go - to_go.mean()) / to_go.std(), rtol=1e-5)
    config = ReinforcePPConfig(group_baseline=True)
    variant = ReinforcePP(config, objective(), NOBODY, NOBODY, ()).advantages()(batch())
    centred = np.array([0.5, 0.5, -0.5, 1, 1, -1])
    np.testing.assert_allclose(
        np.concatenate(rows(variant["advantages"])), (centred - centred.mean()) / centred.std(), rtol=1e-5
    )
    assert ReinforcePP.smallest_group(config) == 2 and ReinforcePP.smallest_group(ReinforcePPConfig()) == 1


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [0.25, 0.25]), (1.0, [0.5, 0.25])])
def test_distillation_rewards_tokens_that_the_teacher_likes_better(gamma: float, expected: list[float]) -> None:
    method = Distill(DistillConfig(gamma=gamma), objective(), NOBODY, NOBODY, NOBODY, ())
    assert rows(method.advantages()(batch())["advantages"])[0] == expected


def safe_rlhf(kl: dict[str, Any] | None = None, **keys: Any) -> SafeRLHF:
    config = SafeRLHFConfig(gamma=1.0, lam=1.0, **keys)
    return SafeRLHF(config, objective(kl=kl), NOBODY, NOBODY, NOBODY, NOBODY, (), NOBODY, lambda number: batch())


def test_safe_rlhf_weighs_the_advantages_of_reward_and_cost() -> None:
    out = safe_rlhf(lambda_init=3.0).advantages()(batch())  # (A_R - 3 A_C) / 4
    np.testing.assert_allclose(np.concatenate(rows(out["advantages"])), [-1.25, -1.25, 0, 0.75, 0.75, -2.75], rtol=1e-6)
    assert rows(out["cost_returns"]) == [[2, 2], [0], [0, 0], [4]] and rows(out["returns"])[0] == [1, 1]


def test_safe_rlhf_takes_the_kl_off_the_reward_and_adds_it_to_the_cost() -> None:
    out = safe_rlhf(kl={"coef": 0.5}).advantages()(batch())
    assert rows(out["rewards"])[0] == [-0.25, 0.75]
    assert rows(out["cost_rewards"])[0] == [0.25, 2.25]


def test_the_multiplier_follows_the_cost_and_stays_bounded() -> None:
    method = safe_rlhf(budget=0.5, lambda_lr=0.1, lambda_init=2.0, lambda_max=2.5)
    method.observe({"cost/mean": 1.0})  # log λ + 0.1 · 2 · 0.5
    assert method.metrics()["lambda"] == pytest.approx(2 * math.exp(0.1))
    method.observe({})
    assert method.metrics()["lambda"] == pytest.approx(2 * math.exp(0.1))
    method.observe({"cost/mean": 100.0})
    assert method.metrics()["lambda"] == pytest.approx(2.5)
    other = safe_rlhf(budget=0.5, lambda_lr=0.1, lambda_init=2.0, lambda_max=2.5)
    other.load_state_dict(method.state_dict())
    assert other.state_dict() == method.state_dict() and other.num_updates == 3
    for _ in range(50):
        method.observe({"cost/mean": 0.0})
    assert 0 < method.metrics()["lambda"] < 0.5


def test_remax_shapes_greedy_scores_as_those_of_samples() -> None:
    """Normalised, advantages are those without shaping over one deviation, that of samples and greedy responses."""
    sampled = batch().with_columns(greedy_scores=np.array([2, 2, 0, 0], np.float32))

    def advantages(**shaping: Any) -> np.ndarray:
        method = ReMax(ReMaxConfig(), objective(shaping=shaping), NOBODY, NOBODY, (), NOBODY, NOBODY)
        return np.concatenate(rows(method.advantages()(sampled)["advantages"]))

    plain = advantages()
    assert plain.tolist() == [-1, -1, -2, 3, 3, 1]
    deviation = np.std([1, 0, 3, 1, 2, 2, 0, 0])
    np.testing.assert_allclose(advantages(normalise="batch"), plain / deviation, rtol=1e-5)
    np.testing.assert_allclose(advantages(normalise="running"), plain / deviation, rtol=1e-5)


def test_a_long_greedy_response_of_remax_is_punished_for_its_own_length() -> None:
    shaped = objective(shaping={"overlong_buffer": 4, "overlong_penalty": 2.0})
    method = ReMax(ReMaxConfig(), shaped, NOBODY, NOBODY, (), NOBODY, NOBODY)
    greedy = Batch({"greedy_scores": np.array([1, 1, 1, 1], np.float32), "response_mask": batch()["response_mask"]})
    [penalty] = method.greedy_penalties()
    assert penalty(greedy)["greedy_scores"].tolist() == [0, 0.5, 0, 0.5]
    assert ReMax(ReMaxConfig(), objective(), NOBODY, NOBODY, (), NOBODY, NOBODY).greedy_penalties() == []


def test_a_greedy_response_that_could_not_be_scored_takes_its_group_out() -> None:
    failed = {"score_failed": np.array([False, False, False, True]), "greedy_failed": np.array([True, True, False, False])}
    data = batch().with_columns(**failed, group_id=np.array(["a", "a", "b", "c"]))
    every = objective()
    every.failures = tuple(failed)
    estimate = every.scored(score_rewards.bind())
    assert set(estimate.reads) == {"scores", "score_failed", "greedy_failed", "group_id", "response_mask"}
    assert estimate.writes == ("response_mask", "rewards")
    out = estimate(data)
    assert [int(row.sum()) for row in out["response_mask"]] == [0, 0, 2, 0]
    assert [bool(row.any()) for row in out["rewards"]] == [False, False, True, False]
    assert objective().scored(score_rewards.bind()).writes == ("rewards",)
