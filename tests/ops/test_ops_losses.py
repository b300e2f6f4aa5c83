import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import ContractError
from hybridflow.core.roles import renamed
from hybridflow.ops.losses import (
    cispo,
    cross_entropy,
    gspo,
    in_one_update,
    ppo_clip,
    reinforce,
    value_loss,
    with_demonstrations,
)

POLICY_LOSSES = [
    ppo_clip.bind(clip=0.2),
    ppo_clip.bind(clip=0.2, clip_high=0.28, dual_clip=3.0, entropy_coef=0.1, kl_coef=0.2),
    ppo_clip.bind(clip=0.2, aggregation="sequence_mean", kl_coef=0.2, kl_kind="k2"),
    ppo_clip.bind(clip=0.2, aggregation="constant", max_tokens=16, entropy_coef=0.1),
    gspo.bind(clip=0.1, clip_high=0.15, entropy_coef=0.1, kl_coef=0.2),
    cispo.bind(clip_high=0.3, entropy_coef=0.1),
    cispo.bind(clip_high=0.3, clip_low=0.2, aggregation="sequence_mean"),
    reinforce.bind(entropy_coef=0.1),
    reinforce.bind(aggregation="constant", max_tokens=16, kl_coef=0.2),
    ppo_clip.bind(clip=0.2, correction="truncate", correction_cap=1.2, entropy_coef=0.1),
    gspo.bind(clip=0.2, correction="mask", correction_cap=1.1),
    cispo.bind(clip_high=0.3, correction="mask", kl_coef=0.2),
    reinforce.bind(aggregation="sequence_mean", correction="truncate"),
]
LOSSES = [*POLICY_LOSSES, value_loss.bind(), value_loss.bind(clip=0.2), cross_entropy.bind()]
NAMES = ("log_probs", "entropy", "values")

each_loss = pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: f"{fn.name}-{'-'.join(map(str, fn.params.values()))}")
each_policy_loss = pytest.mark.parametrize("fn", POLICY_LOSSES, ids=lambda fn: f"{fn.name}-{len(fn.params)}")
quick = settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def random_inputs(seed, num_rows=6, dtype=torch.float32):
    """(outputs, columns) of rows of 1 to 8 steps; log-ratios reach beyond the clip limits."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (num_rows,), generator=generator)
    row_index = torch.arange(num_rows).repeat_interleave(lengths)

    def normal(scale=1.0):
        return torch.randn(len(row_index), generator=generator, dtype=torch.float64).to(dtype) * scale

    old = normal() - 3
    outputs = {"log_probs": old + normal(0.3), "entropy": normal().abs(), "values": normal()}
    columns = {"log_probs": old, "ref_log_probs": old + normal(0.3), "advantages": normal()}
    columns["learner_log_probs"] = old + normal(0.3)
    columns |= {"values": normal(), "returns": normal(), "row_index": row_index}
    return {name: x.requires_grad_() for name, x in outputs.items()}, columns


def pick(outputs, columns, rows):
    """The steps of ``rows``, renumbered, as a microbatch."""
    index = torch.cat([torch.nonzero(columns["row_index"] == row)[:, 0] for row in rows])
    columns = {name: x[index] for name, x in columns.items()}
    columns["row_index"] = torch.arange(len(rows)).repeat_interleave(
        torch.stack([(columns["row_index"] == row).sum() for row in rows])
    )
    return {name: x[index] for name, x in outputs.items()}, columns


def normaliser(fn, columns):
    return len(columns["row_index"]) if fn.per == "step" else len(columns["row_index"].unique())


def gradients(total, outputs):
    grads = torch.autograd.grad(total, [outputs[name] for name in NAMES], allow_unused=True, materialize_grads=True)
    return torch.cat(grads)


def of(**columns):
    return {n: torch.tensor(x, dtype=torch.int64 if n == "row_index" else torch.float64) for n, x in columns.items()}


# --- by hand ---


def policy_inputs(ratios, advantages, row_index=None):
    old = [-1.0] * len(ratios)
    outputs = of(log_probs=[-1 + math.log(r) for r in ratios], entropy=[0.5] * len(ratios))
    outputs["log_probs"].requires_grad_()
    return outputs, of(log_probs=old, advantages=advantages, row_index=row_index or [0] * len(ratios))


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype))


def test_ppo_by_hand():
    outputs, columns = policy_inputs([1.5, 1.5, 0.5, 0.5, 1.1], [1, -1, 1, -1, 2])
    terms, metrics, *_ = ppo_clip(outputs, columns, clip=0.2)
    close(terms, [-1.2, 1.5, -0.5, 0.8, -2.2])
    close(metrics["clipped"], [1.0, 0, 0, 1, 0])
    close(metrics["ratio"], [1.5, 1.5, 0.5, 0.5, 1.1])
    close(metrics["policy_kl"], [r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 0.5, 1.1)])
    terms.sum().backward()  # A ρ where not clipped
    close(outputs["log_probs"].grad, [0, 1.5, -0.5, 0, -2.2])


def test_clip_higher_and_dual_clip_by_hand():
    outputs, columns = policy_inputs([1.5, 5.0, 0.5], [1, -1, -1])
    terms, metrics, *_ = ppo_clip(outputs, columns, clip=0.2, clip_high=0.4, dual_clip=3.0)
    close(terms, [-1.4, 3.0, 0.8])
    close(metrics["clipped"], [1.0, 1, 1])
    terms.sum().backward()
    close(outputs["log_probs"].grad, [0.0, 0, 0])


def test_entropy_and_kl_terms_by_hand():
    outputs, columns = policy_inputs([1.0, 1.0], [0, 0])
    columns["ref_log_probs"] = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    terms, metrics, *_ = ppo_clip(outputs, columns, clip=0.2, entropy_coef=0.1, kl_coef=2.0)
    kl = math.exp(-1)
    close(metrics["kl"], [0, kl])
    close(terms, [-0.05, -0.05 + 2 * kl])


def test_aggregations_by_hand():
    outputs, columns = policy_inputs([1.0, 1.0, 1.0], [-1, -2, -9], row_index=[0, 0, 1])
    close(ppo_clip(outputs, columns, clip=0.2).terms, [1.0, 2, 9])
    close(ppo_clip(outputs, columns, clip=0.2, aggregation="sequence_mean").terms, [1.5, 9])
    close(ppo_clip(outputs, columns, clip=0.2, aggregation="constant", max_tokens=10).terms, [0.3, 0.9])


def test_gspo_by_hand():
    # ratios of the rows: sqrt(1.21 * 1) = 1.1, inside; 2, clipped to 1.3 (A > 0); 2, not clipped (A < 0)
    outputs, columns = policy_inputs([1.21, 1, 2, 2], [1, 1, 1, -1], row_index=[0, 0, 1, 2])
    terms, metrics, *_ = gspo(outputs, columns, clip=0.2, clip_high=0.3)
    close(terms, [-1.1, -1.3, 2.0])
    close(metrics["ratio"], [1.1, 2, 2])
    close(metrics["clipped"], [0.0, 1, 0])
    terms.sum().backward()  # -s A / |y| on every step of the row (eq. 10 of the paper)
    close(outputs["log_probs"].grad, [-0.55, -0.55, 0, 2])


def test_cispo_by_hand():
    outputs, columns = policy_inputs([1.5, 0.5, 1.1], [1, 1, -2])
    terms, metrics, *_ = cispo(outputs, columns, clip_high=0.3)
    close(terms, [-1.3 * (-1 + math.log(1.5)), -0.5 * (-1 + math.log(0.5)), 2.2 * (-1 + math.log(1.1))])
    close(metrics["clipped"], [1.0, 0, 0])
    terms.sum().backward()  # a clipped weight keeps its gradient
    close(outputs["log_probs"].grad, [-1.3, -0.5, 2.2])
    close(cispo(outputs, columns, clip_high=0.3, clip_low=0.2).metrics["clipped"], [1.0, 1, 0])


def test_reinforce_by_hand():
    outputs, columns = policy_inputs([1.0, 2.0], [3, -2])
    terms, *_ = reinforce(outputs, columns)
    close(terms, [3.0, 2 * (-1 + math.log(2))])
    terms.sum().backward()
    close(outputs["log_probs"].grad, [-3.0, 2])


def test_value_loss_by_hand():
    outputs = of(values=[2.0, 0.0, 1.1])
    columns = of(values=[1.0, 1.0, 1.0], returns=[3.0, 0.5, 1.0])
    terms, metrics, *_ = value_loss(outputs, columns, clip=0.5)
    close(terms, [0.5 * 1.5**2, 0.5 * 0.5**2, 0.5 * 0.1**2])
    close(metrics["value_clipped"], [1.0, 0, 0])
    close(value_loss(outputs, columns).terms, [0.5, 0.125, 0.005])
    close(metrics["value_error"], [1.0, 0.5, 0.1])


def test_cross_entropy_by_hand():
    terms, metrics, *_ = cross_entropy(of(log_probs=[-1.0, -0.25]), {})
    close(terms, [1.0, 0.25])
    close(metrics["nll"], [1.0, 0.25])


# --- slow twin: the loss of a whole minibatch, row by row and step by step ---


def slow_ppo(outputs, columns, clip, clip_high, entropy_coef, kl_coef, aggregation, max_tokens):
    rows = {}
    for i, row in enumerate(columns["row_index"].tolist()):
        new, old, ref = (x[i].item() for x in (outputs["log_probs"], columns["log_probs"], columns["ref_log_probs"]))
        advantage, ratio = columns["advantages"][i].item(), math.exp(new - old)
        surrogate = min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip_high) * advantage)
        penalty = kl_coef * (math.exp(ref - new) - 1 - (ref - new)) - entropy_coef * outputs["entropy"][i].item()
        rows.setdefault(row, []).append(penalty - surrogate)
    if aggregation == "token_mean":
        return sum(sum(row) for row in rows.values()) / sum(len(row) for row in rows.values())
    return sum(sum(row) / (len(row) if aggregation == "sequence_mean" else max_tokens) for row in rows.values()) / len(rows)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@quick
@given(seed=seeds)
def test_ppo_equals_the_formula_written_step_by_step(aggregation, seed):
    outputs, columns = random_inputs(seed, dtype=torch.float64)
    params = {"clip": 0.2, "clip_high": 0.3, "entropy_coef": 0.1, "kl_coef": 0.2, "max_tokens": 9}
    fn = ppo_clip.bind(**params, aggregation=aggregation)
    loss = fn(outputs, columns).terms.sum() / normaliser(fn, columns)
    assert loss.item() == pytest.approx(slow_ppo(outputs, columns, **params, aggregation=aggregation), rel=1e-12)


@pytest.mark.parametrize("fn", [fn for fn in LOSSES if fn.name != "cispo"], ids=lambda fn: fn.name)
def test_gradients_are_those_of_the_terms(fn):  # cispo stops a gradient on purpose: by hand above
    outputs, columns = random_inputs(1, num_rows=3, dtype=torch.float64)
    names = ("values",) if fn.name == "value_loss" else ("log_probs", "entropy")

    def terms(*tensors):
        return fn({**outputs, **dict(zip(names, tensors, strict=True))}, columns).terms

    assert torch.autograd.gradcheck(terms, tuple(outputs[name] for name in names))


# --- definitions, differentiated by autograd in float64 ---


def per_row(values, row_index):
    return torch.stack([values[row_index == row].mean() for row in row_index.unique()])


def defined(name, log_probs, entropy, c):
    """The terms of a loss as its paper writes them, with an entropy bonus of 0.1; per step, or per row for gspo."""
    ratio, advantages = (log_probs - c["log_probs"]).exp(), c["advantages"]
    if name == "ppo_clip":
        surrogate = torch.min(ratio * advantages, ratio.clip(0.8, 1.3) * advantages)
        surrogate = torch.where(advantages < 0, torch.max(surrogate, 1.5 * advantages), surrogate)
    elif name == "gspo":
        ratio = per_row(log_probs - c["log_probs"], c["row_index"]).exp()
        advantages = per_row(advantages, c["row_index"])
        surrogate = torch.min(ratio * advantages, ratio.clip(0.9, 1.2) * advantages)
        return -surrogate - 0.1 * per_row(entropy, c["row_index"])
    elif name == "cispo":
        surrogate = ratio.clip(0, 1.3).detach() * advantages * log_probs
    else:
        surrogate = advantages * log_probs
    return -surrogate - 0.1 * entropy


DEFINED = {
    "ppo_clip": ppo_clip.bind(clip=0.2, clip_high=0.3, dual_clip=1.5, entropy_coef=0.1),
    "gspo": gspo.bind(clip=0.1, clip_high=0.2, entropy_coef=0.1),
    "cispo": cispo.bind(clip_high=0.3, entropy_coef=0.1),
    "reinforce": reinforce.bind(entropy_coef=0.1),
}


@pytest.mark.parametrize("name", DEFINED)
@quick
@given(seed=seeds)
def test_losses_and_gradients_equal_their_definitions(name, seed):
    outputs, columns = random_inputs(seed, dtype=torch.float64)
    expected = defined(name, outputs["log_probs"], outputs["entropy"], columns)
    actual = DEFINED[name](outputs, columns).terms
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(actual.sum(), outputs), gradients(expected.sum(), outputs), rtol=1e-12, atol=1e-12)


@quick
@given(seed=seeds)
def test_the_value_loss_and_its_gradient_equal_their_definition(seed):
    outputs, columns = random_inputs(seed, dtype=torch.float64)
    values, old, target = outputs["values"], columns["values"], columns["returns"]
    expected = 0.5 * torch.max((values - target) ** 2, (old + (values - old).clip(-0.2, 0.2) - target) ** 2)
    actual = value_loss.bind(clip=0.2)(outputs, columns).terms
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(actual.sum(), outputs), gradients(expected.sum(), outputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("correction", ["truncate", "mask"])
@quick
@given(seed=seeds)
def test_a_correction_weighs_the_loss_against_the_learner_s_own_policy(name, correction, seed):
    outputs, columns = random_inputs(seed, dtype=torch.float64)
    decoupled = {**columns, "log_probs": columns["learner_log_probs"]}
    log_weight = columns["learner_log_probs"] - columns["log_probs"]
    weight = (per_row(log_weight, columns["row_index"]) if name == "gspo" else log_weight).exp()
    limited = weight.clip(max=1.2) if correction == "truncate" else weight * ((weight <= 1.2) & (weight >= 1 / 1.2))
    fn = DEFINED[name].declared.bind(
        **{**DEFINED[name].params, "entropy_coef": 0.0}, correction=correction, correction_cap=1.2
    )
    plain = DEFINED[name].declared.bind(**{**DEFINED[name].params, "entropy_coef": 0.0})
    actual, expected = fn(outputs, columns), plain(outputs, decoupled).terms * limited
    torch.testing.assert_close(actual.terms, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.drift, outputs["log_probs"].detach() - columns["log_probs"], rtol=0, atol=0)
    torch.testing.assert_close(actual.metrics["weight"], limited, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_without_a_mismatch_a_correction_changes_nothing(correction):
    outputs, columns = random_inputs(3)
    columns["learner_log_probs"] = columns["log_probs"]
    corrected = ppo_clip(outputs, columns, clip=0.2, correction=correction)
    assert torch.equal(corrected.terms, ppo_clip(outputs, columns, clip=0.2).terms)
    assert not corrected.metrics["weight_cut"].any()


@pytest.mark.parametrize("fn", [fn for fn in POLICY_LOSSES if "correction" in fn.params], ids=lambda fn: fn.name)
def test_in_one_update_the_forward_pass_is_that_of_the_learner_before_it(fn):
    outputs, columns = random_inputs(4)
    alone = in_one_update.bind(functions=(fn,))
    found = alone(outputs, {name: column for name, column in columns.items() if name != "learner_log_probs"})
    expected = fn(outputs, {**columns, "learner_log_probs": outputs["log_probs"].detach()})
    assert torch.equal(found.terms, expected.terms)
    torch.testing.assert_close(gradients(found.terms.sum(), outputs), gradients(expected.terms.sum(), outputs))
    assert "learner_log_probs" in fn.reads and set(alone.reads) == {*fn.reads} - {"learner_log_probs"}
    assert alone.per == fn.per


# --- combinators ---


def test_renamed_losses_read_the_other_columns():
    outputs, columns = random_inputs(5)
    names = {"values": "cost_values", "returns": "cost_returns"}
    fn = renamed(value_loss.bind(clip=0.2), names)
    others = {names.get(name, name): x for name, x in columns.items()}
    assert (fn.reads, fn.per, fn.name) == (("cost_values", "cost_returns"), "step", "value_loss")
    assert torch.equal(fn(outputs, others).terms, value_loss(outputs, columns, clip=0.2).terms)
    assert torch.equal(pickle.loads(pickle.dumps(fn))(outputs, others).terms, fn(outputs, others).terms)


@pytest.mark.parametrize(
    "fn", [ppo_clip.bind(clip=0.2), ppo_clip.bind(clip=0.2, aggregation="sequence_mean"), gspo.bind(clip=0.1)]
)
def test_demonstrations_add_their_cross_entropy_and_nothing_else(fn):
    outputs, columns = random_inputs(6)
    mixed = with_demonstrations.bind(functions=(fn,), coef=0.5)
    demonstrated = torch.tensor([False, True, False, False, True, False])
    actual = mixed(outputs, {**columns, "demonstrated": demonstrated})
    sampled, imitated = (torch.nonzero(mask)[:, 0].tolist() for mask in (~demonstrated, demonstrated))
    nll = -pick(outputs, columns, imitated)[0]["log_probs"]
    rows = pick(outputs, columns, imitated)[1]["row_index"]
    expected = (
        fn(*pick(outputs, columns, sampled)).terms.sum() + 0.5 * (nll if fn.per == "step" else per_row(nll, rows)).sum()
    )
    torch.testing.assert_close(actual.terms.sum(), expected)
    torch.testing.assert_close(gradients(actual.terms.sum(), outputs), gradients(expected, outputs))
    assert len(actual.drift) == len(columns["row_index"]) - len(nll)
    assert mixed.per == fn.per and mixed.reads == (*fn.reads, "demonstrated")


# --- properties ---


@each_loss
@quick
@given(seed=seeds)
def test_microbatches_and_row_order_do_not_matter(fn, seed):
    outputs, columns = random_inputs(seed)
    count = normaliser(fn, columns)
    whole = fn(outputs, columns).terms.sum() / count
    expected = gradients(whole, outputs)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    for sizes in ([6], [1] * 6, [2, 4], [3, 1, 2]):
        parts = [order[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        total = sum(fn(*pick(outputs, columns, rows)).terms.sum() / count for rows in parts)
        torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6)
        error = (gradients(total, outputs) - expected).norm()
        assert error <= 1e-6 * expected.norm()


@each_loss
def test_metrics_are_detached_with_one_value_a_step_or_row(fn):
    outputs, columns = random_inputs(2)
    terms, metrics, *_ = fn(outputs, columns)
    assert len(terms) == (len(columns["row_index"]) if fn.per == "step" else 6)
    for values in metrics.values():
        assert not values.requires_grad
        assert len(values) in (6, len(columns["row_index"]))


@each_loss
def test_a_microbatch_without_steps(fn):
    outputs, columns = random_inputs(0)
    empty = ({name: x[:0] for name, x in outputs.items()}, {name: x[:0] for name, x in columns.items()})
    total = fn(*empty).terms.sum()
    assert total.item() == 0
    assert not gradients(total, outputs).any()


@each_policy_loss
def test_rows_without_steps_do_not_count(fn):
    outputs, columns = random_inputs(4)
    gaps = {**columns, "row_index": columns["row_index"] * 3 + 1}  # rows 0, 2, 3, 5, ... have no action step
    torch.testing.assert_close(fn(outputs, gaps).terms, fn(outputs, columns).terms, rtol=0, atol=0)


@pytest.mark.parametrize("fn", [ppo_clip.bind(clip=0.2), gspo.bind(clip=3e-4), cispo.bind(clip_high=0.3)])
def test_first_on_policy_update_has_ratio_one(fn):
    outputs, columns = random_inputs(7)
    outputs["log_probs"] = columns["log_probs"].clone().requires_grad_()
    if fn.name == "gspo":
        columns["advantages"] = torch.randn(6, generator=torch.Generator().manual_seed(0))[columns["row_index"]]
    terms, metrics, *_ = fn(outputs, columns)
    assert (metrics["ratio"] == 1).all()
    assert not metrics["clipped"].any()
    assert not metrics["policy_kl"].any()
    plain = reinforce.bind(aggregation="sequence_mean" if fn.per == "row" else "token_mean")
    expected = gradients(plain(outputs, columns).terms.sum(), outputs)
    torch.testing.assert_close(gradients(terms.sum(), outputs), expected)


@each_policy_loss
def test_ratios_that_overflow_give_finite_losses_and_gradients(fn):
    outputs, columns = random_inputs(0)
    outputs["log_probs"] = (
        columns["log_probs"] + torch.tensor([300.0, -300.0]).repeat(99)[: len(columns["log_probs"])]
    ).requires_grad_()
    terms = fn(outputs, columns).terms
    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradients(terms.sum(), outputs)).all()


def test_an_unused_entropy_has_no_graph():
    outputs, columns = random_inputs(0)
    terms = ppo_clip(outputs, columns, clip=0.2).terms
    assert torch.autograd.grad(terms.sum(), outputs["entropy"], allow_unused=True) == (None,)


# --- declarations ---


def test_what_is_read_depends_on_the_parameters():
    assert ppo_clip.bind(clip=0.2).reads == ("log_probs", "advantages")
    assert ppo_clip.bind(clip=0.2, kl_coef=0.1).reads == ("log_probs", "advantages", "ref_log_probs")
    assert gspo.bind(clip=0.2, kl_coef=0.1).reads == ("log_probs", "advantages", "ref_log_probs")
    assert value_loss.bind().reads == ("returns",)
    assert value_loss.bind(clip=0.2).reads == ("values", "returns")
    assert cross_entropy.bind().reads == ()


@each_loss
def test_a_loss_needs_exactly_what_it_reads(fn):
    outputs, columns = random_inputs(0)
    given_columns = {name: columns[name] for name in (*fn.reads, "row_index")}
    assert len(fn(outputs, given_columns).terms) > 0
    for name in fn.reads:
        with pytest.raises(KeyError, match=name):
            fn(outputs, {other: x for other, x in given_columns.items() if other != name})


def test_the_normaliser_depends_on_the_aggregation():
    assert ppo_clip.bind(clip=0.2).per == "step"
    assert ppo_clip.bind(clip=0.2, aggregation="sequence_mean").per == "row"
    assert reinforce.bind(aggregation="constant", max_tokens=5).per == "row"
    assert gspo.bind(clip=0.2).per == "row"
    assert value_loss.bind().per == "step"


def test_constant_without_max_tokens_is_refused_when_bound():
    with pytest.raises(ContractError, match="max_tokens"):
        ppo_clip.bind(clip=0.2, aggregation="constant")


@each_loss
def test_travels_by_name(fn):
    copy = pickle.loads(pickle.dumps(fn))
    outputs, columns = random_inputs(0)
    assert (copy.reads, copy.per) == (fn.reads, fn.per)
    torch.testing.assert_close(copy(outputs, columns).terms, fn(outputs, columns).terms, rtol=0, atol=0)
