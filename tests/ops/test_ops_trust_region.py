"""TRPO's step against plain linear algebra on a policy that is small enough for it."""

from contextlib import nullcontext
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from torch import nn

from hybridflow.models.nets import Categorical, Gaussian
from hybridflow.ops.trust_region import conjugate_gradient, trust_region_step


def total(x):
    return x.detach()


class Linear(nn.Module):
    """Log-probabilities from one matrix, whose Fisher information is known in closed form."""

    def __init__(self, num_features, num_actions):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(num_features, num_actions, generator=torch.Generator().manual_seed(0)))

    def distribution(self, observations):
        return Categorical((observations @ self.weight).log_softmax(-1))

    def twice_differentiable(self):
        return nullcontext()


def steps(count=40, num_features=3, num_actions=2):
    draw = torch.Generator().manual_seed(1)
    policy = Linear(num_features, num_actions)
    observations = torch.randn(count, num_features, generator=draw)
    with torch.no_grad():
        distribution = policy.distribution(observations)
        actions = distribution.sample(torch.rand(count, 1, generator=draw, dtype=torch.float64))
        log_probs = distribution.log_prob(actions)
    advantages = torch.randn(count, generator=draw)
    return policy, {"observations": observations, "actions": actions, "log_probs": log_probs, "advantages": advantages}


@pytest.mark.parametrize("size", [1, 5, 12])
def test_conjugate_gradients_solve_the_system(size):
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size))
    matrix, target = root @ root.T + np.eye(size), rng.normal(size=size)
    a = torch.from_numpy(matrix)
    x = conjugate_gradient(lambda v: a @ v, torch.from_numpy(target), 2 * size)
    np.testing.assert_allclose(x.numpy(), np.linalg.solve(matrix, target), rtol=1e-6)


def test_conjugate_gradients_of_nothing_are_nothing():
    assert not conjugate_gradient(lambda v: v, torch.zeros(3), 5).any()


def expected_step(policy, columns, max_kl, damping):
    """F⁻¹ g scaled to the trust region, with F = mean of x xᵀ ⊗ (diag(p) - p pᵀ) and numpy's solver."""
    x, weight = columns["observations"].double().numpy(), policy.weight.detach().double().numpy()
    logits = x @ weight
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    spread = np.einsum("nk,kj->nkj", p, np.eye(p.shape[1])) - np.einsum("nk,nj->nkj", p, p)
    fisher = np.einsum("na,nb,nkj->akbj", x, x, spread).reshape(weight.size, weight.size) / len(x)
    chosen = np.eye(p.shape[1])[columns["actions"].numpy()] - p
    gradient = np.einsum("n,na,nk->ak", columns["advantages"].double().numpy(), x, chosen).ravel() / len(x)
    damped = fisher + damping * np.eye(weight.size)
    direction = np.linalg.solve(damped, gradient)
    return (np.sqrt(2 * max_kl / (direction @ damped @ direction)) * direction).reshape(weight.shape)


def test_the_step_is_the_natural_gradient_at_the_edge_of_the_region():
    policy, columns = steps()
    before = policy.weight.detach().clone()
    expected = expected_step(policy, columns, 0.001, 0.1)
    result = trust_region_step({"policy": policy}, columns, total, max_kl=0.001, damping=0.1, iterations=20)
    np.testing.assert_allclose((policy.weight.detach() - before).numpy(), expected, rtol=1e-3, atol=1e-6)
    assert result.metrics["step_scale"].unique().tolist() == [1.0]
    assert 0 < float(result.metrics["policy_kl"].mean()) <= 0.001
    assert float(-result.terms.mean()) > float(columns["advantages"].mean())
    assert not result.drift.any()


def test_steps_that_are_too_long_are_halved_and_the_policy_stays_if_none_helps():
    policy, columns = steps()
    scaled = trust_region_step({"policy": policy}, columns, total, max_kl=5.0, damping=0.1, backtracks=20)
    assert float(scaled.metrics["policy_kl"].mean()) <= 5.0 and 0 < float(scaled.metrics["step_scale"][0]) <= 1
    policy, columns = steps()
    before = policy.weight.detach().clone()
    kept = trust_region_step({"policy": policy}, columns, total, max_kl=1e-3, backtracks=0)
    assert torch.equal(policy.weight, before) and kept.metrics["step_scale"][0] == 0
    still = {**columns, "advantages": torch.zeros_like(columns["advantages"])}
    trust_region_step({"policy": policy}, still, total, max_kl=1e-3)
    assert torch.equal(policy.weight, before)


def test_kl_of_distributions_is_torchs():
    draw = torch.Generator().manual_seed(3)
    one, other = (torch.randn(5, 4, generator=draw).log_softmax(-1) for _ in range(2))
    theirs = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (one, other)))
    torch.testing.assert_close(Categorical(one).kl(Categorical(other)), theirs)
    means, stds = (torch.randn(2, 5, 3, generator=draw) for _ in range(2))
    ours = Gaussian(means[0], stds[0]).kl(Gaussian(means[1], stds[1]))
    normals = (torch.distributions.Normal(mean, std.exp()) for mean, std in zip(means, stds, strict=True))
    torch.testing.assert_close(ours, torch.distributions.kl_divergence(*normals).sum(-1))


def test_two_parts_that_sum_take_the_step_of_the_whole():
    policy, columns = steps()
    trust_region_step({"policy": policy}, columns, total, max_kl=0.01)
    barrier, shared, moved = Barrier(2), [torch.zeros(()), torch.zeros(())], {}

    def part(number):
        def summed(x):
            shared[number] = x.detach().clone()
            barrier.wait()
            out = shared[0] + shared[1]
            barrier.wait()
            return out

        own, rows = steps()[0], slice(None, 13) if number == 0 else slice(13, None)
        trust_region_step({"policy": own}, {name: x[rows] for name, x in columns.items()}, summed, max_kl=0.01)
        moved[number] = own.weight.detach()

    threads = [Thread(target=part, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(moved[0], moved[1])
    torch.testing.assert_close(moved[0], policy.weight.detach(), rtol=1e-4, atol=1e-6)
