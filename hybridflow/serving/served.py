"""A policy that acts while its weights change."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybridflow.core.batch import Array
from hybridflow.core.errors import ModelError

__all__ = ["ActingNetwork", "Actions", "Asked", "ServedPolicy"]


class ActingNetwork(Protocol):
    """(observations [B, ...]) -> actions [B, ...] as the environment takes them, by its ``network``; if that has a memory,
    (observations, memory [B, M]) -> (actions, memory afterwards)."""

    @property
    def network(self) -> Any: ...
    def __call__(self, observations: Tensor, memory: Tensor | None = None, /) -> Any: ...


class Asked(NamedTuple):
    """Observations [B, ...] of the space's type, and what the policy remembers of each one's episode, [B, M]: zeros when
    it begins. M is 0 for policies without a memory."""

    observations: Array
    memory: Array


class Actions(NamedTuple):
    """Actions [B, ...], the version of the policy that all of them come from, and the memory [B, M] for the next step."""

    actions: Array
    version: int
    memory: Array


class ServedPolicy:
    """Acts with a pair of network and version, and ``update`` puts another pair in its place: no answer is computed by two
    versions, and none waits for an update. Both may be called from any thread.

    It keeps no memory of episodes: who asks brings it, and gets it back. ``memory_size``: M.
    An observation has the same action in any batch, to rounding: products of matrices round by the size of the batch.
    """

    def __init__(self, acting: ActingNetwork, version: int = 0) -> None:
        self._current = (copy.deepcopy(acting), version)
        self._updating = threading.Lock()
        self.memory_size = int(acting.network.memory_size)

    @property
    def version(self) -> int:
        return self._current[1]

    def act(self, asked: Asked) -> Actions:
        """What the policy does."""
        acting, version = self._current
        observations, memory = map(torch.from_numpy, asked)
        with torch.inference_mode():
            actions, after = acting(observations, memory) if self.memory_size else (acting(observations), memory)
        return Actions(actions.numpy(), version, after.numpy())

    def update(self, weights: Mapping[str, Tensor | Array], version: int) -> None:
        """Act with a copy of these ``weights`` of the network (parameters and buffers by name) from the next forward on.

        ModelError: they are not those of this network, or not finite; the policy stays as it is.
        """
        with self._updating:  # the version of the last call is the one that stays
            acting = copy.deepcopy(self._current[0])
            _load(acting.network, {name: torch.as_tensor(value) for name, value in weights.items()}, version)
            self._current = (acting, version)


def _load(network: nn.Module, weights: Mapping[str, Tensor], version: int) -> None:
    own = network.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        expected, found = (_shape(some.get(name)) for some in (own, weights))
        if expected != found:
            raise ModelError(f"version {version}: weight {name}: found {found}, expected {expected} of the policy served")
        if not bool(torch.isfinite(weights[name]).all()):
            raise ModelError(f"version {version}: weight {name} is not finite; expected a policy that can act")
    network.load_state_dict(dict(weights))


def _shape(tensor: Any) -> str:
    return "none" if tensor is None else f"shape {tuple(tensor.shape)}"
