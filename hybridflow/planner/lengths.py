"""How long responses are: as recorded, or by mean and deviation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lengths"]


@dataclass(frozen=True)
class Lengths:
    """In tokens. Those in ``recorded`` are drawn again, each as often as any other; without them lengths are gamma
    distributed, by ``mean`` and ``deviation``, and cut at the ``longest`` (0: never). Without a deviation all are alike."""

    mean: float
    deviation: float = 0.0
    longest: float = 0.0
    recorded: tuple[float, ...] = ()

    @classmethod
    def of(cls, recorded: tuple[float, ...]) -> Lengths:
        return cls(float(np.mean(recorded)), float(np.std(recorded)), max(recorded), recorded)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
        if self.recorded:
            return rng.choice(np.array(self.recorded, np.float64), shape)
        if not self.deviation:
            return np.full(shape, self.mean)
        order = (self.mean / self.deviation) ** 2
        return np.minimum(rng.gamma(order, self.mean / order, shape), self.longest or np.inf)
