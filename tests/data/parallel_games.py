"""Small environments of several agents, whose every number a test can work out by hand."""

from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

INFINITE = {"low": -np.inf, "high": np.inf, "dtype": np.float32}


class Relay(ParallelEnv):
    """A script of five steps: a and c begin; b joins after the first, a terminates with the second, c with the fourth, and
    b is truncated with the fifth. Agent k sees (episode's start, steps, k), its reward is 100 k + steps + action / 10."""

    metadata: ClassVar = {"name": "relay"}
    possible_agents: ClassVar = ["a", "b", "c"]
    steps_of: ClassVar = {"a": (0, 2), "b": (1, 5), "c": (0, 4)}

    def __init__(self, fault=None, with_state=True):
        self.fault, self.with_state = fault, with_state

    def observation_space(self, agent):
        return spaces.Box(shape=(3,), **INFINITE)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def state(self):
        if not self.with_state:
            raise NotImplementedError
        return np.array([self.start, self.steps], np.float64)

    def _observations(self, names):
        return {name: np.array([self.start, self.steps, "abc".index(name)], np.float32) for name in names}

    def reset(self, seed=None, options=None):
        self.start, self.steps, self.agents = float(np.random.default_rng(seed).integers(1000)), 0, ["a", "c"]
        return self._observations(self.agents), {}

    def step(self, actions):
        assert sorted(actions) == self.agents
        rewards = {name: 100 * "abc".index(name) + self.steps + actions[name] / 10 for name in self.agents}
        self.steps += 1
        ended = {name: self.steps == self.steps_of[name][1] for name in self.agents}
        acted = self.agents
        self.agents = [name for name, (first, last) in self.steps_of.items() if first <= self.steps < last]
        observations = self._observations({*acted, *self.agents})
        if self.fault == "stays" and self.steps == 2:
            self.agents = ["a", *self.agents]
        if self.fault == "vanishes" and self.steps == 1:
            self.agents = ["b", "c"]
        if self.fault == "unseen" and self.steps == 3:
            del observations["c"]
        terminated = {name: ended[name] and name != "b" for name in acted}
        return observations, rewards, terminated, {name: ended[name] and name == "b" for name in acted}, {}


class Secret(ParallelEnv):
    """One step: each of two agents is rewarded by the sign that the state tells and observations don't."""

    metadata: ClassVar = {"name": "secret"}
    possible_agents: ClassVar = ["x", "y"]

    def observation_space(self, agent):
        return spaces.Box(shape=(1,), **INFINITE)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def state(self):
        return np.array([self.sign], np.float32)

    def reset(self, seed=None, options=None):
        self.sign, self.agents = float(np.random.default_rng(seed).choice([-1, 1])), ["x", "y"]
        return {name: np.zeros(1, np.float32) for name in self.agents}, {}

    def step(self, actions):
        acted, self.agents = self.agents, []
        rewards = dict(zip(acted, (self.sign, -2 * self.sign), strict=True))
        observations, no = {name: np.zeros(1, np.float32) for name in acted}, dict.fromkeys(acted, False)
        return observations, rewards, dict.fromkeys(acted, True), no, {}


class Alone(ParallelEnv):
    """CartPole for an only agent."""

    metadata: ClassVar = {"name": "alone"}
    possible_agents: ClassVar = ["only"]

    def __init__(self):
        self.env = gymnasium.make("CartPole-v1")

    def observation_space(self, agent):
        return self.env.observation_space

    def action_space(self, agent):
        return self.env.action_space

    def reset(self, seed=None, options=None):
        self.agents = ["only"]
        return {"only": self.env.reset(seed=seed)[0]}, {}

    def step(self, actions):
        observation, reward, terminated, truncated, _ = self.env.step(actions["only"])
        self.agents = [] if terminated or truncated else ["only"]
        return {"only": observation}, {"only": reward}, {"only": terminated}, {"only": truncated}, {}


def parallel_env(game="relay", **options):
    """What ``[environment] id`` names."""
    return {"relay": Relay, "secret": Secret, "alone": Alone}[game](**options)
