import numpy as np
import pytest
import torch

from hybridflow.ops.kl import AdaptiveKL, estimate_kl


def test_estimators_by_hand():
    log_probs, other = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -1.5, -4.0])
    assert estimate_kl(log_probs, other, "k1").tolist() == [0, -0.5, 1]
    assert estimate_kl(log_probs, other, "k2").tolist() == [0, 0.125, 0.5]
    torch.testing.assert_close(
        estimate_kl(log_probs, other, "k3"), torch.tensor([0, np.exp(0.5) - 1.5, np.exp(-1.0)]).float()
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_arrays_and_tensors_agree(kind):
    p, q = np.random.default_rng(0).normal(size=(2, 50)) * 3
    expected = estimate_kl(torch.from_numpy(p), torch.from_numpy(q), kind).numpy()
    np.testing.assert_allclose(estimate_kl(p, q, kind), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_in_expectation_over_p(kind):
    p, q = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    torch.testing.assert_close((p.exp() * estimate_kl(p, q, kind)).sum(), expected)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_gradients_of_the_estimators_on_four_tokens(kind):
    """Differentiated as a loss under samples of p: k2 gives the gradient of KL(p || q) exactly, k3 that of KL(q || p)."""
    logits = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.1, 0.4, -0.3, 0.0], dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum() if kind == "k2" else (q.exp() * (q - p)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((p.detach().exp() * estimate_kl(p, q, kind)).sum(), logits)
    torch.testing.assert_close(estimated, exact)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_gradients_of_the_estimators_in_the_reward(kind):
    """REINFORCE with the estimate as cost: k1 gives the gradient of KL(p || q), k3 that of KL(p || q) - KL(q || p)."""
    logits = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.1, 0.4, -0.3, 0.0], dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum() - (0 if kind == "k1" else (q.exp() * (q - p)).sum())
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (reinforced,) = torch.autograd.grad(((p.exp() * estimate_kl(p, q, kind)).detach() * p).sum(), logits)
    torch.testing.assert_close(reinforced, exact)


def test_expected_gradient_of_k2_is_that_of_the_divergence_and_of_k1_is_zero():
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    q = torch.zeros(6, dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    weights = p.detach().exp()
    (k2,) = torch.autograd.grad((weights * estimate_kl(p, q, "k2")).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((weights * estimate_kl(p, q, "k1")).sum(), logits)
    torch.testing.assert_close(k2, exact)
    torch.testing.assert_close(k1, torch.zeros_like(k1))


def test_k3_stays_finite():
    log_probs = torch.tensor([-500.0, 0.0], requires_grad=True)
    kl = estimate_kl(log_probs, torch.tensor([0.0, -500.0]), "k3")
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert log_probs.grad.tolist() == [0, 0]


def test_adaptive_coefficient_by_hand():
    kl = AdaptiveKL(0.1, target=2.0, horizon=100)
    kl.update(2.2, num_samples=50)  # error 0.1
    assert kl.coef == pytest.approx(0.1 * 1.05)
    kl.update(20.0, num_samples=50)  # clipped to 0.2
    assert kl.coef == pytest.approx(0.105 * 1.1)
    kl.update(0.0, num_samples=100)  # clipped to -0.2
    assert kl.coef == pytest.approx(0.105 * 1.1 * 0.8)
    other = AdaptiveKL(7.0, target=2.0, horizon=100)
    other.load_state_dict(kl.state_dict())
    assert other.coef == kl.coef


def test_without_a_target_the_coefficient_stays():
    kl = AdaptiveKL(0.1)
    kl.update(50.0, num_samples=1000)
    assert kl.coef == 0.1
