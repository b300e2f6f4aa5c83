"""Learning from pairs: what a minibatch is made of, and that its split changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_learner import assert_same, batch, decoder, gradients

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.roles import Fn, WorkerContext
from hybridflow.models.policy import TextPolicy, TextReward, fresh_score
from hybridflow.ops.preference import dpo, ipo, kto, pairwise
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.units import Units, action_columns

LOSSES = [
    pairwise.bind(),
    pairwise.bind(use_margins=True),
    dpo.bind(beta=0.3),
    dpo.bind(beta=0.3, label_smoothing=0.1),
    ipo.bind(beta=0.3),
    kto.bind(beta=0.3),
]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda fn: f"{fn.name}-{len(fn.params)}")


def pairs(num_pairs: int = 6, seed: int = 0) -> Batch:
    rows, rng = 2 * num_pairs, np.random.default_rng(seed)
    plain = batch(rows, seed)
    return plain.with_columns(
        ref_log_probs=plain["log_probs"],
        group_id=np.repeat(rng.permutation(100)[:num_pairs], 2),
        preferred=np.tile([True, False], num_pairs),
        margins=np.repeat(rng.exponential(size=num_pairs).astype(np.float32), 2),
        reference_points=np.full(rows, 0.4, np.float32),
    )


def learner(loss: Fn, **plan: int) -> Learner:
    def build() -> dict[str, torch.nn.Module]:
        body = decoder()
        head = fresh_score(body, torch.Generator().manual_seed(1))
        return {"model": TextReward(body, head) if loss.name == "pairwise" else TextPolicy(body)}

    settings = {"optimizer": OptimizerConfig(lr=0.01), "plan": UpdatePlan(**plan), "total_steps": 10, "seed": 1}
    return Learner(WorkerContext(), networks=Networks(build, "model", ("tokens",)), **settings)


@each_loss
@pytest.mark.parametrize("budget", [1, 30, 60])
def test_gradients_do_not_depend_on_microbatches(loss: Fn, budget: int) -> None:
    whole = gradients(learner(loss, token_budget=10_000), pairs(), loss)
    assert_same(whole, gradients(learner(loss, token_budget=budget), pairs(), loss))


@each_loss
def test_gradients_do_not_depend_on_the_order_of_pairs_or_rows(loss: Fn) -> None:
    clean = pairs()
    shuffled = clean.rows(np.random.default_rng(3).permutation(len(clean)))
    assert_same(gradients(learner(loss), clean, loss), gradients(learner(loss), shuffled, loss))


@each_loss
def test_the_loss_is_the_mean_over_pairs_and_of_kto_over_rows(loss: Fn) -> None:
    one, data = learner(loss, token_budget=30), pairs()
    terms = loss(one.model.outputs(data), action_columns(data, torch.device("cpu"))).terms
    assert len(terms) == (len(data) if loss.name == "kto" else len(data) // 2)
    terms.mean().backward()
    expected = {name: p.grad.clone() for name, p in one.model.named_parameters() if p.grad is not None}
    assert_same(expected, gradients(learner(loss, token_budget=30), data, loss))


def test_pairs_are_never_split_and_every_one_is_dealt_once() -> None:
    loss, seen = LOSSES[2], []
    one = learner(loss, minibatches=4, token_budget=1)
    original = one.model.outputs

    def record(micro: Batch) -> object:
        seen.append((micro["group_id"].tolist(), micro["preferred"].tolist()))
        return original(micro)

    one.model.outputs = record
    data = pairs(7)
    one.update(data, loss)
    assert all(groups[::2] == groups[1::2] and preferred == [True, False] for groups, preferred in seen)
    assert sorted(groups[0] for groups, _ in seen) == sorted(data["group_id"][::2].tolist())
    assert one.optimizer.steps == 4


def test_a_pair_with_a_row_that_was_dropped_has_no_part() -> None:
    data = pairs()
    mask = data.ragged("response_mask")
    dropped = mask.like(mask.values & (mask.row_index != 3))
    rest = data.rows([i for i in range(len(data)) if i not in (2, 3)])
    for loss in LOSSES[:3]:
        without = gradients(learner(loss), data.with_columns(response_mask=dropped), loss)
        assert_same(without, gradients(learner(loss), rest, loss))


def test_groups_of_any_size_weigh_their_rows_times_the_longest() -> None:
    data = batch(5).with_columns(group_id=np.array([1, 0, 1, 1, 0]))
    units, lengths = Units.of(data, "group"), data.lengths
    assert [rows.tolist() for rows in units.rows] == [[1, 4], [0, 2, 3]]
    assert units.weights.tolist() == [2 * max(lengths[[1, 4]]), 3 * max(lengths[[0, 2, 3]])]
    second = units.load(data, np.array([1]), torch.device("cpu"))
    assert second.batch()["sample_id"].tolist() == [0, 2, 3]
    assert second.units.num_actions == data.rows([0, 2, 3])["response_mask"].values.sum()


def test_own_log_probs_and_scores_are_those_of_the_models() -> None:
    data = pairs(3)
    policy, scorer = learner(LOSSES[2], token_budget=12), learner(LOSSES[0], token_budget=12)
    with torch.no_grad():
        log_probs = policy.model.outputs(data)["log_probs"].numpy()
        scores = scorer.model.outputs(data)["scores"].numpy()
    found: Ragged = policy.compute_log_probs(data)["learner_log_probs"]
    np.testing.assert_allclose(found.values[data["response_mask"].values], log_probs, atol=1e-5)
    np.testing.assert_allclose(scorer.compute_scores(data)["scores"], scores, atol=1e-6)
