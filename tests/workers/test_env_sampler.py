import pickle
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP
from hybridflow.core.batch import Batch
from hybridflow.core.errors import CheckpointError, ContractError, DataError, NonFiniteError
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext, control_protocol, verb_of
from hybridflow.core.seeding import torch_generator
from hybridflow.data.envs import EnvironmentConfig, rollout_source, spaces_of
from hybridflow.models.continuous import DeterministicPolicy, SquashedGaussianPolicy
from hybridflow.models.nets import NetConfig, make_policy, make_q
from hybridflow.workers import env_sampler
from hybridflow.workers.env_sampler import EnvSampler, ExplorationConfig
from hybridflow.workers.units import action_columns

seen = partial(action_columns, device=torch.device("cpu"))


class Line(gymnasium.Env):
    """A walk whose observation is (episode's start, steps taken); it terminates after ``length`` steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    seeds: ClassVar = []  # of all resets in this process

    def __init__(self, length=3, reward=1.0):
        self.length, self.reward = length, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Line.seeds.append(seed)
        self.start, self.steps = float(self.np_random.integers(1000)), 0
        return np.array([self.start, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.length
        return np.array([self.start, self.steps], np.float32), self.reward * self.steps, ended, False, {}


gymnasium.register("HybridflowLine-v0", Line)


def sampler_for(config, *, exploration=None, seed=5, version=0, rank=0, ranks=1):
    observation_space, action_space = spaces_of(config)
    generator = torch_generator(1, "init")
    if exploration:
        networks = {"q": make_q(observation_space, action_space, NetConfig(hidden=(8,)), generator)}
    else:
        networks = {"policy": make_policy(observation_space, action_space, NetConfig(hidden=(8,)), generator)}
    sampler = EnvSampler(WorkerContext(mesh=Mesh(dp=ranks), rank=rank), config=config, seed=seed, exploration=exploration)
    sampler.attach(SimpleNamespace(networks=networks, main=next(iter(networks)), version=version))
    return sampler


def line(num_envs=2, steps=5, **options):
    return EnvironmentConfig(id="HybridflowLine-v0", num_envs=num_envs, steps_per_rollout=steps, options=options)


def assert_same(left, right, close=()):
    assert left.columns.keys() == right.columns.keys()
    for name in left.columns:
        a, b = (x[name].values if hasattr(x[name], "values") else x[name] for x in (left, right))
        if name in close:
            np.testing.assert_allclose(a, b, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)
        if hasattr(left[name], "lengths"):
            np.testing.assert_array_equal(left[name].lengths, right[name].lengths)


def test_pieces_end_at_episode_ends_and_at_the_limit():
    config = line(num_envs=2, steps=5, length=3)
    sampler = sampler_for(config, version=7)
    batch = sampler.rollout(rollout_source(config))
    assert batch.lengths.tolist() == [3, 2, 3, 2]
    assert batch["sample_id"].tolist() == [0, 1, 10**9, 10**9 + 1]
    assert batch["terminated"].tolist() == [True, False, True, False]
    assert batch["truncated"].tolist() == [False] * 4
    assert batch["final_observations"][:, 1].tolist() == [3, 2, 3, 2]
    assert batch["observations"].values[:, 1].tolist() == [0, 1, 2, 0, 1] * 2
    assert batch["rewards"].values.tolist() == [1, 2, 3, 1, 2] * 2
    starts = batch["observations"].values[:, 0].reshape(2, 5)
    assert len(np.unique(starts)) == 4, "every episode of every slot has a start of its own"
    assert batch["final_observations"][:, 0].tolist() == [x for row in starts for x in (row[0], row[3])]
    assert set(batch["policy_version"].values) == {7} and batch["response_mask"].values.all()
    assert set(batch.columns) == set(verb_of(EnvSampler.rollout).writes({}))


def test_a_cut_episode_goes_on_in_the_next_rollout():
    config = line(num_envs=1, steps=5, length=3)
    sampler = sampler_for(config)
    first, second = (sampler.rollout(rollout_source(config)) for _ in range(2))
    assert second.lengths.tolist() == [1, 3, 1] and second["sample_id"].tolist() == [2, 3, 4]
    assert second["observations"][0].tolist() == [first["final_observations"][1].tolist()]
    assert second["terminated"].tolist() == [True, True, False]


def test_a_truncated_piece_keeps_its_true_last_observation():
    config = line(num_envs=1, steps=4, length=9, max_episode_steps=2)
    batch = sampler_for(config).rollout(rollout_source(config))
    assert batch["truncated"].tolist() == [True, True] and batch["terminated"].tolist() == [False, False]
    assert batch["final_observations"].tolist() == [[start, 2] for start in batch["observations"].values[::2, 0]]


def test_an_end_at_the_limit_is_no_cut():
    config = line(num_envs=1, steps=6, length=3)
    batch = sampler_for(config).rollout(rollout_source(config))
    assert batch.lengths.tolist() == [3, 3] and batch["terminated"].tolist() == [True, True]


def test_episode_metrics():
    config = line(num_envs=2, steps=7, length=3)
    sampler = sampler_for(config)
    sampler.rollout(rollout_source(config))
    assert sampler.context.metrics.values() == {"episode_return": 6.0, "episode_length": 3.0, "steps": 14.0}


@pytest.mark.parametrize("exploration", [None, ExplorationConfig(epsilon_decay_steps=100)])
def test_numbers_do_not_depend_on_how_slots_are_dealt(exploration):
    config = EnvironmentConfig(id="CartPole-v1", num_envs=4, steps_per_rollout=40)
    whole, even, odd = (sampler_for(config, exploration=exploration) for _ in range(3))
    source = rollout_source(config)
    for _ in range(2):
        together = whole.rollout(source)
        apart = Batch.concat([even.rollout(source.rows([2, 0])), odd.rollout(source.rows([3, 1]))])
        assert_same(together, apart.rows(np.argsort(apart["sample_id"])), close=("log_probs",))


def test_slots_may_take_different_numbers_of_steps():
    config = line(num_envs=3, length=3)
    source = Batch({"slot": np.array([2, 0, 1]), "num_steps": np.array([4, 1, 0])})
    batch = sampler_for(config).rollout(source)
    assert batch.lengths.tolist() == [1, 3, 1]
    assert batch["sample_id"].tolist() == [0, 2 * 10**9, 2 * 10**9 + 1]


def test_no_slots_give_no_rows():
    config = line()
    batch = sampler_for(config).rollout(rollout_source(config).rows(np.zeros(0, np.int64)))
    assert len(batch) == 0 and batch["final_observations"].shape == (0, 2)


def test_a_slot_named_twice_is_refused():
    config = line()
    with pytest.raises(ContractError, match="twice"):
        sampler_for(config).rollout(rollout_source(config).rows([1, 1]))


def test_log_probs_are_those_of_the_policy():
    config = EnvironmentConfig(id="CartPole-v1", num_envs=3, steps_per_rollout=20)
    sampler = sampler_for(config)
    batch = sampler.rollout(rollout_source(config))
    with torch.no_grad():
        again = sampler.source.networks["policy"].outputs(seen(batch))["log_probs"].numpy()
    np.testing.assert_allclose(batch["log_probs"].values, again, atol=1e-6)
    assert 0 < batch["actions"].values.mean() < 1


def test_continuous_actions():
    config = EnvironmentConfig(id="Pendulum-v1", num_envs=2, steps_per_rollout=30)
    sampler = sampler_for(config)
    batch = sampler.rollout(rollout_source(config))
    actions = batch["actions"].values
    assert actions.shape == (60, 1) and actions.dtype == np.float32
    assert 0.6 < actions.std() < 1.4 and len(np.unique(actions)) == 60
    with torch.no_grad():
        again = sampler.source.networks["policy"].outputs(seen(batch))["log_probs"].numpy()
    np.testing.assert_allclose(batch["log_probs"].values, again, atol=1e-5)


def bounded(kind, *, noise=0.0, random_steps=0, num_envs=2, steps=40):
    config = EnvironmentConfig(id="Pendulum-v1", num_envs=num_envs, steps_per_rollout=steps)
    policy = kind(*spaces_of(config), NetConfig(hidden=(8,)), torch_generator(1, "init"))
    sampler = EnvSampler(WorkerContext(), config=config, seed=5, noise=noise, random_steps=random_steps)
    sampler.attach(SimpleNamespace(networks={"policy": policy}, main="policy", version=0))
    return policy, lambda: sampler.rollout(rollout_source(config))


@torch.no_grad()
def test_squashed_actions_begin_at_random_and_then_follow_the_policy():
    policy, rollout = bounded(SquashedGaussianPolicy, random_steps=100)
    at_random = [rollout() for _ in range(2)]  # 80 steps of all environments, then 160
    followed = rollout()
    for batch in at_random:
        actions = batch["actions"].values
        assert np.abs(actions).max() <= 2 and abs(np.abs(actions).mean() - 1) < 0.2
        np.testing.assert_allclose(batch["log_probs"].values, -np.log(2), rtol=1e-6)
    distribution = policy.distribution(torch.tensor(followed["observations"].values))
    expected = distribution.log_prob(torch.tensor(followed["actions"].values)).numpy()
    np.testing.assert_allclose(followed["log_probs"].values, expected, atol=1e-5)
    assert np.abs(followed["log_probs"].values + np.log(2)).min() > 1e-6


@torch.no_grad()
def test_deterministic_actions_carry_noise_in_units_of_the_bounds():
    policy, rollout = bounded(DeterministicPolicy, noise=0.1, steps=300)
    batch = rollout()
    greedy = policy.perturbed(torch.tensor(batch["observations"].values)).numpy()
    noise = (batch["actions"].values - greedy)[:, 0] / 2
    assert abs(noise.mean()) < 0.02 and noise.std() == pytest.approx(0.1, rel=0.1)
    expected = -0.5 * (noise / 0.1) ** 2 - np.log(0.1 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(batch["log_probs"].values, expected, atol=1e-4)


def test_exploration_decays_over_the_steps_of_all_environments():
    config = EnvironmentConfig(id="CartPole-v1", num_envs=4, steps_per_rollout=50)
    exploration = ExplorationConfig(epsilon_end=0.0, epsilon_decay_steps=200)
    sampler = sampler_for(config, exploration=exploration)
    first = sampler.rollout(rollout_source(config))
    assert sampler.context.metrics.values()["epsilon"] == pytest.approx(1 - 24.5 / 50)
    second = sampler.rollout(rollout_source(config))
    with torch.no_grad():
        q = sampler.source.networks["q"]
        greedy = [q(torch.from_numpy(b["observations"].values)).argmax(-1).numpy() for b in (first, second)]
    assert (first["actions"].values != greedy[0]).any()
    assert (second["actions"].values == greedy[1]).all() and (second["log_probs"].values == 0).all()


@pytest.mark.parametrize("exploration", [None, ExplorationConfig(epsilon_decay_steps=300)])
def test_resume_is_exact(exploration):
    config = EnvironmentConfig(id="CartPole-v1", num_envs=3, steps_per_rollout=33)
    source = rollout_source(config)
    sampler = sampler_for(config, exploration=exploration)
    sampler.rollout(source)
    saved = pickle.dumps(sampler.state_dict())
    resumed = sampler_for(config, exploration=exploration)
    resumed.rollout(source.rows([1]))
    resumed.load_state_dict(pickle.loads(saved))
    sampler.context.metrics.clear()
    resumed.context.metrics.clear()
    for _ in range(3):
        assert_same(sampler.rollout(source), resumed.rollout(source))
    assert sampler.context.metrics.values() == resumed.context.metrics.values()


def test_evaluate_plays_whole_episodes_and_disturbs_nothing():
    config = EnvironmentConfig(id="CartPole-v1", num_envs=2, steps_per_rollout=20)
    source = rollout_source(config)
    sampler, undisturbed = sampler_for(config), sampler_for(config)
    played = sampler.evaluate(5)
    assert len(played) == 5 and len({one.episode_return for one in played}) > 1 and played == sampler.evaluate(5)
    assert sampler.evaluate(2) == played[:2]
    assert all(episode.episode_return == episode.episode_length for episode in played)  # a pole's reward is 1 a step
    assert_same(sampler.rollout(source), undisturbed.rollout(source))


def test_evaluation_has_seeds_and_options_of_its_own():
    sampler = sampler_for(line(num_envs=4))
    Line.seeds.clear()
    sampler.rollout(rollout_source(sampler.config))
    trained = set(Line.seeds)
    Line.seeds.clear()
    assert {episode.episode_length for episode in sampler.evaluate(6)} == {3}
    assert {episode.episode_length for episode in sampler.evaluate(6, {"length": 5})} == {5}
    assert len(trained) > 4 and Line.seeds[:6] == Line.seeds[6:] and len(set(Line.seeds)) == 6
    assert not trained & set(Line.seeds)


def test_evaluate_refuses_to_wait_forever(monkeypatch):
    monkeypatch.setattr(env_sampler, "MAX_EVALUATION_STEPS", 20)
    with pytest.raises(DataError, match=r"did not end within 20 steps.*max_episode_steps"):
        sampler_for(line(length=-1)).evaluate(2)


def test_a_reward_that_is_not_finite_stops_with_the_sample():
    config = line(num_envs=2, reward=float("inf"), disable_env_checker=True)
    with pytest.raises(NonFiniteError, match=r"HybridflowLine-v0.*samples 0, 1, 1000000000"):
        sampler_for(config).rollout(rollout_source(config))


class Group:
    """A sampler of several ranks, as a runtime calls it."""

    def __init__(self, config, ranks, state=None):
        self.workers = [sampler_for(config, rank=rank, ranks=ranks) for rank in range(ranks)]
        self.mesh = Mesh(dp=ranks)
        for worker in self.workers if state is not None else ():
            worker.load_state_dict(state)

    def rollout(self, source):
        dealt = THREE_D_ALL_MICRO_DP.distribute(source.lengths, self.mesh)
        workers = self.workers[: self.mesh.size]
        parts = [worker.rollout(source.rows(rows)) for worker, rows in zip(workers, dealt, strict=True)]
        return Batch.concat(parts)

    def resize(self, ranks, *speeds):
        """As the Ray runtime does, with the first of so many workers as there may be."""
        old, self.mesh = self.mesh, Mesh(dp=ranks, speeds=speeds)
        for worker in self.workers[old.size : ranks]:
            worker.load_state_dict(())
        given = [state for worker in self.workers[: max(old.size, ranks)] for state in worker.hand_over(self.mesh)]
        for worker in self.workers[:ranks]:
            worker.take_over(pickle.loads(pickle.dumps(given)))
        return sorted(state["slot"] for state in given)

    def state_dict(self):
        assert control_protocol(EnvSampler.state_dict) is ONE_TO_ALL
        return pickle.loads(
            pickle.dumps([slot for worker in self.workers[: self.mesh.size] for slot in worker.state_dict()])
        )


def saved_slots(state):
    return sorted(saved["slot"] for saved in state)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_slots_go_on_at_any_number_of_ranks(ranks):
    config = EnvironmentConfig(id="CartPole-v1", num_envs=4, steps_per_rollout=33)
    source, straight = rollout_source(config), Group(config, 2)
    straight.rollout(source)
    state = straight.state_dict()
    assert saved_slots(state) == [0, 1, 2, 3]
    resumed = Group(config, ranks, state)
    again = Group(config, 3, resumed.state_dict())  # saved without a rollout in between
    assert saved_slots(again.state_dict()) == [0, 1, 2, 3]
    for _ in range(2):
        expected = straight.rollout(source)
        assert_same(expected, resumed.rollout(source), close=("log_probs",))
        assert_same(expected, again.rollout(source), close=("log_probs",))
        assert saved_slots(again.state_dict()) == saved_slots(resumed.state_dict()) == [0, 1, 2, 3]


def test_slots_that_move_to_other_ranks_take_their_episodes_along():
    config = EnvironmentConfig(id="CartPole-v1", num_envs=6, steps_per_rollout=17)
    source, straight = rollout_source(config), Group(config, 1)
    elastic = Group(config, 4)
    late, most = [3, 4, 5], [1, 2, 3, 4, 5]
    for ranks, moved in ((1, most), (1, []), (2, late), (3, [2, 4, 5]), (2, [2, 4, 5]), (2, []), (4, most), (4, [])):
        assert_same(straight.rollout(source), elastic.rollout(source), close=("log_probs",))
        assert elastic.resize(ranks) == moved
        assert saved_slots(elastic.state_dict()) == [0, 1, 2, 3, 4, 5], "each has one owner"
    for speeds, moved in (((0.5, 0.5, 2.0, 0.0001), [2, 4, 5]), ((1.0, 1.0, 1.0, 1.0), [2, 4, 5])):
        assert elastic.resize(4, *speeds) == moved
        assert_same(straight.rollout(source), elastic.rollout(source), close=("log_probs",))


def test_slots_leave_and_enter_child_processes():
    config = EnvironmentConfig(id="CartPole-v1", num_envs=3, steps_per_rollout=17)
    source, straight = rollout_source(config), Group(config, 1)
    elastic = Group(config, 2)
    children = elastic.workers[0] = sampler_for(config.model_copy(update={"processes": 1}), ranks=2)
    try:
        for ranks, moved in ((1, [1, 2]), (2, [1, 2]), (1, [1, 2]), (1, [])):
            assert_same(straight.rollout(source), elastic.rollout(source), close=("log_probs",))
            assert elastic.resize(ranks) == moved
            assert saved_slots(elastic.state_dict()) == [0, 1, 2]
    finally:
        children.close()


def test_slots_move_before_they_have_begun_and_what_was_loaded_for_others_is_not_taken_for_theirs():
    config = line(num_envs=4, steps=5)
    source, straight = rollout_source(config), Group(config, 1)
    straight.rollout(source)
    elastic = Group(config, 3, straight.state_dict())  # all ranks know all slots as they were now
    elastic.resize(2)  # none of them is open
    for ranks in (2, 1, 3, 1):
        assert_same(straight.rollout(source), elastic.rollout(source), close=("log_probs",))
        elastic.resize(ranks)
    assert saved_slots(elastic.state_dict()) == [0, 1, 2, 3]
    elastic.workers[2].load_state_dict(Group(config, 1).state_dict())
    elastic.workers[2]._saved[3] = {"num_pieces": np.array([99]), "state": {}, "memory": np.zeros((1, 0))}
    elastic.resize(3)  # who joins has nothing of former days
    assert_same(straight.rollout(source), elastic.rollout(source), close=("log_probs",))


def test_slots_that_no_rollout_names_any_more_are_kept_by_one_rank():
    many = line(num_envs=5)
    before = Group(many, 2)
    before.rollout(rollout_source(many))
    few = line(num_envs=2)
    resumed = Group(few, 3, before.state_dict())
    resumed.rollout(rollout_source(few))
    state = resumed.state_dict()
    assert saved_slots(state) == [0, 1, 2, 3, 4]
    steps = {saved["slot"]: saved["state"]["num_steps"] for saved in state}
    assert steps == {0: 10, 1: 10, 2: 5, 3: 5, 4: 5}
    back, whole = Group(many, 2, state), rollout_source(many)
    assert back.rollout(whole)["sample_id"].tolist()[:2] == [5, 6]  # goes on behind five pieces


def test_an_environment_that_does_not_come_back_is_told_when_it_is_dealt():
    config = line(num_envs=2)
    sampler = sampler_for(config)
    sampler.rollout(rollout_source(config))
    state = sampler.state_dict()
    state[1]["state"]["observation"] += 1
    resumed = sampler_for(config)
    resumed.load_state_dict(state)
    resumed.rollout(rollout_source(config).rows([0]))
    with pytest.raises(CheckpointError, match="slot 1"):
        resumed.rollout(rollout_source(config))


def test_child_processes_change_nothing():
    here = EnvironmentConfig(id="CartPole-v1", num_envs=3, steps_per_rollout=25)
    there = here.model_copy(update={"processes": 2})
    samplers = [sampler_for(config) for config in (here, there)]
    try:
        for _ in range(2):
            assert_same(*(sampler.rollout(rollout_source(here)) for sampler in samplers))
        assert samplers[0].evaluate(2) == samplers[1].evaluate(2)
        for one, other in zip(*(sampler.state_dict() for sampler in samplers), strict=True):
            assert (one["slot"], one["num_pieces"]) == (other["slot"], other["num_pieces"])
            for name, value in one["state"].items():
                assert np.array_equal(value, other["state"][name]), name
    finally:
        samplers[1].close()
