"""What networks see of observations: numbers.

Shapes: B observations, N steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.core.errors import DataError
from hybridflow.models.layers import allocated

if TYPE_CHECKING:
    from gymnasium import Space

    from hybridflow.models.nets import NetConfig

__all__ = ["Convolutions", "Features", "Moments", "image_axes", "kind_of", "make_features"]


def kind_of(space: Space[Any]) -> str:
    """Name of the space's class: this module needs no gymnasium to be imported."""
    return type(space).__name__


class Moments(nn.Module):
    """Mean and deviation of numbers [N, width] that were seen, as buffers: saved, exported and published. At each ``add``
    what came before counts ``keep`` as much as until then. At first, a little of mean 0 and deviation 1 (as in Gymnasium).
    """

    mean: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, width: int, keep: float = 1.0) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("squares", torch.full((width,), 1e-4, dtype=torch.float64))  # of what is off the mean
        self.register_buffer("count", torch.full((), 1e-4, dtype=torch.float64))

    @property
    def variance(self) -> Tensor:
        """[width]"""
        return self.squares / self.count

    @torch.no_grad()
    def add(self, values: Tensor, total: Callable[[Tensor], Tensor]) -> None:
        """Take ``values`` [N, width] into account (Chan, Golub and LeVeque 1979). ``total`` sums a tensor over all that
        have some of them."""
        off = values.double() - self.mean
        sums = total(torch.cat([off.sum(0), (off**2).sum(0), off.new_tensor([len(off)])]))
        width = len(self.mean)
        sums, squares, count = sums[:width], sums[width:-1], sums[-1]
        if count > 0:
            self.squares *= self.keep
            self.count *= self.keep
            together = self.count + count
            self.squares += squares - sums**2 / count * (1 - self.count / together)
            self.mean += sums / together
            self.count.copy_(together)


class Features(nn.Module):
    """Observations of a space as numbers: boxes are flattened (bytes scaled to [0, 1]), discrete ones become one-hot.

    With ``normalise``, boxes get mean 0 and deviation 1, by the ``moments`` of what was ``observe``d, and are cut at 10.
    ``width``: of an observation. ``size``: of what becomes of it.
    """

    def __init__(self, space: Space[Any], normalise: bool = False) -> None:
        super().__init__()
        self.num_classes, self.start = 0, 0
        kind = kind_of(space)
        if kind == "Discrete":
            self.num_classes, self.start = int(space.n), int(space.start)
            self.width = self.num_classes
        elif kind == "Box":
            self.width = math.prod(space.shape)
        else:
            hint = 'environment.wrappers = [{ name = "FlattenObservation" }] makes boxes of others'
            raise DataError(f"observation space {space}: not supported; supported are Box and Discrete; {hint}")
        self.size = self.width
        self.normalise = normalise and not self.num_classes
        if self.normalise:
            self.moments = Moments(self.width)

    def forward(self, observations: Tensor) -> Tensor:
        """[B, ...] observations -> [B, size]"""
        return self.numbers(observations)

    def numbers(self, observations: Tensor) -> Tensor:
        """[B, ...] observations -> [B, width], without anything that is trained"""
        if self.num_classes:
            return F.one_hot(observations.long() - self.start, self.num_classes).float()
        flat = observations if observations.dim() == 2 else observations.reshape(observations.shape[0], self.width)
        features = flat.float()
        if self.normalise:
            scale = (self.moments.variance + 1e-8).rsqrt()
            return ((features - self.moments.mean.float()) * scale.float()).clip(-10, 10)
        return features / 255 if observations.dtype == torch.uint8 else features

    def observe(self, observations: Tensor, total: Callable[[Tensor], Tensor]) -> None:
        """Take [N, ...] observations into account. ``total`` sums a tensor over all that have some of them."""
        self.moments.add(observations.reshape(len(observations), self.width), total)


def make_features(space: Space[Any], config: NetConfig, generator: torch.Generator) -> Features:
    """What a network of ``config.kind`` sees: numbers, of images by convolutions. DataError if ``space`` is none for it."""
    if config.kind == "cnn" or (config.memory and image_axes(space) is not None):
        return Convolutions(space, config.normalise, generator)
    return Features(space, config.normalise)


def image_axes(space: Space[Any]) -> tuple[int, ...] | None:
    """How the axes of an image stand after those that are put together as its channels: (channels..., height, width); None
    for what is no image. Channels come last, as in Gymnasium, or first where those are fewest ([4, 84, 84])."""
    shape: tuple[int, ...] = space.shape or () if kind_of(space) == "Box" else ()
    if len(shape) == 2:
        return (0, 1)
    if len(shape) == 3:
        return (0, 1, 2) if shape[0] < min(shape[1:]) else (2, 0, 1)
    return (0, 3, 1, 2) if len(shape) == 4 else None  # a stack of images with channels last


def convolutions(height: int, width: int) -> list[tuple[int, int, int]]:
    """(channels, kernel, stride) of each layer: those of Mnih et al. 2015 for large images; for small ones three of kernel
    3, which cut what they can't fill and halve what is larger than 15."""
    if min(height, width) >= 36:
        return [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    layers, side = list[tuple[int, int, int]](), min(height, width)
    for channels in (16, 32, 64):
        kernel, stride = min(3, side), 2 if side > 15 else 1
        layers.append((channels, kernel, stride))
        side = (side - kernel) // stride + 1
    return layers


class Convolutions(Features):
    """Images as ``size`` numbers, by ``convolutions`` with ReLU after each; orthogonal weights with gain sqrt(2), biases of
    zero. DataError if ``space`` holds no images."""

    def __init__(self, space: Space[Any], normalise: bool, generator: torch.Generator) -> None:
        super().__init__(space, normalise)
        axes = image_axes(space)
        if axes is None:
            raise DataError(
                f'observation space {space}: kind = "cnn" needs images, a Box of [H, W], [H, W, C], [C, H, W] or a stack '
                'of them; use kind = "mlp", or environment.wrappers that give images'
            )
        self.shape, self.axes = tuple(space.shape), axes
        *channels, height, width = (self.shape[axis] for axis in axes)
        self.image = (math.prod(channels), height, width)
        layers, inputs = list[nn.Module](), self.image[0]
        for outputs, kernel, stride in convolutions(height, width):
            # From meta, so that torch's global generator is left alone.
            layer = allocated(nn.Conv2d(inputs, outputs, kernel, stride, device="meta"))
            nn.init.orthogonal_(layer.weight, math.sqrt(2), generator)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            layers, inputs = [*layers, layer], outputs
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.layers, self.size = nn.ModuleList(layers), inputs * height * width

    def forward(self, observations: Tensor) -> Tensor:
        """[B, ...] observations -> [B, size]"""
        seen = self.numbers(observations).view(-1, *self.shape).permute(0, *(1 + axis for axis in self.axes))
        x = seen.reshape(-1, *self.image)
        for layer in self.layers:
            x = layer(x).relu_()
        return x.flatten(1)
