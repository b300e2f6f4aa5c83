"""An update on several data-parallel ranks, in processes of their own, is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from ranks import Results, on_blocks
from test_learner import batch, decoder
from test_preference_learner import pairs
from test_scorer import reward_model, reward_scorer
from test_trained_groups import LOSSES as GROUP_LOSSES
from test_trained_groups import batch as group_batch
from test_trained_groups import learner as group_learner
from test_trained_groups import parameters as group_parameters
from torch import nn

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.columns import Held, Lazy
from hybridflow.core.metrics import Metrics
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import Fn, WorkerContext
from hybridflow.core.seeding import torch_generator
from hybridflow.models.memory import memory_size
from hybridflow.models.nets import NetConfig, make_policy, make_q
from hybridflow.models.policy import TextCritic, TextPolicy
from hybridflow.models.values import ValueNet
from hybridflow.ops.losses import ppo_clip, value_loss
from hybridflow.ops.preference import dpo
from hybridflow.ops.td import dqn_loss
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.scorer import ModelScorer, RewardModelScorer

MOST = 4
BOX, DISCRETE = spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(2)
PPO = ppo_clip.bind(clip=0.2, entropy_coef=0.01)


class Outcome(NamedTuple):
    """What a rank has after two updates."""

    metrics: Metrics
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    written: dict[str, Ragged]
    steps: int


def text_networks(kind: type[TextPolicy] | type[TextCritic], dtype: torch.dtype = torch.float32) -> Networks:
    def build() -> dict[str, nn.Module]:
        model = kind(decoder().to(dtype))
        if isinstance(model, TextCritic):
            model.head.weight.data.normal_(generator=torch.Generator().manual_seed(2))
        return {"main": model}

    return Networks(build, "main", ("tokens",))


def net_networks(*names: str, net: NetConfig = NetConfig(hidden=(16,))) -> Networks:  # noqa: B008
    make = make_policy if names == ("policy",) else make_q

    def build() -> dict[str, nn.Module]:
        return {name: make(BOX, DISCRETE, net, torch_generator(i, "net")) for i, name in enumerate(names)}

    memory = ("memory",) if net.memory else ()
    return Networks(build, names[0], ("observations", "actions", *memory), normalised=net.normalise)


def uneven() -> Batch:
    """Five rows, one of them without action steps: four ranks get two units a minibatch."""
    data = batch(5)
    mask = data.ragged("response_mask")
    return data.with_columns(response_mask=mask.like(mask.values & (mask.row_index != 2)))


def pieces(lengths: list[int]) -> Batch:
    """Pieces of episodes with these numbers of steps."""
    rng, total = np.random.default_rng(0), sum(lengths)
    like = partial(Ragged, lengths=np.array(lengths))
    rows = len(lengths)
    return Batch(
        {
            "sample_id": np.arange(rows),
            "observations": like(rng.normal(size=(total, 4)).astype(np.float32)),
            "actions": like(rng.integers(0, 2, total)),
            "rewards": like(rng.normal(size=total).astype(np.float32)),
            "log_probs": like(rng.normal(-0.7, 0.1, total).astype(np.float32)),
            "advantages": like(rng.normal(size=total).astype(np.float32)),
            "response_mask": like(np.ones(total, bool)),
            "discounts": np.where(rng.random(rows) < 0.3, 0.0, 0.9).astype(np.float32),
            "weights": np.ones(rows, np.float32),
            "final_observations": rng.normal(size=(rows, 4)).astype(np.float32),
        }
    )


def groups(context: WorkerContext) -> Outcome:
    """Two updates of a learner that trains several networks, with SGD."""
    one = group_learner(context, minibatches=2, budget=3)
    gradients: list[dict[str, torch.Tensor]] = []
    for name, optimizer in one.optimizers.items():
        masters = optimizer.masters
        optimizer.adamw = torch.optim.SGD(list(masters.values()), 0.01)  # type: ignore[assignment]

        def record(name: str = name, masters: Any = masters, clip: Any = optimizer.clip) -> float:
            gradients.append({f"{name}.{key}": m.grad.clone() for key, m in masters.items() if m.grad is not None})
            return float(clip())

        optimizer.clip = record  # type: ignore[method-assign]
    one.update(group_batch(), *GROUP_LOSSES)
    written = one.update(group_batch(), *GROUP_LOSSES)
    steps = sum(optimizer.steps for optimizer in one.optimizers.values())
    return Outcome(context.metrics, gradients, group_parameters(one), dict(written.columns), steps)  # type: ignore[arg-type]


def updated(
    context: WorkerContext, networks: Networks, data: Batch, loss: Fn, sgd: bool = True, drawn: int | None = None
) -> Outcome:
    """Two updates; with plain SGD, as AdamW makes rounding errors of tiny gradients large."""
    plan = UpdatePlan(minibatches=2, epochs=2, token_budget=20, drawn=drawn)
    optimizer = OptimizerConfig(lr=0.01, max_grad_norm=0.5)
    one = Learner(context, networks=networks, optimizer=optimizer, plan=plan, total_steps=10, seed=1)
    gradients, clip = [], one.optimizer.clip

    def record() -> float:
        gradients.append({name: m.grad.clone() for name, m in one.optimizer.masters.items() if m.grad is not None})
        return clip()

    one.optimizer.clip = record  # type: ignore[method-assign]
    if sgd:
        one.optimizer.adamw = torch.optim.SGD(list(one.optimizer.masters.values()), 0.01)  # type: ignore[assignment]
    one.update(data, loss)
    written = one.update(data, loss)
    parameters = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    return Outcome(context.metrics, gradients, parameters, dict(written.columns), one.optimizer.steps)  # type: ignore[arg-type]


def remembering(kind: str) -> NetConfig:
    return NetConfig.model_validate({"kind": kind, "hidden": [12], "normalise": True})


def remembered(net: NetConfig) -> Batch:
    """Pieces of episodes that begin with a memory."""
    made = pieces([5, 1, 9, 3, 2])
    drawn = np.random.default_rng(1).normal(size=(5, memory_size(BOX, net))).astype(np.float32)
    return made.with_columns(memory=drawn)


def value_networks() -> Networks:
    net = NetConfig(hidden=(16,), normalise=True, normalise_returns=True)
    build = lambda: {"value": ValueNet(BOX, net, torch_generator(0, "net"))}  # noqa: E731
    return Networks(build, "value", ("observations",), normalised=True)


def valued() -> Batch:
    """Pieces of episodes whose returns are far from zero."""
    made = pieces([5, 1, 9, 3])
    drawn = 300 + 50 * np.random.default_rng(1).normal(size=18).astype(np.float32)
    like = made.ragged("rewards").like
    return made.with_columns(returns=like(drawn), values=like(drawn - 20))


class Case(NamedTuple):
    networks: Callable[[], Networks]
    data: Callable[[], Batch]
    loss: Fn
    sgd: bool = True
    drawn: int | None = None

    def __call__(self, context: WorkerContext) -> Outcome:
        return updated(context, self.networks(), self.data(), self.loss, self.sgd, self.drawn)


CASES = {
    "ppo": Case(partial(text_networks, TextPolicy), uneven, PPO),
    "per row": Case(partial(text_networks, TextPolicy), uneven, ppo_clip.bind(clip=0.2, aggregation="sequence_mean")),
    "value": Case(partial(text_networks, TextCritic), uneven, value_loss.bind(clip=0.2)),
    "dpo": Case(partial(text_networks, TextPolicy), partial(pairs, 5), dpo.bind(beta=0.3)),
    "dqn": Case(partial(net_networks, "q", "target"), partial(pieces, [1] * 11), dqn_loss.bind()),
    "draws": Case(partial(net_networks, "q", "target"), partial(pieces, [1] * 11), dqn_loss.bind(), drawn=4),
    "steps of pieces": Case(partial(net_networks, "policy"), partial(pieces, [5, 1, 9, 3]), PPO),
    **{
        kind: Case(partial(net_networks, "policy", net=remembering(kind)), partial(remembered, remembering(kind)), PPO)
        for kind in ("gru", "lstm", "attention")
    },
    "normalised returns": Case(value_networks, valued, value_loss.bind(clip=0.2)),
    "one unit": Case(partial(text_networks, TextPolicy), partial(batch, 1), PPO),
    "adamw": Case(partial(text_networks, TextPolicy), uneven, PPO, sgd=False),
    "bfloat16": Case(partial(text_networks, TextPolicy, torch.bfloat16), uneven, PPO, sgd=False),
}


def skipping(context: WorkerContext) -> Outcome:
    """Updates of minibatches, every other one of which has a row whose advantages aren't finite."""
    data, plan = uneven(), UpdatePlan(minibatches=2, epochs=4, token_budget=20, max_skips=2)
    advantages = data.ragged("advantages")
    spoiled = advantages.like(np.where(advantages.row_index == 0, np.float32(np.inf), advantages.values))
    settings = {"optimizer": OptimizerConfig(lr=0.01), "plan": plan, "total_steps": 10, "seed": 1}
    one = Learner(context, networks=text_networks(TextPolicy), **settings)
    one.update(data.with_columns(advantages=spoiled), PPO)
    parameters = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    return Outcome(context.metrics, [], parameters, {}, one.optimizer.steps)


ALL: dict[str, Callable[[WorkerContext], Outcome]] = {**CASES, "several networks": groups, "skipped": skipping}
exact = pytest.mark.parametrize("case", [*(name for name, case in CASES.items() if case.sgd), "several networks"])
each = pytest.mark.parametrize("case", ALL)
split = pytest.mark.parametrize("blocks", range(2, MOST + 1))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return on_blocks(ALL, MOST, tmp_path_factory.mktemp("ranks"))


def on(results: list[Results], case: str, blocks: int) -> list[Outcome]:
    """What the ranks of ``blocks`` blocks returned."""
    return [results[rank][case, blocks] for rank in range(blocks)]


def merged(outcomes: list[Outcome]) -> dict[str, float]:
    metrics = Metrics()
    for outcome in outcomes:
        metrics.merge(outcome.metrics)
    return metrics.values()


@each
@split
def test_ranks_keep_the_same_parameters_bit_for_bit(results: list[Results], case: str, blocks: int) -> None:
    first, *others = on(results, case, blocks)
    for other in others:
        assert all(torch.equal(p, other.parameters[name]) for name, p in first.parameters.items())
        assert first.steps == other.steps and first.written.keys() == other.written.keys()
        assert all(np.array_equal(c.values, other.written[name].values) for name, c in first.written.items())


@exact
@split
def test_gradients_are_those_of_one_process(results: list[Results], case: str, blocks: int) -> None:
    (alone,), (first, *_) = on(results, case, 1), on(results, case, blocks)
    assert len(alone.gradients) == len(first.gradients) == alone.steps > 0
    for one, other in zip(alone.gradients, first.gradients, strict=True):
        scale = max(float(g.abs().max()) for g in one.values())
        assert one.keys() == other.keys()
        assert all(float((g - other[name]).abs().max()) <= 1e-6 * scale for name, g in one.items())
    for name, parameter in alone.parameters.items():
        torch.testing.assert_close(first.parameters[name], parameter, rtol=1e-6, atol=1e-7)


@exact
@split
def test_metrics_are_those_of_one_process(results: list[Results], case: str, blocks: int) -> None:
    alone, together = merged(on(results, case, 1)), merged(on(results, case, blocks))
    assert together == pytest.approx(alone, rel=1e-6, abs=3e-7)  # means of numbers of size 1 that cancel
    assert {"loss", "grad_norm", "learning_rate"} <= alone.keys()
    policy = case not in ("value", "normalised returns", "dqn", "draws", "dpo", "several networks")
    assert policy == (0 < alone.get("effective_samples", 0) < 1) == (alone.get("mismatch_max", 0) > 0)


@split
def test_all_ranks_skip_what_is_not_finite_on_one_of_them(results: list[Results], blocks: int) -> None:
    (alone,), (first, *_) = on(results, "skipped", 1), on(results, "skipped", blocks)
    assert alone.steps == first.steps == 4
    together = merged(on(results, "skipped", blocks))
    assert together["steps_skipped"] == 0.5 and np.isfinite(list(together.values())).all()


@split
@pytest.mark.parametrize("case", ["dqn", "draws", "several networks"])
def test_written_columns_are_those_of_one_process(results: list[Results], case: str, blocks: int) -> None:
    (alone,), (first, *_) = on(results, case, 1), on(results, case, blocks)
    errors = alone.written["td_errors"].values
    assert (errors != 0).all() and len(errors) == 11
    np.testing.assert_allclose(first.written["td_errors"].values, errors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("case", "rel"), [("adamw", 1e-3), ("bfloat16", 0.05)])
@split
def test_adamw_and_bfloat16_stay_near(results: list[Results], case: str, rel: float, blocks: int) -> None:
    alone, together = merged(on(results, case, 1)), merged(on(results, case, blocks))
    assert together == pytest.approx(alone, rel=rel, abs=rel)


class Spy(Held):
    """A column elsewhere that remembers which of its rows were pulled."""

    def __init__(self, column: Ragged | np.ndarray) -> None:
        super().__init__(column)
        self.pulled: list[int] = []

    def load(self, name: str, rows: np.ndarray | None, /) -> Ragged | np.ndarray:
        self.pulled += range(self.num_rows) if rows is None else rows.tolist()
        return super().load(name, rows)


@pytest.mark.parametrize("case", ["ppo", "dpo", "dqn"])
def test_a_rank_pulls_its_own_rows_once_and_what_deals_them(case: str) -> None:
    networks, data, loss = CASES[case].networks(), CASES[case].data(), CASES[case].loss
    deals = [name for name in ("sample_id", "response_mask", "group_id") if name in data]
    model_inputs = [name for name in data.columns if name not in deals]
    pulled: list[int] = []
    for rank in range(3):
        spies = {name: Spy(data[name]) for name in data.columns}
        lazy = Batch({name: Lazy(((spy, name),)) for name, spy in spies.items()}, len(data))
        context = WorkerContext(mesh=Mesh(dp=3), rank=rank, reduce=lambda tensor: None)
        optimizer, plan = OptimizerConfig(), UpdatePlan(minibatches=2)
        one = Learner(context, networks=networks, optimizer=optimizer, plan=plan, total_steps=10, seed=1)
        one.update(lazy, loss)
        assert all(sorted(spies[name].pulled) == list(range(len(data))) for name in deals)
        assert len({tuple(spies[name].pulled) for name in model_inputs}) == 1
        pulled += spies[model_inputs[0]].pulled
    with_steps = [row for row, mask in enumerate(data.ragged("response_mask")) if mask.any()]
    assert sorted(pulled) == with_steps


def test_lazy_columns_change_no_bit() -> None:
    for case in ("ppo", "dqn"):
        data = CASES[case].data()
        lazy = Batch({name: Lazy(((Held(column), name),)) for name, column in data.columns.items()}, len(data))
        one, other = (CASES[case]._replace(data=lambda given=given: given)(WorkerContext()) for given in (data, lazy))
        assert all(torch.equal(p, other.parameters[name]) for name, p in one.parameters.items())


def test_only_rank_0_exports() -> None:
    saved: list[int] = []
    for rank in range(3):
        context = WorkerContext(mesh=Mesh(dp=3), rank=rank)
        networks, settings = net_networks("q", "target"), {"optimizer": OptimizerConfig(), "plan": UpdatePlan()}
        one = Learner(context, networks=networks, **settings, total_steps=1, seed=1)
        one.export(lambda _, rank=rank: saved.append(rank))
    assert saved == [0]


def test_a_rank_without_rows_returns_empty_columns() -> None:
    def nothing(data: Batch) -> Batch:
        return data.rows(np.zeros(0, np.int64))

    settings = {"optimizer": OptimizerConfig(), "plan": UpdatePlan(), "total_steps": 1, "seed": 1}
    policy, critic = (text_networks(kind) for kind in (TextPolicy, TextCritic))
    value = Networks(lambda: {"value": ValueNet(BOX, NetConfig(), torch_generator(0, "net"))}, "value", ("observations",))
    empty, no_pieces = nothing(batch()), nothing(pieces([2, 1]))
    outputs = [
        Learner(WorkerContext(), networks=policy, **settings).compute_log_probs(empty),
        Learner(WorkerContext(), networks=critic, **settings).compute_values(empty),
        Learner(WorkerContext(), networks=value, **settings).compute_values(no_pieces),
        Learner(WorkerContext(), networks=reward_model(), **settings).compute_scores(empty),
        ModelScorer(WorkerContext(), networks=policy, token_budget=20).score(empty),
        reward_scorer().score(empty),
    ]
    written = {"learner_log_probs", "values", "bootstrap_values", "scores", "log_probs", "score_failed"}
    assert {name for out in outputs for name in out.columns} == written
    for out in outputs:
        for column in out.columns.values():
            values = column.values if isinstance(column, Ragged) else column
            assert len(out) == len(column) == len(values) == 0 and values.dtype in (np.float32, np.bool_)


def test_the_spread_of_scores_is_that_of_all_rows() -> None:
    data, merged = batch(8), Metrics()
    whole = reward_scorer()
    scores = whole.score(data)["scores"].astype(np.float64)
    for rows in ([0, 5, 6], [], [1, 2], [3, 4, 7]):
        part: RewardModelScorer = reward_scorer()
        part.score(data.rows(np.array(rows, np.int64)))
        merged.merge(part.context.metrics)
    assert whole.context.metrics.values()["std"] == scores.std() > 0
    assert merged.values() == pytest.approx(whole.context.metrics.values(), rel=1e-6)
