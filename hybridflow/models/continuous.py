"""Policies over continuous actions with bounds: squashed Gaussian (SAC) and deterministic (TD3, DDPG).

Actions are the environment's numbers. Distances between them are measured in *units*: half the width of the bounds, so that
an action in units lies in [-1, 1] whatever the space. Densities, exploration noise and a critic's inputs are in units.

Shapes: B observations, A numbers in an action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridflow.core.errors import DataError
from hybridflow.models.nets import NetConfig, ObservationNet

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["Bounds", "Deterministic", "DeterministicPolicy", "Noisy", "Squashed", "SquashedGaussianPolicy"]

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
NEARLY_ONE = 1 - 2.0**-23
"""an action at its very bound would have an infinite pre-image"""


class Bounds(nn.Module):
    """The box of actions: ``middle``, and ``unit``, half its width, [*shape]. DataError if it isn't bounded."""

    middle: Tensor
    unit: Tensor

    def __init__(self, space: Space[Any]) -> None:
        super().__init__()
        if type(space).__name__ != "Box" or not space.is_bounded():
            raise DataError(f"action space {space}: not supported here; supported is Box with finite bounds")
        low, high = (np.asarray(bound, np.float32) for bound in (space.low, space.high))
        self.register_buffer("middle", torch.tensor((high + low) / 2))
        self.register_buffer("unit", torch.tensor((high - low) / 2))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.middle.shape)

    @property
    def size(self) -> int:
        """A"""
        return self.middle.numel()

    def from_units(self, x: Tensor) -> Tensor:
        """[B, A] in units -> [B, *shape] actions."""
        return torch.addcmul(self.middle, self.unit, x.reshape(-1, *self.shape))

    def units(self, actions: Tensor) -> Tensor:
        """[B, *shape] actions -> [B, A] in units."""
        return ((actions - self.middle) / self.unit).flatten(1)

    def fill(self, uniforms: Tensor) -> Tensor:
        """Actions that fill the box evenly, from ``uniforms`` [B, A] in [0, 1): of log-density ``fill_log_prob``."""
        return self.from_units(2 * uniforms.float() - 1)

    @property
    def fill_log_prob(self) -> float:
        return -self.size * math.log(2)


def _normal(uniforms: Tensor) -> Tensor:
    """Standard normal numbers from ``uniforms``, by the inverse of the distribution, which is minus infinity at 0."""
    normal: Tensor = torch.special.ndtri(uniforms.double().clamp(min=2.0**-53))
    return normal.float()


def _log_density(z: Tensor, log_std: Tensor) -> Tensor:
    """[B] log-density of independent normal numbers that are ``z`` [B, A] deviations from their means."""
    return (-0.5 * z**2 - log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * z.shape[-1]


def _squashed_density(u: Tensor, z: Tensor, log_std: Tensor) -> Tensor:
    """log N(u) - sum log(1 - tanh(u)^2), of which the last is 2 (log 2 - u - softplus(-2u)): exact for large u, too."""
    return _log_density(z, log_std) - 2 * (math.log(2) - u - F.softplus(-2 * u)).sum(-1)


class _Draw(torch.autograd.Function):
    """apply(mean, log_std, noise) [B, A] -> tanh(u) [B, A] with u = mean + std noise, and its log-density [B]; one node of
    the graph instead of twenty."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        off = log_std.exp().mul_(noise)
        u = mean + off
        units = u.tanh()
        ctx.save_for_backward(off, units)
        return units, _squashed_density(u, noise, log_std)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_units: Tensor, of_log_probs: Tensor) -> tuple[Tensor, Tensor, None]:
        off, units = ctx.saved_tensors
        of_log_probs = of_log_probs[:, None]
        # d log-density / du = 2 tanh(u); of log_std directly -1.
        of_u = torch.ops.aten.tanh_backward(of_units, units).addcmul_(of_log_probs, units, value=2)
        return of_u, (of_u * off).sub_(of_log_probs), None


@dataclass(frozen=True)
class Squashed:
    """tanh of independent normal numbers, scaled to ``bounds``: ``mean`` and ``log_std`` [B, A] are those before tanh."""

    mean: Tensor
    log_std: Tensor
    bounds: Bounds

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def sample(self, uniforms: Tensor) -> Tensor:
        """Actions from ``uniforms`` [B, A] in [0, 1)."""
        return self.draw(_normal(uniforms))[0]

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions, and their log-densities [B], as functions of standard normal ``noise`` [B, ...] (reparametrised)."""
        units, log_probs = _Draw.apply(self.mean, self.log_std, noise.flatten(1))  # type: ignore[no-untyped-call]
        return self.bounds.from_units(units), log_probs

    def _log_density(self, u: Tensor, z: Tensor) -> Tensor:
        return _squashed_density(u, z, self.log_std)

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B] of ``actions``; of those at the bounds, of what lies just inside."""
        u = self.bounds.units(actions).clamp(-NEARLY_ONE, NEARLY_ONE).atanh()
        return self._log_density(u, (u - self.mean) / self.log_std.exp())

    @property
    def mode(self) -> Tensor:
        """Where the normal numbers are likeliest."""
        return self.bounds.from_units(self.mean.tanh())


@dataclass(frozen=True)
class Noisy:
    """Normal noise of deviation ``std`` units around actions ``mean``, clipped to ``bounds``."""

    mean: Tensor
    std: float
    bounds: Bounds

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def sample(self, uniforms: Tensor) -> Tensor:
        """Actions from ``uniforms`` [B, A] in [0, 1)."""
        units = self.bounds.units(self.mean) + self.std * _normal(uniforms)
        return self.bounds.from_units(units.clamp(-1, 1))

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B] of ``actions``, before clipping."""
        z = (self.bounds.units(actions) - self.bounds.units(self.mean)) / self.std
        return _log_density(z, torch.full_like(z, math.log(self.std)))


@dataclass(frozen=True)
class Deterministic:
    """One action each: ``mode`` [B, *shape]."""

    mode: Tensor
    bounds: Bounds

    def noisy(self, std: float) -> Noisy:
        """With normal noise of deviation ``std`` units."""
        return Noisy(self.mode, std, self.bounds)


class SquashedGaussianPolicy(ObservationNet):
    """tanh of normal numbers whose mean and deviation depend on the observation (Haarnoja et al. 2018, appendix C)."""

    def __init__(self, space: Space[Any], action_space: Space[Any], config: NetConfig, generator: torch.Generator) -> None:
        bounds = Bounds(action_space)
        super().__init__(space, 2 * bounds.size, 0.01, config, generator)
        self.bounds = bounds

    def head(self, outputs: Tensor) -> Squashed:
        """Of outputs [B, 2 A]."""
        mean, log_std = outputs.chunk(2, -1)
        return Squashed(mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX), self.bounds)


class DeterministicPolicy(ObservationNet):
    """tanh of the network's outputs, scaled to the bounds of actions (Lillicrap et al. 2016)."""

    def __init__(self, space: Space[Any], action_space: Space[Any], config: NetConfig, generator: torch.Generator) -> None:
        bounds = Bounds(action_space)
        super().__init__(space, bounds.size, 0.01, config, generator)
        self.bounds = bounds

    def head(self, outputs: Tensor) -> Deterministic:
        """Of outputs [B, A]."""
        return Deterministic(self.bounds.from_units(outputs.tanh()), self.bounds)

    def perturbed(self, observations: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Actions [B, *shape], moved by ``offsets`` [B, ...] units and clipped to the bounds."""
        units = self(observations).tanh()
        if offsets is not None:
            units = (units + offsets.flatten(1)).clamp(-1, 1)
        return self.bounds.from_units(units)
