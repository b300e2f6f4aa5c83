"""Linear layers with an activation between them, as one node of autograd's graph.

Shapes: B inputs, I and O numbers of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridflow.ops.linear import linear, product

__all__ = ["MLP", "allocated"]

Module = TypeVar("Module", bound=nn.Module)


def allocated(module: Module) -> Module:
    """A module that was made on "meta", with memory on the CPU that isn't set yet.

    ``to_empty`` does the same, but imports sympy, for a third of a second in every process, to ask for strides.
    """
    found: Module = module._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu"))  # type: ignore[no-untyped-call]
    return found


def _layers(x: Tensor, relu: bool, parameters: Sequence[Tensor], inputs: list[Tensor] | None = None) -> Tensor:
    """Linear layers of ``parameters`` (weight, bias, weight, bias, ...); ``inputs`` gets what all but the first read."""
    for layer in range(0, len(parameters) - 2, 2):
        x = linear(x, parameters[layer], parameters[layer + 1])
        if relu:
            x.relu_()
        else:
            values = x.numpy()
            np.tanh(values, out=values)
        if inputs is not None:
            inputs.append(x)
    return linear(x, parameters[-2], parameters[-1])


class _Layers(torch.autograd.Function):
    """Linear layers with tanh or relu between them, tanh on a CPU: numpy's takes an eighth of the time of torch's, and one
    node of the graph less than one for each operation. apply(x [B, I], relu, weight, bias, weight, bias, ...) -> [B, O]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: bool, *parameters: Tensor) -> Tensor:
        inputs = [x]
        out = _layers(x, relu, parameters, inputs)
        ctx.relu = relu
        ctx.save_for_backward(*inputs, *parameters[::2])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        inputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        out: list[Tensor | None] = []
        for layer in reversed(range(len(weights))):
            trained = needed[2 + 2 * layer]
            out += [gradient.sum(0), product(gradient.t(), inputs[layer])] if trained else [None, None]
            if layer:
                gradient, x = product(gradient, weights[layer]), inputs[layer]
                aten = torch.ops.aten
                gradient = aten.threshold_backward(gradient, x, 0) if ctx.relu else aten.tanh_backward(gradient, x)
            elif needed[0]:
                out.append(product(gradient, weights[0]))
        of_x = out.pop() if needed[0] else None
        return (of_x, None, *reversed(out))


class MLP(nn.Module):
    """Linear layers of ``sizes`` with an activation between them: [B, sizes[0]] -> [B, sizes[-1]].

    Orthogonal weights (Saxe et al. 2014) with gain sqrt(2), ``head_gain`` for the last layer, and biases of zero.
    ``twice_differentiable``: gradients of gradients are wanted, which takes longer.
    """

    twice_differentiable = False

    def __init__(
        self, sizes: tuple[int, ...], activation: Literal["tanh", "relu"], head_gain: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        # From meta, so that torch's global generator is left alone.
        self.layers = nn.ModuleList(allocated(nn.Linear(i, o, device="meta")) for i, o in itertools.pairwise(sizes))
        self.activation = torch.tanh if activation == "tanh" else torch.relu
        for layer in self.layers:
            gain = head_gain if layer is self.layers[-1] else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain, generator)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    @cached_property
    def _flat(self) -> list[Tensor]:
        # Reading attributes of modules takes longer than multiplying matrices of this size.
        return [parameter for layer in self.layers for parameter in (layer.weight, layer.bias)]  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        return self._flat[0].device

    def forward(self, x: Tensor) -> Tensor:
        parameters, relu = self._flat, self.activation is torch.relu
        plain = self.twice_differentiable or torch.is_autocast_enabled(x.device.type)
        if (relu or x.device.type == "cpu") and not plain:
            if not torch.is_grad_enabled():
                return _layers(x, relu, parameters)
            return cast(Tensor, _Layers.apply(x, relu, *parameters))  # type: ignore[no-untyped-call]
        for layer in range(0, len(parameters) - 2, 2):
            x = self.activation(F.linear(x, parameters[layer], parameters[layer + 1]))
        return F.linear(x, parameters[-2], parameters[-1])
