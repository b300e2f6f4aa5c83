"""Scorers: failed rewards and frozen models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import batch, decoder

from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.errors import NonFiniteError, RewardError
from hybridflow.core.roles import WorkerContext
from hybridflow.models.policy import TextPolicy, TextReward, fresh_score
from hybridflow.ops.advantages import drop_failed
from hybridflow.rollout.rewards import RewardConfig
from hybridflow.workers.networks import Networks
from hybridflow.workers.scorer import ModelScorer, RewardModelScorer, RewardScorer

SOURCE = "def f(response):\n    if response == 'bad': raise ValueError('no')\n    return len(response)\n"


def responses(texts: list[str], groups: list[object]) -> Batch:
    mask = Ragged.from_rows([[False, True, True]] * len(texts), bool)
    none = objects({} for _ in texts)
    prompts, group_ids = objects(["p"] * len(texts)), np.array(groups)
    columns = {"prompt_text": prompts, "response": objects(texts), "fields": none, "group_id": group_ids}
    return Batch({**columns, "response_mask": mask}, len(texts))


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[RewardScorer]:
    (tmp_path / "f.py").write_text(SOURCE)
    config = RewardConfig(functions=(f"{tmp_path / 'f.py'}:f",), max_failed_fraction=0.4, workers=1)
    made = RewardScorer(WorkerContext(), specs=config.specs(), config=config)
    yield made
    made.close()


@pytest.mark.parametrize("groups", [[-1, -1, 7, 7], ["a", "a", "b", "b"]])
def test_a_failed_row_has_no_score_and_takes_its_whole_group_out(scorer: RewardScorer, groups: list[object]) -> None:
    data = responses(["abc", "bad", "ab", "a"], groups)
    out = scorer.score(data)
    assert out["score_failed"].tolist() == [False, True, False, False]
    dropped = drop_failed(data.with_columns(**out.columns), ("score_failed",))["response_mask"]
    assert [row.any() for row in dropped] == [False, False, True, True]
    assert out["scores"][[0, 2, 3]].tolist() == [3.0, 2.0, 1.0]
    means = scorer.context.metrics.values()
    assert means["failed"] == 1 and means["mean"] == 2.0


def test_more_failures_than_the_budget_stop(scorer: RewardScorer) -> None:
    with pytest.raises(RewardError, match="no"):
        scorer.score(responses(["bad", "bad", "ab", "a"], [1, 1, 2, 2]))


def test_an_empty_batch_is_scored(scorer: RewardScorer) -> None:
    assert len(scorer.score(responses(["a"], [1]).rows([]))) == 0


def test_a_frozen_model_gives_its_own_log_probs_and_the_kl_against_them() -> None:
    networks = Networks(lambda: {"policy": TextPolicy(decoder())}, "policy", ("tokens",))
    scorer, data = ModelScorer(WorkerContext(), networks=networks, token_budget=20), batch()
    out = scorer.score(data).ragged("log_probs")
    mask = data.ragged("response_mask").values
    with torch.no_grad():
        expected = TextPolicy(decoder()).outputs(data)["log_probs"].numpy()
    np.testing.assert_allclose(out.values[mask], expected, atol=1e-5)
    difference = out.values[mask] - data.ragged("log_probs").values[mask]
    assert scorer.context.metrics.values()["kl"] == pytest.approx((np.exp(difference) - 1 - difference).mean(), rel=1e-4)


def test_a_frozen_model_scores_rows_that_nobody_sampled() -> None:
    networks = Networks(lambda: {"policy": TextPolicy(decoder())}, "policy", ("tokens",))
    scorer = ModelScorer(WorkerContext(), networks=networks, token_budget=20, sampled=False)
    data = batch()
    sampled = ModelScorer(WorkerContext(), networks=networks, token_budget=20).score(data)
    out = scorer.score(data.select(("tokens", "response_mask")))
    np.testing.assert_array_equal(out["log_probs"].values, sampled["log_probs"].values)
    assert scorer.context.metrics.values() == {}


def reward_model(scale: float = 1.0) -> Networks:
    body = decoder()
    head = fresh_score(body, torch.Generator().manual_seed(1)) * scale
    return Networks(lambda: {"reward": TextReward(body, head)}, "reward", ("tokens",))


def reward_scorer(networks: Networks | None = None, token_budget: int = 100) -> RewardModelScorer:
    networks = networks or reward_model()
    return RewardModelScorer(WorkerContext(), networks=networks, token_budget=token_budget, end_tokens=(18, 17))


def test_a_reward_model_scores_each_row_however_rows_are_split() -> None:
    data = batch()
    one, other = (reward_scorer(token_budget=n) for n in (1, 1000))
    scores = one.score(data)["scores"]
    np.testing.assert_allclose(scores, other.score(data)["scores"], atol=1e-6)
    alone = [float(one.score(data.rows([i]))["scores"][0]) for i in range(len(data))]
    np.testing.assert_allclose(scores, alone, atol=1e-6)
    cut = data.ragged("tokens").values.copy()
    cut[data.ragged("tokens").offsets[1:] - 1] = 0  # another last token is another score
    changed = one.score(data.with_columns(tokens=data.ragged("tokens").like(cut)))["scores"]
    assert np.abs(changed - scores).max() > 1e-3
    assert one.context.metrics.values()["mean"] != 0


def test_a_reward_model_reads_every_row_as_it_was_trained_with_one_end_token() -> None:
    ends = ([3, 4, 5], [3, 4, 5, 18], [3, 4, 5, 17])  # cut by the limit, ended, ended by another end token
    data = Batch({"tokens": Ragged.from_rows(ends, np.int64)})
    trained = reward_model().build()["reward"].outputs(data.rows([1]))["scores"].item()
    np.testing.assert_allclose(reward_scorer().score(data)["scores"], [trained] * 3, atol=1e-6)


def test_a_reward_model_that_gives_no_number_stops() -> None:
    broken = reward_scorer(reward_model(float("nan")))
    with pytest.raises(NonFiniteError, match="row 0 no finite score"):
        broken.score(batch(2))
