"""What a sampler reads when the learner lives in other processes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from hybridflow.core.errors import ContractError
from hybridflow.workers.learner import Networks, as_array, tensors

__all__ = ["Replica"]


class Replica:
    """A copy of the main network of a learner that was built from the same ``networks``; ``version`` is the learner's."""

    def __init__(self, networks: Networks) -> None:
        self.main, self.version = networks.main, 0
        self.networks: dict[str, nn.Module] = {self.main: networks.build()[self.main].requires_grad_(False)}

    def load(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        """Copy ``weights`` (of ``Learner.weights``) into the network in place; ContractError, with nothing copied, if they
        are those of another one."""
        own = tensors(self.networks, self.main)
        here = {name: _kind(tuple(x.shape), as_array(x.new_empty(0))) for name, x in own.items()}
        given = {name: _kind(x.shape, x) for name, x in weights.items()}
        for name in sorted(here.keys() | given.keys()):
            found, expected = given.get(name, "missing"), here.get(name, "none of that name")
            if found != expected:
                raise ContractError(f"replica: {name!r} is {found}, expected {expected}; build it as its learner was built")
        for name, tensor in own.items():
            tensor.copy_(torch.tensor(weights[name]).view(tensor.dtype))
        self.version = version


def _kind(shape: tuple[int, ...], array: np.ndarray) -> str:
    return f"{array.dtype} {list(shape)}"
