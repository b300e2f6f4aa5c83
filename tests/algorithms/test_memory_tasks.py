"""What can't be solved without a memory is solved with one, and what can't be combined with one is refused."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CARTPOLE, PENDULUM, with_keys

from hybridflow.build import build
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError

CUE: dict[str, Any] = {
    "algorithm": "ppo",
    "run_dir": "unused",
    "threads": 1,
    "ppo": {"gamma": 0.99},
    "loss": {"entropy_coef": 0.01},
    "actor": {"net": {"hidden": [16]}, "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5}},
    "critic": {"net": {"hidden": [16]}, "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5}},
    # Rollouts of 10 steps cut episodes of 4 in their middle.
    "environment": {"id": "memory_envs:HybridflowCue-v0", "num_envs": 16, "steps_per_rollout": 10, "options": {"delay": 4}},
    "train": {"steps": 50, "epochs": 4},
    "evaluation": {"limit": 100},
}


def score_of(kind: str, **keys: Any) -> float:
    return played(with_keys(CUE, actor__net__kind=kind, critic__net__kind=kind, **keys))


def played(data: dict[str, Any]) -> float:
    made = build(validate(data, "test"))
    try:
        made.trainer.train(made.config.train.steps)
        evaluation = made.parts.evaluate
        assert evaluation is not None
        return evaluation().score
    finally:
        made.runtime.stop()


def test_without_a_memory_the_cue_is_forgotten() -> None:
    assert 0.3 < score_of("mlp") < 0.7


@pytest.mark.parametrize("kind", ["gru", "lstm", "attention"])
def test_with_a_memory_the_cue_is_remembered(kind: str) -> None:
    assert score_of(kind) == 1.0


def test_env_workers_remember_their_own_episodes() -> None:
    """Each of two has half of the environments, and rollouts in turn: a memory waits in its worker meanwhile."""
    a3c = {"a3c": {"entropy_coef": 0.01}, "critic__optimizer": None, "environment__workers": 2, "train": {"steps": 400}}
    assert score_of("gru", algorithm="a3c", ppo=None, loss=None, **a3c) == 1.0


RECURRENT: dict[str, Any] = {
    "algorithm": "dqn",
    "run_dir": "unused",
    "threads": 1,
    "actor": {"net": {"hidden": [16]}, "optimizer": {"lr": 1e-2, "max_grad_norm": 1.0}},
    # Rollouts cut episodes of 4 in their middle; what has to be remembered lies within a sequence in most of them.
    "environment": CUE["environment"],
    "exploration": {"epsilon_decay_steps": 1000, "epsilon_end": 0.1},
    "replay": {"capacity": 4000, "batch_size": 64, "warmup": 300, "sequence": 5},
    "train": {"steps": 30, "updates_per_step": 10},
    "evaluation": {"limit": 100},
}


def test_dqn_without_a_memory_forgets_the_cue() -> None:
    assert 0.3 < played(with_keys(RECURRENT, replay__sequence=1, replay__batch_size=192)) < 0.7


@pytest.mark.parametrize(
    "keys",
    [
        {"actor__net__kind": "gru"},
        {"actor__net__kind": "lstm", "replay__n_steps": 3, "replay__priority": 0.6},
        {"actor__net__kind": "attention", "dqn": {"duelling": True, "double": False}},
    ],
)
def test_dqn_remembers_the_cue_by_sequences(keys: dict[str, Any]) -> None:
    assert played(with_keys(RECURRENT, **keys)) == 1.0


@pytest.mark.parametrize(
    "method",
    [
        {"algorithm": "impala", "schedule": {"kind": "async"}},
        {"algorithm": "reinforce", "reinforce": {"baseline": "value"}},
    ],
)
def test_other_methods_learn_from_what_acted_too(method: dict[str, Any]) -> None:
    nets = {"actor__net__kind": "gru", "critic__net__kind": "gru"}
    data = with_keys({**CUE, **method}, ppo=None, loss=None, train={"steps": 3}, **nets)
    made, seen = build(validate(data, "test")), list[Any]()
    made.trainer.hooks = [lambda step: seen.append(step.metrics)]
    try:
        made.trainer.train(3)
    finally:
        made.runtime.stop()
    # IMPALA learns from rollouts of the policy before.
    drift = seen[-1]["actor/mismatch_max"]
    assert drift < 1e-5 if method["algorithm"] == "reinforce" else drift > 1e-4
    assert all(metrics.get("critic/grad_norm", 1.0) > 0 for metrics in seen)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"actor__net": {"kind": "mlp", "context": 4}}, 'context = 4 has no effect with kind = "mlp"; leave it out'),
        ({"actor__net": {"kind": "gru", "hidden": []}}, 'kind = "gru" needs the width of its memory: hidden = [64]'),
        ({"critic__net": {"kind": "gru"}}, 'critic.net.kind = "gru", but actor.net.kind = "mlp": a critic starts from'),
        (
            {"actor__net": {"kind": "lstm"}, "critic__net": {"kind": "gru"}},
            'critic.net.kind = "gru", but actor.net.kind = "lstm": a critic starts from the actor\'s memory; make them',
        ),
        (
            {"actor__net": {"kind": "attention"}, "critic__net": {"kind": "attention", "context": 4}},
            "critic.net.context = 4, but actor.net.context = 16: both see the same past observations; make them equal",
        ),
        (
            {"algorithm": "trpo", "ppo": None, "loss": None, "actor__net": {"kind": "gru"}},
            'actor.net.kind = "gru": trpo learns from single steps; use "mlp" or "cnn"',
        ),
    ],
)
def test_what_has_no_use_for_a_memory_says_so(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(with_keys(CARTPOLE, run_dir="unused", **keys), "test")
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"replay__sequence": 1}, 'actor.net.kind = "gru": dqn learns a memory from sequences; set replay.sequence = 20'),
        ({"actor__net__kind": "mlp"}, 'replay.sequence = 5: actor.net.kind = "mlp" learns from single steps; leave it out'),
        (
            {"dqn": {"atoms": 11, "v_min": 0, "v_max": 1}},
            "dqn.atoms = 11: with replay.sequence = 5 dqn learns means; leave atoms, v_min and v_max out",
        ),
        ({"replay__dataset": "x"}, "replay.dataset: no recorded step has the memory that replay.sequence = 5 begins with"),
        (
            {"environment__steps_per_rollout": 4},
            "replay.sequence = 5: no sequence is longer than a rollout, and environment.steps_per_rollout = 4; raise it",
        ),
        ({"replay__capacity": 4}, "replay.sequence = 5, but replay.capacity = 4: there is no room for one; raise it"),
    ],
)
def test_what_sequences_cannot_be_combined_with_is_told(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(with_keys(RECURRENT, **{"actor__net__kind": "gru", **keys}), "test")
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0]


def test_methods_that_learn_from_single_steps_have_no_sequences() -> None:
    with pytest.raises(ConfigError, match=r"replay\.sequence = 4: sac learns from single steps; leave it out"):
        validate(with_keys(PENDULUM, run_dir="unused", replay__sequence=4), "test")


@pytest.mark.parametrize("where", ["actor", "critic"])
def test_other_methods_with_a_replay_have_no_memory(where: str) -> None:
    with pytest.raises(ConfigError, match=rf'{where}\.net\.kind = "lstm": sac learns from single steps'):
        validate(with_keys(PENDULUM, run_dir="unused", **{f"{where}__net__kind": "lstm"}), "test")
