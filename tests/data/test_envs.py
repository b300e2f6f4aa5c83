import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hybridflow.core.config import parse
from hybridflow.core.errors import CheckpointError, ConfigError, DataError, UserError
from hybridflow.data.envs import EnvironmentConfig, Slot, make_environment, rollout_source, spaces_of


class Forgetful(gymnasium.Env):
    """Its observations depend on something that reset(seed) doesn't set."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2, start=3)
    life = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        assert action in (3, 4)
        Forgetful.life += 1
        return np.array([float(Forgetful.life)]), float(action), False, False, {}


class Counter(gymnasium.Env):
    """Writes every observation into the same array; rewards are the clipped actions."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.zeros(1, np.float32)
        return self.state, {}

    def step(self, action):
        self.state += 1
        return self.state, float(action[0]), bool(self.state[0] == 5), False, {}


gymnasium.register("HybridflowForgetful-v0", Forgetful)
gymnasium.register("HybridflowCounter-v0", Counter)
# Gymnasium's checker would warn of the shared array, which is the point here.
COUNTER = EnvironmentConfig(id="HybridflowCounter-v0", options={"disable_env_checker": True})


def play(slot, count):
    rng = np.random.default_rng(0)
    observations = []
    for _ in range(count):
        transition = slot.step(rng.integers(0, 2))
        observations.append(transition.observation)
        if transition.terminated or transition.truncated:
            slot.begin(slot.episode + 1)
    return np.array(observations)


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(DataError, match=r"CartPole-v7.*did you mean 'CartPole-v1'"):
        make_environment(EnvironmentConfig(id="CartPole-v7"))


def test_options_reach_the_environment_and_wrong_ones_are_named():
    config = EnvironmentConfig(id="CartPole-v1", options={"max_episode_steps": 3})
    slot = Slot(config, 1, 0)
    steps = [slot.step(np.int64(t % 2)) for t in range(3)]
    assert [step.truncated for step in steps] == [False, False, True]
    with pytest.raises(DataError, match=r"CartPole-v1.*wheels"):
        make_environment(EnvironmentConfig(id="CartPole-v1", options={"wheels": 3}))


def test_a_missing_module_is_one_line():
    with pytest.raises(DataError, match=r"nowhere:Thing-v0.*can't be imported"):
        make_environment(EnvironmentConfig(id="nowhere:Thing-v0"))


def test_missing_gymnasium_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"pip install hybridflow\[rl\]"):
        make_environment(EnvironmentConfig(id="CartPole-v1"))


def test_spaces_and_source():
    config = EnvironmentConfig(id="CartPole-v1", num_envs=3, steps_per_rollout=7)
    observation_space, action_space = spaces_of(config)
    assert observation_space.shape == (4,) and action_space.n == 2
    source = rollout_source(config)
    assert source["slot"].tolist() == [0, 1, 2] and source["num_steps"].tolist() == [7, 7, 7]


def test_slots_and_episodes_have_seeds_of_their_own():
    config = EnvironmentConfig(id="CartPole-v1")
    starts = [Slot(config, 1, 0).observation, Slot(config, 1, 1).observation, Slot(config, 2, 0).observation]
    slot = Slot(config, 1, 0)
    play(slot, 60)
    assert slot.episode > 0
    slot.begin(1)
    fresh = Slot(config, 1, 0)
    fresh.begin(1)
    assert np.array_equal(slot.observation, fresh.observation)
    assert len({tuple(start) for start in [*starts, slot.observation]}) == 4


@pytest.mark.parametrize("count", [0, 25, 61])
def test_a_slot_resumes_exactly(count):
    config = EnvironmentConfig(id="CartPole-v1")
    slot, resumed = Slot(config, 1, 4), Slot(config, 1, 4)
    play(slot, count)
    resumed.load_state_dict(slot.state_dict())
    assert (resumed.episode, resumed.num_steps) == (slot.episode, count)
    assert resumed.episode_return == slot.episode_return
    assert np.array_equal(play(slot, 80), play(resumed, 80))


def test_an_environment_that_cannot_be_played_again_is_an_error():
    config = EnvironmentConfig(id="HybridflowForgetful-v0")
    slot = Slot(config, 1, 2)
    slot.step(np.int64(0))
    with pytest.raises(CheckpointError, match=r"HybridflowForgetful-v0.*slot 2.*resumed exactly") as caught:
        Slot(config, 1, 2).load_state_dict(slot.state_dict())
    assert "\n" not in str(caught.value)


def test_actions_become_the_environments_own():
    assert Slot(EnvironmentConfig(id="HybridflowForgetful-v0"), 1, 0).step(np.int64(1)).reward == 4.0
    slot = Slot(COUNTER, 1, 0)
    assert slot.step(np.array([7.0], np.float32)).reward == 1.0
    assert slot.step(np.array([-0.25], np.float32)).reward == -0.25


def test_observations_are_copies():
    slot = Slot(COUNTER, 1, 0)
    first = slot.observation
    slot.step(np.zeros(1, np.float32))
    assert first.tolist() == [0.0] and slot.observation.tolist() == [1.0]


def wrapped(*wrappers, id="CartPole-v1"):
    return EnvironmentConfig(id=id, wrappers=wrappers)


def test_wrappers_go_around_from_the_inside():
    config = wrapped({"name": "FrameStackObservation", "stack_size": 3}, {"name": "ReshapeObservation", "shape": [12]})
    slot = Slot(config, 1, 0)
    assert spaces_of(config)[0].shape == (12,) and slot.observation.shape == (12,)
    before = slot.observation
    after = slot.step(np.int64(1)).observation
    assert np.array_equal(after[:8], before[4:]) and not np.array_equal(after[8:], before[8:])


def test_wrappers_of_other_packages_have_a_module():
    config = wrapped({"name": "minigrid.wrappers:ImgObsWrapper"}, id="minigrid:MiniGrid-Empty-5x5-v0")
    assert spaces_of(config)[0].shape == (7, 7, 3) and Slot(config, 1, 0).observation.dtype == np.uint8


def test_wrapped_slots_resume_exactly():
    config = wrapped({"name": "FrameStackObservation", "stack_size": 2}, {"name": "FlattenObservation"})
    slot, resumed = Slot(config, 1, 4), Slot(config, 1, 4)
    play(slot, 37)
    resumed.load_state_dict(slot.state_dict())
    assert np.array_equal(play(slot, 30), play(resumed, 30))


def test_rewards_are_clipped_by_a_wrapper():
    config = wrapped({"name": "ClipReward", "min_reward": -1.0, "max_reward": 1.0}, id="Pendulum-v1")
    slot = Slot(config, 1, 0)
    assert min(slot.step(np.zeros(1, np.float32)).reward for _ in range(50)) == -1.0


def test_the_first_of_all_environments_is_recorded(tmp_path):
    recording = {"name": "RecordVideo", "video_folder": str(tmp_path / "videos"), "name_prefix": "pole"}
    options = {"render_mode": "rgb_array", "max_episode_steps": 4}
    config = EnvironmentConfig(id="CartPole-v1", options=options, wrappers=(recording,))
    spaces_of(config)
    assert list(tmp_path.iterdir()) == []
    slots = [Slot(config, 1, 0), Slot(config, 1, 1), Slot(config, 1, 0, "eval-env")]
    for slot in slots:
        for _ in range(4):
            slot.step(np.int64(0))
        slot.close()
    names = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert names == ["pole-env-episode-0.mp4", "pole-eval-env-episode-0.mp4"]
    Slot(config.unrecorded, 1, 0, "other").close()
    assert len(list((tmp_path / "videos").iterdir())) == 2
    with pytest.raises(DataError, match=r"'RecordVideo' doesn't fit here.*render_mode"):
        Slot(config.model_copy(update={"options": {}}), 1, 0)


@pytest.mark.parametrize(
    ("wrapper", "told"),
    [
        ({"name": "FrameStack", "stack_size": 2}, r"'FrameStack' is no wrapper.*'FrameStackObservation'"),
        ({"name": "FrameStackObservation", "size": 2}, r"'FrameStackObservation' doesn't.*'size'"),
        ({"name": "NormalizeObservation"}, r"statistics of its own.*actor\.net\.normalise"),
        ({"name": "GrayscaleObservation"}, r"'GrayscaleObservation' doesn't fit"),
        ({"name": "no_such_module:Wrapper"}, r"No module named 'no_such_module'; install what has it"),
        (
            {"name": "minigrid.wrappers:ImgObs"},
            r"minigrid\.wrappers has no wrapper 'ImgObs', expected .*gymnasium\.Wrapper",
        ),
        ({"name": "json:JSONDecoder"}, r"json has no wrapper 'JSONDecoder'"),
        ({"name": "ClipReward", "min_reward": 1, "max_reward": -1}, r"Min reward \(1\) must be smaller than max reward"),
        ({"name": "StickyAction", "repeat_action_probability": 2}, r"should be in the interval"),
        ({"name": "NumpyToTorch"}, r"'NumpyToTorch': No module named 'array_api_compat'; install what it needs"),
    ],
)
def test_wrong_wrappers_are_one_line(wrapper, told):
    with pytest.raises(DataError, match=told) as caught:
        make_environment(wrapped(wrapper))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrapper", ["FrameStackObservation", {"stack_size": 2}, {"name": 3}])
def test_wrappers_without_a_name_are_one_line(wrapper):
    with pytest.raises(ConfigError, match=r'has no name, expected \{ name = "FrameStackObservation"') as caught:
        parse(EnvironmentConfig, {"id": "CartPole-v1", "wrappers": [wrapper]}, "test")
    assert len(caught.value.problems) == 1


def test_videos_that_can_not_be_written_and_ids_that_are_none_are_one_line(tmp_path):
    (tmp_path / "file").touch()
    recording = {"name": "RecordVideo", "video_folder": str(tmp_path / "file" / "videos")}
    config = EnvironmentConfig(id="CartPole-v1", options={"render_mode": "rgb_array"}, wrappers=(recording,))
    with pytest.raises(DataError, match=r"Not a directory.*it needs a video_folder"):
        Slot(config, 1, 0)
    with pytest.raises(DataError, match=r"environment 'Cart Pole' can't be made: Malformed environment ID"):
        make_environment(EnvironmentConfig(id="Cart Pole"))
