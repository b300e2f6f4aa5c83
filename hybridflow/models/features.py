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

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["Features", "kind_of"]


def kind_of(space: Space[Any]) -> str:
    """Name of the space's class: this module needs no gymnasium to be imported."""
    return type(space).__name__


class Features(nn.Module):
    """Observations of a space as numbers: boxes are flattened (bytes scaled to [0, 1]), discrete ones become one-hot.

    With ``normalise``, boxes get mean 0 and deviation 1 by ``mean``, ``squares`` (of what is off the mean) and ``count`` of
    what was ``observe``d, and are cut at 10 deviations. These are buffers: they are saved, exported and published.
    """

    mean: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, space: Space[Any], normalise: bool = False) -> None:
        super().__init__()
        self.num_classes, self.start = 0, 0
        kind = kind_of(space)
        if kind == "Discrete":
            self.num_classes, self.start = int(space.n), int(space.start)
            self.size = self.num_classes
        elif kind == "Box":
            self.size = math.prod(space.shape)
        else:
            hint = 'environment.wrappers = [{ name = "FlattenObservation" }] makes boxes of Dict and Tuple'
            raise DataError(f"observation space {space}: not supported; supported are Box and Discrete; {hint}")
        self.normalise = normalise and not self.num_classes
        if self.normalise:  # the prior of Gymnasium: a little of mean 0 and deviation 1
            self.register_buffer("mean", torch.zeros(self.size, dtype=torch.float64))
            self.register_buffer("squares", torch.full((self.size,), 1e-4, dtype=torch.float64))
            self.register_buffer("count", torch.full((), 1e-4, dtype=torch.float64))

    def forward(self, observations: Tensor) -> Tensor:
        """[B, ...] observations -> [B, size]"""
        if self.num_classes:
            return F.one_hot(observations.long() - self.start, self.num_classes).float()
        features = observations.reshape(observations.shape[0], self.size).float()
        if self.normalise:
            scale = (self.squares / self.count + 1e-8).rsqrt()
            return ((features - self.mean.float()) * scale.float()).clip(-10, 10)
        return features / 255 if observations.dtype == torch.uint8 else features

    @torch.no_grad()
    def observe(self, observations: Tensor, total: Callable[[Tensor], Tensor]) -> None:
        """Take [N, ...] observations into account (Chan, Golub and LeVeque 1979). ``total`` sums a tensor over all that
        have some of them."""
        off = observations.reshape(len(observations), self.size).double() - self.mean
        sums = total(torch.cat([off.sum(0), (off**2).sum(0), off.new_tensor([len(off)])]))
        sums, squares, count = sums[: self.size], sums[self.size : -1], sums[-1]
        if count > 0:
            together = self.count + count
            self.squares += squares - sums**2 / count * (1 - self.count / together)
            self.mean += sums / together
            self.count.copy_(together)
