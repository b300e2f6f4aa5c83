"""A policy and a value network as one, so that whoever has a copy of it can act and learn by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridflow.core.batch import Batch

__all__ = ["ActorCritic"]


class ActorCritic(nn.Module):
    """Acts as ``policy`` does; its outputs are those of both networks, on rows if the policy has a memory, else on single
    steps."""

    def __init__(self, policy: Any, value: Any) -> None:
        super().__init__()
        self.policy, self.value = policy, value
        self.inputs: tuple[str, ...] = policy.inputs
        self.unit: Literal["row", "step"] = policy.unit
        self.memory_size: int = policy.memory_size

    @property
    def device(self) -> torch.device:
        device: torch.device = self.policy.device
        return device

    def distribution(self, observations: Tensor) -> Any:
        """Of the action at each observation [B, ...]."""
        return self.policy.distribution(observations)

    def step(self, observations: Tensor, memory: Tensor) -> tuple[Any, Tensor]:
        """As that of the policy."""
        distribution, after = self.policy.step(observations, memory)
        return distribution, after

    def outputs(self, columns: Mapping[str, Tensor] | Batch) -> dict[str, Tensor]:
        """``log_probs``, ``entropy`` and ``values``, [N] over the action steps."""
        return {**self.policy.outputs(columns), **self.value.outputs(columns)}

    def bootstrap(self, batch: Batch) -> Tensor:
        """[B] value of ``final_observations``, also of rows that terminated."""
        values: Tensor = self.value.bootstrap(batch)
        return values
