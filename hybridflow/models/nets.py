"""Small networks for environments, and the distributions over actions that they give.

A policy is two things: ``distribution(observations)`` for acting and ``outputs(columns)`` for learning, on columns packed
over action steps, both from the same forward. A distribution draws its actions from uniform numbers that the caller brings,
so a sampler decides what its randomness derives from. ``inputs`` names the columns that a network reads besides
``response_mask``; ``unit = "step"`` says that minibatches are made of steps.

Shapes: B observations, N action steps, K actions, A numbers in a continuous action.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.errors import DataError
from hybridflow.models.features import Features, kind_of
from hybridflow.models.layers import MLP

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = [
    "Categorical",
    "CategoricalPolicy",
    "Gaussian",
    "GaussianPolicy",
    "NetConfig",
    "ObservationNet",
    "QNet",
    "QTable",
    "ValueNet",
    "joined",
    "make_policy",
    "make_q",
    "make_table",
    "make_value",
]


class NetConfig(Config):
    """A multilayer perceptron."""

    hidden: tuple[int, ...] = (64, 64)
    """width of each hidden layer"""
    activation: Literal["tanh", "relu"] = Field("tanh")
    """between the layers"""
    normalise: bool = False
    """observations to mean 0 and deviation 1, as they were in all that was learned from; for methods without a replay"""


@dataclass(frozen=True)
class Categorical:
    """K discrete actions: ``log_probabilities`` [B, K], normalised; minus infinity is a probability of zero."""

    log_probabilities: Tensor

    def sample(self, uniforms: Tensor) -> Tensor:
        """Actions [B] int64 by the inverse of the cumulative distribution, from ``uniforms`` [B, 1] in [0, 1)."""
        cumulative = self.log_probabilities.softmax(-1, dtype=torch.float64).cumsum(-1)
        actions = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]
        return actions.clamp_(max=cumulative.shape[-1] - 1)

    @property
    def device(self) -> torch.device:
        return self.log_probabilities.device

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B] of ``actions`` [B]."""
        return self.log_probabilities.gather(-1, actions[:, None])[:, 0]

    def entropy(self) -> Tensor:
        """[B], nats."""
        probabilities = self.log_probabilities.exp()
        return -torch.where(probabilities > 0, probabilities * self.log_probabilities, 0.0).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """[B] KL(self || other), nats."""
        chance = self.log_probabilities.exp()
        return torch.where(chance > 0, chance * (self.log_probabilities - other.log_probabilities), 0.0).sum(-1)

    def detached(self) -> Categorical:
        """The same without a gradient."""
        return Categorical(self.log_probabilities.detach())

    @property
    def mode(self) -> Tensor:
        """[B] the likeliest action."""
        return self.log_probabilities.argmax(-1)

    def explore(self, epsilon: Tensor) -> Categorical:
        """With probability ``epsilon`` [B] an action drawn uniformly, otherwise one of this distribution."""
        uniform = epsilon[:, None] / self.log_probabilities.shape[-1]
        mixed = uniform + (1 - epsilon)[:, None] * self.log_probabilities.exp()
        return Categorical(mixed.log())


@dataclass(frozen=True)
class Gaussian:
    """Independent normal numbers: ``mean`` and ``log_std`` [B, *shape of an action]."""

    mean: Tensor
    log_std: Tensor

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def sample(self, uniforms: Tensor) -> Tensor:
        """Actions like ``mean``, from ``uniforms`` [B, one for each number of an action] in [0, 1)."""
        # The inverse of the normal distribution is minus infinity at 0, which a generator can return.
        normal: Tensor = torch.special.ndtri(uniforms.double().clamp(min=2.0**-53)).to(self.mean.dtype)
        return self.mean + self.log_std.exp() * normal.reshape(self.mean.shape)

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B] of ``actions`` like ``mean``."""
        z = (actions - self.mean) / self.log_std.exp()
        return (-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi)).flatten(1).sum(-1)

    def entropy(self) -> Tensor:
        """[B], nats."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).flatten(1).sum(-1)

    def kl(self, other: Gaussian) -> Tensor:
        """[B] KL(self || other), nats."""
        off = (self.mean - other.mean) ** 2 + (2 * self.log_std).exp()
        return (other.log_std - self.log_std + 0.5 * off / (2 * other.log_std).exp() - 0.5).flatten(1).sum(-1)

    def detached(self) -> Gaussian:
        """The same without a gradient."""
        return Gaussian(self.mean.detach(), self.log_std.detach())

    @property
    def mode(self) -> Tensor:
        return self.mean


def joined(distributions: Sequence[Any]) -> Any:
    """Distributions of one kind as one, their actions one behind the other."""
    first = distributions[0]
    parts = ([getattr(one, f.name) for one in distributions] for f in fields(first))
    # What is no tensor is the same for all of them.
    return type(first)(*(torch.cat(part) if isinstance(part[0], Tensor) else part[0] for part in parts))


class ObservationNet(nn.Module):
    """An MLP on observations of a space."""

    inputs: tuple[str, ...] = ("observations", "actions")
    unit: Literal["row", "step"] = "step"

    def __init__(
        self, space: Space[Any], num_outputs: int, head_gain: float, config: NetConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.features = Features(space, config.normalise)
        self.mlp = MLP((self.features.size, *config.hidden, num_outputs), config.activation, head_gain, generator)

    def forward(self, observations: Tensor) -> Tensor:
        """[B, ...] observations -> [B, num_outputs]"""
        return self.mlp.forward(self.features.forward(observations))

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        """As long as it lasts, gradients have gradients."""
        self.mlp.twice_differentiable = True
        try:
            yield
        finally:
            self.mlp.twice_differentiable = False

    @property
    def device(self) -> torch.device:
        return self.mlp.device


class CategoricalPolicy(ObservationNet):
    """A policy over K discrete actions, numbered from 0."""

    def distribution(self, observations: Tensor) -> Categorical:
        """Of the action at each observation [B, ...]."""
        return Categorical(self.forward(observations).log_softmax(-1))

    def outputs(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``log_probs`` and ``entropy``, [N] over the action steps."""
        distribution = self.distribution(columns["observations"])
        return {"log_probs": distribution.log_prob(columns["actions"]), "entropy": distribution.entropy()}


class GaussianPolicy(ObservationNet):
    """A policy over continuous actions; its standard deviation doesn't depend on the observation and starts at 1.

    Actions are the unbounded numbers that were drawn; the environment clips them to its bounds.
    """

    def __init__(
        self,
        space: Space[Any],
        shape: tuple[int, ...],
        config: NetConfig,
        generator: torch.Generator,
        head_gain: float = 0.01,
    ) -> None:
        super().__init__(space, math.prod(shape), head_gain, config, generator)
        self.shape = shape
        self.log_std = nn.Parameter(torch.zeros(shape))

    def distribution(self, observations: Tensor) -> Gaussian:
        """Of the action at each observation [B, ...]."""
        mean = self.forward(observations).reshape(-1, *self.shape)
        return Gaussian(mean, self.log_std.expand_as(mean))

    def outputs(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``log_probs`` and ``entropy``, [N] over the action steps."""
        distribution = self.distribution(columns["observations"])
        return {"log_probs": distribution.log_prob(columns["actions"]), "entropy": distribution.entropy()}


class ValueNet(ObservationNet):
    """The value of a state, by ``inputs`` [0]: "observations", or "states" for a critic of several agents."""

    inputs: tuple[str, ...] = ("observations",)

    def outputs(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``values`` [N] over the action steps."""
        return {"values": self.forward(columns[self.inputs[0]])[:, 0]}

    def bootstrap(self, batch: Batch) -> Tensor:
        """[B] value of ``final_observations``, also of rows that terminated: estimators leave those out."""
        values: Tensor = self(torch.tensor(batch[f"final_{self.inputs[0]}"], device=self.device))
        return values[:, 0]


class QNet(ObservationNet):
    """The value of each of K discrete actions: forward(observations [B, ...]) -> [B, K]."""

    def distribution(self, observations: Tensor) -> Categorical:
        """The greedy policy."""
        values = self(observations)
        best = values.argmax(-1, keepdim=True)
        return Categorical(torch.full_like(values, -math.inf).scatter(-1, best, 0.0))


class QTable(nn.Module):
    """The value of each of K actions in each of S states, numbered from ``start``: a table [S, K], all zero at first."""

    inputs: tuple[str, ...] = ("observations", "actions")
    unit: Literal["row", "step"] = "step"

    def __init__(self, num_states: int, num_actions: int, start: int = 0) -> None:
        super().__init__()
        self.table, self.start = nn.Parameter(torch.zeros(num_states, num_actions)), start

    @property
    def device(self) -> torch.device:
        return self.table.device

    def states(self, observations: Tensor) -> Tensor:
        """Rows of the table [B]."""
        return observations.long() - self.start

    def distribution(self, observations: Tensor) -> Categorical:
        """The greedy policy, which draws among equally good actions."""
        values = self.table[self.states(observations)]
        return Categorical(torch.where(values == values.amax(-1, keepdim=True), 0.0, -math.inf).log_softmax(-1))


def make_policy(
    observation_space: Space[Any], action_space: Space[Any], config: NetConfig, generator: torch.Generator
) -> CategoricalPolicy | GaussianPolicy:
    """A policy for the spaces (Gymnasium's); DataError if one of them is not supported."""
    if kind_of(action_space) == "Box":
        return GaussianPolicy(observation_space, action_space.shape, config, generator)
    number = _num_actions(action_space, "Box, Discrete and MultiDiscrete")
    return CategoricalPolicy(observation_space, number, 0.01, config, generator)


def make_value(space: Space[Any], config: NetConfig, generator: torch.Generator, column: str = "observations") -> ValueNet:
    """A value network on a ``column`` of the space; DataError if it is not supported."""
    network = ValueNet(space, 1, 1.0, config, generator)
    network.inputs = (column,)
    return network


def make_q(observation_space: Space[Any], action_space: Space[Any], config: NetConfig, generator: torch.Generator) -> QNet:
    """An action-value network for the spaces; DataError if one of them is not supported."""
    return QNet(observation_space, _num_actions(action_space, "Discrete"), 1.0, config, generator)


def make_table(observation_space: Space[Any], action_space: Space[Any]) -> QTable:
    """A table of action values for the spaces; DataError if one of them is not discrete."""
    if kind_of(observation_space) != "Discrete":
        raise DataError(f"observation space {observation_space}: a table needs Discrete; use dqn")
    return QTable(int(observation_space.n), _num_actions(action_space, "Discrete"), int(observation_space.start))


def _num_actions(space: Space[Any], supported: str) -> int:
    if kind_of(space) != "Discrete":
        raise DataError(f"action space {space}: not supported here; supported are {supported}")
    return int(space.n)
