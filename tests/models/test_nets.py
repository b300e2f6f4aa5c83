import math
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import DataError
from hybridflow.core.seeding import torch_generator
from hybridflow.models.layers import MLP
from hybridflow.models.nets import Categorical, Gaussian, NetConfig, joined, make_policy, make_q
from hybridflow.models.values import ValueNet
from hybridflow.workers.units import action_columns

seen = partial(action_columns, device=torch.device("cpu"))

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


def steps_batch(num_actions: int = 4) -> Batch:
    rng = np.random.default_rng(0)
    lengths = np.array([2, 3])
    return Batch(
        {
            "observations": Ragged(rng.standard_normal((5, 3)).astype(np.float32), lengths),
            "actions": Ragged(rng.integers(0, num_actions, 5), lengths),
            "response_mask": Ragged(np.array([True, True, False, True, True]), lengths),
            "final_observations": rng.standard_normal((2, 3)).astype(np.float32),
        }
    )


def test_mlp_is_orthogonal_with_gains_and_depends_on_the_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    mlp = MLP((8, 8, 4), "tanh", 0.01, torch_generator(1, "init"))
    assert torch.equal(torch.random.get_rng_state(), before)
    hidden, head = mlp.layers[0].weight, mlp.layers[1].weight
    assert torch.allclose(hidden @ hidden.T, 2 * torch.eye(8), atol=1e-5)
    assert torch.allclose(head @ head.T, 1e-4 * torch.eye(4), atol=1e-8)
    assert mlp.layers[0].bias.abs().sum() == 0
    again = MLP((8, 8, 4), "tanh", 0.01, torch_generator(1, "init"))
    assert torch.equal(again.layers[0].weight, hidden)


def test_mlp_by_hand():
    mlp = MLP((2, 2, 1), "relu", 1.0, torch_generator(1, "init"))
    with torch.no_grad():
        mlp.layers[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        mlp.layers[1].weight.copy_(torch.tensor([[2.0, 5.0]]))
    assert mlp(torch.tensor([[3.0, 4.0], [-1.0, -2.0]])).tolist() == [[6.0], [10.0]]


def test_categorical_by_hand():
    distribution = Categorical(torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log())
    assert distribution.entropy().tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    assert distribution.mode.tolist() == [0, 0]
    assert distribution.log_prob(torch.tensor([2, 0])).tolist() == pytest.approx([math.log(0.25), 0.0])
    almost_one = 1 - 2.0**-53
    assert distribution.sample(torch.tensor([[0.51], [almost_one]], dtype=torch.float64)).tolist() == [1, 0]
    assert distribution.sample(torch.tensor([[0.49], [0.0]], dtype=torch.float64)).tolist() == [0, 0]


def test_explore_mixes_with_uniform():
    greedy = Categorical(torch.tensor([[0.0, -math.inf], [0.0, -math.inf], [0.0, -math.inf]]))
    mixed = greedy.explore(torch.tensor([0.0, 0.5, 1.0]))
    assert mixed.log_probabilities.exp().flatten().tolist() == pytest.approx([1.0, 0.0, 0.75, 0.25, 0.5, 0.5])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_categorical_matches_torch(seed, num_actions):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(4, num_actions, generator=generator)
    ours, theirs = Categorical(logits.log_softmax(-1)), torch.distributions.Categorical(logits=logits)
    actions = ours.sample(torch.rand(4, 1, generator=generator, dtype=torch.float64))
    assert torch.allclose(ours.log_prob(actions), theirs.log_prob(actions), atol=1e-6)
    assert torch.allclose(ours.entropy(), theirs.entropy(), atol=1e-5)


def test_categorical_samples_follow_the_probabilities():
    probabilities = torch.tensor([0.1, 0.6, 0.3])
    uniforms = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    actions = Categorical(probabilities.log().expand(1000, 3)).sample(uniforms)
    assert torch.bincount(actions).tolist() == [100, 600, 300]


def test_gaussian_matches_torch_and_inverts_the_normal_distribution():
    mean, log_std = torch.tensor([[[0.5], [-1.0]]]), torch.tensor([[[0.2], [-0.3]]])
    ours, theirs = Gaussian(mean, log_std), torch.distributions.Normal(mean, log_std.exp())
    actions = ours.sample(torch.tensor([[0.5, 0.8413447460685429]], dtype=torch.float64))
    assert actions.shape == (1, 2, 1)
    assert actions.flatten().tolist() == pytest.approx([0.5, -1.0 + math.exp(-0.3)], abs=1e-6)
    assert ours.log_prob(actions).item() == pytest.approx(theirs.log_prob(actions).sum().item(), abs=1e-6)
    assert ours.entropy().item() == pytest.approx(theirs.entropy().sum().item(), abs=1e-6)
    extreme = ours.sample(torch.tensor([[0.0, 1 - 2.0**-53]], dtype=torch.float64))
    assert torch.isfinite(extreme).all()


def test_outputs_are_packed_over_the_action_steps():
    batch = steps_batch()
    policy = make_policy(BOX, spaces.Discrete(4), NetConfig(), torch_generator(1, "policy"))
    outputs = policy.outputs(seen(batch))
    kept = batch.ragged("response_mask").values
    distribution = policy.distribution(torch.from_numpy(batch.ragged("observations").values[kept]))
    expected = distribution.log_prob(torch.from_numpy(batch.ragged("actions").values[kept]))
    assert torch.equal(outputs["log_probs"], expected) and outputs["entropy"].shape == (4,)
    assert policy.unit == "step" and policy.inputs == ("observations", "actions")


def test_outputs_of_single_steps_equal_those_of_whole_pieces():
    batch = steps_batch()
    value = ValueNet(BOX, NetConfig(), torch_generator(1, "value"))
    assert torch.equal(*(value.outputs(seen(rows))["values"] for rows in (batch, batch.steps())))
    assert value.bootstrap(batch).shape == (2,) and value.inputs == ("observations",)


def test_networks_take_read_only_columns():
    batch = steps_batch().freeze()
    policy = make_policy(BOX, spaces.Discrete(4), NetConfig(), torch_generator(1, "policy"))
    assert policy.outputs(seen(batch))["log_probs"].shape == (4,)


def test_gaussian_policy_on_a_box():
    policy = make_policy(BOX, spaces.Box(-2.0, 2.0, (2,), np.float32), NetConfig(), torch_generator(1, "policy"))
    lengths = np.array([3])
    batch = Batch(
        {
            "observations": Ragged(np.ones((3, 3), np.float32), lengths),
            "actions": Ragged(np.zeros((3, 2), np.float32), lengths),
            "response_mask": Ragged(np.ones(3, bool), lengths),
        }
    )
    outputs = policy.outputs(seen(batch))
    assert outputs["entropy"].tolist() == pytest.approx([math.log(2 * math.pi * math.e)] * 3)
    outputs["log_probs"].sum().backward()
    assert policy.log_std.grad is not None and policy.log_std.grad.shape == (2,)


def test_discrete_observations_are_one_hot_and_bytes_are_scaled():
    q = make_q(spaces.Discrete(3, start=5), spaces.Discrete(2), NetConfig(hidden=()), torch_generator(1, "q"))
    weight = q.mlp.layers[0].weight
    assert torch.allclose(q(torch.tensor([5, 7])), weight.T[[0, 2]])
    bytes_space = spaces.Box(0, 255, (2, 2), np.uint8)
    value = ValueNet(bytes_space, NetConfig(hidden=()), torch_generator(1, "value"))
    full = value(torch.full((1, 2, 2), 255, dtype=torch.uint8))
    assert full.item() == pytest.approx(value.mlp.layers[0].weight.sum().item(), abs=1e-6)


def test_q_net_acts_greedily():
    q = make_q(BOX, spaces.Discrete(4), NetConfig(), torch_generator(1, "q"))
    observations = torch.randn(6, 3, generator=torch_generator(1, "x"))
    distribution = q.distribution(observations)
    assert torch.equal(distribution.mode, q(observations).argmax(-1))
    assert distribution.log_probabilities.exp().sum(-1).tolist() == [1.0] * 6


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_policy(BOX, spaces.MultiBinary(3), NetConfig(), torch_generator(1, "x")),
        lambda: make_q(BOX, BOX, NetConfig(), torch_generator(1, "x")),
        lambda: ValueNet(spaces.MultiBinary(3), NetConfig(), torch_generator(1, "x")),
    ],
)
def test_unsupported_spaces_are_named(make):
    with pytest.raises(DataError, match=r"space .*(MultiBinary|Box)\(.*supported are") as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("frozen", [(), ("layers.0.weight", "layers.0.bias"), ("layers.2.weight", "layers.2.bias")])
@pytest.mark.parametrize("of_input", [False, True])
def test_layers_of_tanh_in_one_node_are_those_of_autograd(frozen, of_input):
    one, other = (MLP((3, 8, 5, 2), "tanh", 1.0, torch_generator(1, "init")) for _ in range(2))
    other.twice_differentiable = True
    results = []
    for net in (one, other):
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name not in frozen)
        x = torch.linspace(-2, 2, 12).reshape(4, 3).requires_grad_(of_input)
        out = net(x)
        (out**2).sum().backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in net.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert (results[0][1] is None) == (not of_input)


def test_gradients_of_gradients_are_refused_rather_than_wrong():
    net = MLP((3, 8, 2), "tanh", 1.0, torch_generator(1, "init"))
    (gradient,) = torch.autograd.grad((net(torch.ones(1, 3)) ** 2).sum(), net.layers[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()
    net.twice_differentiable = True
    (gradient,) = torch.autograd.grad((net(torch.ones(1, 3)) ** 2).sum(), net.layers[0].weight, create_graph=True)
    gradient.sum().backward()
    assert net.layers[0].weight.grad.abs().sum() > 0


def test_distributions_join():
    logits = torch.randn(3, 2).log_softmax(-1)
    together = joined([Categorical(logits[:1]), Categorical(logits[1:])])
    assert torch.equal(together.log_probabilities, logits)


def test_observations_get_mean_zero_and_deviation_one():
    net, draw = ValueNet(BOX, NetConfig(normalise=True), torch_generator(1, "init")), torch_generator(2, "data")
    seen = 3 + 5 * torch.randn(400, 3, generator=draw)
    for part in seen.split(150):
        net.features.observe(part, lambda x: x)
    features = net.features.forward(seen)
    torch.testing.assert_close(features.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(features.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)
    assert net.features.forward(1e6 * torch.ones(1, 3)).max() == 10
    net.features.observe(torch.zeros(0, 3), lambda x: x)
    assert torch.equal(net.features.forward(seen), features)


def test_statistics_of_parts_are_those_of_the_whole():
    seen = torch.linspace(-3, 9, 30).reshape(10, 3)
    whole, part = (ValueNet(BOX, NetConfig(normalise=True), torch_generator(1, "init")).features for _ in range(2))
    whole.observe(seen, lambda x: x)
    other: list = []
    part_of = ValueNet(BOX, NetConfig(normalise=True), torch_generator(1, "init")).features
    part_of.observe(seen[4:], lambda x: other.append(x) or x)
    part.observe(seen[:4], lambda x: x + other[0])
    for name in ("mean", "squares", "count"):
        torch.testing.assert_close(getattr(part.moments, name), getattr(whole.moments, name))
    assert {"features.moments.mean", "features.moments.squares", "features.moments.count"} <= dict(
        ValueNet(BOX, NetConfig(normalise=True), torch_generator(1, "init")).named_buffers()
    ).keys()


def test_no_uniform_number_draws_an_impossible_action() -> None:
    impossible_first_and_last = Categorical(torch.tensor([[0.0, 1.0, 1.0, 0.0]]).log().log_softmax(-1).expand(3, 4))
    edges = torch.tensor([[0.0], [0.5], [1 - 2.0**-53]], dtype=torch.float64)
    assert impossible_first_and_last.sample(edges).tolist() == [1, 2, 2]
