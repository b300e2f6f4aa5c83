"""Networks that value actions: ensembles of Q(s, a), and of Q(s, .) over discrete actions, each as one batched network; and
those of DQN's switches.

Shapes: E members, N steps, K actions, Z atoms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridflow.models.continuous import Bounds
from hybridflow.models.features import make_features
from hybridflow.models.layers import MLP
from hybridflow.models.nets import NetConfig, QNet

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["ActionValues", "CategoricalQNet", "DiscreteActionValues", "DuellingMLP", "EnsembleMLP", "Temperature"]


class _EnsembleLayers(torch.autograd.Function):
    """Batched linear layers with an activation between them, as one node of the graph: one for each operation takes longer
    than small products do. apply(x [N, I], relu, weight, bias, weight, bias, ...) -> [E, N, O]; biases [E, 1, outputs]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: bool, *parameters: Tensor) -> Tensor:
        inputs, out = _EnsembleLayers.through(x, relu, parameters)
        ctx.relu = relu
        ctx.save_for_backward(*inputs, *parameters[::2])
        return out

    @staticmethod
    def through(x: Tensor, relu: bool, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The inputs of all layers [E, N, inputs], and the output."""
        weights, biases = parameters[::2], parameters[1::2]
        x = x.expand(len(weights[0]), *x.shape)
        inputs = [x]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            x = torch.baddbmm(bias, x, weight)
            x = x.relu_() if relu else x.tanh_()
            inputs.append(x)
        return inputs, _product(x, weights[-1]) + biases[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        inputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        out: list[Tensor | None] = []
        for layer in reversed(range(len(weights))):
            x, weight, trained = inputs[layer], weights[layer], needed[2 + 2 * layer]
            out += [gradient.sum(1, keepdim=True), _product(x.mT, gradient)] if trained else [None, None]
            if layer or needed[0]:
                gradient = gradient * weight.mT if weight.shape[-1] == 1 else torch.bmm(gradient, weight.mT)
            if layer:
                shut = torch.ops.aten.threshold_backward.grad_input if ctx.relu else torch.ops.aten.tanh_backward.grad_input
                shut(gradient, x, *((0,) if ctx.relu else ()), grad_input=gradient)
        return (gradient.sum(0) if needed[0] else None, None, *reversed(out))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, [E, N, M] and [E, M, O]: of one column member by member, as batched products with one are slow."""
    if y.shape[-1] > 1:
        return torch.bmm(x, y)
    return torch.stack([torch.mv(*pair) for pair in zip(x, y[..., 0], strict=True)])[..., None]


class EnsembleMLP(nn.Module):
    """``members`` MLPs of equal ``sizes`` side by side: [N, sizes[0]] -> [E, N, sizes[-1]].

    A layer is one batched matrix product. Weights are [E, inputs, outputs]; initial ones are those of ``MLP``.
    """

    def __init__(self, sizes: tuple[int, ...], members: int, config: NetConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.relu = config.activation == "relu"
        layers = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList(torch.empty(members, inputs, outputs) for inputs, outputs in layers)
        # One row, so that they count as biases wherever weights are told from biases.
        self.biases = nn.ParameterList(torch.zeros(members * outputs) for _, outputs in layers)
        for layer, member in itertools.product(range(len(layers)), range(members)):
            gain = 1.0 if layer == len(layers) - 1 else math.sqrt(2)
            nn.init.orthogonal_(self.weights[layer][member].T, gain, generator)

    def forward(self, x: Tensor, members: int | None = None) -> Tensor:
        """Of the first ``members``, all if None."""
        parts = [y for weight, bias in self._layers for y in (weight, bias.view(len(weight), 1, -1))]
        if members is not None:
            parts = [y[:members] for y in parts]
        if not torch.is_grad_enabled():
            return _EnsembleLayers.through(x, self.relu, parts)[1]
        values: Tensor = _EnsembleLayers.apply(x, self.relu, *parts)  # type: ignore[no-untyped-call]
        return values

    @cached_property
    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        # Reading attributes of modules takes longer than multiplying matrices of this size.
        return list(zip(self.weights, self.biases, strict=True))


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
        return self.mlp.forward(inputs, members)[..., 0]


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

    The last hidden layer is each stream's own, the others are the trunk's.
    """

    def __init__(
        self, features: int, num_actions: int, num_atoms: int, config: NetConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shape = (num_actions, num_atoms)
        *below, last = config.hidden
        inner = below[-1] if below else features
        self.trunk = MLP((features, *below), config.activation, math.sqrt(2), generator) if below else None
        self.value = MLP((inner, last, num_atoms), config.activation, 1.0, generator)
        self.advantage = MLP((inner, last, num_actions * num_atoms), config.activation, 1.0, generator)

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
