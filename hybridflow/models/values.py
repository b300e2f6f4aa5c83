"""Networks that value states.

Shapes: B observations, R pieces, N action steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hybridflow.core.batch import Batch
from hybridflow.models.features import Moments
from hybridflow.models.layers import allocated
from hybridflow.models.nets import NetConfig, ObservationNet

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["ValueNet"]

RETURNS_KEPT = 0.99
"""what returns of earlier updates count after one more: the last hundred updates make the mean"""
LEAST_DEVIATION = 0.01
"""returns that are nearly equal are not blown up"""


class ValueNet(ObservationNet):
    """The value of a state, by a ``column`` of the ``space``: "observations", or "states" for a critic of several agents.

    With a memory, which is another one than the policy's, it begins each piece with what it reads from the policy's there:
    ``policy_memory_size`` numbers, by a linear map that is learned. A policy's memory says what it will do, so a value is a
    function of it anyway.

    With ``config.normalise_returns``, what the layers give is a value in deviations off the mean of ``returns``, those that
    were learned from lately. When these change, the last layer is changed so that values stay what they were (PopArt, van
    Hasselt et al. 2016).
    """

    def __init__(
        self,
        space: Space[Any],
        config: NetConfig,
        generator: torch.Generator,
        column: str = "observations",
        policy_memory_size: int = 0,
    ) -> None:
        super().__init__(space, 1, 1.0, config, generator)
        self.inputs = (column, "memory") if self.memory_size else (column,)
        self.returns = Moments(1, RETURNS_KEPT) if config.normalise_returns else None
        self.reading: nn.Linear | None = None
        if self.memory_size and config.kind != "attention":  # whose memory, past observations, is the same for all
            reading = allocated(nn.Linear(policy_memory_size, self.memory_size, bias=False, device="meta"))
            nn.init.orthogonal_(reading.weight, 1.0, generator)
            self.reading = reading

    def unroll(self, observations: Tensor, memory: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """As above, with the policy's ``memory`` [R, policy_memory_size]."""
        begun = memory if self.reading is None else self.reading(memory)
        return super().unroll(observations, begun, lengths)

    def head(self, outputs: Tensor) -> Tensor:
        """Values [B] of outputs [B, 1]."""
        values = outputs.squeeze(-1)
        return values if self.returns is None else values * self._deviation + self.returns.mean.float()

    @property
    def _deviation(self) -> Tensor:
        """[1] of returns, as far as it is one."""
        assert self.returns is not None
        return self.returns.variance.clamp(min=LEAST_DEVIATION**2).sqrt().float()

    def outputs(self, columns: Mapping[str, Tensor] | Batch) -> dict[str, Tensor]:
        """``values`` [N] over the action steps and, of normalised ones, their ``value_scale`` [N]."""
        values = self.head(self.learned(columns))
        return {"values": values} | ({} if self.returns is None else {"value_scale": self._deviation.expand_as(values)})

    @torch.no_grad()
    def observe(self, columns: Mapping[str, Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """See ``ObservationNet``."""
        super().observe(columns, total)
        if self.returns is not None:
            last: Any = self.mlp.layers[-1]
            deviation, mean = self._deviation, self.returns.mean.float()
            self.returns.add(columns["returns"][:, None], total)
            last.weight.mul_(deviation / self._deviation)
            last.bias.mul_(deviation).add_(mean - self.returns.mean.float()).div_(self._deviation)

    def bootstrap(self, batch: Batch) -> Tensor:
        """[B] value of ``final_observations``, also of rows that terminated: estimators leave those out."""
        final = self._tensor(batch[f"final_{self.inputs[0]}"])
        if not self.memory_size:
            return self.head(self.forward(final))
        observed = batch.ragged(self.inputs[0])
        memory = self._tensor(batch["memory"])
        values = self.unroll_on(self._tensor(observed.values), final, memory, observed.lengths)
        return self.head(values[self._tensor(np.cumsum(observed.lengths) + np.arange(len(final)))])
