"""A market of one share, with costs: daily closes of GOOGL, 2009 to 2018, from the package gym-anytrading.

Every day, after its close, the policy chooses the position that is held to the next close: -1 (short), 0 (flat) or 1
(long), in units of the wealth. The reward is the logarithm of the wealth's growth, so a return is that of the episode:

    log((1 - cost * |position - position before|) * (1 + position * (close tomorrow / close today - 1)))

An observation is the last ``WINDOW`` daily log-returns, each divided by the deviation of the last ``VOLATILITY``, and the
position: what is known after the close of that day. An episode ends with the period, as everything has to: it is truncated.
"""

from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

WINDOW, VOLATILITY = 20, 60


@cache
def closes() -> tuple[np.ndarray, np.ndarray]:
    """(days, their adjusted closes)"""
    from gym_anytrading.datasets import STOCKS_GOOGL

    return STOCKS_GOOGL.index.to_numpy("datetime64[D]"), STOCKS_GOOGL["Adj Close"].to_numpy(np.float64)


class Market(gymnasium.Env):
    """Trade from the day ``first`` to the day ``last`` (prices before count as known): ``days`` of them, from one that is
    drawn, or the whole period if 0. ``cost`` is the share of what is bought or sold that goes to others."""

    positions = (-1, 0, 1)

    def __init__(self, first: str, last: str, days: int = 0, cost: float = 0.001) -> None:
        dates, prices = closes()
        self.cost = cost
        self.growth = np.diff(prices) / prices[:-1]  # from day i to day i + 1
        self.returns = np.concatenate([[0.0], np.diff(np.log(prices))])  # of day i, known after its close
        # Up to each day: a return divided by what came later would tell of that.
        past = np.lib.stride_tricks.sliding_window_view(self.returns, VOLATILITY)
        self.deviation = np.concatenate([np.zeros(VOLATILITY - 1), past.std(1)])
        start = max(int(np.searchsorted(dates, np.datetime64(first))), VOLATILITY)
        end = int(np.searchsorted(dates, np.datetime64(last), "right")) - 1
        if not 0 <= days <= end - start:
            raise ValueError(f"{first} to {last}: {end - start} days can be traded, days = {days}")
        self.period, self.days = (start, end), days or end - start
        self.observation_space = spaces.Box(-np.inf, np.inf, (WINDOW + 1,), np.float32)
        self.action_space = spaces.Discrete(len(self.positions))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        start, end = self.period
        self.day = int(self.np_random.integers(start, end - self.days + 1))
        self.last, self.position = self.day + self.days, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        position = self.positions[action]
        paid = 1 - self.cost * abs(position - self.position)
        reward = np.log(paid * max(1e-6, 1 + position * self.growth[self.day]))  # a short position can lose more than all
        self.day, self.position = self.day + 1, position
        return self._observation(), float(reward), False, self.day == self.last, {}

    def _observation(self) -> np.ndarray:
        seen = self.returns[self.day - WINDOW + 1 : self.day + 1] / (self.deviation[self.day] + 1e-8)
        return np.append(seen, self.position).astype(np.float32)


gymnasium.registry.pop("Market-v0", None)  # of another copy of this file
gymnasium.register("Market-v0", Market)
