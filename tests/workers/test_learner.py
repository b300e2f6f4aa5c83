from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import NonFiniteError
from hybridflow.core.roles import Fn, Loss, WorkerContext, columns
from hybridflow.core.seeding import generator
from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.policy import TextCritic, TextPolicy
from hybridflow.models.spec import DecoderSpec
from hybridflow.ops.losses import ppo_clip, value_loss
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.units import Pulled, Units

SPEC = DecoderSpec("llama", 19, 16, 32, 2, 4, 2, 4, 64)


def decoder() -> Decoder:
    model = Decoder(SPEC)
    init_weights(model, torch.Generator().manual_seed(0))
    return model


def learner(kind: str = "policy", plan: UpdatePlan = UpdatePlan(), freeze: tuple[str, ...] = ()) -> Learner:  # noqa: B008
    build = (lambda: {"policy": TextPolicy(decoder())}) if kind == "policy" else (lambda: {"value": TextCritic(decoder())})
    networks = Networks(build, kind if kind == "policy" else "value", ("tokens",))
    optimizer = OptimizerConfig(lr=0.01, freeze=freeze)
    return Learner(WorkerContext(), networks=networks, optimizer=optimizer, plan=plan, total_steps=10, seed=1)


def batch(num_rows: int = 8, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 6, num_rows), rng.integers(1, 9, num_rows)
    lengths = prompts + responses
    total = int(lengths.sum())
    like = partial(Ragged, lengths=lengths)
    mask = np.concatenate([np.arange(n) >= p for p, n in zip(prompts, lengths, strict=True)])
    return Batch(
        {
            "sample_id": np.arange(num_rows),
            "tokens": like(rng.integers(0, 19, total)),
            "response_mask": like(mask),
            "log_probs": like(np.where(mask, rng.normal(-3, 0.2, total), 0).astype(np.float32)),
            "advantages": like(rng.normal(size=total).astype(np.float32)),
            "returns": like(rng.normal(size=total).astype(np.float32)),
            "values": like(rng.normal(size=total).astype(np.float32)),
        }
    )


def without_actions(data: Batch) -> Batch:
    mask = data.ragged("response_mask")
    return data.with_columns(response_mask=mask.like(np.zeros_like(mask.values)))


def gradients(one: Learner, data: Batch, loss: Fn) -> dict[str, torch.Tensor]:
    """Gradients of the last minibatch, before clipping."""
    kept: dict[str, torch.Tensor] = {}

    def step() -> None:
        kept.update({name: p.grad.clone() for name, p in one.model.named_parameters() if p.grad is not None})

    one.optimizer.step = step  # type: ignore[method-assign]
    one.optimizer.clip = lambda: 1.0  # type: ignore[method-assign]
    one.update(data, loss)
    return kept


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    scale = max(float(g.abs().max()) for g in a.values())
    for name, gradient in a.items():
        assert float((gradient - b[name]).abs().max()) <= 1e-6 * scale, name


LOSSES = [
    ppo_clip.bind(clip=0.2, entropy_coef=0.01),
    ppo_clip.bind(clip=0.2, aggregation="sequence_mean"),
    ppo_clip.bind(clip=0.2, aggregation="constant", max_tokens=8),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda fn: fn.params.get("aggregation", "token_mean"))
@pytest.mark.parametrize("budget", [1, 20, 40])
def test_gradients_do_not_depend_on_microbatches(loss: Fn, budget: int) -> None:
    whole = gradients(learner(plan=UpdatePlan(token_budget=10_000)), batch(), loss)
    assert_same(whole, gradients(learner(plan=UpdatePlan(token_budget=budget)), batch(), loss))


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_gradients_do_not_depend_on_row_order_or_masked_garbage(kind: str) -> None:
    loss = LOSSES[0] if kind == "policy" else value_loss.bind(clip=0.2)
    clean = batch()
    mask = clean.ragged("response_mask")
    dirty = {
        name: mask.like(np.where(mask.values, clean.ragged(name).values, np.float32(np.nan)))
        for name in ("log_probs", "advantages", "returns", "values")
    }
    shuffled = clean.with_columns(**dirty).rows(np.random.default_rng(3).permutation(len(clean)))
    assert_same(gradients(learner(kind), clean, loss), gradients(learner(kind), shuffled, loss))


def test_fully_masked_rows_have_no_part() -> None:
    clean = batch()
    together = Batch.concat([clean, without_actions(batch(3, seed=5))])
    for loss in LOSSES:
        assert_same(gradients(learner(), clean, loss), gradients(learner(), together, loss))


def test_minibatches_are_dealt_by_seed_and_cover_everything() -> None:
    seen: list[list[int]] = []
    one = learner(plan=UpdatePlan(minibatches=3, epochs=2, token_budget=12))
    original = one.loss_steps.minibatch

    def record(whole: Units, part: Pulled, *rest: Any) -> list[torch.Tensor]:
        seen.append(part.batch()["sample_id"].tolist())
        return original(whole, part, *rest)

    one.loss_steps.minibatch = record  # type: ignore[method-assign]
    one.update(batch(), LOSSES[0])
    first, second = (sorted(i for part in parts for i in part) for parts in (seen[:3], seen[3:]))
    assert first == second == list(range(8))
    assert seen[:3] != seen[3:]
    assert one.version == 1 and one.optimizer.steps == 6


def test_first_update_has_ratio_one() -> None:
    one = learner(plan=UpdatePlan(token_budget=16))
    data = batch()
    with torch.no_grad():
        own = one.model.outputs(data)["log_probs"].numpy()
    mask = data.ragged("response_mask")
    log_probs = np.zeros(len(mask.values), np.float32)
    log_probs[mask.values] = own
    one.update(data.with_columns(log_probs=mask.like(log_probs)), ppo_clip.bind(clip=0.2))
    means = one.context.metrics.values()
    assert means["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert means["clipped"] == 0.0


@pytest.mark.parametrize("token_budget", [4096, 40, 8])
def test_the_mismatch_with_the_sampler_is_measured_before_the_first_step(token_budget: int) -> None:
    one = learner(plan=UpdatePlan(minibatches=2, epochs=2, token_budget=token_budget))
    data = batch()
    own = one.compute_log_probs(data)["learner_log_probs"]
    mask = data.ragged("response_mask").values
    order = generator(1, "minibatch", 0, 0).permutation(8)[:4]
    rows = np.isin(own.row_index[mask], order)  # the first minibatch is all that the old weights have seen
    drift = (own.values - data.ragged("log_probs").values)[mask][rows].astype(np.float64)
    one.update(data, ppo_clip.bind(clip=0.2))
    values, weights = one.context.metrics.values(), np.exp(drift)
    assert values["mismatch"] == pytest.approx(np.abs(drift).mean(), rel=1e-5)
    assert values["mismatch_max"] == pytest.approx(np.abs(drift).max(), rel=1e-5)
    assert values["effective_samples"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / len(weights), rel=1e-5)
    assert 0 < values["effective_samples"] < 1


def test_an_update_moves_only_what_is_not_frozen() -> None:
    one = learner(freeze=("embed*", "layers.0.*"))
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    one.update(batch(), LOSSES[0])
    moved = {name for name, p in one.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any(name.startswith(("decoder.embed", "decoder.layers.0.")) for name in moved)


@columns(reads=("advantages",))
def broken(outputs: dict, columns: dict) -> Loss:
    terms = outputs["log_probs"] * columns["advantages"]
    return Loss(torch.where(columns["row_index"] == 0, torch.nan, terms), {})


def test_a_loss_that_is_not_finite_stops_before_the_step() -> None:
    one = learner()
    before = [p.detach().clone() for p in one.model.parameters()]
    with pytest.raises(NonFiniteError, match=r"loss broken is nan in update 0, samples 0, 1"):
        one.update(batch(2), broken.bind())
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))


def test_a_batch_without_action_steps_is_counted_as_skipped() -> None:
    one = learner()
    one.update(without_actions(batch()), LOSSES[0])
    assert one.context.metrics.values() == {"updates_skipped": 1.0}
    assert one.optimizer.steps == 0


def test_values_stand_before_their_token_and_nothing_is_bootstrapped() -> None:
    one, data = learner("critic", UpdatePlan(token_budget=12)), batch()
    torch.nn.init.normal_(one.model.head.weight)
    out = one.compute_values(data)
    mask = data.ragged("response_mask").values
    with torch.no_grad():
        expected = one.model.outputs(data)["values"].numpy()
    np.testing.assert_allclose(out["values"].values[mask], expected, rtol=1e-4, atol=1e-5)
    assert (out["values"].values[~mask] == 0).all() and (out["bootstrap_values"] == 0).all()


def test_resume_is_bit_exact(tmp_path: Path) -> None:
    plan = UpdatePlan(minibatches=2, epochs=2)
    straight, first = learner(plan=plan), learner(plan=plan)
    for seed in range(4):
        straight.update(batch(seed=seed), LOSSES[0])
    for seed in range(2):
        first.update(batch(seed=seed), LOSSES[0])
    resumed = learner(plan=plan)
    resumed.load(*save(first, tmp_path / "run" / "actor"))
    for seed in range(2, 4):
        resumed.update(batch(seed=seed), LOSSES[0])
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True))


def test_activation_checkpointing_changes_memory_and_nothing_else() -> None:
    plain, recomputed = learner(), learner()
    recomputed.model.decoder.activation_checkpointing = True
    assert_same(gradients(plain, batch(), LOSSES[0]), gradients(recomputed, batch(), LOSSES[0]))


def test_every_update_deals_its_minibatches_anew() -> None:
    one, dealt = learner(plan=UpdatePlan(minibatches=4)), []

    def record(_: Units, part: Pulled, *rest: Any) -> list[torch.Tensor]:
        dealt.append(part.batch()["sample_id"].tolist())
        return []

    one.loss_steps.minibatch = record  # type: ignore[method-assign]
    one.update(batch(), LOSSES[0])
    one.update(batch(), LOSSES[0])
    assert dealt[:4] != dealt[4:]


class NoTransition:
    """A hybrid engine that must not change its layout."""

    def generation(self) -> None:
        raise AssertionError("every rank would hold its generation slices")


def test_an_export_reads_what_is_trained_and_gathers_nothing_to_generate() -> None:
    one, saved = learner(), list[Any]()
    one.hybrid = NoTransition()  # type: ignore[assignment]
    one.export(saved.append)
    assert saved == [one.model]
    with pytest.raises(AssertionError, match="generation slices"), one.reading():
        pass


@pytest.mark.parametrize("max_skips", [1, 2])
def test_steps_that_are_not_finite_are_skipped_so_many_times_in_a_row(max_skips: int) -> None:
    one = learner(plan=UpdatePlan(max_skips=max_skips))
    before = [p.detach().clone() for p in one.model.parameters()]
    for _ in range(max_skips):
        one.update(batch(2), broken.bind())
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
    assert one.optimizer.steps == 0 and one.version == max_skips
    one.update(batch(), LOSSES[0])
    assert one.optimizer.steps == 1
    assert one.context.metrics.values()["steps_skipped"] == pytest.approx(max_skips / (max_skips + 1))
    assert np.isfinite(list(one.context.metrics.values().values())).all()
    for _ in range(max_skips):
        one.update(batch(2), broken.bind())
    skipped = rf"gradient norm of broken is nan in update {one.version}, after {max_skips} skipped ones, samples 0, 1"
    with pytest.raises(NonFiniteError, match=skipped):
        one.update(batch(2), broken.bind())


def test_parts_of_steps_keep_units_and_columns_together() -> None:
    lengths = np.array([2, 3], np.int64)
    steps = Batch(
        {
            "sample_id": np.arange(2),
            "response_mask": Ragged(np.ones(5, bool), lengths),
            "rewards": Ragged(np.arange(5, dtype=np.float32), lengths),
        }
    )
    parts = Units.of(steps, "step").load(steps, np.arange(5), torch.device("cpu")).split([1, 3, 1])
    places = [part.units.places.values.tolist() for part in parts]
    rows = [part.units.rows.values.tolist() for part in parts]
    assert places == [[0], [1, 2, 3], [4]] and rows == [[0], [0, 1, 1], [1]]
    assert [part.seen(None)["rewards"].tolist() for part in parts] == places
    assert [part.seen(None)["row_index"].tolist() for part in parts] == [[0], [0, 1, 2], [0]]
