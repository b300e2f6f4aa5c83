"""A trained policy by itself, outside of a run: what plays, serves, exports and measures it starts from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridflow.build_networks import actor_networks, main_network
from hybridflow.commands.evaluate import run_config
from hybridflow.config import RunConfig
from hybridflow.core.batch import Array
from hybridflow.core.errors import ModelError
from hybridflow.data.envs import EnvironmentConfig, spaces_of

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """``network`` acts in ``environment``, which has ``spaces`` of observations and actions; ``config`` is its run's."""

    network: Any
    environment: EnvironmentConfig
    spaces: tuple[Any, Any]
    config: RunConfig

    @classmethod
    def load(cls, run: Path) -> Policy:
        """What the run in directory ``run`` has exported. ModelError: it hasn't, or was no run in an environment."""
        config = run_config(run, ["--device", "cpu"])
        if config.environment is None:
            raise ModelError(f"{run}: a run on [data]; expected one in an [environment], whose policy acts")
        spaces = spaces_of(config.environment)
        network = actor_networks(spaces, config)[main_network(config)].eval().requires_grad_(False)
        return cls(network, config.environment, spaces, config)

    @torch.inference_mode()
    def act(self, observations: Array) -> Array:
        """The likeliest action [B, ...] at each observation [B, ...]; discrete ones are numbered from 0."""
        actions: Array = self.network.distribution(torch.from_numpy(observations)).mode.numpy()
        return actions
