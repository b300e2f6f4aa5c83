"""An environment that can't be solved without a memory."""

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["CUE"]


class Cue(gymnasium.Env[np.ndarray, np.int64]):
    """The first observation shows which of two actions pays in the last step; after it, time is all that is seen."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, delay: int) -> None:
        self.delay = delay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.delay
        reward = float(ended and action == self.cue)
        return np.array([0, self.steps / self.delay], np.float32), reward, ended, False, {}


CUE = "HybridflowCue-v0"
gymnasium.register(CUE, Cue)
