"""Policies that tests serve, and how they are asked."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from hybridflow.models.nets import NetConfig, make_policy
from hybridflow.policy import Acting
from hybridflow.serving.served import Asked

OBSERVED = spaces.Box(-8.0, 8.0, (3,), np.float32)
DONE = spaces.Box(-2.0, 2.0, (2,), np.float32)


def acting(seed: int = 0, observed: Any = OBSERVED, done: Any = DONE) -> Acting:
    """A policy of random weights, whose actions depend on the observation."""
    made = Acting(make_policy(observed, done, NetConfig(hidden=(16, 16)), torch.Generator().manual_seed(seed)), done)
    with torch.no_grad():
        for parameter in made.network.mlp.layers[-1].parameters():
            parameter.mul_(60)
    return made.eval().requires_grad_(False)


def remembering(seed: int = 0) -> Acting:
    """A policy with a GRU."""
    config = NetConfig(kind="gru", hidden=(16,))
    return (
        Acting(make_policy(OBSERVED, DONE, config, torch.Generator().manual_seed(seed)), DONE).eval().requires_grad_(False)
    )


def weights(seed: int) -> dict[str, Tensor]:
    return dict(acting(seed).network.state_dict())


class Slow:
    """A policy whose forward takes ``seconds``; ``sizes``: how many observations each had."""

    def __init__(self, seconds: float) -> None:
        self._acting, self.seconds, self.sizes = acting(), seconds, list[int]()
        self.network = self._acting.network

    def __call__(self, observations: Tensor, memory: Tensor | None = None) -> Tensor:
        self.sizes.append(len(observations))
        time.sleep(self.seconds)
        actions: Tensor = self._acting(observations)
        return actions

    def __deepcopy__(self, _: Any) -> Slow:
        return self  # what is served is what the test looks at


def asked(observations: Any) -> Asked:
    return Asked(observations, np.zeros((len(observations), 0), np.float32))


def observations(number: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(-8, 8, (number, 3)).astype(np.float32)
