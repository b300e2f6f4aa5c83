"""C51 against its algorithm 1, atom by atom, and the networks of DQN's switches."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from hybridflow.core.seeding import torch_generator
from hybridflow.models.action_values import CategoricalQNet, DuellingMLP
from hybridflow.models.layers import MLP
from hybridflow.models.nets import NetConfig
from hybridflow.ops.td import c51_loss

SEEN = spaces.Box(-1.0, 1.0, (3,), np.float32)
NET = NetConfig(hidden=(6, 5), activation="tanh")
SUPPORT = (-2.0, 4.0, 7)
N, K, Z = 6, 3, 7


class Atoms(nn.Module):
    """Logits [states, K, Z] of states by number."""

    def __init__(self, seed):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(4, K, Z, generator=torch.Generator().manual_seed(seed)))
        self.support = torch.linspace(*SUPPORT)

    def log_probabilities(self, observations):
        return self.logits[observations].log_softmax(-1)

    def forward(self, observations):
        return (self.log_probabilities(observations).exp() * self.support).sum(-1)


def transitions():
    rng = np.random.default_rng(0)
    return {
        "observations": rng.integers(0, 4, N),
        "actions": rng.integers(0, K, N),
        "rewards": np.array([0.5, 1.0, -9.0, 9.0, 0.25, 2.0], np.float32),
        "discounts": np.array([0.9, 0.81, 0.9, 0.9, 0.0, 0.5], np.float32),
        "weights": np.array([1.0, 2.0, 1.0, 0.5, 1.0, 1.0], np.float32),
        "final_observations": rng.integers(0, 4, N),
    }


def algorithm_1(reward, discount, probabilities):
    """Lines 5 to 12 of the paper, with the case that it leaves out: an atom that lands on another."""
    low, high, _ = SUPPORT
    width, shares = (high - low) / (Z - 1), np.zeros(Z)
    for j, z in enumerate(np.linspace(*SUPPORT)):
        b = (min(max(reward + discount * z, low), high) - low) / width
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:
            shares[lower] += probabilities[j]
        else:
            shares[lower] += probabilities[j] * (upper - b)
            shares[upper] += probabilities[j] * (b - lower)
    return shares


@pytest.mark.parametrize("double", [False, True])
def test_c51_by_hand(double):
    networks, data = {"q": Atoms(1), "target": Atoms(2)}, transitions()
    q, target = (networks[name].logits.detach().softmax(-1).double().numpy() for name in ("q", "target"))
    terms, divergences, means = [], [], []
    for i in range(N):
        following = data["final_observations"][i]
        best = ((q if double else target)[following] @ np.linspace(*SUPPORT)).argmax()
        shares = algorithm_1(data["rewards"][i], data["discounts"][i], target[following, best])
        assert shares.sum() == pytest.approx(1)
        own = q[data["observations"][i], data["actions"][i]]
        terms.append(-data["weights"][i] * (shares * np.log(own)).sum())
        there = shares > 0
        divergences.append((shares[there] * np.log(shares[there] / own[there])).sum())
        means.append(own @ np.linspace(*SUPPORT))
    loss = c51_loss.bind(double=double)
    result = loss(networks, {name: torch.tensor(x) for name, x in data.items()})
    np.testing.assert_allclose(result.terms.detach().numpy(), terms, rtol=1e-4)
    np.testing.assert_allclose(result.columns["td_errors"].numpy(), divergences, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(result.metrics["q"].numpy(), means, rtol=1e-4)
    result.terms.sum().backward()
    assert networks["q"].logits.grad.abs().sum() > 0 and networks["target"].logits.grad is None


def test_values_over_atoms_are_their_means():
    q = CategoricalQNet(SEEN, K, NET, torch_generator(1, "init"), SUPPORT)
    seen = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    log_probs = q.log_probabilities(seen)
    assert log_probs.shape == (5, K, Z)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(5, K))
    torch.testing.assert_close(q(seen), (log_probs.exp() * torch.linspace(*SUPPORT)).sum(-1))
    assert torch.equal(q.distribution(seen).mode, q(seen).argmax(-1))


@pytest.mark.parametrize("hidden", [(6, 5), (5,)])
def test_duelling_streams_by_hand(hidden):
    duelling = DuellingMLP(3, K, 2, NetConfig(hidden=hidden, activation="tanh"), torch_generator(1, "init"))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def through(mlp: MLP, y):
        for layer in mlp.layers[:-1]:
            y = torch.tanh(y @ layer.weight.T + layer.bias)
        return y @ mlp.layers[-1].weight.T + mlp.layers[-1].bias

    inner = x if len(hidden) == 1 else torch.tanh(through(duelling.trunk, x))
    value, advantage = through(duelling.value, inner), through(duelling.advantage, inner).reshape(4, K, 2)
    expected = torch.stack([value + advantage[:, k] - advantage.mean(1) for k in range(K)], 1)
    torch.testing.assert_close(duelling(x).reshape(4, K, 2), expected)
    torch.testing.assert_close(duelling(x).reshape(4, K, 2).mean(1), value)
