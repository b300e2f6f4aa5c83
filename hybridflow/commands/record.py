"""The record command: episodes of a trained policy as a Minari dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybridflow.data.recorded import record as record_episodes
from hybridflow.policy import Policy

__all__ = ["record"]


def record(run: Path, folder: Path, num_steps: int, chance: float) -> None:
    """Write whole episodes of a run's policy, ``num_steps`` steps or a few more, and say how good they are."""
    policy = Policy.load(run)
    about = {
        "algorithm_name": policy.config.algorithm,
        "description": f"episodes of a policy that hybridflow trained; with a chance of {chance:g}, actions are random",
    }
    steps, returns = record_episodes(policy.environment, policy.act, folder, num_steps, chance, about)
    print(f"{steps} steps of {len(returns)} episodes, mean return {np.mean(returns):.3f}: {folder}")
