"""ONNX files of all kinds of policies act as torch does, or are not written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import CARTPOLE, Outcome, with_keys, written
from gymnasium import spaces

from hybridflow.build_networks import actor_networks, main_network
from hybridflow.commands import export as module
from hybridflow.commands.export import run_onnx, write_onnx
from hybridflow.config import validate
from hybridflow.core.errors import DataError, ModelError
from hybridflow.data.envs import EnvironmentConfig
from hybridflow.models.agent_groups import GroupedPolicy
from hybridflow.models.nets import CategoricalPolicy, NetConfig
from hybridflow.policy import Policy

Program = Callable[..., Outcome]
SEEN = spaces.Box(np.array([-1, -np.inf, 0], np.float32), np.array([1, np.inf, np.inf], np.float32))
BYTES = spaces.Box(0, 255, (2, 3), np.uint8)
NUMBERED = spaces.Discrete(6, start=-2)
WIDE = spaces.Box(-np.inf, np.inf, (4,), np.float64)
STEER = spaces.Box(np.array([-0.02, -2], np.float32), np.array([0.01, 3], np.float32))
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "categorical": (SEEN, spaces.Discrete(3, start=7), {"actor__net__normalise": True}),
    "multi-discrete": (BYTES, spaces.MultiDiscrete([2, 4], start=np.array([5, -1])), {}),
    "gaussian": (WIDE, spaces.Box(-0.05, 0.1, (2, 2), np.float64), {"actor__net__activation": "relu"}),
    "squashed": (SEEN, STEER, {"algorithm": "sac"}),
    "deterministic": (WIDE, STEER, {"algorithm": "td3"}),
    "duelling": (SEEN, spaces.Discrete(4), {"algorithm": "dqn", "dqn": {"duelling": True}}),
    "distributional": (NUMBERED, spaces.Discrete(4), {"algorithm": "dqn", "dqn": {"atoms": 11, "v_min": -1, "v_max": 1}}),
    "convolutional": (spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(3), {"actor__net__kind": "cnn"}),
    "gru": (WIDE, spaces.Discrete(3), {"actor__net": {"kind": "gru", "normalise": True}}),
    "lstm": (SEEN, STEER, {"actor__net__kind": "lstm"}),
    "attention": (WIDE, spaces.MultiDiscrete([2, 4]), {"actor__net": {"kind": "attention", "context": 4}}),
    "recurrent-values": (
        WIDE,
        spaces.Discrete(4),
        {
            "algorithm": "dqn",
            "dqn": {"duelling": True},
            "actor__net__kind": "gru",
            "replay": {"sequence": 2, "warmup": 8},
            "environment__steps_per_rollout": 2,
        },
    ),
    "table": (NUMBERED, spaces.Discrete(4), {"algorithm": "q_learning"}),
}


def policy(kind: str) -> Policy:
    """A policy of random weights that is sure enough of itself to tell actions apart."""
    observed, done, keys = KINDS[kind]
    if "algorithm" in keys:
        keys = {"ppo": None, "train": {"steps": 2}, **keys}
    keys = {"run_dir": "unused", **keys}
    if keys.get("algorithm") in ("dqn", "q_learning"):
        keys = {"critic": None, "environment__steps_per_rollout": 1, **keys}
    config = validate(with_keys(CARTPOLE, **keys), "test")
    network: Any = actor_networks((observed, done), config)[main_network(config)].eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if config.actor.net.normalise:
        network.features.observe(torch.randn(100, observed.shape[0], generator=generator) * 5 + 2, lambda x: x)
    return Policy(network, EnvironmentConfig(id="CartPole-v1"), (observed, done), config, 0)


@pytest.mark.parametrize("kind", ["categorical", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:])])
def test_every_kind_of_policy_acts_alike(kind: str, tmp_path: Path) -> None:
    made = policy(kind)
    write_onnx(made, tmp_path / "policy.onnx", {"some": "thing"})
    run = run_onnx(tmp_path / "policy.onnx")
    parts = [module._random_observations(made, size, np.random.default_rng(size)) for size in (1, 2, 997)]
    for observations in parts:
        memory = np.random.default_rng(0).uniform(0, 1, (len(observations), made.memory_size)).astype(np.float32)
        (expected, after), (found, found_after) = made.step(observations, memory), run(observations, memory)
        assert np.allclose(found_after, after, rtol=1e-5, atol=1e-5) and after.shape == memory.shape
        assert found.dtype == expected.dtype == made.spaces[1].dtype and found.shape == expected.shape
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert all(made.spaces[1].contains(action) for action in found[:50])
    assert len(np.unique(found)) > 2 and len(np.unique(observations)) > 5
    assert not any(node.metadata_props for node in onnx.load(tmp_path / "policy.onnx").graph.node)


def test_observations_are_of_the_space_and_of_several_scales() -> None:
    for kind, (observed, _, _) in KINDS.items():
        drawn = module._random_observations(policy(kind), 4000, np.random.default_rng(0))
        assert drawn.dtype == observed.dtype and all(map(observed.contains, drawn[:200]))
    assert np.ptp(module._random_observations(policy("multi-discrete"), 4000, np.random.default_rng(0))) == 255
    wide = np.abs(module._random_observations(policy("gaussian"), 4000, np.random.default_rng(0))).max(1)
    assert (wide < 0.4).sum() > 300 and (wide > 50).sum() > 300


def test_a_run_s_policy_is_exported(cartpole_run: Path, hybridflow: Program, tmp_path: Path) -> None:
    file = tmp_path / "made" / "cartpole.onnx"
    outcome = hybridflow("export", cartpole_run, file)
    assert outcome.code == 0 and "checked on 10000 random and" in outcome.out and "the same actions" in outcome.out
    model = onnx.load(file)
    told = {entry.key: entry.value for entry in model.metadata_props}
    assert told["environment"] == "CartPole-v1" and told["algorithm"] == "ppo" and told["hybridflow_version"]
    evaluated = json.loads(hybridflow("eval", cartpole_run, "--json").out)
    assert told["policy_version"] == str(evaluated["policy_version"])
    assert int(told["policy_version"]) > 0
    (seen,), (done,) = model.graph.input, model.graph.output
    assert (seen.name, done.name) == ("observations", "actions")
    run, loaded, none = run_onnx(file), Policy.load(cartpole_run), np.zeros((1, 0), np.float32)
    for moment in loaded.episode(2):
        assert run(moment.observation[None], none)[0] == loaded.act(moment.observation)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "cartpole.onnx"]


SPREAD = {"environment__id": "pettingzoo:mpe2.simple_spread_v3", "actor__net__normalise": True}
REMEMBERED = {"actor__net__kind": "gru", "critic__net__kind": "gru"}
SPEAKER = {"environment__id": "pettingzoo:mpe2.simple_speaker_listener_v4"}


@pytest.mark.parametrize(
    ("keys", "num_groups", "width"),
    [
        pytest.param(SPREAD, 1, 18, marks=pytest.mark.slow),
        pytest.param({**SPREAD, **REMEMBERED, "environment__agent_id": True}, 1, 21, marks=pytest.mark.slow),
        (SPEAKER, 2, 13),
        pytest.param({**SPEAKER, "environment__agent_id": True}, 2, 13, marks=pytest.mark.slow),
    ],
)
def test_one_file_is_of_all_agents(
    keys: dict[str, Any], num_groups: int, width: int, hybridflow: Program, tmp_path: Path, capsys: Any
) -> None:
    data = with_keys(CARTPOLE, **keys, train={"steps": 1}, environment__num_envs=2)
    assert hybridflow("train", written(tmp_path, data)).code == 0
    run, file = tmp_path / "run", tmp_path / "agents.onnx"
    outcome = hybridflow("export", run, file)
    each = f" for each of {num_groups} groups of agents" if num_groups > 1 else ""
    assert outcome.code == 0 and f"checked on 10000 random{each} and" in outcome.out, outcome
    policy, acts = Policy.load(run), run_onnx(file)
    memory, chosen = np.zeros((len(policy.agents.names), policy.memory_size), np.float32), []
    for moment in policy.episode(1):
        assert moment.observation.shape == (len(memory), width)
        (expected, after), (found, memory) = policy.step(moment.observation, memory), acts(moment.observation, memory)
        assert np.array_equal(found, expected) and np.allclose(memory, after, atol=1e-5)
        chosen.append(found)
    assert len(chosen) == 26
    told = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert told["agents"] == ", ".join(policy.agents.names)
    measured = hybridflow("bench-policy", run, "--budget-ms", 10_000, "--steps", 1000, "--json")
    assert measured.code == 0 and [one["engine"] for one in json.loads(measured.out)["latencies"]] == [
        "torch",
        "onnxruntime",
    ]


def test_random_observations_are_those_of_each_group(hybridflow: Program, tmp_path: Path) -> None:
    data = with_keys(CARTPOLE, **SPEAKER, train={"steps": 1}, environment__num_envs=2)
    assert hybridflow("train", written(tmp_path, data)).code == 0
    policy = Policy.load(tmp_path / "run")
    for agent, seen in ((0, 3), (1, 11)):
        rows = module._random_observations(policy, 200, np.random.default_rng(0), [agent])
        assert (rows[:, 11 + agent] == 1).all() and not rows[:, 12 - agent].any() and not rows[:, seen:11].any()
        assert rows[:, :seen].any(0).all()
        log_probs = policy.network.distribution(torch.from_numpy(rows)).log_probabilities
        torch.testing.assert_close(policy.network._everywhere(torch.from_numpy(rows)).log_probabilities, log_probs)
        assert policy.act(rows).shape == (200,)
    for nobody in (0, [1, 1], [0.5, 0.5]):
        rows[3, -2:] = nobody
        with pytest.raises(DataError, match=r"observation 3 names no agent: .* last 2 numbers .* speaker_0, listener_0"):
            policy.act(rows)


@pytest.mark.parametrize("agent_id", [False, True])
def test_every_network_on_every_row_gives_what_each_gives_on_its_own(agent_id: bool) -> None:
    """Agents 0 and 2 see three numbers and have two actions, agent 1 sees five and has four."""
    net, random = NetConfig(hidden=(8,)), torch.Generator().manual_seed(0)
    sizes = ((3, 2), (5, 4))
    boxes = [spaces.Box(-9, 9, (seen + 3 * agent_id,), np.float32) for seen, _ in sizes]
    networks = [CategoricalPolicy(box, done, 1.0, net, random) for box, (_, done) in zip(boxes, sizes, strict=True)]
    grouped = GroupedPolicy(networks, [[0, 2], [1]], [3, 5], 4, agent_id)
    rows = torch.cat([torch.randn(30, 5, generator=random), torch.eye(3).repeat(10, 1)], 1)
    expected = grouped.distribution(rows).log_probabilities
    assert torch.isinf(expected).sum() == 20 * 2
    torch.testing.assert_close(grouped._everywhere(rows).log_probabilities, expected)


def test_an_impossible_action_is_no_tie() -> None:
    values = np.array([[0.0, -0.00001, -np.inf]])
    network, chosen = policy("categorical").network, np.array([0])
    assert module._gap(network, values, chosen, np.array([1])) < module.TOLERANCE
    assert module._gap(network, values, chosen, np.array([2])) > module.TOLERANCE


def test_a_file_that_acts_differently_is_not_written(
    cartpole_run: Path, hybridflow: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(given: Policy, file: Path, metadata: dict[str, str]) -> None:
        other = Policy.load(cartpole_run)
        other.network.mlp.layers[-1].bias.data.add_(torch.tensor([0.05, 0.0]))
        write_onnx(other, file, metadata)

    monkeypatch.setattr(module, "write_onnx", wrong)
    outcome = hybridflow("export", cartpole_run, tmp_path / "x.onnx")
    assert outcome.code == 2 and "differ from torch's" in outcome.err and outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ties_are_counted_and_mistakes_are_not_ties() -> None:
    made = policy("multi-discrete")
    seen = module._random_observations(made, 3, np.random.default_rng(0))
    chosen = made.act(seen)
    other = chosen.copy()
    other[1] = [6 if chosen[1, 0] == 5 else 5, chosen[1, 1]]
    given = (seen, np.zeros((3, 0), np.float32))
    assert module._ties(made, given, chosen, chosen) == 0
    with pytest.raises(ModelError, match="1 of the ONNX file's actions differ from torch's in 3"):
        module._ties(made, given, chosen, other)
    made.network.mlp.layers[-1].weight.data[:2] = 0  # both choices of the first action become equally good
    made.network.mlp.layers[-1].bias.data[:2] = 1
    assert module._ties(made, given, chosen, other) == 1


def test_continuous_actions_may_differ_by_float_error_alone() -> None:
    near = np.array([[1.0, 2000.0]], np.float32)
    assert 0.05 < module._difference(near, near + np.float32([0.00005, 0.1])) < 0.11
    for wrong in (near + np.float32([0.001, 0]), near * np.nan):
        with pytest.raises(ModelError, match="differs from torch's"):
            module._difference(near, wrong)


def test_mistakes_are_told(cartpole_run: Path, hybridflow: Program, tmp_path: Path, monkeypatch: Any) -> None:
    assert "expected a name that ends in .onnx" in hybridflow("export", cartpole_run, "policy.pt").err
    assert "no such run directory" in hybridflow("export", tmp_path / "none", "policy.onnx").err
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    told = hybridflow("export", cartpole_run, tmp_path / "policy.onnx").err
    assert told == (
        'error: export: needs onnx, onnxscript, onnxruntime, not installed here: pip install "hybridflow[export]"\n'
    )
