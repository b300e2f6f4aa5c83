"""What agents get that act at random, each by itself: what trained ones are compared with in docs/classical.md.

    python benchmarks/random_agents.py --id pettingzoo:mpe2.simple_spread_v3 --episodes 1000

Episodes are those that `hybridflow eval` plays for a run of the same seed. Returns are sums over the agents.
"""

from __future__ import annotations

import argparse

import numpy as np

from hybridflow.core.seeding import generator
from hybridflow.data.agents import SharedSlots
from hybridflow.data.envs import EVALUATION, EnvironmentConfig, spaces_of
from hybridflow.telemetry.result import mean_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--id", default="pettingzoo:mpe2.simple_spread_v3")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--action", type=int, help="always this one, instead of any; 0 stands still in MPE")
    options = parser.parse_args()
    config = EnvironmentConfig(id=options.id)
    returns = play(config, options.episodes, options.seed, options.action)
    mean, low, high = mean_interval(returns)
    print(f"{options.id}: {mean:.1f}, 95 % confidence [{low:.1f}, {high:.1f}], n {len(returns)}")


def play(config: EnvironmentConfig, episodes: int, seed: int, action: int | None) -> list[float]:
    """Returns of episodes whose agents draw their actions evenly, or always take the same ``action``."""
    slots, returns = SharedSlots(config, seed, spaces_of(config), EVALUATION, restart=False), dict[int, float]()
    number, random = np.array([space.n for space in slots.agents.done]), generator(seed, "random agents")
    for episode in range(episodes):
        slots.open([episode], {})
        while episode not in returns:
            live = np.flatnonzero(slots.present)
            actions = random.integers(number[live]) if action is None else np.full(len(live), action)
            for end in slots.step(live.tolist(), actions):
                returns |= {} if end.episode is None else {episode: end.episode.episode_return}
        slots.close()
    return list(returns.values())


if __name__ == "__main__":
    main()
