"""Networks that value actions: ensembles of Q(s, a), and of Q(s, .) over discrete actions; and those of DQN's switches.

Shapes: E members, N steps, K actions, Z atoms.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridflow.models.continuous import Bounds
from hybridflow.models.features import make_features
from hybridflow.models.layers import MLP
from hybridflow.models.nets import NetConfig, QNet

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["ActionValues", "CategoricalQNet", "DiscreteActionValues", "DuellingMLP", "EnsembleMLP", "Temperature"]


class EnsembleMLP(nn.Module):
    """``members`` MLPs of equal ``sizes`` side by side: [N, sizes[0]] -> [E, N, sizes[-1]]."""

    def __init__(self, sizes: tuple[int, ...], members: int, config: NetConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.members = nn.ModuleList(MLP(sizes, config.activation, 1.0, generator) for _ in range(members))

    def forward(self, x: Tensor, members: int | None = None) -> Tensor:
        """Of the first ``members``, all if None."""
        return torch.stack([member.forward(x) for member in self._listed[:members]])

    @cached_property
    def _listed(self) -> list[nn.Module]:
        # Reading attributes of modules takes longer than multiplying matrices of this size.
        return [*self.members]


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
        self.features, self.bounds = make_features(space, config, generator), Bounds(action_space)
        sizes = (self.features.size + self.bounds.size, *config.hidden, 1)
        self.mlp = EnsembleMLP(sizes, members, config, generator)

    def forward(self, observations: Tensor, actions: Tensor, members: int | None = None) -> Tensor:
        """[E, N] values of ``actions`` [N, *shape]; of the first ``members`` networks, all if None."""
        inputs = torch.cat([self.features.forward(observations), self.bounds.units(actions)], -1)
        return self.mlp.forward(inputs, members).squeeze(-1)


class DiscreteActionValues(nn.Module):
    """Q(s, .) of K actions, by ``members`` networks."""

    def __init__(
        self, space: Space[Any], num_actions: int, config: NetConfig, generator: torch.Generator, members: int
    ) -> None:
        super().__init__()
        self.features = make_features(space, config, generator)
        self.mlp = EnsembleMLP((self.features.size, *config.hidden, num_actions), members, config, generator)

    def forward(self, observations: Tensor) -> Tensor:
        """[E, N, K]"""
        return self.mlp.forward(self.features.forward(observations))


class DuellingMLP(nn.Module):
    """Two streams from a common trunk (Wang et al. 2016, eq. 9): [N, features] -> [N, K Z], by action, of

        V(s) + A(s, a) - mean over actions of A(s, .)

    The last hidden layer is each stream's own, the others are the trunk's; behind a memory, which is the last of them, each
    stream is one layer.
    """

    def __init__(
        self, features: int, num_actions: int, num_atoms: int, config: NetConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shape = (num_actions, num_atoms)
        below, own = ((), ()) if config.memory else (config.hidden[:-1], config.hidden[-1:])
        inner = (below[-1] if below else features, *own)
        self.trunk = MLP((features, *below), config.activation, math.sqrt(2), generator) if below else None
        self.value = MLP((*inner, num_atoms), config.activation, 1.0, generator)
        self.advantage = MLP((*inner, num_actions * num_atoms), config.activation, 1.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.trunk is not None:
            x = self.trunk.activation(self.trunk(x))
        advantages = self.advantage(x).view(-1, *self.shape)
        values: Tensor = self.value(x)[:, None] + advantages - advantages.mean(1, keepdim=True)
        return values.flatten(1)

    @property
    def device(self) -> torch.device:
        return self.advantage.device


class CategoricalQNet(QNet):
    """Of each of K discrete actions the distribution of its return over atoms ``support`` [Z] (Bellemare et al. 2017)."""

    support: Tensor

    def __init__(
        self,
        space: Space[Any],
        num_actions: int,
        config: NetConfig,
        generator: torch.Generator,
        support: tuple[float, float, int],
    ) -> None:
        low, high, num_atoms = support
        super().__init__(space, num_actions * num_atoms, 1.0, config, generator)
        self.register_buffer("support", torch.linspace(low, high, num_atoms))

    def log_probabilities(self, observations: Tensor) -> Tensor:
        """[N, K, Z]"""
        outputs: Tensor = self.mlp(self.features(observations))
        return outputs.view(outputs.shape[0], -1, len(self.support)).log_softmax(-1)

    def forward(self, observations: Tensor) -> Tensor:
        """[N, K] mean returns."""
        means: Tensor = (self.log_probabilities(observations).exp() * self.support).sum(-1)
        return means


class Temperature(nn.Module):
    """The weight of the entropy (SAC), learned by its logarithm; forward() -> [1]."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(initial)]))

    def forward(self) -> Tensor:
        return self.log.exp()
