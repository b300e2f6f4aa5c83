import numpy as np

from hybridflow.data.envs import EnvironmentConfig, Slot, spaces_of
from hybridflow.data.slots import Slots

CONFIG = EnvironmentConfig(id="CartPole-v1", options={"max_episode_steps": 6})


def opened(ids=(3, 1), restart=True):
    slots = Slots(CONFIG, 7, spaces_of(CONFIG), restart=restart)
    slots.open(ids, {})
    return slots


def test_slots_are_what_each_is_alone():
    slots, alone = opened(), [Slot(CONFIG, 7, 3), Slot(CONFIG, 7, 1)]
    assert np.array_equal(slots.observations, [slot.observation for slot in alone])
    for t in range(5):
        actions = np.array([t % 2, 1])
        assert slots.step([0, 1], actions) == []
        steps = [slot.step(action) for slot, action in zip(alone, actions, strict=True)]
        assert np.array_equal(slots.observations, [step.observation for step in steps])
        assert slots.rewards.tolist() == [1.0, 1.0]


def test_an_ended_episode_is_told_and_the_next_one_begins():
    slots, alone = opened(), Slot(CONFIG, 7, 1)
    for t in range(6):
        ended = slots.step([1], np.array([t % 2]))
        last = alone.step(np.int64(t % 2))
    (end,) = ended
    assert (end.place, end.terminated, end.truncated, end.episode) == (1, False, True, (6.0, 6, {}))
    assert np.array_equal(end.observation, last.observation)
    alone.begin(1)
    assert np.array_equal(slots.observations[1], alone.observation)
    assert np.array_equal(slots.observations[0], Slot(CONFIG, 7, 3).observation), "slots that are not live stand still"


def test_without_a_restart_the_last_observation_stays():
    slots = opened(restart=False)
    ended = [end for t in range(6) for end in slots.step([0], np.array([t % 2]))]
    assert np.array_equal(slots.observations[0], ended[0].observation)


def test_saved_slots_are_opened_where_they_stood():
    slots = opened()
    for t in range(9):
        slots.step([0, 1], np.array([t % 2, 1]))
    again = Slots(CONFIG, 7, spaces_of(CONFIG))
    again.open([1, 3, 0], slots.state_dicts())
    assert np.array_equal(again.observations[:2], slots.observations[::-1])
    assert again.num_steps.tolist() == [9, 9, 0]
    slots.open([3], {})
    assert slots.num_steps.tolist() == [9] and sorted(slots.state_dicts()) == [1, 3]
