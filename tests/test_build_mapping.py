"""From configurations to graphs of tasks and device mappings, and back into the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, with_keys

from hybridflow.algorithms import ALGORITHMS
from hybridflow.build_mapping import task_graph
from hybridflow.build_plan import needs
from hybridflow.build_trace import trace
from hybridflow.config import RunConfig, validate
from hybridflow.core.errors import ConfigError

PAIRS = [{"prompt": "3+4=", "chosen": "7", "rejected": "8"}, {"prompt": "1+1=", "chosen": "2", "rejected": "31"}] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Models without weights, a language model and a reward model, and pairs."""
    folder = tmp_path_factory.mktemp("sizes")
    for name, kind in (("lm", "LlamaForCausalLM"), ("rm", "LlamaForSequenceClassification")):
        shutil.copytree(tiny_model, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    return folder


def run_of(folder: Path, algorithm: str, **keys: Any) -> RunConfig:
    """A run of an algorithm, with models wherever it can have one."""
    data = with_keys(REVERSE, algorithm=algorithm, actor={"model": str(folder / "lm")}, run_dir=str(folder / "run"))
    if ALGORITHMS[algorithm].records == "pairs":
        pairs = {"pairs": str(folder / "pairs.jsonl")}
        data = with_keys(data, data=pairs, generation=None, train__group_size=None, train__minibatches=1)
    elif ALGORITHMS[algorithm].records == "demonstrations":
        data = with_keys(data, data__task="addition", data__options=None, train__group_size=None)
    elif algorithm in ("ppo", "reinforce_pp", "grpo", "rloo", "remax", "safe_rlhf"):
        data = with_keys(data, reward__model=str(folder / "rm"), kl__coef=0.1)
    if algorithm == "safe_rlhf":
        data = with_keys(data, cost__model=str(folder / "rm"))
    if algorithm == "distill":
        data = with_keys(data, teacher__model=str(folder / "lm"))
    return validate(with_keys(data, **keys), "test")


TEXT = [name for name, algorithm in ALGORITHMS.items() if algorithm.inputs != ("environment",)]


@pytest.mark.parametrize("algorithm", TEXT)
def test_the_graph_has_the_rows_and_tokens_of_the_trace(folder: Path, algorithm: str) -> None:
    config = run_of(folder, algorithm)
    graph, calls = task_graph(config), [call for call in trace(config).calls if call.kind != "source"]
    assert len({task.name for task in graph.tasks}) == len(calls)
    assert [(task.rows, task.kind, task.role) for task in graph.tasks] == [(c.rows, c.kind, c.role) for c in calls]
    assert [task.tokens for task in graph.tasks] == pytest.approx([call.tokens_in + call.tokens_out for call in calls])
    assert any(role.trained for role in graph.roles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", TEXT)
def test_its_roles_have_the_bytes_of_the_plan(folder: Path, algorithm: str, dtype: str) -> None:
    config = run_of(
        folder, algorithm, actor__dtype=dtype, actor__optimizer__freeze=["embed*", "layers.0.qkv.*", "layers.1.*norm*"]
    )
    roles = {role.name: role for role in task_graph(config).roles}
    found = {need.role: need.footprint for need in needs(config) if need.role in roles}
    assert found.keys() == roles.keys()
    for name, role in roles.items():
        told = (found[name].weights, found[name].gradients, found[name].optimizer)
        weights = 0 if role.weights_of else role.parameters * role.itemsize
        trained = role.trained_parameters
        assert (weights, trained * role.gradient_bytes, trained * role.optimizer_bytes) == pytest.approx(told)


def test_calls_of_one_verb_have_names_of_their_own(folder: Path) -> None:
    names = [task.name for task in task_graph(run_of(folder, "remax")).tasks if task.role == "sampler"]
    assert names == ["sampler.rollout 1", "sampler.rollout 2"]


def test_what_a_file_leaves_open_is_the_planner_s(folder: Path) -> None:
    config = run_of(folder, "ppo", train__token_budget=None)
    roles = {role.name: role for role in task_graph(config).roles}
    assert roles.keys() == {"actor", "critic", "reference", "reward", "sampler"}
    assert {role.token_budget for role in roles.values()} == {None} and roles["sampler"].weights_of == "actor"
    assert (roles["critic"].head, roles["reward"].head) == ("value", "score")
    given = task_graph(run_of(folder, "ppo", train__token_budget=99, actor__activation_checkpointing=True))
    assert {role.token_budget for role in given.roles if not role.weights_of} == {99}
    assert [role.name for role in given.roles if role.recompute] == ["actor"]


def test_responses_may_be_shorter_than_they_may(folder: Path) -> None:
    config = run_of(folder, "grpo", generation__max_new_tokens=40)
    whole, part = task_graph(config).tasks[0], task_graph(config, 10.0).tasks[0]
    assert (whole.response, whole.longest, whole.slots, whole.group) == (40.0, 0.0, 128, 4)
    assert (part.response, part.longest, part.prompt) == (10.0, 40.0, whole.prompt)
    with pytest.raises(ConfigError, match="responses of 0 tokens in the mean: expected more than 0"):
        task_graph(config, 0.0)


def test_a_planner_knows_language_models_only(tmp_path: Path) -> None:
    config = validate({**CARTPOLE, "run_dir": str(tmp_path)}, "test")
    with pytest.raises(ConfigError, match="ppo in CartPole-v1: a planner knows language models only"):
        task_graph(config)
