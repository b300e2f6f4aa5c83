"""Asynchronous actor-critic: its gradients, who has which weights, that it learns, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import CARTPOLE, PENDULUM, with_keys

from hybridflow.build import build
from hybridflow.config import validate
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ConfigError, NonFiniteError
from hybridflow.train import Step

CLIPPING = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 0.05}
NO_CLIPPING = {**CLIPPING, "max_grad_norm": 1e9}
A3C: dict[str, Any] = with_keys(
    CARTPOLE,
    algorithm="a3c",
    run_dir="unused",
    ppo=None,
    critic=None,
    a3c={"lam": 0.9, "entropy_coef": 0.02},
    actor={"net": {"hidden": [8]}, "optimizer": NO_CLIPPING},
    environment={"id": "CartPole-v1", "num_envs": 4, "workers": 2, "steps_per_rollout": 8},
    train={"steps": 6},
)
A2C = with_keys(
    A3C,
    algorithm="a2c",
    a3c=None,
    a2c={"lam": 0.9, "entropy_coef": 0.02},
    critic={"optimizer": NO_CLIPPING},
    environment__workers=None,
)


def trained(data: dict[str, Any]) -> tuple[dict[str, np.ndarray], list[Step]]:
    """Weights after the run's steps, and the steps."""
    run, steps = build(validate(data, "test")), list[Step]()
    run.trainer.hooks = [steps.append]
    try:
        run.trainer.train(run.config.train.steps)
        weights: dict[str, np.ndarray] = run.parts.actor.learner.weights(0).arrays  # type: ignore[attr-defined]
        return {name: array.copy() for name, array in weights.items()}, steps
    finally:
        run.runtime.stop()


CUE = {"id": "memory_envs:HybridflowCue-v0", "options": {"delay": 4}, "num_envs": 4, "steps_per_rollout": 6}


@pytest.mark.parametrize(
    ("environment", "kinds"),
    [
        ({"id": "CartPole-v1"}, ("mlp", "mlp")),
        ({"id": "Pendulum-v1"}, ("mlp", "mlp")),
        (CUE, ("gru", "gru")),
        (CUE, ("gru", "mlp")),
        (CUE, ("lstm", "lstm")),
        (CUE, ("attention", "attention")),
    ],
)
def test_one_worker_learns_what_a2c_learns(environment: dict[str, Any], kinds: tuple[str, str]) -> None:
    """With a memory, too: it goes on over rollouts, which are longer than an episode here and cut others. Gradients of
    policy and value are clipped each by itself, and all of them are."""
    keys: dict[str, Any] = {f"environment__{name}": value for name, value in environment.items()}
    keys |= {f"{role}__net": {"kind": kind, "hidden": [8]} for role, kind in zip(("actor", "critic"), kinds, strict=True)}
    keys["actor__optimizer"] = CLIPPING
    mine, _ = trained(with_keys(A3C, **keys, environment__workers=1))
    keys["critic__optimizer"] = CLIPPING
    theirs, _ = trained(with_keys(A2C, **keys))
    first, _ = trained(with_keys(A2C, **keys, train__steps=1))
    assert max(np.abs(array - first[name]).max() for name, array in theirs.items()) > 1e-3
    for name, array in theirs.items():
        own = mine[name.replace("policy/", "policy/policy.")]
        np.testing.assert_allclose(own, array, rtol=1e-4, atol=1e-6)


def test_gradients_are_as_old_as_there_are_other_workers() -> None:
    _, steps = trained(with_keys(A3C, environment__workers=4))
    assert [step.metrics["actor/staleness"] for step in steps] == [0, 1, 2, 3, 3, 3]
    assert [step.metrics["worker"] for step in steps] == [0, 1, 2, 3, 0, 1]
    for step in steps:
        assert step.metrics["staleness"] == step.metrics["actor/staleness"]


def test_every_worker_steps_its_own_environments() -> None:
    run, seen = build(validate(with_keys(A3C, environment__num_envs=5), "test")), list[list[int]]()
    actor: Any = run.parts.actor  # type: ignore[attr-defined]
    rollout = actor.rollout
    actor.rollout = lambda batch: (seen.append(batch["slot"].tolist()), rollout(batch))[1]
    try:
        run.trainer.train(3)
    finally:
        run.runtime.stop()
    assert seen == [[0, 1], [2, 3, 4], [0, 1], [2, 3, 4]]


def test_frozen_weights_stay() -> None:
    names = ("policy.mlp.layers.0.*", "value.mlp.layers.1.*")
    after, _ = trained(with_keys(A3C, actor__optimizer={**NO_CLIPPING, "freeze": names}))
    before, _ = trained(with_keys(A3C, train__steps=1, actor__optimizer={**NO_CLIPPING, "lr": 1e-30}))
    moved = {name for name, array in after.items() if not np.allclose(array, before[name], atol=1e-9)}
    still = [f"policy/{name[:-1]}{kind}" for name in names for kind in ("weight", "bias")]
    assert moved and moved == after.keys() - set(still)


def test_gradients_that_are_not_finite_are_not_applied() -> None:
    run = build(validate(with_keys(A3C, environment__workers=1), "test"))
    actor: Any = run.parts.actor  # type: ignore[attr-defined]
    try:
        run.trainer.train(1)
        before = {name: array.copy() for name, array in actor.learner.weights(0).arrays.items()}
        batch = run.trainer.algorithm.rollout(run.trainer.source(1))
        bad = batch["gradients"].copy()
        bad[0, 3] = np.nan
        with pytest.raises(NonFiniteError, match="gradient norm of a rollout's gradients is nan in update 1, samples 1"):
            actor.apply(batch.with_columns(gradients=bad))
        for name, array in actor.learner.weights(0).arrays.items():
            assert np.array_equal(array, before[name])
        with torch.no_grad():
            actor.learner.export(lambda network: network.value.mlp.layers[-1].bias.fill_(torch.nan))
        with pytest.raises(NonFiniteError, match=r"loss reinforce is nan, samples \d+"):
            run.trainer.algorithm.rollout(run.trainer.source(1))
    finally:
        run.runtime.stop()


def test_a_worker_s_gradients_leave_the_learner_s_alone() -> None:
    run = build(validate(with_keys(A3C, actor__optimizer__freeze=["value.*"]), "test"))
    actor: Any = run.parts.actor  # type: ignore[attr-defined]
    try:
        out: Batch = run.trainer.algorithm.rollout(run.trainer.source(1))
        left = list[Any]()
        actor.learner.export(lambda net: left.extend((name, p.grad, p.requires_grad) for name, p in net.named_parameters()))
        assert all(grad is None and wanted == name.startswith("policy.") for name, grad, wanted in left)
        assert len(out) == 1 and out["gradients"].shape == (1, actor.learner.num_parameters()[0])
    finally:
        run.runtime.stop()


def test_a3c_learns_cartpole() -> None:
    keys = {"environment": {"id": "CartPole-v1", "num_envs": 8, "workers": 2, "steps_per_rollout": 16}}
    data = with_keys(A3C, **keys, a3c={"lam": 0.95, "entropy_coef": 0.0}, actor={"optimizer": {"lr": 3e-3}})
    _, steps = trained(with_keys(data, train__steps=700))
    returns = [step.metrics["sampler/episode_return"] for step in steps if "sampler/episode_return" in step.metrics]
    assert np.mean(returns[:20]) < 60 and np.mean(returns[-20:]) > 150


IMPALA = with_keys(CARTPOLE, algorithm="impala", run_dir="unused", ppo=None, train={"steps": 2})
SAC = with_keys(PENDULUM, run_dir="unused", environment__workers=2)
RAY: dict[str, Any] = {"runtime": {"kind": "ray"}}


def on(pools: dict[str, int], **roles: str) -> dict[str, Any]:
    return {**RAY, "placement": {"pools": pools, "roles": roles}}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (with_keys(A3C, environment__workers=0), "environment.workers = 0: a3c learns from env workers; set how many"),
        (with_keys(A3C, environment__workers=-1), "environment.workers = -1: input should be greater than or equal to 0"),
        (with_keys(A3C, environment__workers=9), "workers = 9: each needs an environment, but environment.num_envs = 4"),
        (with_keys(A3C, replay={"capacity": 9}), "[replay] is set, but a3c on [environment] doesn't read it"),
        (with_keys(A3C, critic={"optimizer": {"lr": 1.0}}), "critic.optimizer: a3c has one optimizer, actor.optimizer"),
        (with_keys(A3C, actor__net={"normalise": True}), "actor.net.normalise: the learner of a3c sees gradients"),
        (with_keys(A3C, train__epochs=2), "train.epochs = 2: a3c makes one step of a rollout; leave it out"),
        (with_keys(A2C, environment__workers=2), "a2c learns from its newest policy's rollouts alone; leave it out"),
        (
            with_keys(IMPALA, environment__workers=2, schedule={"kind": "async"}),
            'schedule.kind = "async": environment.workers collect by themselves',
        ),
        ({**A3C, **RAY}, "placement.roles: actor would wait for rollouts on pool 'main'; give the sampler one of its own"),
        (
            {**A3C, **on({"learner": 1, "envs": 3}, actor="learner", sampler="envs")},
            "placement.pools.envs = 3: environment.workers = 2 are a process each; make them equal",
        ),
        (
            {**A3C, **on({"learner": 2, "envs": 2}, actor="learner", sampler="envs")},
            "placement.pools.learner = 2: the actor of a3c takes its steps in one process; use 1",
        ),
        (
            {**IMPALA, **on({"a": 1, "b": 2}, actor="a", critic="b", sampler="b"), "environment": A3C["environment"]},
            "placement.roles: critic would wait for rollouts on pool 'b'",
        ),
        ({**SAC, **RAY}, "placement.roles: actor, replay would wait for rollouts on pool 'main'"),
    ],
)
def test_mistakes_are_told_in_one_line(data: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(data, "test")
    (problem,) = str(caught.value).splitlines()
    assert told in problem, problem
