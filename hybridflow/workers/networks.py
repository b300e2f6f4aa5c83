"""Networks by name, as workers build and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.core.errors import UserError
from hybridflow.workers.parts import Lines

__all__ = ["Networks", "all_tensors", "as_array", "tensors"]


@dataclass(frozen=True)
class Networks:
    """Networks to build by name. ``main`` is trained; ``inputs`` are the columns that it reads. ``model``: whose weights
    they start from, for people to read. ``part``: builds what a rank holds of them, None for networks that can't be cut.
    ``normalised``: the main one normalises what it observes, by statistics of all updates. ``clipped_apart``: parts of it,
    by the start of their parameters' names, whose gradients are clipped each by itself.
    """

    build: Callable[[], Mapping[str, nn.Module]]
    main: str
    inputs: tuple[str, ...]
    model: str = "a new network"
    part: Callable[[Lines], Mapping[str, nn.Module]] | None = None
    normalised: bool = False
    clipped_apart: tuple[str, ...] = ("",)

    def at(self, lines: Lines) -> dict[str, nn.Module]:
        """What the rank at this place of a mesh holds. UserError if they can't be cut."""
        if lines.whole and lines.cp.size == 1:
            return dict(self.build())
        if self.part is None:
            raise UserError(f"mesh: {self.model} can't be cut; use tp = 1, pp = 1 and cp = 1 for it")
        return dict(self.part(lines))


def tensors(networks: Mapping[str, nn.Module], name: str) -> dict[str, Tensor]:
    """Parameters and buffers of network ``name``, by "<network>/<their name>"; a tied one has its first name alone."""
    network = networks[name]
    return {f"{name}/{key}": tensor for key, tensor in (*network.named_parameters(), *network.named_buffers())}


def all_tensors(*networks: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of all ``networks``."""
    for network in networks:
        yield from (*network.parameters(), *network.buffers())


def as_array(tensor: Tensor) -> np.ndarray:
    """The tensor as numpy, without a copy on CPUs; bfloat16, which numpy doesn't know, as its bits in uint16."""
    tensor = tensor.detach().cpu()
    # By DLPack: ``Tensor.numpy`` would fix the tensor's memory for ever, and then it can't be offloaded any more.
    return np.from_dlpack(tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor)
