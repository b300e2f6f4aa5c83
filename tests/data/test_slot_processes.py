import os
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hybridflow.core.errors import WorkerError
from hybridflow.data.envs import EnvironmentConfig, spaces_of
from hybridflow.data.slot_processes import SlotProcesses, make_slots
from hybridflow.data.slots import Slots

OPTIONS = {"max_episode_steps": 7}


class Fragile(gymnasium.Env):
    """Raises at action 1, and ends its process at action 2."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 1:
            raise ValueError("broken")
        if action == 2:
            os._exit(3)
        return np.zeros(1, np.float32), 0.0, False, False, {}


gymnasium.register("HybridflowFragile-v0", Fragile)


def both(count=5, **keys):
    config = EnvironmentConfig(id="CartPole-v1", num_envs=count, options=OPTIONS, processes=2, **keys)
    arguments = (config, 3, spaces_of(config))
    return Slots(*arguments), SlotProcesses(*arguments)


def walk(slots, count, live):
    seen = []
    for t in range(count):
        ended = slots.step(live, np.arange(len(live)) % 2 ^ t % 2)
        ends = [(e.place, e.terminated, e.truncated, *e.episode[:2], *e.observation) for e in ended]
        seen.append((slots.observations.copy(), slots.rewards.copy(), ends))
    return seen


def assert_same(left, right):
    for (observations, rewards, ends), (others, theirs, their_ends) in zip(left, right, strict=True):
        assert np.array_equal(observations, others) and np.array_equal(rewards, theirs) and ends == their_ends
    assert any(ends for *_, ends in left)


def test_processes_are_slots_and_go_on_as_such():
    here, there = both()
    try:
        for ids, live in (([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([4, 1, 2], [0, 2])):
            here.open(ids, {})
            there.open(ids, {})
            assert np.array_equal(here.observations, there.observations)
            assert here.num_steps.tolist() == there.num_steps.tolist()
            assert_same(walk(here, 9, live), walk(there, 9, live))
        again, _ = both()
        again.open([0, 1, 2, 3, 4], there.state_dicts())
        here.open([0, 1, 2, 3, 4], {})
        assert_same(walk(here, 9, [0, 3]), walk(again, 9, [0, 3]))
    finally:
        there.close()


def fragile():
    config = EnvironmentConfig(id=f"{Path(__file__).stem}:HybridflowFragile-v0", num_envs=2, processes=2)
    slots = make_slots(config, 1, (Fragile.observation_space, Fragile.action_space))
    slots.open([0, 1], {})
    return slots


def test_errors_of_environments_are_raised_and_deaths_are_told(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    slots = fragile()
    try:
        with pytest.raises(ValueError, match="broken"):
            slots.step([0, 1], np.array([0, 1]))
        with pytest.raises(WorkerError, match=r"HybridflowFragile-v0.*process 1 of 2 died, exit code 3"):
            slots.step([1], np.array([2]))
    finally:
        slots.close()


def test_a_child_that_hangs_is_told_and_ended():
    _, slots = both()
    slots.open([0, 1], {})
    slots.config = slots.config.model_copy(update={"timeout_s": 0.5})  # which they need not have started within
    try:
        (hanging, _) = slots._children
        os.kill(hanging.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"process 0 of 2 did not answer for 0.5 s \(environment.timeout_s\)"):
            slots.step([0, 1], np.array([0, 1]))
        hanging.join(5)
        assert hanging.exitcode == -signal.SIGKILL
    finally:
        slots.close()
