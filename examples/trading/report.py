"""What policies of the trading example make of the years that they were trained on and of the later ones, beside what
anybody could do: buy and hold, do nothing, choose by chance.

    python examples/trading/report.py runs/trading-1 runs/trading-2 ...

Returns are logarithms of growth a year (252 days), costs included. Intervals are of 95 %, of the mean over days, by a
circular block bootstrap (Politis and Romano 1992): blocks of 20 days, so that days that hang together stay together. That
of all policies together is of their mean each day: it tells of the market's chance, not of what seeds change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybridflow.data.envs import EnvironmentConfig, make_environment
from hybridflow.policy import Policy

YEAR, BLOCK, RESAMPLES, CHANCES = 252, 20, 10_000, 20


def days_of(act: Callable[[np.ndarray], int], market: EnvironmentConfig) -> np.ndarray:
    """The reward of every day of a period."""
    environment, rewards, ended = make_environment(market), [], False
    observation, _ = environment.reset(seed=0)
    while not ended:
        observation, reward, _, ended, _ = environment.step(act(observation))
        rewards.append(reward)
    return np.array(rewards)


def interval(days: np.ndarray) -> tuple[float, float]:
    """(low, high) of the mean."""
    blocks = np.array([np.roll(days, -start)[:BLOCK].mean() for start in range(len(days))])
    drawn = np.random.default_rng(0).integers(len(days), size=(RESAMPLES, round(len(days) / BLOCK)))
    low, high = np.quantile(blocks[drawn].mean(1), [0.025, 0.975])
    return float(low), float(high)


def baselines(market: EnvironmentConfig) -> dict[str, np.ndarray]:
    rng, positions = np.random.default_rng(0), make_environment(market).unwrapped.positions
    chances = [days_of(lambda _: int(rng.integers(len(positions))), market) for _ in range(CHANCES)]
    return {
        "buy and hold": days_of(lambda _: positions.index(1), market),
        "always flat": days_of(lambda _: positions.index(0), market),
        f"by chance, mean of {CHANCES}": np.mean(chances, axis=0),
    }


def line(name: str, days: np.ndarray, hold: np.ndarray) -> str:
    told = []
    for values in (days, days - hold):
        low, high = interval(values)
        told.append(f"{YEAR * values.mean():+.3f} [{YEAR * low:+.3f}, {YEAR * high:+.3f}]")
    return f"| {name} | {np.exp(days.sum()):.2f} | {told[0]} | {told[1]} |"


def table(policies: list[Policy], market: EnvironmentConfig) -> str:
    rows, others = [days_of(policy.act, market) for policy in policies], baselines(market)
    hold, yearly = others["buy and hold"], [YEAR * days.mean() for days in rows]
    out = ["| | wealth at the end | a year | a year, more than buy and hold |", "|---|---|---|---|"]
    out += [line(name, days, hold) for name, days in others.items()]
    out += [line(f"policy, seed {policy.config.seed}", days, hold) for policy, days in zip(policies, rows, strict=True)]
    if len(rows) > 1:
        spread = f"mean of {len(rows)} policies, deviation between them {np.std(yearly, ddof=1):.3f}"
        out.append(line(spread, np.mean(rows, axis=0), hold))
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Policies of the trading example beside what anybody could do.")
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    policies = [Policy.load(run) for run in parser.parse_args().runs]
    later, trained = policies[0].environment, policies[0].config.environment
    assert trained is not None, "Policy.load says so"
    for name, market in (("trained on", trained.with_options({"days": 0})), ("later", later)):
        print(f"\n{name}: {market.options['first']} to {market.options['last']}\n\n{table(policies, market)}")


if __name__ == "__main__":
    main()
