"""Losses of SAC, TD3 and DDPG against formulas that are written out with numpy, one transition at a time."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hybridflow.core.errors import ContractError
from hybridflow.core.seeding import torch_generator
from hybridflow.models.action_values import ActionValues, DiscreteActionValues, Temperature
from hybridflow.models.continuous import DeterministicPolicy, SquashedGaussianPolicy
from hybridflow.models.nets import CategoricalPolicy, NetConfig
from hybridflow.ops.actor_critic import (
    deterministic_policy_loss,
    discrete_sac_critic_loss,
    discrete_sac_policy_loss,
    sac_critic_loss,
    sac_policy_loss,
    td3_critic_loss,
)
from hybridflow.ops.td import bootstrapped

SEEN = spaces.Box(-1.0, 1.0, (3,), np.float32)
DONE = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
MIDDLE, UNIT = np.array([0.0, 3.0]), np.array([2.0, 2.0])
NET = NetConfig(hidden=(5,), activation="tanh")
ALPHA, N = 0.3, 4


def net(layers, x):
    """A one-layer tanh network, [3] -> [outputs], with weights [inputs, outputs]."""
    (w1, b1), (w2, b2) = layers
    return np.tanh(x @ w1 + b1) @ w2 + b2


def of_mlp(mlp):
    return [(layer.weight.detach().double().numpy().T, layer.bias.detach().double().numpy()) for layer in mlp.layers]


def members(mlp):
    """The layers of every member of an ensemble."""
    return [of_mlp(member) for member in mlp.members]


def spread(module, seed):
    """Away from initial weights, where everything is near zero."""
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    return module


def networks(policy, critics=2):
    made = {
        "policy": spread(policy(SEEN, DONE, NET, torch_generator(1, "x")), 1),
        "target_policy": spread(policy(SEEN, DONE, NET, torch_generator(1, "x")), 2),
        "temperature": Temperature(ALPHA),
    }
    for seed, name in enumerate(("critic", "target_critic"), start=3):
        made[name] = spread(ActionValues(SEEN, DONE, NET, torch_generator(1, "x"), critics), seed)
    return made


def discrete_networks():
    made = {
        "policy": spread(CategoricalPolicy(SEEN, 3, 0.01, NET, torch_generator(1, "x")), 1),
        "temperature": Temperature(ALPHA),
    }
    for seed, name in enumerate(("critic", "target_critic"), start=3):
        made[name] = spread(DiscreteActionValues(SEEN, 3, NET, torch_generator(1, "x"), 2), seed)
    return made


def transitions(discrete=False):
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 3, N) if discrete else (MIDDLE + UNIT * rng.uniform(-1, 1, (N, 2))).astype(np.float32)
    return {
        "observations": rng.normal(size=(N, 3)).astype(np.float32),
        "actions": actions,
        "rewards": rng.normal(size=N).astype(np.float32),
        "discounts": np.array([0.9, 0.0, 0.81, 0.9], np.float32),
        "weights": np.array([1.0, 0.5, 2.0, 1.0], np.float32),
        "final_observations": rng.normal(size=(N, 3)).astype(np.float32),
        "noise": rng.normal(size=(N, 2)).astype(np.float32),
    }


def tensors(data):
    return {name: torch.tensor(values) for name, values in data.items()}


def q_values(critic, s, a):
    return [net(layers, np.concatenate([s, (a - MIDDLE) / UNIT]))[0] for layers in members(critic.mlp)]


def squashed(policy, s, noise):
    """Action and log-density of it in units, by the definition of a transformed density."""
    mean, log_std = np.split(net(of_mlp(policy.mlp), s), 2)
    u = mean + np.exp(log_std) * noise
    density = np.prod(np.exp(-0.5 * noise**2) / np.sqrt(2 * np.pi) / np.exp(log_std) / (1 - np.tanh(u) ** 2))
    return MIDDLE + UNIT * np.tanh(u), math.log(density)


def weighted_squares(nets, data, targets):
    terms, errors = [], []
    for i in range(N):
        found = q_values(nets["critic"], data["observations"][i], data["actions"][i])
        terms.append(data["weights"][i] * sum((q - targets[i]) ** 2 for q in found) / 2)
        errors.append(np.mean(found) - targets[i])
    return terms, errors


def check(result, terms, errors):
    np.testing.assert_allclose(result.terms.detach().numpy(), terms, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.columns["td_errors"].numpy(), errors, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.metrics["td_error"].numpy(), np.abs(errors), rtol=1e-4, atol=1e-5)


def test_sac_critic_by_hand():
    nets, data = networks(SquashedGaussianPolicy), transitions()
    targets = []
    for i in range(N):
        action, log_prob = squashed(nets["policy"], data["final_observations"][i], data["noise"][i])
        soft = min(q_values(nets["target_critic"], data["final_observations"][i], action)) - ALPHA * log_prob
        targets.append(data["rewards"][i] + data["discounts"][i] * soft)
    loss = sac_critic_loss.bind()
    result = loss(nets, tensors(data))
    check(result, *weighted_squares(nets, data, targets))
    result.terms.sum().backward()
    with_gradients = {name for name, one in nets.items() if any(p.grad is not None for p in one.parameters())}
    assert with_gradients == {"critic"} == set(loss.trains) and loss.noise and loss.writes == ("td_errors",)


def test_sac_policy_and_temperature_by_hand():
    nets, data = networks(SquashedGaussianPolicy), transitions()
    expected, log_probs = [], []
    for i in range(N):
        action, log_prob = squashed(nets["policy"], data["observations"][i], data["noise"][i])
        log_probs.append(log_prob)
        expected.append(ALPHA * log_prob - min(q_values(nets["critic"], data["observations"][i], action)))
    plain = sac_policy_loss.bind(target_entropy=None)
    np.testing.assert_allclose(plain(nets, tensors(data)).terms.detach().numpy(), expected, rtol=1e-4, atol=1e-4)
    assert plain.trains == ("policy",)
    adapting = sac_policy_loss.bind(target_entropy=-2.0)
    result = adapting(nets, tensors(data))
    assert adapting.trains == ("policy", "temperature")
    np.testing.assert_allclose(result.metrics["entropy"].numpy(), np.negative(log_probs), rtol=1e-4, atol=1e-4)
    result.terms.sum().backward()
    # d/d log alpha of log alpha (H - target), whatever else depends on alpha.
    assert nets["temperature"].log.grad.item() == pytest.approx(sum(-x + 2.0 for x in log_probs), rel=1e-4)
    adapted = [p.grad.clone() for p in nets["policy"].parameters()]
    nets["policy"].zero_grad()
    plain(nets, tensors(data)).terms.sum().backward()
    for one, other in zip(adapted, nets["policy"].parameters(), strict=True):
        assert torch.equal(one, other.grad)


def test_gradients_of_the_sac_policy_are_those_of_finite_differences():
    nets, data = networks(SquashedGaussianPolicy), transitions()
    loss = sac_policy_loss.bind(target_entropy=None)
    loss(nets, tensors(data)).terms.sum().backward()
    weight, step = nets["policy"].mlp.layers[1].weight, 1e-2
    gradient, at = weight.grad.clone(), weight.data.clone()
    for place in ((0, 1), (1, 3), (2, 0), (3, 4)):
        values = []
        for sign in (1, -1):
            weight.data.copy_(at)
            weight.data[place] += sign * step
            values.append(loss(nets, tensors(data)).terms.sum().item())
        assert gradient[place].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2, abs=2e-2)


def test_discrete_sac_by_hand():
    nets, data = discrete_networks(), transitions(discrete=True)
    target_entropy, terms, errors, policy_terms, entropies = 0.5, [], [], [], []

    def distribution(s):
        logits = net(of_mlp(nets["policy"].mlp), s)
        return np.exp(logits) / np.exp(logits).sum()

    def q(name, s):
        return np.array([net(layers, s) for layers in members(nets[name].mlp)])

    for i in range(N):
        p = distribution(data["final_observations"][i])
        value = (p * (q("target_critic", data["final_observations"][i]).min(0) - ALPHA * np.log(p))).sum()
        found = q("critic", data["observations"][i])[:, data["actions"][i]]
        target = data["rewards"][i] + data["discounts"][i] * value
        terms.append(data["weights"][i] * ((found - target) ** 2).sum() / 2)
        errors.append(found.mean() - target)
        p = distribution(data["observations"][i])
        entropies.append(-(p * np.log(p)).sum())
        values = (p * (ALPHA * np.log(p) - q("critic", data["observations"][i]).min(0))).sum()
        policy_terms.append(values + math.log(ALPHA) * (entropies[-1] - target_entropy))
    check(discrete_sac_critic_loss.bind()(nets, tensors(data)), terms, errors)
    result = discrete_sac_policy_loss.bind(target_entropy=target_entropy)(nets, tensors(data))
    np.testing.assert_allclose(result.terms.detach().numpy(), policy_terms, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.metrics["entropy"].numpy(), entropies, rtol=1e-4)


@pytest.mark.parametrize(("critics", "smoothing"), [(2, 0.7), (1, 0.0)])
def test_td3_and_ddpg_by_hand(critics, smoothing):
    nets, data = networks(DeterministicPolicy, critics), transitions()
    targets, values = [], []
    for i in range(N):
        greedy = np.tanh(net(of_mlp(nets["target_policy"].mlp), data["final_observations"][i]))
        moved = np.clip(greedy + np.clip(smoothing * data["noise"][i], -0.5, 0.5), -1, 1)
        following = q_values(nets["target_critic"], data["final_observations"][i], MIDDLE + UNIT * moved)
        targets.append(data["rewards"][i] + data["discounts"][i] * min(following))
        action = MIDDLE + UNIT * np.tanh(net(of_mlp(nets["policy"].mlp), data["observations"][i]))
        values.append(-q_values(nets["critic"], data["observations"][i], action)[0])
    result = td3_critic_loss.bind(smoothing=smoothing, smoothing_clip=0.5)(nets, tensors(data))
    check(result, *weighted_squares(nets, data, targets))
    policy_loss = deterministic_policy_loss.bind()
    result = policy_loss(nets, tensors(data))
    np.testing.assert_allclose(result.terms.detach().numpy(), values, rtol=1e-4, atol=1e-5)
    assert policy_loss.trains == ("policy",)


def test_what_follows_an_end_counts_nothing_even_if_it_is_no_number():
    columns = {"rewards": torch.tensor([1.0, 2.0]), "discounts": torch.tensor([0.0, 0.5])}
    assert bootstrapped(columns, torch.tensor([float("nan"), 4.0])).tolist() == [1.0, 4.0]
    with pytest.raises(ContractError, match=r"2 steps in 1 rows.*one transition"):
        bootstrapped({**columns, "discounts": torch.tensor([0.5])}, torch.tensor([1.0]))
