"""DQN on the real learner and sampler, and its loss by hand."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from hybridflow.algorithms.dqn import DQN, DQNConfig
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Role
from hybridflow.core.seeding import torch_generator
from hybridflow.data.envs import EnvironmentConfig, entry_types, rollout_source, spaces_of
from hybridflow.models.nets import NetConfig, make_q
from hybridflow.ops.td import dqn_loss
from hybridflow.rollout.replay import Replay, ReplayConfig
from hybridflow.workers.env_sampler import EnvSampler, ExplorationConfig
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.replay_rows import ReplayWorker

GAMMA = 0.9


class Chain(gymnasium.Env):
    """Five states in a row; action 1 goes right, 0 back to the first, and only the last step right is rewarded."""

    observation_space = spaces.Discrete(5)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 0
        return self.state, {}

    def step(self, action):
        ended = bool(action == 1 and self.state == 4)
        self.state = min(self.state + 1, 4) if action == 1 else 0
        return self.state, float(ended), ended, False, {}


gymnasium.register("HybridflowChain-v0", Chain, max_episode_steps=20)
CHAIN = EnvironmentConfig(id="HybridflowChain-v0", num_envs=4, steps_per_rollout=4)


class ActorOf:
    """Sampler and learner as one actor."""

    def __init__(self, runtime):
        observation_space, action_space = spaces_of(CHAIN)

        def build():
            make = [
                make_q(observation_space, action_space, NetConfig(hidden=(32,)), torch_generator(1, "q")) for _ in range(2)
            ]
            return dict(zip(("q", "target"), make, strict=True))

        arguments = {
            "networks": Networks(build, "q", ("observations", "actions")),
            "optimizer": OptimizerConfig(lr=3e-3, max_grad_norm=10.0),
            "plan": UpdatePlan(),
            "total_steps": 10_000,
            "seed": 1,
        }
        exploration = ExplorationConfig(epsilon_end=0.2, epsilon_decay_steps=2000)
        self.learner = runtime.role(Role("learner", Learner, arguments))
        self.sampler = runtime.role(Role("sampler", EnvSampler, {"config": CHAIN, "seed": 1, "exploration": exploration}))
        runtime.share("learner", "sampler")
        self.rollout, self.update = self.sampler.rollout, self.learner.update


def q_table(runtime):
    q = runtime._workers["learner"].networks["q"]
    with torch.no_grad():
        return q(torch.arange(5))


def replay_of(runtime, config):
    role = Role("replay", ReplayWorker, {"capacity": config.capacity, "types": entry_types(spaces_of(CHAIN))})
    return Replay(config, 1, GAMMA, runtime.role(role))


def test_dqn_solves_a_chain_and_finds_its_values():
    runtime = LocalRuntime()
    actor = ActorOf(runtime)
    replay = ReplayConfig(capacity=2000, batch_size=64, warmup=100)
    algorithm = DQN(DQNConfig(gamma=GAMMA, target_update_every=20, tau=1.0), actor, replay)
    buffer = replay_of(runtime, replay)
    assert actor.sampler.evaluate(1)[0].episode_return == 0
    for _ in range(250):
        buffer.add(algorithm.rollout(rollout_source(CHAIN)), 0)
        for _ in range(4):
            batch = buffer.sample(0)
            if batch is not None:
                learned = algorithm.learn(batch)
    assert [played.episode_return for played in actor.sampler.evaluate(3)] == [1.0, 1.0, 1.0]
    right = [GAMMA ** (4 - state) for state in range(5)]
    expected = torch.tensor([[GAMMA * right[0], right[state]] for state in range(5)])
    assert torch.allclose(q_table(runtime), expected, atol=0.05)
    assert learned["td_errors"].lengths.tolist() == [1] * 64 and np.abs(learned["td_errors"].values).mean() < 0.05


class Table(nn.Module):
    """Q values of states 0 and 1."""

    def __init__(self, rows):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(rows))

    def forward(self, observations):
        return self.values[observations]


def transitions():
    return {
        "observations": torch.tensor([0, 1]),
        "actions": torch.tensor([1, 0]),
        "rewards": torch.tensor([1.0, -3.0]),
        "discounts": torch.tensor([0.5, 0.0]),
        "weights": torch.ones(2),
        "final_observations": torch.tensor([1, 0]),
    }


@pytest.mark.parametrize(("double", "bootstrap"), [(False, 8.0), (True, 6.0)])
def test_dqn_loss_by_hand(double, bootstrap):
    networks = {"q": Table([[1.0, 2.0], [4.0, 3.0]]), "target": Table([[0.0, 0.0], [6.0, 8.0]])}
    loss = dqn_loss.bind(double=double, huber_delta=1.0)
    result = loss(networks, transitions())
    first = 2.0 - (1.0 + 0.5 * bootstrap)
    assert result.columns["td_errors"].tolist() == [first, 7.0]
    assert result.terms.tolist() == [abs(first) - 0.5, 6.5]
    assert result.metrics["q"].tolist() == [2.0, 4.0] and result.metrics["td_error"].tolist() == [abs(first), 7.0]
    result.terms.sum().backward()
    assert networks["q"].values.grad.tolist() == [[0.0, -1.0], [1.0, 0.0]] and networks["target"].values.grad is None
    assert loss.on == "networks" and loss.writes == ("td_errors",)


def test_errors_count_linearly_beyond_huber_delta():
    networks = {"q": Table([[1.0, 2.0], [4.0, 3.0]]), "target": Table([[0.0, 0.0], [6.0, 8.0]])}
    errors = dqn_loss(networks, transitions()).columns["td_errors"].tolist()
    result = dqn_loss(networks, transitions(), huber_delta=4.0)
    assert errors == [-2.0, 7.0] and result.terms.tolist() == [0.5 * 2.0**2, 4.0 * (7.0 - 2.0)]
    squared = dqn_loss(networks, transitions()).terms.tolist()
    assert squared == [0.5 * 2.0**2, 0.5 * 7.0**2]


def test_a_terminated_transition_ignores_what_follows():
    networks = {"q": Table([[1.0, 2.0], [4.0, 3.0]]), "target": Table([[float("nan")] * 2, [6.0, 8.0]])}
    result = dqn_loss(networks, transitions())
    assert torch.isfinite(result.terms).all()


def test_dqn_loss_refuses_pieces_of_several_steps():
    columns = {**transitions(), "final_observations": torch.tensor([1]), "discounts": torch.tensor([0.5])}
    with pytest.raises(ContractError, match=r"2 steps in 1 rows.*one transition"):
        dqn_loss({"q": Table([[0.0], [0.0]]), "target": Table([[0.0], [0.0]])}, columns)


def test_the_target_network_follows_every_so_many_updates():
    runtime = LocalRuntime()
    actor = ActorOf(runtime)
    replay = ReplayConfig(batch_size=8, warmup=1)
    algorithm = DQN(DQNConfig(target_update_every=3, tau=1.0), actor, replay)
    networks = runtime._workers["learner"].networks
    buffer = replay_of(runtime, replay)
    buffer.add(algorithm.rollout(rollout_source(CHAIN)), 0)
    equal = []
    for _ in range(7):
        algorithm.learn(buffer.sample(0))
        pairs = zip(networks["q"].parameters(), networks["target"].parameters(), strict=True)
        equal.append(all(torch.equal(*pair) for pair in pairs))
    assert equal == [False, False, True, False, False, True, False]
