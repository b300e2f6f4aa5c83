"""Preference losses against independent definitions in plain Python, by hand, and by their gradients."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.ops.preference import calibration, dpo, ipo, kto, kto_reference_points, mismatched, pairwise, row_log_ratios

quick = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
POLICY_LOSSES = [
    dpo.bind(beta=0.1),
    dpo.bind(beta=0.5, label_smoothing=0.2),
    ipo.bind(beta=0.3),
    kto.bind(beta=0.4),
]
each_policy_loss = pytest.mark.parametrize("fn", POLICY_LOSSES, ids=lambda fn: f"{fn.name}-{len(fn.params)}")


def pair_inputs(seed: int, pairs: int = 4):
    """(outputs, columns) in float64; the preferred row of a pair may come first or second."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 2 * pairs)
    first = rng.integers(0, 2, pairs).astype(bool)
    steps = int(lengths.sum())
    columns = {
        "row_index": torch.arange(2 * pairs).repeat_interleave(torch.tensor(lengths)),
        "group_id": torch.arange(pairs).repeat_interleave(2),
        "preferred": torch.tensor(np.stack([first, ~first], 1).ravel()),
        "ref_log_probs": torch.tensor(rng.normal(-3, 1, steps)),
        "margins": torch.tensor(rng.exponential(size=pairs)).repeat_interleave(2),
        "reference_points": torch.full((2 * pairs,), rng.exponential()).double(),
    }
    outputs = {"log_probs": torch.tensor(rng.normal(-3, 1, steps)), "scores": torch.tensor(rng.normal(size=2 * pairs))}
    return {name: x.requires_grad_() for name, x in outputs.items()}, columns


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def twins(outputs, columns):
    """(score, log-ratio) of the preferred and of the other row of every pair, by loops."""
    rows: dict[int, list[float]] = {}
    outputs = {name: x.detach() for name, x in outputs.items()}
    for row, new, ref in zip(columns["row_index"], outputs["log_probs"], columns["ref_log_probs"], strict=True):
        rows.setdefault(int(row), []).append(float(new) - float(ref))
    for pair in range(len(columns["preferred"]) // 2):
        places = sorted((2 * pair, 2 * pair + 1), key=lambda row: not columns["preferred"][row])
        yield [(float(outputs["scores"][row]), math.fsum(rows[row])) for row in places]


@given(seeds)
@quick
def test_losses_equal_their_definitions(seed: int) -> None:
    outputs, columns = pair_inputs(seed)
    margins = columns["margins"][::2].tolist()
    z = float(columns["reference_points"][0])
    expected: dict[str, list[float]] = {name: [] for name in ("pairwise", "margins", "dpo", "smooth", "ipo", "kto")}
    for ((score_w, ratio_w), (score_l, ratio_l)), margin in zip(twins(outputs, columns), margins, strict=True):
        h = ratio_w - ratio_l
        expected["pairwise"].append(-math.log(sigmoid(score_w - score_l)))
        expected["margins"].append(-math.log(sigmoid(score_w - score_l - margin)))
        expected["dpo"].append(-math.log(sigmoid(0.3 * h)))
        expected["smooth"].append(-0.8 * math.log(sigmoid(0.3 * h)) - 0.2 * math.log(sigmoid(-0.3 * h)))
        expected["ipo"].append((h - 1 / 0.6) ** 2)
        expected["kto"].append(1 - sigmoid(0.3 * (ratio_w - z)) + 1 - sigmoid(0.3 * (z - ratio_l)))
    got = {
        "pairwise": pairwise(outputs, columns).terms,
        "margins": pairwise(outputs, columns, use_margins=True).terms,
        "dpo": dpo(outputs, columns, beta=0.3).terms,
        "smooth": dpo(outputs, columns, beta=0.3, label_smoothing=0.2).terms,
        "ipo": ipo(outputs, columns, beta=0.3).terms,
        "kto": kto(outputs, columns, beta=0.3).terms.view(-1, 2).sum(1),
    }
    for name, values in expected.items():
        torch.testing.assert_close(got[name].detach(), torch.tensor(values, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@each_policy_loss
def test_gradients_are_those_of_the_values(fn) -> None:
    outputs, columns = pair_inputs(3)
    assert torch.autograd.gradcheck(lambda x: fn({"log_probs": x}, columns).terms, outputs["log_probs"])
    scores = outputs["scores"]
    assert torch.autograd.gradcheck(lambda x: pairwise({"scores": x}, columns, use_margins=True).terms, scores)


def test_pairwise_by_hand() -> None:
    columns = {"group_id": torch.tensor([7, 7, 9, 9]), "preferred": torch.tensor([True, False, False, True])}
    loss = pairwise({"scores": torch.tensor([1.0, 1.0, 2.0, 0.0])}, columns)
    terms, metrics = loss.terms, loss.metrics
    assert terms.tolist() == pytest.approx([math.log(2), math.log(1 + math.e**2)])
    assert metrics["accuracy"].tolist() == [0, 0] and metrics["margin"].tolist() == [0, -2]
    assert metrics["chosen"].tolist() == [1, 0] and metrics["rejected"].tolist() == [1, 2]
    assert metrics["brier"].tolist() == pytest.approx([0.25, sigmoid(2) ** 2])


def test_dpo_at_the_reference_by_hand() -> None:
    """At π = π_ref the loss is log 2 and each token of a response is pushed by β / 2 (eq. 7 of the paper)."""
    _, columns = pair_inputs(1)
    same = columns["ref_log_probs"].clone().requires_grad_()
    terms = dpo({"log_probs": same}, columns, beta=0.4).terms
    assert terms.tolist() == pytest.approx([math.log(2)] * 4)
    (gradient,) = torch.autograd.grad(terms.sum(), same)
    preferred = columns["preferred"][columns["row_index"]]
    torch.testing.assert_close(gradient, torch.where(preferred, -0.2, 0.2).double())


def test_ipo_is_least_at_its_target_and_kto_saturates() -> None:
    columns = {
        "group_id": torch.tensor([0, 0]),
        "preferred": torch.tensor([True, False]),
        "row_index": torch.tensor([0, 1]),
    }
    columns |= {"ref_log_probs": torch.zeros(2), "reference_points": torch.zeros(2)}
    at_target = ipo({"log_probs": torch.tensor([2.5, -2.5])}, columns, beta=0.1)
    assert at_target.terms.tolist() == [0.0] and at_target.metrics["margin"].tolist() == [0.5]
    far = kto({"log_probs": torch.tensor([900.0, -900.0])}, columns, beta=0.1)
    assert far.terms.tolist() == [0.0, 0.0] and far.metrics["chosen"].tolist() == [90.0]


@each_policy_loss
def test_losses_split_between_pairs(fn) -> None:
    outputs, columns = pair_inputs(5)
    whole = fn(outputs, columns).terms
    size = len(whole) // 2
    parts = []
    for rows in (range(4), range(4, 8)):
        steps = (columns["row_index"] >= rows[0]) & (columns["row_index"] <= rows[-1])
        part = {
            n: x[steps] if n in ("row_index", "ref_log_probs") else x[rows[0] : rows[-1] + 1] for n, x in columns.items()
        }
        part["row_index"] = part["row_index"] - rows[0]
        parts.append(fn({"log_probs": outputs["log_probs"][steps]}, part).terms)
    assert all(len(part) == size for part in parts)
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("pairs", "preferred"),
    [([0, 0, 1, 1], [True, True, False, True]), ([0, 1, 0, 1], [True, True, False, True]), ([0, 0, 1, 2], [1, 0, 1, 0])],
)
def test_rows_that_are_no_pairs_are_told(pairs: list[int], preferred: list[bool]) -> None:
    columns = {"group_id": torch.tensor(pairs), "preferred": torch.tensor(preferred, dtype=torch.bool)}
    with pytest.raises(ContractError, match="rows are no pairs"):
        pairwise({"scores": torch.zeros(4)}, columns)


def test_margins_are_read_only_where_they_count() -> None:
    assert "margins" in pairwise.bind(use_margins=True).reads and "margins" not in pairwise.bind().reads
    assert pairwise.bind().per == dpo.bind(beta=1).per == "group" and kto.bind(beta=1).per == "row"
    assert pickle.loads(pickle.dumps(dpo.bind(beta=0.2))).params == {"beta": 0.2}


def rows(prompts: list[list[int]], responses: list[list[int]], **columns) -> Batch:
    tokens = Ragged.from_rows([p + r for p, r in zip(prompts, responses, strict=True)], np.int64)
    mask = Ragged.from_rows([[False] * len(p) + [True] * len(r) for p, r in zip(prompts, responses, strict=True)], bool)
    more = {name: tokens.like(np.array(values, np.float32)) for name, values in columns.items()}
    return Batch({"sample_id": np.arange(len(prompts)), "tokens": tokens, "response_mask": mask, **more})


def test_mismatched_rows_by_hand() -> None:
    batch = rows([[1], [1], [2, 3], [2, 3]], [[10, 11], [20], [30], [40, 41, 42]])
    mixed = mismatched(batch)
    assert [row.tolist() for row in mixed["tokens"]] == [[1, 30], [1, 40, 41, 42], [2, 3, 10, 11], [2, 3, 20]]
    assert [row.tolist() for row in mixed["response_mask"]][2] == [False, False, True, True]
    with pytest.raises(ContractError, match="two pairs"):
        mismatched(batch.rows([0, 1]))


def test_reference_points_are_the_mean_log_ratio_of_rows_and_never_negative() -> None:
    new, ref = [9, -1.0, -2.0, 9, -3.0], [9, -2.0, -2.5, 9, -3.5]  # prompts' values, here 9, never count
    batch = rows([[1], [2]], [[5, 6], [7]], learner_log_probs=new, ref_log_probs=ref)
    assert row_log_ratios(batch).tolist() == [1.5, 0.5]
    assert kto_reference_points(batch)["reference_points"].tolist() == [1.0, 1.0]
    other = rows([[1], [2]], [[5, 6], [7]], learner_log_probs=ref, ref_log_probs=new)
    assert kto_reference_points(other)["reference_points"].tolist() == [0.0, 0.0]


def test_calibration_by_hand() -> None:
    def logit(p: float) -> float:
        return math.log(p / (1 - p))

    found = calibration(np.array([logit(0.82), logit(0.88), -logit(0.82), logit(0.54)]))
    assert found["probability"] == pytest.approx((0.82 + 0.88 + 0.18 + 0.54) / 4)
    assert found["brier"] == pytest.approx((0.18**2 + 0.12**2 + 0.82**2 + 0.46**2) / 4)
    # bins of [½, 1] by 0.05: 0.82 twice, one of them right; 0.88, right; 0.54, right
    assert found["calibration_error"] == pytest.approx((abs(1 - 1.64) + 0.12 + 0.46) / 4)
    assert calibration(np.zeros(3)) == {"probability": 0.5, "brier": 0.25, "calibration_error": 0.0}
