"""CartPole without its velocities: what moves how fast can only be told from what was seen before."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box

SEEN = [0, 2]
"""the cart's position and the pole's angle"""


class Masked(gymnasium.ObservationWrapper[np.ndarray, int, np.ndarray]):
    """Of each observation what is ``SEEN``, doubled and tenfold, so that both are about 1 where an episode ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(CartPoleEnv(**options))
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return (observation[SEEN] * np.array([0.5, 5.0])).astype(np.float32)


gymnasium.register("MaskedCartPole-v0", Masked, max_episode_steps=500)
