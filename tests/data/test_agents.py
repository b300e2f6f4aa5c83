"""Several agents in one environment: every column against a reference by hand, workers, resuming, processes, critics."""

import json
import pickle
import re
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CARTPOLE, with_keys, written

from hybridflow.build_networks import actor_networks
from hybridflow.config import validate
from hybridflow.controller.protocols import THREE_D_ALL_MICRO_DP
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext, verb_of
from hybridflow.core.seeding import derive, torch_generator
from hybridflow.data.agents import agents_of
from hybridflow.data.envs import EnvironmentConfig, make_environment, rollout_source, spaces_of
from hybridflow.models.nets import NetConfig, make_policy
from hybridflow.policy import Policy
from hybridflow.workers.env_sampler import EnvSampler

HERE = "pettingzoo:parallel_games"


def relay(num_envs=2, steps=4, agent_id=False, processes=0, **options):
    keys = {"num_envs": num_envs, "steps_per_rollout": steps, "agent_id": agent_id, "processes": processes}
    return EnvironmentConfig(id=HERE, options=options, **keys)


def sampler_for(config, rank=0, ranks=1, with_states=True):
    policy = make_policy(*spaces_of(config), NetConfig(hidden=(8,)), torch_generator(1, "init"))
    context = WorkerContext(mesh=Mesh(dp=ranks), rank=rank)
    sampler = EnvSampler(context, config=config, seed=5, with_states=with_states)
    sampler.attach(SimpleNamespace(networks={"policy": policy}, main="policy", version=3))
    return sampler


def assert_same(left, right, close=()):
    assert left.columns.keys() == right.columns.keys() and len(left) == len(right)
    for name in left.columns:
        a, b = (x[name].values if hasattr(x[name], "values") else x[name] for x in (left, right))
        np.testing.assert_allclose(a, b, atol=1e-6 if name in close else 0, err_msg=name)
        if hasattr(left[name], "lengths"):
            np.testing.assert_array_equal(left[name].lengths, right[name].lengths)


# (agent, steps of the episode that the piece has, terminated, truncated), of rollouts of four steps
FIRST = [(0, (0, 1), True, False), (1, (1, 2, 3), False, False), (2, (0, 1, 2, 3), True, False)]
SECOND = [
    (0, (0, 1), True, False),
    (1, (4,), False, True),
    (1, (1, 2), False, False),
    (2, (0, 1, 2), False, False),
]


def by_hand(pieces, starts, first_ids, env, agents=3):
    """What a rollout gives of one environment; ``starts``: of each piece's episode."""
    rows, numbers = [], dict(enumerate(first_ids))
    for (agent, steps, terminated, truncated), start in zip(pieces, starts, strict=True):
        seen = [[start, step, agent] for step in (*steps, steps[-1] + 1)]
        who = np.eye(agents)[agent].tolist()
        states = [[start, step, *who] for step in (*steps, steps[-1] + 1)]
        sample = (env * agents + agent) * 10**9 + numbers[agent]
        numbers[agent] += 1
        rewards = [100 * agent + step for step in steps]
        rows.append((sample, len(steps), seen[:-1], seen[-1], states[:-1], states[-1], rewards, terminated, truncated))
    return rows


def test_every_column_is_what_the_script_says():
    config, sampler = relay(), sampler_for(relay())
    starts = [[float(np.random.default_rng(derive(5, "env", env, k)).integers(1000)) for k in range(2)] for env in (0, 1)]
    for number, (script, ids) in enumerate(((FIRST, (0, 0, 0)), (SECOND, (1, 1, 1)))):
        batch, expected = sampler.rollout(rollout_source(config)), []
        for env, (one, two) in enumerate(starts):
            of = [one] * 3 if number == 0 else [two, one, two, two]
            expected += by_hand(script, of, ids, env)
        sample, lengths, seen, final, states, final_states, rewards, terminated, truncated = zip(*expected, strict=True)
        assert batch["sample_id"].tolist() == list(sample) and batch.lengths.tolist() == list(lengths)
        assert batch["observations"].values.tolist() == [*chain(*seen)]
        assert batch["final_observations"].tolist() == list(final)
        assert batch["states"].values.tolist() == [*chain(*states)]
        assert batch["final_states"].tolist() == list(final_states)
        assert batch["terminated"].tolist() == list(terminated) and batch["truncated"].tolist() == list(truncated)
        actions = batch["actions"].values
        np.testing.assert_allclose(batch["rewards"].values, np.array([*chain(*rewards)]) + actions / 10, rtol=1e-6)
        assert 0 < actions.mean() < 1 and set(batch["policy_version"].values) == {3} and batch["response_mask"].values.all()
        with torch.no_grad():
            distribution = sampler.source.networks["policy"].distribution(torch.tensor(batch["observations"].values))
            log_probs = distribution.log_prob(torch.tensor(actions)).numpy()
        np.testing.assert_allclose(batch["log_probs"].values, log_probs, atol=1e-6)
        assert set(batch.columns) == set(verb_of(EnvSampler.rollout).writes({"with_states": True}))


def test_an_episode_counts_once_and_tells_the_return_of_each_agent():
    config = relay(num_envs=2, steps=5)
    sampler = sampler_for(config, with_states=False)
    batch = sampler.rollout(rollout_source(config))
    metrics = sampler.context.metrics.values()
    by_agent = {name: metrics[f"episode_return/{name}"] for name in "abc"}
    own = [batch.ragged("rewards").values[batch.ragged("rewards").row_index % 3 == agent].sum() / 2 for agent in range(3)]
    np.testing.assert_allclose(list(by_agent.values()), own, rtol=1e-6)
    assert metrics["episode_return"] == pytest.approx(sum(own)) and metrics["episode_length"] == 5
    assert metrics["steps"] == 10 and "states" not in batch
    for episode in sampler.evaluate(3):
        assert episode.episode_length == 5 and episode.episode_return == pytest.approx(sum(episode.by_agent.values()))
        assert [round(value, -1) for value in episode.by_agent.values()] == [0, 410, 810]


def test_without_a_state_a_critic_sees_what_all_observe_and_who_asks():
    config = relay(num_envs=1, steps=5, with_state=False)
    batch = sampler_for(config).rollout(rollout_source(config))
    start = batch["observations"].values[0, 0]
    seen = {name: [start, step, number] for number, name in enumerate("abc") for step in [0]}
    nobody = [0.0] * 3
    of_c = batch["states"].rows([2]).values.tolist()
    assert of_c[0] == [*seen["a"], *nobody, *seen["c"], 0, 0, 1]
    assert of_c[2] == [start, 2, 0, start, 2, 1, start, 2, 2, 0, 0, 1]  # a's last observation is there when it has gone
    assert of_c[3] == [*nobody, start, 3, 1, start, 3, 2, 0, 0, 1]
    assert batch["final_states"].tolist()[1] == [*nobody, start, 5, 1, *nobody, 0, 1, 0]


def test_agents_may_see_their_number():
    config = relay(num_envs=2, steps=3, agent_id=True)
    batch = sampler_for(config).rollout(rollout_source(config))
    observed = batch["observations"].values
    assert observed.shape[1] == 6 == batch["final_observations"].shape[1] and spaces_of(config)[0].shape == (6,)
    assert (observed[:, 3:].argmax(1) == observed[:, 2]).all() and (observed[:, 3:].sum(1) == 1).all()
    assert (batch["final_observations"][:, 3:].argmax(1) == batch["final_observations"][:, 2]).all()


class Group:
    """Samplers of several ranks, dealt to as a runtime does."""

    def __init__(self, config, ranks, state=None):
        self.samplers = [sampler_for(config, rank, ranks) for rank in range(ranks)]
        for sampler in self.samplers if state else ():
            sampler.load_state_dict(state)

    def rollout(self, source):
        dealt = THREE_D_ALL_MICRO_DP.distribute(np.ones(len(source), np.int64), Mesh(dp=len(self.samplers)))
        parts = [sampler.rollout(source.rows(rows)) for sampler, rows in zip(self.samplers, dealt, strict=True)]
        batch = Batch.concat(parts)
        return batch.rows(np.argsort(batch["sample_id"]))

    def state_dict(self):
        return pickle.loads(pickle.dumps([*chain(*(sampler.state_dict() for sampler in self.samplers))]))


def test_any_number_of_workers_gives_the_same_rows_and_goes_on_as_one():
    config = relay(num_envs=5)
    source = rollout_source(config)
    whole, two = Group(config, 1), Group(config, 2)
    for _ in range(2):
        assert_same(whole.rollout(source), two.rollout(source), close=("log_probs",))
    three, one = Group(config, 3, two.state_dict()), Group(config, 1, two.state_dict())
    for _ in range(2):
        expected = whole.rollout(source)
        assert expected["sample_id"][0] > 1
        assert_same(expected, three.rollout(source), close=("log_probs",))
        assert_same(expected, one.rollout(source), close=("log_probs",))


@pytest.mark.slow
def test_child_processes_change_nothing(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    here, there = sampler_for(relay(num_envs=3)), sampler_for(relay(num_envs=3, processes=2))
    try:
        for _ in range(3):
            assert_same(here.rollout(rollout_source(here.config)), there.rollout(rollout_source(here.config)))
        resumed = sampler_for(relay(num_envs=3))
        resumed.load_state_dict(there.state_dict())
        assert_same(here.rollout(rollout_source(here.config)), resumed.rollout(rollout_source(here.config)))
    finally:
        there.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stays", r"agent 'a', step 2: ended, but is still in agents"),
        ("vanishes", r"agent 'a', step 1: left agents, but didn't end"),
        ("unseen", r"agent 'c', step 3: acted and isn't in all that step returned"),
    ],
)
def test_environments_that_break_the_rules_are_told(fault, said):
    config = relay(fault=fault)
    with pytest.raises(DataError, match=said):
        sampler_for(config).rollout(rollout_source(config))


def test_what_is_no_environment_of_several_agents_is_told():
    with pytest.raises(DataError, match=r"pettingzoo:nowhere.*can't be imported.*hybridflow\[agents\]"):
        agents_of(EnvironmentConfig(id="pettingzoo:nowhere"))
    with pytest.raises(DataError, match="math has no parallel_env"):
        agents_of(EnvironmentConfig(id="pettingzoo:math"))
    with pytest.raises(DataError, match=r"doesn't take the options.*speed"):
        agents_of(relay(speed=3))
    with pytest.raises(DataError, match="has several agents, one is needed; hybridflow eval"):
        make_environment(relay())


def run_of(game, **keys):
    base = with_keys(CARTPOLE, environment__id=HERE, environment__options={"game": game})
    return with_keys(base, **keys)


def records(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_an_only_agent_learns_what_ppo_learns_without_others(hybridflow, tmp_path):
    for name, data in (("alone", run_of("alone")), ("plain", CARTPOLE)):
        (tmp_path / name).mkdir()
        assert hybridflow("train", written(tmp_path / name, data)).code == 0
    alone, plain = (records(tmp_path / name) for name in ("alone", "plain"))
    assert len(plain) == 3
    for one, other in zip(alone, plain, strict=True):
        same = {key for key in other if not key.startswith(("time/", "memory/")) and not key.endswith("_per_s")}
        assert len(same) > 4 and {key: one[key] for key in same} == {key: other[key] for key in same}
    weights = [(tmp_path / name / "run" / "model" / "policy.safetensors").read_bytes() for name in ("alone", "plain")]
    assert weights[0] == weights[1]


def test_a_critic_of_the_state_knows_what_observations_hide(hybridflow, tmp_path):
    errors = {}
    for name in ("observations", "state"):
        keys = {"train__steps": 40, "environment__num_envs": 16, "environment__steps_per_rollout": 4}
        lr = {"critic__optimizer__lr": 1e-2, "critic__input": name, "ppo__value_clip": 0.0}
        (tmp_path / name).mkdir()
        assert hybridflow("train", written(tmp_path / name, run_of("secret", **keys, **lr))).code == 0
        errors[name] = records(tmp_path / name)[-1]["critic/value_error"]
    assert errors["state"] < 0.1 and errors["observations"] > 1.2


def test_groups_of_agents_with_different_spaces_have_networks_of_their_own():
    config = EnvironmentConfig(id="pettingzoo:mpe2.simple_speaker_listener_v4", num_envs=2, steps_per_rollout=6)
    agents = agents_of(config)
    assert agents.names == ("speaker_0", "listener_0") and agents.groups == [[0], [1]]
    assert spaces_of(config)[0].shape == (13,) and spaces_of(config)[1].n == 5  # 11 numbers and who it is; 3 words, 5 moves
    networks = actor_networks(spaces_of(config), validate(speaking("unused"), "test"))
    sampler = EnvSampler(WorkerContext(), config=config, seed=5)
    sampler.attach(SimpleNamespace(networks=networks, main="policy", version=0))
    batch = sampler.rollout(rollout_source(config))
    seen, actions = (torch.tensor(batch[name].values) for name in ("observations", "actions"))
    speaks = batch["observations"].row_index % 2 == 0
    assert (seen[speaks, 3:11] == 0).all() and (seen[:, 11:].argmax(-1).numpy() == ~speaks).all()
    assert actions[speaks].max() == 2 and actions[~speaks].max() == 4
    policy = networks["policy"]
    own = [policy.networks[0].distribution(seen[speaks][:, :3]), policy.networks[1].distribution(seen[~speaks][:, :11])]
    for rows, distribution in zip((speaks, ~speaks), own, strict=True):
        expected = distribution.log_prob(actions[rows]).detach().numpy()
        np.testing.assert_allclose(batch["log_probs"].values[rows], expected, atol=1e-6)
        entropy = policy.distribution(seen[rows]).entropy().detach().numpy()
        np.testing.assert_allclose(entropy, distribution.entropy().detach().numpy(), atol=1e-6)


def speaking(run_dir, **keys):
    return with_keys(run_of("relay", run_dir=run_dir, environment__options={}, **keys), environment__id=SPEAKING)


SPEAKING = "pettingzoo:mpe2.simple_speaker_listener_v4"
OTHERS = {
    "a2c": {"ppo": None, "train": {"steps": 3}},
    "trpo": {"ppo": None},
    "reinforce": {"ppo": None, "critic": None},
    "impala": {"ppo": None, "train": {"steps": 3}},
}


@pytest.mark.parametrize("algorithm", ["ppo", *OTHERS])
def test_agents_learn_by_every_method_without_replay(algorithm, hybridflow, tmp_path):
    data = speaking(str(tmp_path), algorithm=algorithm, actor__net__normalise=True, **OTHERS.get(algorithm, {}))
    assert hybridflow("train", written(tmp_path, data)).code == 0
    policy = Policy.load(tmp_path / "run")
    fresh = actor_networks(policy.spaces, validate(data, "test"))["policy"]
    for trained, before in zip(policy.network.networks, fresh.networks, strict=True):
        assert trained.features.moments.count > 1
        moved = [bool((a != b).any()) for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
        assert all(moved) and all(parameter.isfinite().all() for parameter in trained.parameters())
    assert policy.act(np.eye(13, dtype=np.float32)[[11, 12]]).shape == (2,)


def test_agents_remember_their_own_episodes(hybridflow, tmp_path):
    keys = {"actor__net": {"kind": "gru", "hidden": [8]}, "critic__input": "state", "train__steps": 3}
    assert hybridflow("train", written(tmp_path, run_of("relay", **keys))).code == 0
    data = validate(run_of("relay", run_dir="unused", **keys), "test")
    network = actor_networks(spaces_of(data.environment), data)["policy"]
    sampler = EnvSampler(WorkerContext(), config=relay(steps=7), seed=5, memory_size=8)
    sampler.attach(SimpleNamespace(networks={"policy": network}, main="policy", version=0))
    batch = sampler.rollout(rollout_source(relay(steps=7)))
    assert (batch["memory"] == 0).all()  # every piece begins an episode of its agent
    again = sampler.rollout(rollout_source(relay(steps=7)))
    goes_on = [row for row in range(len(again)) if again["observations"].rows([row]).values[0, 1] == 2]
    assert len(goes_on) == 4 and (again["memory"][goes_on] != 0).any(1).all()  # b and c, cut by the limit
    assert (np.delete(again["memory"], goes_on, 0) == 0).all()
    with torch.no_grad():
        outputs = network.outputs(again)
    np.testing.assert_allclose(outputs["log_probs"].numpy(), again["log_probs"].values, atol=1e-5)


def test_replaying_methods_learn_from_agents_alike_and_refuse_others(hybridflow, tmp_path):
    replays = {"algorithm": "dqn", "ppo": None, "critic": None, "train": {"steps": 6}}
    replays |= {"replay": {"capacity": 500, "batch_size": 8, "warmup": 20, "n_steps": 2}}
    outcome = hybridflow("train", written(tmp_path, speaking(str(tmp_path), **replays)))
    assert outcome.code == 2 and "agents whose spaces differ need a method without replay" in outcome.err
    data = run_of("relay", **replays, environment__steps_per_rollout=4)
    assert hybridflow("train", written(tmp_path, data)).code == 0
    assert records(tmp_path)[-1]["policy_version"] > 0


def test_an_evaluation_tells_the_return_of_each_agent(hybridflow, tmp_path):
    assert hybridflow("train", written(tmp_path, run_of("relay", critic__input="state", train__steps=1))).code == 0
    assert "return/b" in hybridflow("eval", tmp_path / "run").out.replace(" /", "/")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"environment__wrappers": [{"name": "FlattenObservation"}]}, "wrappers are gymnasium's"),
        ({"environment__id": "CartPole-v1", "environment__agent_id": True}, "agent_id is for several agents"),
        (
            {"algorithm": "dqn", "ppo": None, "critic": {"input": "state"}, "train": {"steps": 1}},
            "[critic] is set, but dqn on [environment] doesn't read it",
        ),
        ({"environment__id": "CartPole-v1", "critic__input": "state"}, 'critic.input = "state": needs several agents'),
    ],
)
def test_keys_that_do_not_fit_are_told(keys, said, hybridflow, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(said)):
        validate(run_of("relay", run_dir=str(tmp_path), **keys), "test")


def test_the_graph_knows_the_seats(hybridflow, tmp_path):
    graph = hybridflow("graph", written(tmp_path, run_of("relay", critic__input="state"))).out
    assert "compute_values  forward, 12 rows, 384 steps" in graph and "states, final_states" in graph
