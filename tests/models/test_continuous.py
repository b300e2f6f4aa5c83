"""Policies over bounded actions, and critics of them."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import DataError
from hybridflow.core.seeding import torch_generator
from hybridflow.models.action_values import ActionValues, DiscreteActionValues, EnsembleMLP, Temperature
from hybridflow.models.continuous import Bounds, Deterministic, DeterministicPolicy, Noisy, Squashed, SquashedGaussianPolicy
from hybridflow.models.layers import MLP
from hybridflow.models.nets import NetConfig, joined

SEEN = spaces.Box(-1.0, 1.0, (3,), np.float32)
DONE = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
NET = NetConfig(hidden=(8, 6), activation="relu")


def squashed(seed: int, scale: float = 1.0) -> Squashed:
    generator = torch.Generator().manual_seed(seed)
    mean, log_std = scale * torch.randn(5, 2, generator=generator), torch.randn(5, 2, generator=generator)
    return Squashed(mean, log_std, Bounds(DONE))


def test_units_are_half_widths_of_the_bounds():
    bounds = Bounds(DONE)
    actions = torch.tensor([[-2.0, 0.0], [0.0, 5.0], [2.0, 7.5]])
    assert bounds.units(actions).tolist() == [[-1.0, -1.0], [0.0, 0.0], [1.0, 0.5]]
    assert torch.equal(bounds.from_units(bounds.units(actions)), actions)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (2,), np.float32)])
def test_actions_without_bounds_are_refused(space):
    with pytest.raises(DataError, match="supported is Box with finite bounds"):
        Bounds(space)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_densities_are_those_of_torch_in_units(seed):
    ours = squashed(seed)
    normal = torch.distributions.Normal(ours.mean.double(), ours.log_std.double().exp())
    theirs = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    noise = torch.randn(5, 2, generator=torch.Generator().manual_seed(seed + 1))
    actions, log_probs = ours.draw(noise)
    u = ours.mean.double() + ours.log_std.double().exp() * noise.double()
    expected = (normal.log_prob(u) - torch.distributions.TanhTransform().log_abs_det_jacobian(u, u.tanh())).sum(-1)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        actions.double(), torch.tensor([0.0, 5.0]) + u.tanh() * torch.tensor([2.0, 5.0]), rtol=1e-5, atol=1e-5
    )
    inside = (u.abs() < 4).all(-1)
    from_actions = theirs.log_prob(u.tanh()).sum(-1)
    torch.testing.assert_close(ours.log_prob(actions).double()[inside], from_actions[inside], rtol=1e-2, atol=1e-2)


def test_densities_and_their_gradients_stay_finite_where_tanh_is_one():
    mean = torch.tensor([[50.0, -30.0]], requires_grad=True)
    far = Squashed(mean, torch.zeros(1, 2), Bounds(DONE))
    actions, log_probs = far.draw(torch.zeros(1, 2))
    assert actions.tolist() == [[2.0, 0.0]]
    # log(1 - tanh(u)^2) is 2 log 2 - 2 |u| for large |u|.
    assert log_probs.item() == pytest.approx(-math.log(2 * math.pi) + 2 * (50 + 30) - 4 * math.log(2))
    log_probs.backward()
    assert mean.grad.tolist() == [[2.0, -2.0]]
    assert torch.isfinite(far.log_prob(actions)).all()


def test_samples_are_functions_of_uniforms_and_follow_the_density():
    wide = Squashed(torch.zeros(20000, 2), torch.full((20000, 2), math.log(0.5)), Bounds(DONE))
    uniforms = torch.rand(20000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actions = wide.sample(uniforms)
    assert torch.equal(actions, wide.sample(uniforms))
    units = wide.bounds.units(actions)
    assert units.abs().max() <= 1 and abs(units.mean()) < 0.02
    # The median of |tanh(0.5 z)| is tanh of half the median of |z|.
    assert units.abs().median().item() == pytest.approx(math.tanh(0.5 * 0.6745), abs=0.01)
    assert torch.equal(wide.mode, wide.bounds.middle.expand(20000, 2))


def test_uniform_actions_fill_the_bounds():
    bounds = Bounds(DONE)
    uniforms = torch.tensor([[0.0, 0.0], [0.5, 0.25], [1 - 2**-53, 0.75]], dtype=torch.float64)
    assert bounds.fill(uniforms).tolist() == [[-2.0, 0.0], [0.0, 2.5], [2.0, 7.5]]
    assert bounds.fill_log_prob == pytest.approx(math.log(0.25))


def test_exploration_noise_by_hand():
    greedy = Deterministic(torch.tensor([[0.0, 5.0], [2.0, 10.0]]), Bounds(DONE))
    noisy = greedy.noisy(0.1)
    assert isinstance(noisy, Noisy)
    one_deviation = 0.8413447460685429
    moved = noisy.sample(torch.tensor([[one_deviation, 0.5], [one_deviation, 0.5]], dtype=torch.float64))
    torch.testing.assert_close(moved, torch.tensor([[0.2, 5.0], [2.0, 10.0]]))
    expected = 2 * (-0.5 * math.log(2 * math.pi) - math.log(0.1)) - 0.5
    assert noisy.log_prob(moved)[0].item() == pytest.approx(expected)


def test_distributions_are_joined_with_their_bounds():
    one, other = squashed(1), squashed(2)
    together = joined([one, other])
    assert torch.equal(together.mean, torch.cat([one.mean, other.mean])) and together.bounds is one.bounds
    noisy = joined([Noisy(torch.zeros(2, 2), 0.1, one.bounds), Noisy(torch.ones(3, 2), 0.1, one.bounds)])
    assert noisy.mean.shape == (5, 2) and noisy.std == 0.1


def test_policies_depend_on_the_generator_alone_and_stay_within_bounds():
    seen = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    one, again = (SquashedGaussianPolicy(SEEN, DONE, NET, torch_generator(1, "init")) for _ in range(2))
    assert torch.equal(one(seen), again(seen)) and one.distribution(seen).mean.shape == (64, 2)
    policy = DeterministicPolicy(SEEN, DONE, NET, torch_generator(1, "init"))
    assert torch.equal(policy.distribution(seen).mode, policy.perturbed(seen))
    moved = policy.perturbed(seen, torch.full((64, 2), 5.0))
    assert torch.equal(moved, torch.tensor([2.0, 10.0]).expand(64, 2))
    near = policy.perturbed(seen, torch.full((64, 2), 0.1)) - policy.perturbed(seen)
    torch.testing.assert_close(near, torch.tensor([0.2, 0.5]).expand(64, 2), rtol=1e-4, atol=1e-5)


def test_an_ensemble_is_its_members_side_by_side():
    ensemble = EnsembleMLP((3, 8, 6, 4), 2, NET, torch_generator(1, "init"))
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    for member in range(2):
        single = MLP((3, 8, 6, 4), "relu", 1.0, torch_generator(2, "init"))
        single.load_state_dict(ensemble.members[member].state_dict())
        assert torch.equal(ensemble(x)[member], single(x))
    assert not torch.equal(*ensemble(x)) and torch.equal(ensemble(x, 1), ensemble(x)[:1])
    hidden = ensemble.members[0].layers[1].weight
    torch.testing.assert_close(hidden @ hidden.T, 2 * torch.eye(6), rtol=1e-4, atol=1e-5)


def test_critics_value_actions_in_units():
    critic = ActionValues(SEEN, DONE, NET, torch_generator(1, "init"), 2)
    seen, actions = torch.zeros(4, 3), torch.tensor([[2.0, 10.0]]).expand(4, 2)
    inputs = torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0]]).expand(4, 5)
    torch.testing.assert_close(critic(seen, actions), critic.mlp(inputs)[..., 0])
    assert critic(seen, actions).shape == (2, 4) and critic(seen, actions, 1).shape == (1, 4)
    assert DiscreteActionValues(SEEN, 5, NET, torch_generator(1, "init"), 2)(seen).shape == (2, 4, 5)
    assert Temperature(0.2)().tolist() == pytest.approx([0.2])
