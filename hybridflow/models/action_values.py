"""Critics that value actions: ensembles of Q(s, a), and of Q(s, .) over discrete actions, each as one batched network.

Shapes: E members, N steps, K actions.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridflow.models.continuous import Bounds
from hybridflow.models.nets import Features, NetConfig

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["ActionValues", "DiscreteActionValues", "EnsembleMLP", "Temperature"]


class EnsembleMLP(nn.Module):
    """``members`` MLPs of equal ``sizes`` side by side: [N, sizes[0]] -> [E, N, sizes[-1]].

    A layer is one batched matrix product. Weights are [E, inputs, outputs]; initial ones are those of ``MLP``.
    """

    def __init__(self, sizes: tuple[int, ...], members: int, config: NetConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.activation = torch.tanh if config.activation == "tanh" else torch.relu
        layers = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList(torch.empty(members, inputs, outputs) for inputs, outputs in layers)
        # One row, so that they count as biases wherever weights are told from biases.
        self.biases = nn.ParameterList(torch.zeros(members * outputs) for _, outputs in layers)
        for layer, member in itertools.product(range(len(layers)), range(members)):
            gain = 1.0 if layer == len(layers) - 1 else math.sqrt(2)
            nn.init.orthogonal_(self.weights[layer][member].T, gain, generator)

    def forward(self, x: Tensor, members: int | None = None) -> Tensor:
        """Of the first ``members``, all if None."""
        parts = [
            (weight[:members], bias.view(len(weight), 1, -1)[:members])
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        x = x.expand(len(parts[0][0]), *x.shape)
        for weight, bias in parts[:-1]:
            x = self.activation(torch.baddbmm(bias, x, weight))
        weight, bias = parts[-1]
        if weight.shape[-1] == 1:  # a product with one column is slow
            values: Tensor = torch.mul(x, weight.transpose(1, 2)).sum(-1, keepdim=True) + bias
            return values
        return torch.baddbmm(bias, x, weight)


class ActionValues(nn.Module):
    """Q(s, a) of continuous actions, by ``members`` networks."""

    def __init__(
        self,
        space: Space[Any],
        action_space: Space[Any],
        config: NetConfig,
        generator: torch.Generator,
        members: int,
    ) -> None:
        super().__init__()
        self.features, self.bounds = Features(space), Bounds(action_space)
        sizes = (self.features.size + self.bounds.size, *config.hidden, 1)
        self.mlp = EnsembleMLP(sizes, members, config, generator)

    def forward(self, observations: Tensor, actions: Tensor, members: int | None = None) -> Tensor:
        """[E, N] values of ``actions`` [N, *shape]; of the first ``members`` networks, all if None."""
        inputs = torch.cat([self.features(observations), self.bounds.units(actions)], -1)
        values: Tensor = self.mlp(inputs, members)
        return values[..., 0]


class DiscreteActionValues(nn.Module):
    """Q(s, .) of K actions, by ``members`` networks."""

    def __init__(
        self, space: Space[Any], num_actions: int, config: NetConfig, generator: torch.Generator, members: int
    ) -> None:
        super().__init__()
        self.features = Features(space)
        self.mlp = EnsembleMLP((self.features.size, *config.hidden, num_actions), members, config, generator)

    def forward(self, observations: Tensor) -> Tensor:
        """[E, N, K]"""
        values: Tensor = self.mlp(self.features(observations))
        return values


class Temperature(nn.Module):
    """The weight of the entropy (SAC), learned by its logarithm; forward() -> [1]."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(initial)]))

    def forward(self) -> Tensor:
        return self.log.exp()
