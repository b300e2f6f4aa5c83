"""What a network remembers of an episode: a GRU, an LSTM, or attention to the last observations.

A memory is M numbers, zeros when an episode begins. ``step`` takes one observation of each of B episodes, as acting does;
``unroll`` takes pieces of episodes one behind the other, as learning does, each from the memory with which it began. Both
give the same outputs, however episodes are cut into pieces.

Shapes: B observations, R pieces, N steps of all of them, I numbers of what ``encode`` makes of an observation, D outputs,
C observations that attention sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hybridflow.models.layers import MLP, allocated

if TYPE_CHECKING:
    from gymnasium import Space

    from hybridflow.models.nets import NetConfig

__all__ = ["Memory", "make_memory", "memory_size"]

Encode = Callable[[Tensor], Tensor]
Ints = NDArray[np.int64]


class Memory(Protocol):
    """``size``: M."""

    size: int

    def step(self, encode: Encode, observations: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[B, ...] observations and [B, M] -> [B, D], and the memory afterwards"""

    def unroll(self, encode: Encode, observations: Tensor, memory: Tensor, lengths: Ints) -> Tensor:
        """[N, ...] observations and [R, M] -> [N, D]; ``lengths`` [R] of the pieces"""


def memory_size(space: Space[Any], config: NetConfig) -> int:
    """M of a network for the space; 0 if it remembers nothing."""
    if config.kind == "attention":
        return (config.context - 1) * (math.prod(space.shape or ()) + 1)
    return config.hidden[-1] * (2 if config.kind == "lstm" else 1) if config.memory else 0


def make_memory(space: Space[Any], inputs: int, config: NetConfig, generator: torch.Generator) -> Memory | None:
    """The memory of a network of ``config.kind``, of width ``config.hidden[-1]``; None if it has none."""
    if config.kind == "attention":
        return Attention(math.prod(space.shape or ()), inputs, config.hidden[-1], config.context, generator)
    return Recurrent(config.kind, inputs, config.hidden[-1], generator) if config.memory else None


class Recurrent(nn.Module):
    """A layer of GRU (Cho et al. 2014) or LSTM (Hochreiter and Schmidhuber 1997) cells, ``encode`` before it.

    Weights of each gate are orthogonal with gain 1, biases zero, that of an LSTM's forget gate 1 (Jozefowicz et al. 2015).
    """

    def __init__(self, kind: str, inputs: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.width, self.size = width, width * (2 if kind == "lstm" else 1)
        # From meta, so that torch's global generator is left alone.
        self.cells = allocated((nn.LSTM if kind == "lstm" else nn.GRU)(inputs, width, device="meta"))
        for name, parameter in self.cells.named_parameters():
            for gate, part in enumerate(torch.split(parameter.detach(), width)):
                if part.dim() == 2:
                    nn.init.orthogonal_(part, 1.0, generator)
                else:
                    part.fill_(float(kind == "lstm" and gate == 1 and name.startswith("bias_ih")))

    def step(self, encode: Encode, observations: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Memory``."""
        cells, x = self.cells, encode(observations)
        weights: Any = (cells.weight_ih_l0, cells.weight_hh_l0, cells.bias_ih_l0, cells.bias_hh_l0)
        if self.size == self.width:
            after = torch.gru_cell(x, memory, *weights)
            return after, after
        after, inner = torch.lstm_cell(x, memory.chunk(2, -1), *weights)
        return after, torch.cat([after, inner], -1)

    def unroll(self, encode: Encode, observations: Tensor, memory: Tensor, lengths: Ints) -> Tensor:
        """See ``Memory``. Steps of all pieces go side by side, the longest pieces first, so none is padded."""
        x = encode(observations)
        if not len(x):
            return x.new_zeros(0, self.width)
        by_length = np.argsort(-lengths, kind="stable")
        live = np.arange(lengths.max())[:, None] < lengths[by_length]  # [longest, R]
        steps = (np.cumsum(lengths) - lengths)[by_length] + np.arange(len(live))[:, None]
        order, back = _index(steps[live], x.device), _index(np.argsort(steps[live]), x.device)
        begun = memory[_index(by_length[live[0]], x.device)][None]
        state = begun if self.size == self.width else tuple(part.contiguous() for part in begun.chunk(2, -1))
        packed = nn.utils.rnn.PackedSequence(x[order], torch.from_numpy(live.sum(1)))
        out = self.cells(packed, state)[0]
        return cast(Tensor, out.data[back])


class Attention(nn.Module):
    """A block of causal attention (Vaswani et al. 2017, normalised before) of each observation to the last C, itself among
    them, which are told apart by their age (Shaw et al. 2018); ``encode`` before it.

    Its memory are the C - 1 observations before, each with a 1 that says that it is there. Weights are orthogonal with gain
    1, biases and what is added by age start at zero.
    """

    def __init__(self, observed: int, inputs: int, width: int, context: int, generator: torch.Generator) -> None:
        super().__init__()
        self.observed, self.context, self.size = observed, context, (context - 1) * (observed + 1)
        self.heads = math.gcd(4, width)
        self.embed = MLP((inputs, width), "relu", 1.0, generator)
        self.queries, self.keys, self.values, self.out = (MLP((width, width), "relu", 1.0, generator) for _ in range(4))
        self.ages = nn.Parameter(torch.zeros(context, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mlp = MLP((width, 2 * width, width), "relu", 1.0, generator)

    def step(self, encode: Encode, observations: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Memory``."""
        past = memory.view(memory.shape[0], self.context - 1, self.observed + 1)
        there, x = past[..., -1] > 0, self.embed(encode(observations))
        before = self.embed(encode(self._seen(past, observations[:, None]).flatten(0, 1)))
        keys, values = self._remembered(torch.cat([before.view(x.shape[0], -1, x.shape[-1]), x[:, None]], 1))
        out = self._attend(x, keys, values, torch.cat([there, torch.ones_like(there[:, :1])], 1))
        now = torch.cat([observations.reshape(x.shape[0], self.observed).float(), x.new_ones(x.shape[0], 1)], 1)
        return out, torch.cat([past[:, 1:], now[:, None]], 1).flatten(1)

    def unroll(self, encode: Encode, observations: Tensor, memory: Tensor, lengths: Ints) -> Tensor:
        """See ``Memory``. Each piece is put behind what it remembers, so that what a step attends to lies in one run."""
        before, rows, device = self.context - 1, len(lengths), observations.device
        if not len(observations):
            return memory.new_zeros(0, self.ages.shape[1])
        past = memory.view(rows, before, self.observed + 1)
        number = np.arange(rows)
        own = _index(np.arange(len(observations)) + before * (np.repeat(number, lengths) + 1), device)
        kept = _index((np.cumsum(lengths) - lengths + before * number)[:, None] + np.arange(before), device)
        seen = observations.new_empty(len(own) + kept.numel(), *observations.shape[1:])
        seen[own], seen[kept] = observations, self._seen(past, observations[:1, None])
        there = torch.ones(len(seen), dtype=torch.bool, device=device)
        there[kept] = past[..., -1] > 0
        x = self.embed(encode(seen))
        keys, values = self._remembered(x)
        window = own[:, None] + torch.arange(-before, 1, device=device)
        return self._attend(x[own], keys[window], values[window], there[window])

    @staticmethod
    def _seen(past: Tensor, filler: Tensor) -> Tensor:
        """The observations [B, C - 1, ...] in ``past`` as they were; what isn't there is ``filler`` [B or 1, 1, ...]."""
        there = (past[..., -1] > 0).view(*past.shape[:2], *[1] * (filler.dim() - 2))
        return torch.where(there, past[..., :-1].reshape(*past.shape[:2], *filler.shape[2:]).to(filler.dtype), filler)

    def _remembered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., D] of embedded observations."""
        flat = self.norms[0](x).flatten(0, -2)
        return self.keys(flat).view_as(x), self.values(flat).view_as(x)

    def _attend(self, x: Tensor, keys: Tensor, values: Tensor, present: Tensor) -> Tensor:
        """What becomes of ``x`` [N, D] with ``keys`` and ``values`` [N, C, D] of which some are ``present`` [N, C]."""
        shape = (*keys.shape[:2], self.heads, -1)
        queries = self.queries(self.norms[0](x)).view(x.shape[0], 1, self.heads, -1)
        scores = (queries * (keys + self.ages).view(shape)).sum(-1) / math.sqrt(queries.shape[-1])
        weights = scores.masked_fill(~present[..., None], -math.inf).softmax(1)
        x = x + self.out((weights[..., None] * values.view(shape)).sum(1).flatten(1))
        return F.relu(self.norms[2](x + self.mlp(self.norms[1](x))))


def _index(places: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(places).to(device)
