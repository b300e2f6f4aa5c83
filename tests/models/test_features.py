"""What networks see of images: convolutions by their size, wherever the channels are."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hybridflow.core.errors import DataError
from hybridflow.models.action_values import ActionValues, CategoricalQNet, DiscreteActionValues, DuellingMLP
from hybridflow.models.features import Convolutions, image_axes
from hybridflow.models.nets import NetConfig, make_policy, make_q
from hybridflow.models.values import ValueNet

CNN = NetConfig(kind="cnn", hidden=(16,))


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("shape", "channels", "layers", "size"),
    [
        ((7, 7, 3), 3, [(16, 3, 1), (32, 3, 1), (64, 3, 1)], 64),
        ((10, 10, 4), 4, [(16, 3, 1), (32, 3, 1), (64, 3, 1)], 64 * 16),
        ((3, 3, 2), 2, [(16, 3, 1), (32, 1, 1), (64, 1, 1)], 64),
        ((24, 20), 1, [(16, 3, 2), (32, 3, 1), (64, 3, 1)], 64 * 7 * 5),
        ((4, 84, 84), 4, [(32, 8, 4), (64, 4, 2), (64, 3, 1)], 64 * 49),
        ((210, 160, 3), 3, [(32, 8, 4), (64, 4, 2), (64, 3, 1)], 64 * 22 * 16),
        ((4, 84, 84, 3), 12, [(32, 8, 4), (64, 4, 2), (64, 3, 1)], 64 * 49),
    ],
)
def test_kernels_follow_the_size_of_images(shape, channels, layers, size) -> None:
    made = Convolutions(image(*shape), False, random())
    assert [(one.out_channels, one.kernel_size[0], one.stride[0]) for one in made.layers] == layers
    assert made.layers[0].in_channels == channels
    assert made(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, size) and made.size == size


@torch.no_grad()
def test_channels_may_come_first_or_last() -> None:
    last, first = Convolutions(image(9, 8, 3), False, random()), Convolutions(image(3, 9, 8), False, random())
    seen = torch.randint(0, 255, (2, 9, 8, 3), dtype=torch.uint8, generator=random())
    torch.testing.assert_close(last(seen), first(seen.permute(0, 3, 1, 2)))
    expected = torch.nn.functional.conv2d(seen.permute(0, 3, 1, 2) / 255, last.layers[0].weight).relu()
    np.testing.assert_allclose(expected, last.layers[0](seen.permute(0, 3, 1, 2) / 255).relu(), atol=1e-6)


def test_channels_come_last_where_it_can_not_be_told() -> None:
    assert image_axes(image(7, 9, 7)) == image_axes(image(8, 8, 8)) == (2, 0, 1)


@torch.no_grad()
def test_a_stack_of_images_is_channels() -> None:
    stacked, flat = Convolutions(image(2, 9, 8, 3), False, random()), Convolutions(image(6, 9, 8), False, random())
    seen = torch.randint(0, 255, (2, 2, 9, 8, 3), dtype=torch.uint8, generator=random())
    torch.testing.assert_close(stacked(seen), flat(seen.permute(0, 1, 4, 2, 3).reshape(2, 6, 9, 8)))


@torch.no_grad()
def test_bytes_count_from_0_to_1_and_floats_as_they_are() -> None:
    seen = torch.randint(0, 255, (2, 7, 7, 3), dtype=torch.uint8, generator=random())
    made = Convolutions(image(7, 7, 3), False, random())
    torch.testing.assert_close(made(seen), made(seen / 255))


@torch.no_grad()
def test_images_are_normalised_pixel_by_pixel() -> None:
    made = Convolutions(image(7, 7, 3), True, random())
    seen = torch.randint(0, 9, (500, 7, 7, 3), dtype=torch.uint8, generator=random())
    made.observe(seen, lambda tensor: tensor)
    numbers = made.numbers(seen)
    assert numbers.shape == (500, 147) and float(numbers.mean(0).abs().max()) < 0.01
    assert float((numbers.std(0) - 1).abs().max()) < 0.01


def test_weights_are_orthogonal_with_gain_sqrt_2() -> None:
    for layer in Convolutions(image(10, 10, 4), False, random()).layers:
        flat = layer.weight.detach().flatten(1)
        square = flat @ flat.T if len(flat) <= flat.shape[1] else flat.T @ flat
        torch.testing.assert_close(square, 2 * torch.eye(len(square)), atol=1e-5, rtol=1e-5)
        assert not layer.bias.any()


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (4,)), spaces.Discrete(3), spaces.Box(-1, 1, (2, 2, 2, 2, 2))])
def test_what_is_no_image_is_refused_in_one_line(space) -> None:
    with pytest.raises(DataError, match=r'kind = "cnn" needs images.*use kind = "mlp"') as caught:
        make_policy(space, spaces.Discrete(2), CNN, random())
    assert "\n" not in str(caught.value)


def test_all_networks_take_images() -> None:
    space, box = image(7, 7, 3), spaces.Box(-1, 1, (2,), np.float32)
    seen, acted = torch.randint(0, 255, (5, 7, 7, 3), dtype=torch.uint8, generator=random()), torch.ones(5, 2)
    q = make_q(space, spaces.Discrete(3), CNN, random())
    duelling = make_q(space, spaces.Discrete(3), CNN, random())
    duelling.mlp = DuellingMLP(duelling.features.size, 3, 1, CNN, random())
    outputs = {
        "policy": make_policy(space, box, CNN, random()).outputs({"observations": seen, "actions": acted})["log_probs"],
        "value": ValueNet(space, CNN, random()).outputs({"observations": seen})["values"],
        "q": q(seen).sum(1),
        "duelling": duelling(seen).sum(1),
        "c51": CategoricalQNet(space, 3, CNN, random(), (0.0, 1.0, 5))(seen).sum(1),
        "ensemble": ActionValues(space, box, CNN, random(), 2)(seen, acted).sum(0),
        "discrete ensemble": DiscreteActionValues(space, 3, CNN, random(), 2)(seen).sum((0, 2)),
    }
    assert all(values.shape == (5,) for values in outputs.values())
    q(seen).sum().backward()
    assert all(parameter.grad is not None for parameter in q.parameters())
    assert all(float(values.detach().std()) > 0 for values in outputs.values())
