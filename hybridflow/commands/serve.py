"""The serve-rewards command."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.rollout.reward_server import RewardServer
from hybridflow.rollout.rewards import RewardPool, RewardSpec

__all__ = ["serve_rewards"]


def serve_rewards(functions: Sequence[str], host: str, port: int, timeout_s: float, workers: int | None) -> None:
    """Serve the sum of reward functions until interrupted. The line that tells the URL comes once it answers."""
    specs = [RewardSpec(function) for function in functions]
    with RewardPool(specs, timeout_s, workers) as pool, RewardServer(pool, host, port) as server:
        print(f"serving {', '.join(functions)} at {server.url}; Ctrl-C stops", flush=True)
        server.serve_forever()
