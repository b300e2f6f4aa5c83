"""Policies over several discrete actions at once (Gymnasium's MultiDiscrete), independent of each other given the
observation.

Shapes: B observations, N action steps, M actions at once, of which number m has K_m choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.core.errors import DataError
from hybridflow.models.nets import Categorical, NetConfig, ObservationNet

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["MultiCategorical", "MultiCategoricalPolicy"]


@dataclass(frozen=True)
class MultiCategorical:
    """M discrete actions: ``log_probabilities`` [B, K_1 + ... + K_M] side by side, each part normalised; ``sizes`` K_m."""

    log_probabilities: Tensor
    sizes: tuple[int, ...]

    @property
    def parts(self) -> list[Categorical]:
        return [Categorical(part) for part in torch.split(self.log_probabilities, list(self.sizes), -1)]

    @property
    def device(self) -> torch.device:
        return self.log_probabilities.device

    def sample(self, uniforms: Tensor) -> Tensor:
        """Actions [B, M] int64 from ``uniforms`` [B, M] in [0, 1)."""
        drawn = [part.sample(uniforms[:, m : m + 1].contiguous()) for m, part in enumerate(self.parts)]
        return torch.stack(drawn, -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B] of ``actions`` [B, M]."""
        return self._sum(lambda m, part: part.log_prob(actions[:, m]))

    def entropy(self) -> Tensor:
        """[B], nats."""
        return self._sum(lambda _, part: part.entropy())

    def kl(self, other: MultiCategorical) -> Tensor:
        """[B] KL(self || other), nats."""
        others = other.parts
        return self._sum(lambda m, part: part.kl(others[m]))

    def _sum(self, of: Callable[[int, Categorical], Tensor]) -> Tensor:
        return torch.stack([of(m, part) for m, part in enumerate(self.parts)]).sum(0)

    def detached(self) -> MultiCategorical:
        """The same without a gradient."""
        return MultiCategorical(self.log_probabilities.detach(), self.sizes)

    @property
    def mode(self) -> Tensor:
        """[B, M] the likeliest actions."""
        return torch.stack([part.mode for part in self.parts], -1)


class MultiCategoricalPolicy(ObservationNet):
    """A policy over M discrete actions at once, each numbered from 0."""

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], config: NetConfig, generator: torch.Generator
    ) -> None:
        choices = action_space.nvec
        if choices.ndim != 1:
            raise DataError(f"action space {action_space}: not supported here; of MultiDiscrete, those in a row are")
        super().__init__(observation_space, int(choices.sum()), 0.01, config, generator)
        self.sizes = tuple(int(size) for size in choices)

    def head(self, outputs: Tensor) -> MultiCategorical:
        """Of outputs [B, K_1 + ... + K_M]."""
        parts = torch.split(outputs, list(self.sizes), -1)
        return MultiCategorical(torch.cat([part.log_softmax(-1) for part in parts], -1), self.sizes)
