"""A control loop at a fixed rate, whose actions come from a policy server.

    hybridflow train examples/sac_pendulum.toml --checkpoint.export_every 20 &
    hybridflow serve runs/sac --follow &
    python examples/pendulum_control.py http://127.0.0.1:8001

The environment stands for a machine that waits for nobody: it moves on with every tick, and holds the last action where no
new one has come. Other policies drive other environments: --environment Reacher-v5.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from hybridflow.core.errors import LateError
from hybridflow.serving.client import PolicyClient


@dataclass
class Loop:
    """Ticks of ``period_s``. It keeps how long actions took, how many ticks had none, and versions of the policy."""

    client: PolicyClient
    period_s: float
    latencies_s: list[float] = field(default_factory=list)
    missed: int = 0
    versions: set[int] = field(default_factory=set)

    def episode(self, environment: Any, seed: int, steps: int) -> float:
        """The return of an episode of ``steps`` at most."""
        observation, _ = environment.reset(seed=seed)
        held, total = np.zeros(environment.action_space.shape, environment.action_space.dtype), 0.0
        tick = time.monotonic()
        for _ in range(steps):
            held = self.action(observation, held)
            tick += self.period_s
            time.sleep(max(0.0, tick - time.monotonic()))
            observation, reward, terminated, truncated, _ = environment.step(held)
            total += float(reward)
            if terminated or truncated:
                break
        return total

    def action(self, observation: Any, held: Any) -> Any:
        asked = time.monotonic()
        try:
            action, version = self.client.act(observation)
        except LateError:
            self.missed += 1
            return held
        self.latencies_s.append(time.monotonic() - asked)
        self.versions.add(version)
        return action


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of hybridflow serve")
    parser.add_argument("--environment", default="Pendulum-v1", help="default: Pendulum-v1")
    parser.add_argument("--rate", type=float, default=50.0, help="ticks a second; default: 50")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of an episode, at most; default: 200")
    options = parser.parse_args()
    environment, returns = gymnasium.make(options.environment), []
    with PolicyClient(options.url, timeout_s=0.9 / options.rate) as client:
        loop = Loop(client, 1 / options.rate)
        for episode in range(options.episodes):
            returns.append(loop.episode(environment, episode, options.steps))
            print(
                f"episode {episode}: return {returns[-1]:.0f}, policy version {max(loop.versions, default=-1)}", flush=True
            )
    p50, p99 = 1000 * np.percentile(loop.latencies_s or [np.nan], (50, 99))
    asked = len(loop.latencies_s) + loop.missed
    print(f"mean return {np.mean(returns):.0f}; {asked} ticks, {loop.missed} without an action")
    print(f"actions took {p50:.2f} ms (p50), {p99:.2f} ms (p99)")


if __name__ == "__main__":
    main()
