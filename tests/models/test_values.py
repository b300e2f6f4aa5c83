"""Critics whose returns are normalised: values are in the rewards' units, what is learned is of size 1."""

import math

import pytest
import torch
from conftest import CARTPOLE, PENDULUM, with_keys
from gymnasium import spaces

from hybridflow.config import validate
from hybridflow.core.errors import ConfigError
from hybridflow.models.nets import NetConfig
from hybridflow.models.values import LEAST_DEVIATION, ValueNet
from hybridflow.ops.losses import value_loss

BOX = spaces.Box(-9, 9, (3,))


def value_of(**keys: object) -> ValueNet:
    net = NetConfig.model_validate({"normalise_returns": True, "hidden": [16], **keys})
    return ValueNet(BOX, net, torch.Generator().manual_seed(0))


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def columns_of(mean: float, deviation: float, steps: int = 200) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    seen = torch.randn(steps, 3, generator=random)
    return {"observations": seen, "returns": mean + deviation * torch.tanh(seen.sum(1)), "values": torch.zeros(steps)}


@pytest.mark.parametrize(("mean", "deviation"), [(-800.0, 300.0), (1e5, 2e4), (0.0, 0.05), (3.0, 0.0)])
def test_values_stay_what_they_were_when_statistics_change(mean: float, deviation: float) -> None:
    network = value_of()
    for columns in (columns_of(5.0, 7.0), columns_of(mean, deviation)):  # also at the first time
        before = network.outputs(columns)
        network.observe(columns, alone)
        after = network.outputs(columns)
        torch.testing.assert_close(after["values"], before["values"], rtol=1e-4, atol=1e-4 * (1 + abs(mean)))
        assert not torch.equal(after["value_scale"], before["value_scale"])
    assert network.returns is not None and float(network.returns.mean) != 5.0


def test_returns_of_earlier_updates_are_forgotten() -> None:
    network = value_of()
    for _ in range(3):
        network.observe(columns_of(0.0, 1.0), alone)
    for _ in range(300):
        network.observe(columns_of(1000.0, 10.0), alone)
    assert network.returns is not None
    assert abs(float(network.returns.mean) - float(columns_of(1000.0, 10.0)["returns"].mean())) < 20
    assert float(network.outputs(columns_of(0, 1))["value_scale"][0]) < 200


def test_equal_returns_have_a_least_deviation() -> None:
    network = value_of()
    for _ in range(2000):
        network.observe(columns_of(3.0, 0.0), alone)
    scale = network.outputs(columns_of(0, 1))["value_scale"]
    assert math.isclose(float(scale[0]), LEAST_DEVIATION, rel_tol=1e-5)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_loss_is_that_of_normalised_values(clip: float | None) -> None:
    """Whatever the units: rewards a thousand times as large give the same terms."""
    terms = []
    for unit in (1.0, 1000.0):
        network, columns = value_of(), columns_of(3.0 * unit, 2.0 * unit)
        for _ in range(400):  # the deviation of 1 at the very beginning is forgotten
            network.observe(columns, alone)
        with torch.no_grad():
            network.mlp.layers[-1].weight.copy_(value_of().mlp.layers[-1].weight)
            network.mlp.layers[-1].bias.zero_()
        outputs = network.outputs(columns)
        seen = columns | {"values": outputs["values"].detach() + unit * columns["observations"][:, 0]}
        terms.append(value_loss.bind(clip=clip)(outputs, seen).terms)
    torch.testing.assert_close(terms[0], terms[1], rtol=1e-3, atol=1e-4)
    assert 0.1 < float(terms[0].detach().mean()) < 10


def errors_after(steps: int, **keys: object) -> float:
    """Mean error, in deviations of the returns, of a critic that has taken so many steps."""
    network, columns = value_of(**keys), columns_of(-800.0, 300.0)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        value_loss.bind()(network.outputs(columns), columns).terms.mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        network.observe(columns, alone)
    return float((network.outputs(columns)["values"] - columns["returns"]).detach().abs().mean() / 300)


def test_large_returns_are_learned_as_fast_as_small_ones() -> None:
    assert errors_after(400) < 0.3 < 2 < errors_after(400, normalise_returns=False)


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        (CARTPOLE, {"actor__net": {"normalise_returns": True}}, "actor.net.normalise_returns: a policy has no returns"),
        (PENDULUM, {"critic__net__normalise_returns": True}, "critic.net.normalise_returns: sac learns from no returns"),
    ],
)
def test_who_has_no_returns_says_so(data, keys, message) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(with_keys(data, run_dir="unused", **keys), "test")
