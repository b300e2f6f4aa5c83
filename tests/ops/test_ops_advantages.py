import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.roles import chain, renamed
from hybridflow.ops.advantages import (
    discounted_returns,
    gae,
    greedy_baseline,
    group_baseline,
    group_centred,
    group_counts,
    kl_into_scores,
    kl_penalty,
    lagrangian,
    leave_one_out,
    n_step_returns,
    normalise_scores,
    normalise_with_greedy,
    overlong_penalty,
    score_rewards,
    teacher_rewards,
    v_trace,
    whiten,
)

ESTIMATORS = [
    score_rewards.bind(),
    kl_penalty.bind(coef=0.3),
    kl_penalty.bind(coef=0.3, kind="k3"),
    kl_into_scores.bind(coef=0.3),
    overlong_penalty.bind(max_tokens=5, buffer_tokens=3, penalty=0.5),
    gae.bind(gamma=0.9, lam=0.8),
    discounted_returns.bind(gamma=0.9),
    n_step_returns.bind(gamma=0.9, n=2),
    v_trace.bind(gamma=0.9, rho_clip=1.2, c_clip=0.9),
    whiten.bind(),
    group_centred.bind(scale="std"),
    group_centred.bind(scale="none"),
    leave_one_out.bind(),
    greedy_baseline.bind(),
    group_baseline.bind(),
    normalise_scores.bind(),
    normalise_scores.bind(mean=0.5, std=2.0),
    normalise_with_greedy.bind(),
    normalise_with_greedy.bind(mean=0.5, std=2.0),
    teacher_rewards.bind(),
    lagrangian.bind(multiplier=0.5),
    renamed(gae.bind(gamma=0.9, lam=0.8), {"values": "cost_values", "advantages": "cost_advantages"}),
]
GROUPED = [group_centred.bind(scale="std"), group_centred.bind(scale="none"), leave_one_out.bind()]
TIME = ("rewards", "values", "log_probs", "ref_log_probs", "learner_log_probs", "teacher_log_probs", "advantages")
TIME += ("cost_values", "cost_advantages")
ROW = ("scores", "greedy_scores", "bootstrap_values")

each_estimator = pytest.mark.parametrize("fn", ESTIMATORS, ids=lambda fn: f"{fn.name}-{len(fn.params)}")
quick = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def random_batch(seed, num_rows=None):
    """Rows of 0 to 7 steps with holes in their masks; some rows have no action step."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(0, 7)) if num_rows is None else num_rows
    lengths = rng.integers(0, 8, num_rows)
    total = int(lengths.sum())
    time = {name: Ragged(rng.normal(size=total).astype(np.float32), lengths) for name in TIME}
    mask = (rng.random(total) < 0.7) & np.repeat(rng.random(num_rows) < 0.8, lengths)
    row = {name: rng.normal(size=num_rows).astype(np.float32) for name in ROW}
    groups = {"group_id": rng.integers(-2, 2, num_rows), "terminated": rng.random(num_rows) < 0.5}
    return Batch({**time, **row, **groups, "response_mask": Ragged(mask, lengths)}, num_rows)


def batch_of(mask, **columns):
    """A batch from nested lists; lists of lists are time columns."""
    made = {"response_mask": Ragged.from_rows(mask, bool)}
    for name, values in columns.items():
        nested = len(values) > 0 and isinstance(values[0], list)
        made[name] = Ragged.from_rows(values, np.float32) if nested else np.asarray(values)
    floats = {n: c.astype(np.float32) for n, c in made.items() if not isinstance(c, Ragged) and n in ROW}
    return Batch({**made, **floats}, len(mask))


def rows_of(column):
    return [row.tolist() for row in column]


def assert_same(actual, expected, tolerance=0.0):
    assert actual.keys() == expected.keys()
    for name, column in actual.items():
        other = expected[name]
        if isinstance(column, Ragged):
            np.testing.assert_array_equal(column.lengths, other.lengths)
            column, other = column.values, other.values
        np.testing.assert_allclose(column, other, rtol=tolerance, atol=tolerance)


# --- by hand ---


def test_score_is_the_reward_of_the_last_action_step():
    batch = batch_of([[0, 1, 1], [1, 1, 0, 0], [0, 0]], scores=[2.0, -1.0, 9.0])
    assert rows_of(score_rewards(batch)["rewards"]) == [[0, 0, 2], [0, -1, 0, 0], [0, 0]]


def test_kl_penalty_by_hand():
    batch = batch_of([[0, 1, 1]], rewards=[[5, 0, 1]], log_probs=[[0, -1, -2]], ref_log_probs=[[0, -1.5, -1]])
    assert rows_of(kl_penalty(batch, coef=0.5)["rewards"]) == [[0, -0.25, 1.5]]
    assert rows_of(kl_penalty(batch, coef=0.5, kind="k2")["rewards"]) == [[0, -0.0625, 0.75]]


def test_kl_into_scores_sums_over_the_row():
    batch = batch_of([[0, 1, 1], [1]], scores=[2, 1], log_probs=[[9, -1, -2], [0]], ref_log_probs=[[0, -2, -4], [0]])
    assert kl_into_scores(batch, coef=0.5)["scores"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(("steps", "expected"), [(4, 1.0), (6, 1.0), (7, 0.75), (8, 0.5), (10, 0.0), (15, 0.0)])
def test_overlong_penalty_grows_over_the_buffer(steps, expected):
    batch = batch_of([[0, 0] + [1] * steps], scores=[1.0])
    assert overlong_penalty(batch, max_tokens=10, buffer_tokens=4, penalty=1.0)["scores"].tolist() == [expected]


def test_overlong_penalty_without_buffer_is_a_step():
    batch = batch_of([[1] * 10, [1] * 11], scores=[1.0, 1.0])
    assert overlong_penalty(batch, max_tokens=10, buffer_tokens=0, penalty=2.0)["scores"].tolist() == [1.0, -1.0]


def test_gae_by_hand():
    # terminated: A1 = 1 - 0.5 = 0.5, A0 = 0 + 0.5 * 0.5 - 1 + 0.25 * 0.5 = -0.625; the hole between is passed over
    batch = batch_of(
        [[1, 0, 1], [1, 0, 1]],
        rewards=[[0, 7, 1], [0, 7, 1]],
        values=[[1, 7, 0.5], [1, 7, 0.5]],
        bootstrap_values=[8.0, 8.0],
        terminated=[True, False],
    )
    out = gae(batch, gamma=0.5, lam=0.5)
    assert rows_of(out["advantages"]) == [[-0.625, 0, 0.5], [0.375, 0, 4.5]]  # cut: A1 = 0.5 + 0.5 * 8
    assert rows_of(out["returns"]) == [[0.375, 0, 1.0], [1.375, 0, 5.0]]


def test_one_valid_token():
    batch = batch_of([[0, 1]], rewards=[[0, 1]], values=[[9, 0.25]], bootstrap_values=[5.0], terminated=[True])
    out = gae(batch, gamma=1.0, lam=0.95)
    assert rows_of(out["advantages"]) == [[0, 0.75]]
    assert rows_of(out["returns"]) == [[0, 1.0]]
    whitened = whiten(batch.with_columns(advantages=out["advantages"]))
    assert rows_of(whitened["advantages"]) == [[0, 0]]


def test_discounted_returns_by_hand():
    out = discounted_returns(batch_of([[1, 1, 0, 1]], rewards=[[1, 2, 9, 4]]), gamma=0.5)
    assert rows_of(out["returns"]) == [[3, 4, 0, 4]]
    assert rows_of(out["advantages"]) == [[3, 4, 0, 4]]


def test_n_step_returns_by_hand():
    batch = batch_of([[1, 1, 1]], rewards=[[1, 2, 4]], values=[[8, 16, 32]], bootstrap_values=[64.0], terminated=[False])
    assert rows_of(n_step_returns(batch, gamma=0.5, n=1)["returns"]) == [[9, 18, 36]]
    assert rows_of(n_step_returns(batch, gamma=0.5, n=2)["returns"]) == [[10, 20, 36]]
    assert rows_of(n_step_returns(batch, gamma=0.5, n=99)["advantages"]) == [[3, 4, 4]]


def test_whiten_by_hand():
    batch = batch_of([[1, 0, 1], [1, 1]], advantages=[[1, 50, 1], [3, 3]])
    assert rows_of(whiten(batch)["advantages"]) == [[-1, 0, -1], [1, 1]]
    constant = batch_of([[1, 1], [1]], advantages=[[0.1, 0.1], [0.1]])
    assert rows_of(whiten(constant)["advantages"]) == [[0, 0], [0]]


def test_group_centred_by_hand():
    batch = batch_of([[1, 0]] * 4, scores=[1.0, 3.0, 5.0, 5.0], group_id=[7, 7, 2, 2])
    assert rows_of(group_centred(batch, scale="none")["advantages"]) == [[-1, 0], [1, 0], [0, 0], [0, 0]]
    root = 1 / (2**0.5 + 1e-6)  # sample deviation of 1 and 3
    np.testing.assert_allclose(group_centred(batch, scale="std")["advantages"].values[:4], [-root, 0, root, 0], rtol=1e-7)


@pytest.mark.parametrize("score", [0.1, -1e6, 1e-30, 3.3e37])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_scores_of_a_group_give_exactly_zero(score, size):
    batch = batch_of([[1]] * size, scores=[score] * size, group_id=[0] * size)
    for out in (group_centred(batch, scale="std"), group_centred(batch, scale="none"), leave_one_out(batch)):
        assert not out["advantages"].values.any()


def test_leave_one_out_by_hand():
    batch = batch_of([[1], [1, 1], [1]], scores=[1.0, 2.0, 6.0], group_id=[0, 0, 0])
    assert rows_of(leave_one_out(batch)["advantages"]) == [[-3], [-1.5, -1.5], [4.5]]


def test_greedy_baseline_is_reward_to_go_minus_the_greedy_score():
    batch = batch_of([[0, 1, 1]], rewards=[[9, -0.5, 2]], scores=[2.0], greedy_scores=[1.0])
    assert rows_of(greedy_baseline(batch)["advantages"]) == [[0, 0.5, 1]]
    from_score = chain(score_rewards.bind(), greedy_baseline.bind())(batch)
    assert rows_of(from_score["advantages"]) == [[0, 1, 1]]


# --- one batch of reference values for every estimator ---

REWARDS = [[0, 0, 0, 1], [0, 0, 0.5, 0], [0, 0, 0, 0], [0, 2, 0, 0]]
MASKS = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]]  # the hole in the third row is a tool's token
VALUES = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0], [0.5, 9, 0.1, 0.2], [0.3, 0.6, 0, 0]]


def reference_batch():
    return batch_of(
        MASKS,
        rewards=REWARDS,
        values=VALUES,
        scores=[1.0, 0.5, 0.0, 2.0],
        greedy_scores=[0.5, 0.5, 0.0, 1.0],
        group_id=["a", "a", "b", "b"],
        terminated=[True] * 4,
        bootstrap_values=[7.0] * 4,
    )


def test_reference_values_of_gae():
    returns = rows_of(gae(reference_batch(), gamma=0.9, lam=0.8)["returns"])
    np.testing.assert_allclose(returns[0], [0.485453, 0.62424, 0.792, 1], atol=1e-6)
    np.testing.assert_allclose(returns[3], [1.548, 2, 0, 0], atol=1e-6)


def test_credit_passes_over_a_tool_s_token():
    without = reference_batch().rows([2])
    steps = [0, 2, 3]
    closed = batch_of([[1, 1, 1]], rewards=[[0, 0, 0]], values=[[0.5, 0.1, 0.2]], terminated=[True], bootstrap_values=[7.0])
    for name, column in gae(without, gamma=0.9, lam=0.8).items():
        assert column[0][steps].tolist() == gae(closed, gamma=0.9, lam=0.8)[name][0].tolist()
        assert column[0][1] == 0


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (group_centred.bind(scale="std"), [2**-0.5, -(2**-0.5), -(2**-0.5), 2**-0.5]),
        (group_centred.bind(scale="none"), [0.25, -0.25, -1, 1]),
        (leave_one_out.bind(), [0.5, -0.5, -2, 2]),
        (chain(score_rewards.bind(), greedy_baseline.bind()), [0.5, 0, 0, 1]),
    ],
    ids=["grpo", "dr_grpo", "rloo", "remax"],
)
def test_reference_values_of_methods_that_compare_responses(fn, expected):
    batch = reference_batch()
    advantages = fn(batch)["advantages"]
    mask = np.array(MASKS, bool)
    np.testing.assert_allclose(advantages.padded()[mask], np.repeat(expected, mask.sum(1)), atol=2e-6)


def test_groups_of_one_get_zero_and_are_counted():
    batch = batch_of([[1]] * 4, scores=[1.0, 0.0, 1.0, 0.5], group_id=["a", "a", "b", "c"])
    for fn in GROUPED:
        advantages = rows_of(fn(batch)["advantages"])
        assert advantages[0][0] > 0 and advantages[1][0] < 0 and advantages[2:] == [[0], [0]]
    assert group_counts(batch) == {"groups": 3, "groups_of_one": 2, "groups_with_equal_scores": 0}
    equal = batch_of([[1], [1], [0], [1]], scores=[1.0, 1.0, 2.0, 3.0], group_id=[0, 0, 1, 1])
    assert group_counts(equal) == {"groups": 2, "groups_of_one": 1, "groups_with_equal_scores": 1}
    assert set(group_counts(batch.rows([])).values()) == {0}


NEAR_CONSTANT = [
    [1, 1.00001, 1.00002],
    [0.95] * 7 + [0.95 - 1e-8],
    [1e6, 1e6 + 1],
    [0.95] * 7 + [np.nextafter(np.float32(0.95), 0)],
]


@pytest.mark.parametrize("scores", NEAR_CONSTANT, ids=range(4))
def test_nearly_constant_groups_equal_the_two_pass_answer_in_float64(scores):
    batch = batch_of([[1]] * len(scores), scores=scores, group_id=[0] * len(scores))
    exact = np.array(scores, np.float32).astype(np.float64)
    centred = exact - exact.mean()
    expected = centred / (np.sqrt((centred**2).sum() / (len(scores) - 1)) + 1e-6)
    advantages = group_centred(batch, scale="std")["advantages"].values
    assert np.isfinite(advantages).all()
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-9)
    if len(set(exact)) == 1:
        assert not advantages.any()


def test_normalised_scores_have_mean_zero_and_deviation_one():
    batch = batch_of([[1], [1], [0], [1]], scores=[1.0, 3.0, 99.0, 5.0])
    root = 1.5**0.5
    np.testing.assert_allclose(normalise_scores(batch)["scores"], [-root, 0, 0, root], rtol=1e-6)
    assert normalise_scores(batch, mean=1.0, std=2.0)["scores"].tolist() == [0, 1, 0, 2]
    assert not normalise_scores(batch_of([[1], [1]], scores=[7.0, 7.0]))["scores"].any()


def test_greedy_scores_are_normalised_on_the_scale_of_both():
    batch = batch_of([[1], [0], [1]], scores=[1.0, 99.0, 3.0], greedy_scores=[1.0, 99.0, 7.0])
    both = normalise_with_greedy(batch)  # mean 3, deviation √6
    np.testing.assert_allclose(both["scores"], [-2 / 6**0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(both["greedy_scores"], [-2 / 6**0.5, 0, 4 / 6**0.5], rtol=1e-6)
    given = normalise_with_greedy(batch, mean=1.0, std=2.0)
    assert given["scores"].tolist() == [0, 0, 1] and given["greedy_scores"].tolist() == [0, 0, 3]


def test_group_baseline_by_hand():
    batch = batch_of([[1], [1], [0], [1]], scores=[1.0, 3.0, 99.0, 5.0], group_id=[0, 0, 0, 1])
    assert group_baseline(batch)["scores"].tolist() == [-1, 1, 0, 0]


def test_lagrangian_and_teacher_rewards_by_hand():
    batch = batch_of([[1, 0, 1]], advantages=[[1, 9, 2]], cost_advantages=[[3, 9, -1]])
    assert rows_of(lagrangian(batch, multiplier=1.0)["advantages"]) == [[-1, 0, 1.5]]
    batch = batch_of([[1, 0, 1]], log_probs=[[-1, 9, -2]], teacher_log_probs=[[-0.5, 9, -4]])
    assert rows_of(teacher_rewards(batch)["rewards"]) == [[0.5, 0, -2]]


def test_renamed_estimators_work_on_the_other_columns():
    batch = reference_batch()
    names = {"rewards": "cost_rewards", "values": "cost_values", "bootstrap_values": "cost_bootstrap_values"}
    names |= {"advantages": "cost_advantages", "returns": "cost_returns"}
    others = Batch({names.get(name, name): column for name, column in batch.columns.items()}, 4)
    fn = renamed(gae.bind(gamma=0.9, lam=0.8), names)
    assert fn.writes == ("cost_advantages", "cost_returns") and "cost_values" in fn.reads and "values" not in fn.reads
    expected = gae(batch, gamma=0.9, lam=0.8)
    assert_same(fn(others), {names[name]: column for name, column in expected.items()})


# --- rows that must not count ---


@pytest.mark.parametrize(
    "estimator", [group_centred.bind(scale="std"), group_centred.bind(scale="none"), leave_one_out.bind()]
)
def test_a_fully_masked_row_has_no_influence_on_its_group(estimator):
    scores, ids = [1.0, np.nan, 2.0, 4.0], [0, 0, 0, 0]
    batch = batch_of([[1, 1], [0, 0], [1, 1], [1, 1]], scores=scores, group_id=ids)
    out = estimator(batch)["advantages"]
    assert rows_of(out)[1] == [0, 0]
    assert rows_of(out.rows([0, 2, 3])) == rows_of(estimator(batch.rows([0, 2, 3]))["advantages"])


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_of_one_is_declared_too_small_and_one_left_row_gets_zero(estimator):
    assert estimator.min_group == 2
    batch = batch_of([[1], [0]], scores=[3.0, 5.0], group_id=[0, 0])
    assert rows_of(estimator(batch)["advantages"]) == [[0], [0]]


def test_a_chain_needs_the_largest_group_of_its_parts():
    assert chain(overlong_penalty.bind(max_tokens=4, buffer_tokens=2), leave_one_out.bind()).min_group == 2
    assert chain(score_rewards.bind(), whiten.bind()).min_group == 1


# --- slow twins: the formulas, step by step ---


def action_steps(batch, row):
    return np.flatnonzero(batch["response_mask"][row])


def value_after(batch, row, steps, index, values):
    if index + 1 < len(steps):
        return float(values[index + 1])
    return 0.0 if batch["terminated"][row] else float(batch["bootstrap_values"][row])


def slow_gae(batch, row, steps, gamma, lam):
    rewards, values = (batch[name][row][steps].astype(float) for name in ("rewards", "values"))
    deltas = [r + gamma * value_after(batch, row, steps, i, values) - values[i] for i, r in enumerate(rewards)]
    advantages = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[i:])) for i in range(len(steps))]
    return {"advantages": advantages, "returns": advantages + values}


def slow_n_step(batch, row, steps, gamma, n):
    rewards, values = (batch[name][row][steps].astype(float) for name in ("rewards", "values"))
    returns = []
    for start in range(len(steps)):
        end = min(start + n, len(steps))
        total = sum(gamma**k * reward for k, reward in enumerate(rewards[start:end]))
        returns.append(total + gamma ** (end - start) * value_after(batch, row, steps, end - 1, values))
    return {"advantages": returns - values, "returns": returns}


def slow_v_trace(batch, row, steps, gamma, rho_clip, c_clip):
    """The sum of eq. 1 of the paper, not its recursion."""
    names = ("rewards", "values", "log_probs", "learner_log_probs")
    rewards, values, old, new = (batch[name][row][steps].astype(float) for name in names)
    rho, c = (np.minimum(limit, np.exp(new - old)) for limit in (rho_clip, c_clip))
    deltas = [
        rho[t] * (rewards[t] + gamma * value_after(batch, row, steps, t, values) - values[t]) for t in range(len(steps))
    ]
    targets = [
        values[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * deltas[t] for t in range(s, len(steps)))
        for s in range(len(steps))
    ]
    after = [value_after(batch, row, steps, t, targets) for t in range(len(steps))]
    return {"advantages": rho * (rewards + gamma * np.array(after) - values), "returns": targets}


@pytest.mark.parametrize(
    ("fast", "slow", "params"),
    [
        (gae, slow_gae, {"gamma": 0.9, "lam": 0.7}),
        (gae, slow_gae, {"gamma": 1.0, "lam": 1.0}),
        (n_step_returns, slow_n_step, {"gamma": 0.9, "n": 1}),
        (n_step_returns, slow_n_step, {"gamma": 0.9, "n": 3}),
        (v_trace, slow_v_trace, {"gamma": 0.9, "rho_clip": 1.5, "c_clip": 1.1}),
    ],
)
@quick
@given(seed=seeds)
def test_equals_the_formula_written_step_by_step(fast, slow, params, seed):
    batch = random_batch(seed)
    out = fast(batch, **params)
    for row in range(len(batch)):
        steps = action_steps(batch, row)
        for name, expected in slow(batch, row, steps, **params).items():
            np.testing.assert_allclose(out[name][row][steps], expected, rtol=1e-6, atol=1e-6)


@quick
@given(seed=seeds)
def test_on_policy_v_trace_is_the_return_of_gae_with_lambda_one(seed):
    batch = random_batch(seed)
    batch = batch.with_columns(learner_log_probs=batch["log_probs"])
    assert_same(v_trace(batch, gamma=0.9), gae(batch, gamma=0.9, lam=1.0), 1e-6)


# --- properties of all estimators ---


@each_estimator
def test_writes_what_it_declares_on_action_steps_only(fn):
    batch = random_batch(3, num_rows=6)
    out = fn(batch.select(fn.reads).freeze())
    assert set(out) == set(fn.writes)
    Batch(out, len(batch))  # kinds, types and lengths fit the vocabulary
    for column in out.values():
        if isinstance(column, Ragged):
            assert not column.values[~batch["response_mask"].values].any()


@each_estimator
@quick
@given(seed=seeds)
def test_row_order_does_not_matter(fn, seed):
    batch = random_batch(seed)
    order = np.random.default_rng(seed).permutation(len(batch))
    expected = Batch(fn(batch), len(batch)).rows(order).columns
    assert_same(fn(batch.rows(order)), expected, 1e-6)


def padded_with_garbage(batch, rng):
    """Up to three more masked steps behind each row; NaN and infinities in every masked place."""
    more = rng.integers(0, 4, len(batch))
    masks = [np.append(mask, np.zeros(n, bool)) for mask, n in zip(batch["response_mask"], more, strict=True)]
    mask = Ragged.from_rows(masks, bool)
    columns = {**batch.columns, "response_mask": mask}
    for name in TIME:
        values = rng.choice([np.nan, np.inf, -np.inf], len(mask.values)).astype(np.float32)
        values[mask.values] = batch[name].values[batch["response_mask"].values]
        columns[name] = mask.like(values)
    masked = np.array([not row.any() for row in masks], bool)
    columns |= {name: np.where(masked, np.float32(np.nan), batch[name]) for name in ROW}
    return Batch(columns, len(batch))


@each_estimator
@quick
@given(seed=seeds)
def test_masked_steps_never_matter(fn, seed):
    batch = random_batch(seed)
    changed = padded_with_garbage(batch, np.random.default_rng(seed))
    expected, actual = fn(batch), fn(changed)
    for name, column in actual.items():
        if isinstance(column, Ragged):
            before, after = batch["response_mask"].values, changed["response_mask"].values
            np.testing.assert_array_equal(column.values[after], expected[name].values[before])
            assert not column.values[~after].any()
        else:
            acting = np.array([row.any() for row in changed["response_mask"]], bool)
            np.testing.assert_array_equal(column[acting], expected[name][acting])


@each_estimator
def test_a_batch_without_rows(fn):
    out = fn(random_batch(0, num_rows=0))
    assert {name: len(column) for name, column in out.items()} == dict.fromkeys(fn.writes, 0)


RELABELLINGS = {
    "huge": lambda ids: np.array([2**62 - int(i) for i in ids], np.int64),
    "beyond int64": lambda ids: objects(10**30 * (int(i) - 1) for i in ids),
    "strings": lambda ids: np.array([f"prompt {i}" for i in ids], "U16"),
    "objects": lambda ids: objects(("data set", int(i), None) for i in ids),
    "mixed": lambda ids: objects(int(i) if i % 2 else f"{i}" for i in ids),
}


@pytest.mark.parametrize("relabel", RELABELLINGS.values(), ids=RELABELLINGS)
@pytest.mark.parametrize("fn", GROUPED)
def test_group_ids_compare_by_equality(fn, relabel):
    batch = random_batch(11, num_rows=40)
    renamed = batch.with_columns(group_id=relabel(batch["group_id"]))
    assert fn(batch)["advantages"].values.any()
    assert_same(fn(renamed), fn(batch))


@each_estimator
def test_travels_by_name(fn):
    copy = pickle.loads(pickle.dumps(fn))
    batch = random_batch(5, num_rows=4)
    assert (copy.reads, copy.writes, copy.min_group) == (fn.reads, fn.writes, fn.min_group)
    assert_same(copy(batch), fn(batch))
