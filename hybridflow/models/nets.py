"""Small networks for environments, and the distributions over actions that they give.

A policy is two things: ``distribution(observations)`` for acting and ``outputs(columns)`` for learning, on columns packed
over action steps, both from the same forward. A distribution draws its actions from uniform numbers that the caller brings,
so a sampler decides what its randomness derives from. ``inputs`` names the columns that a network reads besides
``response_mask``; ``unit = "step"`` says that minibatches are made of steps.

Shapes: B observations, N action steps, K actions, A numbers in a continuous action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridflow.core.batch import Array, Batch
from hybridflow.core.config import Config
from hybridflow.core.errors import ContractError, DataError
from hybridflow.models.features import kind_of, make_features
from hybridflow.models.layers import MLP
from hybridflow.models.memory import make_memory, memory_size

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
    "joined",
    "make_policy",
    "make_q",
    "make_table",
]


CONTEXT = 16


class NetConfig(Config):
    """What is between observations and the last layer."""

    kind: Literal["mlp", "cnn", "gru", "lstm", "attention"] = "mlp"
    """layers; convolutions before them, for images; or layers of which the last is a memory (images get convolutions)"""
    hidden: tuple[int, ...] = (64, 64)
    """width of each hidden layer"""
    context: int = Field(CONTEXT, ge=1)
    """with attention: observations that it sees, the newest among them"""
    activation: Literal["tanh", "relu"] = Field("tanh")
    """between the layers"""
    normalise: bool = False
    """observations to mean 0 and deviation 1, as they were in all that was learned from; for methods without a replay"""
    normalise_returns: bool = False
    """of a critic: it learns returns of mean 0 and deviation 1, whatever the rewards' size; for methods without a replay"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.memory and not self.hidden:
            raise ValueError(f'kind = "{self.kind}" needs the width of its memory: hidden = [64], for instance')
        if self.kind != "attention" and self.context != CONTEXT:
            raise ValueError(f'context = {self.context} has no effect with kind = "{self.kind}"; leave it out')
        return self

    @property
    def memory(self) -> bool:
        """Whether the network remembers what it saw earlier in an episode."""
        return self.kind in ("gru", "lstm", "attention")

    @property
    def remembered(self) -> tuple[str, ...]:
        """The column that networks with a memory read besides observations."""
        return ("memory",) if self.memory else ()


@dataclass(frozen=True)
class Categorical:
    """K discrete actions: ``log_probabilities`` [B, K], normalised; minus infinity is a probability of zero."""

    log_probabilities: Tensor

    def sample(self, uniforms: Tensor) -> Tensor:
        """Actions [B] int64 by the inverse of the cumulative distribution, from ``uniforms`` [B, 1] in [0, 1)."""
        # By numpy, which takes half the time of torch for a few of them.
        chances = np.exp(self.log_probabilities.numpy(force=True), dtype=np.float64).cumsum(-1)
        # Without the last, so that no rounding leads beyond it.
        below = chances[:, :-1] <= uniforms.numpy(force=True) * chances[:, -1:]
        return torch.from_numpy(below.sum(-1)).to(self.device)

    @property
    def device(self) -> torch.device:
        return self.log_probabilities.device

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B] of ``actions`` [B]."""
        return self.log_probabilities.gather(-1, actions[:, None]).squeeze(-1)

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
    """A network on observations of a space: features, layers, and between them a memory, if its kind has one.

    ``head`` makes of its outputs what is wanted of it. ``memory_size``: M, the numbers of its memory; 0 if it has none.
    Networks with a memory learn from whole rows, those without from single steps. ``dtype``: of the activations that are
    learned from (mixed precision, by torch's autocast); weights, and what acts, are float32.
    """

    dtype = torch.float32

    inputs: tuple[str, ...] = ("observations", "actions")
    unit: Literal["row", "step"] = "step"

    def __init__(
        self, space: Space[Any], num_outputs: int, head_gain: float, config: NetConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.features = make_features(space, config, generator)
        self.memory_size, hidden, size = memory_size(space, config), config.hidden, self.features.size
        if self.memory_size:
            self.unit, self.inputs = "row", (*self.inputs, "memory")
            below, hidden = hidden[:-1], ()
            self.trunk = MLP((size, *below), config.activation, math.sqrt(2), generator) if below else None
            size = config.hidden[-1]
            self.memory: Any = make_memory(space, below[-1] if below else self.features.size, config, generator)
        self.mlp = MLP((size, *hidden, num_outputs), config.activation, head_gain, generator)

    def forward(self, observations: Tensor) -> Tensor:
        """[B, ...] observations -> [B, num_outputs], of a network without a memory"""
        if self.memory_size:
            raise ContractError("this network has a memory; call step(observations, memory)")
        return self.mlp.forward(self.features.forward(observations))

    def head(self, outputs: Tensor) -> Any:
        """What is made of outputs [B, num_outputs]."""
        raise NotImplementedError

    def distribution(self, observations: Tensor) -> Any:
        """Of the action at each observation [B, ...], of a network without a memory."""
        return self.head(self.forward(observations))

    def step(self, observations: Tensor, memory: Tensor) -> tuple[Any, Tensor]:
        """The distribution at each observation [B, ...] given ``memory`` [B, M], zeros when an episode begins, and the
        memory afterwards; without a memory, M is 0."""
        outputs, after = self.advance(observations, memory)
        return self.head(outputs), after

    def advance(self, observations: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """``step`` with the outputs [B, num_outputs] instead of what is made of them."""
        if not self.memory_size:
            return self.forward(observations), memory
        outputs, after = self.memory.step(self._encode, observations, memory)
        return self.mlp.forward(outputs), after

    def unroll(self, observations: Tensor, memory: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """[N, ...] observations of pieces of ``lengths`` [R] that begin with ``memory`` [R, M] -> [N, num_outputs]"""
        return self.mlp.forward(self.memory.unroll(self._encode, observations, memory, lengths))

    def unroll_on(self, observations: Tensor, final: Tensor, memory: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """``unroll`` of pieces and of the ``final`` observations [R, ...] that followed them: [N + R, num_outputs], that of
        each piece's final one behind the others."""
        number, count = np.arange(len(lengths)), len(observations)
        order = np.insert(np.arange(count), np.cumsum(lengths), count + number)
        return self.unroll(torch.cat([observations, final])[self._tensor(order)], memory, lengths + 1)

    def _encode(self, observations: Tensor) -> Tensor:
        x = self.features.forward(observations)
        return x if self.trunk is None else self.trunk.activation(self.trunk.forward(x))

    def learned(self, columns: Mapping[str, Tensor] | Batch) -> Tensor:
        """[N, num_outputs] over the action steps of what is learned from: columns packed over them, or rows of a batch."""
        if self.dtype == torch.float32 or not torch.is_grad_enabled():
            return self._learned(columns)
        with torch.autocast(self.device.type, self.dtype):
            return self._learned(columns).float()

    def _learned(self, columns: Mapping[str, Tensor] | Batch) -> Tensor:
        if not isinstance(columns, Batch):
            return self.forward(columns[self.inputs[0]])
        observed, mask = columns.ragged(self.inputs[0]), columns.ragged("response_mask").values
        steps = self._tensor(observed.values)
        if self.memory_size:
            outputs = self.unroll(steps, self._tensor(columns["memory"]), observed.lengths)
        else:
            outputs = self.forward(steps)
        return outputs if mask.all() else outputs[self._tensor(mask)]

    def _tensor(self, array: Array) -> Tensor:
        return torch.tensor(array, device=self.device)

    def outputs(self, columns: Mapping[str, Tensor] | Batch) -> dict[str, Tensor]:
        """``log_probs`` and ``entropy``, [N] over the action steps."""
        distribution = self.head(self.learned(columns))
        if isinstance(columns, Batch):
            chosen = columns.ragged("response_mask").values
            actions = self._tensor(columns.ragged("actions").values[chosen])
        else:
            actions = columns["actions"]
        return {"log_probs": distribution.log_prob(actions), "entropy": distribution.entropy()}

    def observe(self, columns: Mapping[str, Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """Take what was learned from into the statistics. ``total`` sums a tensor over all that have some of it."""
        if self.features.normalise:
            self.features.observe(columns[self.inputs[0]], total)

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        """As long as it lasts, gradients have gradients."""
        layers = [module for module in self.modules() if isinstance(module, MLP)]
        for module in layers:
            module.twice_differentiable = True
        try:
            yield
        finally:
            for module in layers:
                module.twice_differentiable = False

    @property
    def device(self) -> torch.device:
        return self.mlp.device


class CategoricalPolicy(ObservationNet):
    """A policy over K discrete actions, numbered from 0."""

    def head(self, outputs: Tensor) -> Categorical:
        """Of outputs [B, K]."""
        return Categorical(outputs.log_softmax(-1))


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

    def head(self, outputs: Tensor) -> Gaussian:
        """Of outputs [B, A]."""
        mean = outputs.reshape(-1, *self.shape)
        return Gaussian(mean, self.log_std.expand_as(mean))


class QNet(ObservationNet):
    """The value of each of K discrete actions: forward(observations [B, ...]) -> [B, K]."""

    def head(self, outputs: Tensor) -> Categorical:
        """The greedy policy."""
        best = outputs.argmax(-1, keepdim=True)
        return Categorical(torch.full_like(outputs, -math.inf).scatter(-1, best, 0.0))


class QTable(nn.Module):
    """The value of each of K actions in each of S states, numbered from ``start``: a table [S, K], all zero at first."""

    inputs: tuple[str, ...] = ("observations", "actions")
    unit: Literal["row", "step"] = "step"
    memory_size = 0

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

    def step(self, observations: Tensor, memory: Tensor) -> tuple[Categorical, Tensor]:
        """As that of other networks, without a memory."""
        return self.distribution(observations), memory


def make_policy(
    observation_space: Space[Any], action_space: Space[Any], config: NetConfig, generator: torch.Generator
) -> CategoricalPolicy | GaussianPolicy:
    """A policy for the spaces (Gymnasium's); DataError if one of them is not supported."""
    if kind_of(action_space) == "Box":
        return GaussianPolicy(observation_space, action_space.shape, config, generator)
    number = _num_actions(action_space, "Box, Discrete and MultiDiscrete")
    return CategoricalPolicy(observation_space, number, 0.01, config, generator)


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
