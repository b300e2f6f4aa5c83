"""Policies with a memory in sampler and learner: it goes with its episode, and what is learned from is what acted."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from memory_envs import CUE

from hybridflow.controller.protocols import THREE_D_ALL_MICRO_DP
from hybridflow.core.batch import Batch
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext, verb_of
from hybridflow.core.seeding import torch_generator
from hybridflow.data.envs import EnvironmentConfig, rollout_source, spaces_of
from hybridflow.models.nets import NetConfig, make_policy
from hybridflow.ops.losses import ppo_clip
from hybridflow.workers.env_sampler import EnvSampler
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig

KINDS = ("gru", "lstm", "attention")
DELAY = 7
kinds = pytest.mark.parametrize("kind", KINDS)


def environment(steps: int, num_envs: int = 3) -> EnvironmentConfig:
    return EnvironmentConfig(id=CUE, num_envs=num_envs, steps_per_rollout=steps, options={"delay": DELAY})


def policy_of(kind: str) -> torch.nn.Module:
    net = NetConfig.model_validate({"kind": kind, "hidden": [8]} | ({"context": 5} if kind == "attention" else {}))
    made = make_policy(*spaces_of(environment(1)), net, torch_generator(1, "init"))
    with torch.no_grad():
        made.mlp.layers[-1].weight.mul_(50)  # the small gain of a policy's head would hide differences
    return made


def sampler_of(kind: str, config: EnvironmentConfig, rank: int = 0, ranks: int = 1, max_piece: int = 0) -> EnvSampler:
    policy = policy_of(kind)
    context = WorkerContext(mesh=Mesh(dp=ranks), rank=rank)
    sampler = EnvSampler(context, config=config, seed=5, memory_size=policy.memory_size, max_piece=max_piece)
    sampler.attach(SimpleNamespace(networks={"policy": policy}, main="policy", version=0))
    return sampler


def assert_same(left: Batch, right: Batch) -> None:
    assert left.columns.keys() == right.columns.keys() == {*verb_of(EnvSampler.rollout).writes({"memory_size": 1})}
    for name in left.columns:
        a, b = (x[name].values if hasattr(x[name], "values") else x[name] for x in (left, right))
        if name in ("log_probs", "memory"):
            np.testing.assert_allclose(a, b, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


@kinds
def test_memory_begins_with_the_episode_and_goes_on_over_rollouts(kind: str) -> None:
    """The same steps in one rollout and in many: the limit of a rollout changes nothing but where pieces are cut."""
    whole, short = sampler_of(kind, environment(20)), sampler_of(kind, environment(4))
    once = whole.rollout(rollout_source(whole.config))
    parts = [short.rollout(rollout_source(short.config)) for _ in range(5)]
    for slot in range(3):
        rows = [part.rows(part["sample_id"] // 10**9 == slot) for part in parts]
        own = once.rows(once["sample_id"] // 10**9 == slot)
        for name in ("observations", "actions", "rewards"):
            together = np.concatenate([part.ragged(name).values for part in rows])
            np.testing.assert_array_equal(together, own.ragged(name).values)
        log_probs = np.concatenate([part.ragged("log_probs").values for part in rows])
        np.testing.assert_allclose(log_probs, own.ragged("log_probs").values, atol=1e-6)
    first = np.concatenate([[part["observations"][row][0, 1] == 0 for row in range(len(part))] for part in parts])
    remembered = np.concatenate([part["memory"].any(1) for part in parts])
    assert (first == ~remembered).all() and 0 < first.mean() < 1


@kinds
@pytest.mark.parametrize("budget", [1, 9, 4096])
def test_the_learner_finds_the_log_probs_of_acting(kind: str, budget: int) -> None:
    """In the second rollout, whose pieces begin in the middle of episodes."""
    sampler = sampler_of(kind, environment(10))
    sampler.rollout(rollout_source(sampler.config))
    batch = sampler.rollout(rollout_source(sampler.config))
    assert batch["memory"].any()
    networks = Networks(lambda: {"policy": policy_of(kind)}, "policy", ("observations", "actions", "memory"))
    plan = UpdatePlan(minibatches=2, epochs=2, token_budget=budget)
    one = Learner(WorkerContext(), networks=networks, optimizer=OptimizerConfig(), plan=plan, total_steps=4, seed=1)
    found = one.compute_log_probs(batch).ragged("learner_log_probs").values
    np.testing.assert_allclose(found, batch.ragged("log_probs").values, atol=1e-5)
    assert np.ptp(found) > 0.1
    advantages = batch.ragged("log_probs").like(np.ones(30, np.float32))
    one.update(batch.with_columns(advantages=advantages), ppo_clip.bind(clip=0.2))
    assert one.context.metrics.values()["mismatch_max"] < 1e-5


@kinds
def test_pieces_are_cut_where_a_sequence_is_full_and_begin_with_their_memory(kind: str) -> None:
    """Episodes of 7 in rollouts of 20: pieces of 3, 3 and 1, the last one of the rollout is cut by its limit."""
    whole, cut = sampler_of(kind, environment(20)), sampler_of(kind, environment(20), max_piece=3)
    one, many = whole.rollout(rollout_source(whole.config)), cut.rollout(rollout_source(cut.config))
    for name in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(one.ragged(name).values, many.ragged(name).values)
    assert many.lengths.tolist() == [3, 3, 1, 3, 3, 1, 3, 3] * 3
    assert many["sample_id"].tolist() == [slot * 10**9 + piece for slot in range(3) for piece in range(8)]
    ends = np.cumsum(many.lengths)
    inside = np.isin(np.arange(24) % 8, [0, 1, 3, 4, 6])
    np.testing.assert_array_equal(many["final_observations"][inside], many.ragged("observations").values[ends[inside]])
    assert not (many["terminated"] | many["truncated"])[inside].any() and many["terminated"][[2, 5, 10]].all()
    assert many["memory"].any(1).tolist() == [False, True, True, False, True, True, False, True] * 3
    networks = Networks(lambda: {"policy": policy_of(kind)}, "policy", ("observations", "actions", "memory"))
    one_more = Learner(
        WorkerContext(), networks=networks, optimizer=OptimizerConfig(), plan=UpdatePlan(), total_steps=4, seed=1
    )
    found = one_more.compute_log_probs(many).ragged("learner_log_probs").values
    np.testing.assert_allclose(found, many.ragged("log_probs").values, atol=1e-5)


@kinds
def test_resume_is_exact(kind: str) -> None:
    config = environment(10)
    source, sampler, resumed = rollout_source(config), sampler_of(kind, config), sampler_of(kind, config)
    sampler.rollout(source)
    resumed.rollout(source.rows([1]))
    resumed.load_state_dict(pickle.loads(pickle.dumps(sampler.state_dict())))
    for _ in range(2):
        before, after = sampler.rollout(source), resumed.rollout(source)
        assert_same(before, after)
        assert np.array_equal(before["memory"], after["memory"]) and before["memory"].any()


@kinds
def test_memory_moves_with_its_slot(kind: str) -> None:
    config = environment(10)
    source, alone = rollout_source(config), sampler_of(kind, config)

    def group(ranks: int) -> list[EnvSampler]:
        return [sampler_of(kind, config, rank, ranks) for rank in range(ranks)]

    def rollout(workers: list[EnvSampler]) -> Batch:
        dealt = THREE_D_ALL_MICRO_DP.distribute(source.lengths, Mesh(dp=len(workers)))
        parts = [worker.rollout(source.rows(rows)) for worker, rows in zip(workers, dealt, strict=True)]
        together = Batch.concat(parts)
        return together.rows(np.argsort(together["sample_id"]))

    workers = group(2)
    for ranks in (2, 3, 1):
        moved = group(ranks)
        state = [slot for worker in workers for slot in worker.state_dict()]
        for worker in moved:
            worker.load_state_dict(pickle.loads(pickle.dumps(state)))
        workers = moved
        assert_same(alone.rollout(source), rollout(workers))


@kinds
def test_evaluation_remembers(kind: str) -> None:
    sampler = sampler_of(kind, environment(1))
    policy = sampler.source.networks["policy"]
    stepped, memories = policy.step, list[torch.Tensor]()
    policy.step = lambda seen, memory: (memories.append(memory.clone()), stepped(seen, memory))[1]
    returns = sampler.evaluate(4)
    assert len(returns) == 4 and len(memories) == DELAY
    assert not memories[0].any() and all(memory.any(1).all() for memory in memories[1:])
    assert returns == sampler.evaluate(4)
