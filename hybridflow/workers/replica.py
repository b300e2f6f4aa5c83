"""What a sampler reads when the learner lives in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.core.errors import ContractError, WorkerError
from hybridflow.core.roles import WorkerContext
from hybridflow.generation.stream import Stream
from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import decoder_shards
from hybridflow.models.policy import network_shards
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import Shard
from hybridflow.workers.forward import forward
from hybridflow.workers.networks import Networks, as_array, tensors
from hybridflow.workers.parts import WHOLE, Lines
from hybridflow.workers.publish import Published, checksum, compare_probes, probe_texts

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
        self._seen: set[str] = set()
        self._sums: list[int] = []
        self._last_sums: list[int] = []
        self.gate: Stream | None = None
        """closed while the weights change"""
        self.probe_error = 0.0
        """how far log-probabilities were from the learner's, at the last publish"""

    @staticmethod
    def at(networks: Networks, context: WorkerContext) -> Replica:
        """That of a sampler: cut as the sampler's mesh is."""
        return Replica(networks, Lines.of(context))

    def load(self, parts: Sequence[Published], last: bool) -> None:
        """Copy one bucket of weights, whose ``parts`` come from the stages of a learner, into the network in place; in the
        ``last`` one, check that nothing is missing, that an update has changed something, and that both models agree.

        Raises ContractError for weights of another network; WorkerError for bytes that were damaged on their way, for a
        step without effect, and for log-probabilities that differ.
        """
        if self.gate is not None and not self._sums:
            self.gate.close(parts[0].version)
        own = tensors(self.networks, self.main)
        for part in parts:
            if checksum(part.arrays.values()) != part.checksum:
                raise WorkerError(f"publish: weights of version {part.version} were damaged on their way to a sampler")
            for name, array in part.arrays.items():
                self._copy(name, own.get(name), array)
        self._sums += [part.checksum for part in parts]
        if last:
            self._finish(own, parts)
            if self.gate is not None:
                self.gate.open()

    def forget(self) -> None:
        """The rest of the buckets won't come."""
        self._sums, self._seen = [], set()

    def _copy(self, name: str, tensor: Tensor | None, array: np.ndarray) -> None:
        if tensor is None and name in self._elsewhere:
            return
        found, expected = _kind(array.shape, array), "none of that name"
        if tensor is not None:
            expected = _kind(self._full_shape(name, tensor), as_array(tensor.new_empty(0)))
        if tensor is None or found != expected:
            raise ContractError(f"replica: {name!r} is {found}, expected {expected}; build it as its learner was built")
        for target, piece in _pairs(tensor, array, self._shards.get(name)):
            target.copy_(torch.tensor(piece).view(tensor.dtype))
        self._seen.add(name)

    def _finish(self, own: Mapping[str, Tensor], parts: Sequence[Published]) -> None:
        version, stepped = parts[0].version, parts[0].stepped
        if missing := sorted(own.keys() - self._seen):
            raise ContractError(f"replica: {missing[0]!r} is missing; build it as its learner was built")
        if stepped and self._sums == self._last_sums:
            raise WorkerError(
                f"publish: up to version {version} the learner took a step, but its weights are those of version "
                f"{self.version} to the last bit; in bfloat16 small steps can be rounded away: raise the learning rate"
            )
        self._last_sums, self._sums, self._seen = self._sums, [], set()
        self.version = version
        for probe in [part.probe for part in parts if part.probe is not None]:
            network, decoder = self.networks[self.main], self.sampled
            texts = probe_texts(decoder.spec.vocab_size)
            found = forward(network, texts, ("log_probs",), texts.lengths.sum(), self.lines.pp)["log_probs"]
            if decoder.part.last:
                self.probe_error = compare_probes(probe, found.values, decoder.anchor.dtype, version)

    @property
    def sampled(self) -> Decoder:
        """What a sampler draws responses with."""
        network: Any = self.networks[self.main]
        decoder: Decoder = network.decoder
        return decoder

    @property
    def sampled_pp(self) -> Line:
        """The pipeline that ``sampled`` is a stage of."""
        return self.lines.pp

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
