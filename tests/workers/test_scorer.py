"""Scorers: failed rewards and frozen models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import batch, decoder

from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.errors import RewardError
from hybridflow.core.roles import WorkerContext
from hybridflow.models.policy import TextPolicy
from hybridflow.rollout.rewards import RewardConfig
from hybridflow.workers.learner import Networks
from hybridflow.workers.scorer import ModelScorer, RewardScorer

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
def test_a_failed_row_takes_the_action_steps_of_its_whole_group(scorer: RewardScorer, groups: list[object]) -> None:
    out = scorer.score(responses(["abc", "bad", "ab", "a"], groups))
    assert out["score_failed"].tolist() == [False, True, False, False]
    assert [row.any() for row in out.ragged("response_mask")] == [False, False, True, True]
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
