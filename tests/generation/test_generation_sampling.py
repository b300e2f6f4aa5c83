import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import UserError
from hybridflow.core.seeding import uniforms
from hybridflow.generation.request import SamplingParams
from hybridflow.generation.sampling import inverse_cdf, sample

LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 0.9])
DRAWS = 40_000


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def truncated(probs, top_k, top_p):
    """The exact distribution, spelled out one token at a time."""
    order = np.argsort(-probs)[: top_k or len(probs)]
    kept = probs[order] / probs[order].sum()
    count, mass = 0, 0.0
    while mass < top_p and count < len(kept):
        mass += kept[count]
        count += 1
    exact = np.zeros_like(probs)
    exact[order[:count]] = kept[:count] / mass
    return exact


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.8), (1, 1.0), (0, 1e-9)])
def test_frequencies_are_the_exact_probabilities(temperature, top_k, top_p):
    draws = uniforms(0, "sample", np.arange(DRAWS), np.zeros(DRAWS))
    logits = torch.tensor(LOGITS, dtype=torch.float32).repeat(DRAWS, 1)
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, log_probs = sample(logits, draws, params)
    probs = softmax(LOGITS / temperature)
    exact = truncated(probs, top_k, top_p)
    counts = np.bincount(tokens.numpy(), minlength=len(exact))
    assert counts[exact == 0].sum() == 0
    support = exact > 0
    chi_square = ((counts - DRAWS * exact)[support] ** 2 / (DRAWS * exact[support])).sum()
    assert chi_square < 24.3  # the 99.9 % point of 7 degrees of freedom
    np.testing.assert_allclose(log_probs.numpy(), np.log(probs)[tokens.numpy()], atol=1e-6)


def test_top_p_keeps_the_token_that_reaches_the_mass():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(100, 1)
    tokens, _ = sample(logits, np.linspace(0, 0.999, 100), SamplingParams(1, top_p=0.6))
    assert set(tokens.tolist()) == {0, 1}


def test_a_flat_nucleus_is_wider_than_the_first_guess():
    logits = torch.zeros(1000, 1000)
    tokens, log_probs = sample(logits, np.arange(1000) / 1000, SamplingParams(1, top_p=0.5))
    assert 499 <= len(set(tokens.tolist())) <= 501
    np.testing.assert_allclose(log_probs.numpy(), -np.log(1000), atol=1e-5)


def test_greedy_takes_the_best_token_at_temperature_one():
    logits = torch.tensor(LOGITS, dtype=torch.float32)[None]
    tokens, log_probs = sample(logits, np.array([0.99]), SamplingParams(1, temperature=0))
    assert tokens.tolist() == [0]
    assert log_probs.item() == pytest.approx(np.log(softmax(LOGITS)[0]), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 5, 128, 129, 1000, 4096]), st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 0.99]))
def test_inverse_cdf_finds_the_interval_of_the_draw(vocab, seed, share_of_zeros):
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=(20, vocab)) * (rng.random((20, vocab)) >= share_of_zeros)
    weights[:, rng.integers(vocab)] = 1.0
    weights = weights.astype(np.float32)
    draws = rng.random(20).astype(np.float32)
    draws[:2] = 0, 1
    index = inverse_cdf(torch.from_numpy(weights), torch.from_numpy(draws)).numpy()
    rows, cdf = np.arange(20), weights.cumsum(1, dtype=np.float64)
    assert (weights[rows, index] > 0).all()
    target, slack = draws * cdf[:, -1], 1e-5 * cdf[:, -1]
    assert (cdf[rows, index] >= target - slack).all()
    assert (cdf[rows, index] - weights[rows, index] <= target + slack).all()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"stop_strings": ("",)}, "stop_strings is"),
    ],
)
def test_wrong_parameters_are_refused(wrong, told):
    with pytest.raises(UserError, match=told):
        SamplingParams(**{"max_new_tokens": 1, **wrong})
