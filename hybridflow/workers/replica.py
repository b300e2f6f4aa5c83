"""What a sampler reads when the learner lives in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.core.errors import ContractError
from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import decoder_shards
from hybridflow.models.policy import network_shards
from hybridflow.parallel.shard import Shard
from hybridflow.workers.learner import Networks, as_array, tensors
from hybridflow.workers.parts import WHOLE, Lines

__all__ = ["Replica"]


class Replica:
    """A copy of the main network of a learner that was built from the same ``networks``; ``version`` is the learner's.

    ``lines``: how the copy is cut over processes, of which this one holds its part, whatever the learner's mesh.
    """

    def __init__(self, networks: Networks, lines: Lines = WHOLE) -> None:
        self.main, self.version, self.lines = networks.main, 0, lines
        network = networks.at(lines)[self.main].requires_grad_(False)
        self.networks: dict[str, nn.Module] = {self.main: network}
        self._shards = {} if lines.whole else {f"{self.main}/{name}": s for name, s in network_shards(network).items()}
        decoders = [(path, module) for path, module in network.named_modules() if isinstance(module, Decoder)]
        names = {f"{self.main}/{path}.{name}" for path, module in decoders for name in decoder_shards(module.spec)}
        self._elsewhere = set() if lines.whole else names - self._shards.keys()
        """what other pipeline stages hold"""

    def load(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        """Copy ``weights`` (of ``Learner.weights``: full arrays) into the network in place; ContractError, with nothing
        copied, if they are those of another one."""
        own = tensors(self.networks, self.main)
        here = {name: _kind(self._full_shape(name, x), as_array(x.new_empty(0))) for name, x in own.items()}
        weights = {name: array for name, array in weights.items() if name in here or name not in self._elsewhere}
        given = {name: _kind(x.shape, x) for name, x in weights.items()}
        for name in sorted(here.keys() | given.keys()):
            found, expected = given.get(name, "missing"), here.get(name, "none of that name")
            if found != expected:
                raise ContractError(f"replica: {name!r} is {found}, expected {expected}; build it as its learner was built")
        for name, tensor in own.items():
            for target, array in _pairs(tensor, weights[name], self._shards.get(name)):
                target.copy_(torch.tensor(array).view(tensor.dtype))
        self.version = version

    def reading(self) -> AbstractContextManager[None]:
        """See ``PolicySource``."""
        return nullcontext()

    def _full_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        return self._shards[name].shape if name in self._shards else tuple(tensor.shape)


def _pairs(tensor: Tensor, array: np.ndarray, shard: Shard | None) -> Iterator[tuple[Tensor, np.ndarray]]:
    """What of a full array belongs where in a slice of it; None: the slice is all of it."""
    if shard is None:
        yield tensor, array
        return
    for cut, place, _ in shard.places:
        yield (
            tensor.narrow(shard.dim, place.start, len(place)),
            array[(*[slice(None)] * shard.dim, slice(cut.start, cut.stop))],
        )


def _kind(shape: tuple[int, ...], array: np.ndarray) -> str:
    return f"{array.dtype} {list(shape)}"
