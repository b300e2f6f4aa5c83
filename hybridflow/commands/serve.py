"""The serve-rewards command."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.rollout.reward_server import RewardServer
from hybridflow.rollout.rewards import RewardPool, RewardSpec

__all__ = ["serve_rewards"]


def serve_rewards(
    functions: Sequence[str], address: tuple[str, int], limits: tuple[float, int | None], secrets: Sequence[str]
) -> None:
    """Serve the sum of reward functions until interrupted. The line that tells the URL comes once it answers.

    ``limits``: seconds of a call, and processes.
    """
    specs, (timeout_s, workers) = [RewardSpec(function) for function in functions], limits
    with RewardPool(specs, timeout_s, workers, secrets=secrets) as pool, RewardServer(pool, *address) as server:
        print(f"serving {', '.join(functions)} at {server.url}; Ctrl-C stops", flush=True)
        server.serve_forever()
