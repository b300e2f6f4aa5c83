"""From configurations to graphs of tasks and device mappings, and back into the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, with_keys
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import ALGORITHMS
from hybridflow.build_mapping import mapping_of, task_graph, written
from hybridflow.build_plan import needs
from hybridflow.build_trace import trace
from hybridflow.config import RunConfig, load_config, validate
from hybridflow.core.errors import ConfigError
from hybridflow.core.toml_edit import edit_toml
from hybridflow.planner.cluster import PRESETS, Machine, parse_cluster
from hybridflow.planner.cost import CostModel, Efficiency
from hybridflow.planner.graph import TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Pool, Practice, Strategy

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


@pytest.mark.parametrize("algorithm", ["sft", "reward_model", "dpo", "remax", "safe_rlhf"])
@pytest.mark.parametrize("cut", [Strategy(dp=4), Strategy(1, 2, 2, "zero1"), Strategy(2, 2), Strategy(dp=4, shard="fsdp")])
def test_costs_count_the_bytes_of_the_plan(folder: Path, algorithm: str, cut: Strategy) -> None:
    mesh = {"tp": cut.tp, "pp": cut.pp, "shard": cut.shard, "sequence_parallel": cut.tp > 1}
    keys: dict[str, Any] = {"runtime__kind": "ray", "placement__pools__main": 4, "actor__mesh": mesh}
    keys |= {"critic__mesh": mesh} if algorithm == "safe_rlhf" else {}
    config = run_of(folder, algorithm, train__token_budget=99, **keys)
    graph = task_graph(config)
    cost, strategies = CostModel(graph, Efficiency(device="cpu")), mapping_of(config, CLUSTER, graph).strategies
    found = {need.role: need.footprint for need in needs(config)}
    for role in (role for role in graph.roles if not role.weights_of):
        held, working = (count(role, strategies[role.name]) for count in (cost.resident_bytes, cost.working_bytes))
        assert held == pytest.approx(found[role.name].held, rel=0.01)
        least = found[role.name].forward  # gradients are gone then, which a planner doesn't count on
        assert working == pytest.approx(max(found[role.name].working, least), rel=0.1)


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


# ------------------------------------------------------------------------------------------------- device mappings

CLUSTER = parse_cluster("a100-80g:4x4")
MACHINE: Machine = CLUSTER.machines[0][1]
NAMES = ("reward", "reference", "cost", "actor", "critic", "cost_critic", "sampler")


def test_in_one_process_all_roles_are_on_one_device(folder: Path) -> None:
    mapping = mapping_of(run_of(folder, "ppo", train__token_budget=60), CLUSTER)
    assert mapping.pools == (Pool("driver", MACHINE, 1, ("reward", "reference", "actor", "critic", "sampler")),)
    length = 8  # "reverse 123" and four tokens
    graph = task_graph(run_of(folder, "ppo"))
    length = max(int(task.prompt + task.response) for task in graph.tasks)
    assert mapping.strategies["actor"] == Strategy(rows=60 // length) and mapping.strategies["sampler"] == Strategy()


def test_a_configuration_s_own_placement_is_a_mapping(folder: Path) -> None:
    keys: dict[str, Any] = {
        "runtime": {"kind": "ray"},
        "placement": {
            "pools": {"learn": [4, 4], "rest": 2},
            "roles": {"actor": "learn", "critic": "rest", "reference": "rest", "reward": "rest"},
        },
        "actor__mesh": {"tp": 2, "pp": 2, "shard": "zero1"},
        "actor__generation_mesh": {"tp": 2},
        "critic": {"mesh": {"shard": "fsdp"}, "token_budget": 7, "activation_checkpointing": True},
        "reference": {"mesh": {"tp": 2}},
        "train__token_budget": 4096,
    }
    mapping = mapping_of(run_of(folder, "ppo", **keys), CLUSTER)
    learn, rest = mapping.pools
    assert learn == Pool("learn", MACHINE, 8, ("actor", "sampler"))
    assert (rest.devices, set(rest.roles)) == (2, {"critic", "reference", "reward"})
    actor, critic = mapping.strategies["actor"], mapping.strategies["critic"]
    assert actor[:5] == (2, 2, 2, "zero1", False) and mapping.strategies["sampler"] == Strategy(1, 2, 4)
    assert critic == Strategy(dp=2, shard="fsdp", recompute=True) and mapping.strategies["reference"][:3] == (1, 2, 1)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"actor__mesh": {"cp": 2}}, "actor.mesh.cp = 2: a planner knows tp, pp and shard only; leave it out"),
        ({"actor__mesh": {"pp": 2, "chunks": 2}}, "actor.mesh.chunks = 2: a planner knows tp, pp and shard only"),
        ({"placement__offload": ["actor"]}, "placement.offload: a planner keeps the weights of all roles in memory"),
        ({"generation__engine": "vllm"}, "generation.engine = 'vllm': a planner knows \"hybridflow\" only"),
        ({"placement__pools__main": 6}, "placement.pools.main = 6: there is no room on 4x4 devices; give a list with"),
        ({"placement__pools__main": [4] * 5}, "placement.pools.main = [4, 4, 4, 4, 4]: there is no room on 4x4 devices"),
    ],
)
def test_what_a_planner_does_not_know_is_told(folder: Path, keys: dict[str, Any], said: str) -> None:
    config = run_of(folder, "grpo", **{"runtime__kind": "ray", "placement__pools__main": 4, **keys})
    with pytest.raises(ConfigError) as caught:
        mapping_of(config, CLUSTER)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def file_of(folder: Path, name: str, algorithm: str, **keys: Any) -> Path:
    """With the keys that are set alone, in tables by their headers."""
    path, config = folder / f"{name}.toml", run_of(folder, algorithm, **keys)
    path.write_text(edit_toml("", dict(leaves(config.model_dump(exclude_unset=True)))))
    return path


def leaves(data: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in data.items():
        inner = leaves(value) if isinstance(value, dict) else [((), value)]
        yield from (((key, *path), leaf) for path, leaf in inner)


PHASES = [phase for phase in Phase if phase is not Phase.shrink]  # an example takes a quarter of a second


@st.composite
def mappings(draw: st.DrawFn, roles: tuple[str, ...]) -> DeviceMapping:
    """Any that a run can have."""
    numbers = {role: draw(st.integers(0, 2)) for role in roles}
    pools, strategies = [], {}
    for number in sorted(set(numbers.values())):
        there = tuple(role for role in roles if numbers[role] == number)
        devices = draw(st.sampled_from([1, 2, 3, 4])) if number else 8
        pools.append(Pool(f"pool{number}", MACHINE, devices, there))
        for role in there:
            pp, tp = draw(st.sampled_from([(p, t) for p in (1, 2) for t in (1, 2, 4) if devices % (p * t) == 0]))
            strategies[role] = Strategy(pp, tp, devices // pp // tp)
            if role != "sampler":
                strategies[role] = strategies[role]._replace(rows=draw(st.integers(1, 8)))
            if role in ("actor", "critic", "cost_critic"):
                shard = draw(st.sampled_from(["none", "zero1", "fsdp"]))
                strategies[role] = strategies[role]._replace(shard=shard, recompute=draw(st.booleans()))
    for role in set(strategies) & {"cost_critic", "baseline"}:  # cut like those whose section they share
        other = {"cost_critic": "critic", "baseline": "reward"}[role]
        home = next(pool for pool in pools if other in pool.roles)
        pools = [pool._replace(roles=tuple(name for name in pool.roles if name != role)) for pool in pools]
        pools = [
            pool._replace(roles=tuple(name for name in roles if name in pool.roles or name == role))
            if pool.name == home.name
            else pool
            for pool in pools
        ]
        strategies[role] = strategies[other]
    return DeviceMapping(tuple(pool for pool in pools if pool.roles), strategies)


@pytest.mark.parametrize("algorithm", ["ppo", "safe_rlhf", "remax", "dpo"])
@settings(max_examples=4, deadline=None, phases=PHASES)
@given(data=st.data())
def test_what_is_written_says_the_mapping(folder: Path, algorithm: str, data: st.DataObject) -> None:
    path = file_of(folder, algorithm, algorithm)
    roles = tuple(role.name for role in task_graph(load_config(path)).roles)
    mapping = data.draw(mappings(roles))
    path.write_text(written(path, mapping))
    config = load_config(path)
    assert mapping_of(config, CLUSTER) == mapping
    assert written(path, mapping) == path.read_text()
    assert (config.runtime.kind, config.runtime.address) == (
        "ray",
        "auto" if sum(p.devices for p in mapping.pools) > 4 else None,
    )


def colocated(graph: TaskGraph, devices: int = 4, **strategies: Strategy) -> DeviceMapping:
    plain = {role.name: Strategy(dp=devices) for role in graph.roles}
    return DeviceMapping((Pool("all", MACHINE, devices, tuple(plain)),), plain | strategies)


def test_the_rest_of_the_file_stays(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(
        f"""# my run
algorithm = "grpo"
run_dir = "{tmp_path}/run"
placement = {{ pools = {{ mine = 3 }}, offload = ["actor"] }}  # before
actor.model = "{folder}/lm"  # small
actor.mesh.cp = 3
actor.mesh.tp = 1

[runtime]
kind = "ray"
timeout_s = 60

[train]
group_size = 4
# few
steps = 2

[data]
task = "reverse"
options = {{ length = 3 }}
""".replace("\n", "\r\n").encode()
    )
    mapping = colocated(task_graph(load_config(path)), actor=Strategy(2, 2, 1, "zero1", True, 2))
    text = written(path, mapping).replace("\r\n", "\n")
    assert text == (
        f"""# my run
algorithm = "grpo"
run_dir = "{tmp_path}/run"
placement = {{ pools = {{ all = 4 }} }}  # before
actor.model = "{folder}/lm"  # small
actor.mesh.tp = 2
actor.mesh.pp = 2
actor.mesh.shard = "zero1"
actor.mesh.sequence_parallel = true
actor.token_budget = 136
actor.activation_checkpointing = true

[runtime]
kind = "ray"
timeout_s = 60

[train]
group_size = 4
# few
steps = 2

[data]
task = "reverse"
options = {{ length = 3 }}
"""
    )


def test_roles_follow_and_functions_score_where_it_is_drawn(folder: Path) -> None:
    path = file_of(folder, "split", "ppo", reward=None)
    pools = (Pool("a", MACHINE, 2, ("reference", "actor")), Pool("b", MACHINE, 2, ("critic", "sampler")))
    mapping = DeviceMapping(pools, dict.fromkeys(("actor", "reference", "critic", "sampler"), Strategy(dp=2)))
    path.write_text(written(path, mapping))
    config = load_config(path)
    assert config.placement.pools == {"a": 2, "b": 2}
    assert config.placement.roles == {"actor": "a", "reference": "a", "critic": "b", "sampler": "b", "reward": "b"}
    assert config.placed.roles["estimator"] == "a" and mapping_of(config, CLUSTER).pools == pools


def test_a_plan_that_is_one_step_stale_says_so_in_the_schedule(folder: Path) -> None:
    path = file_of(folder, "stale", "ppo", reward=None)
    pools = (Pool("a", MACHINE, 2, ("reference", "actor", "critic")), Pool("b", MACHINE, 2, ("sampler",)))
    mapping = DeviceMapping(pools, dict.fromkeys(("actor", "reference", "critic", "sampler"), Strategy(dp=2)), "async")
    path.write_text(written(path, mapping))
    config = load_config(path)
    assert config.schedule.kind == "one_step_off" and config.placement.roles["reward"] == "a"
    assert mapping_of(config, CLUSTER).schedule == "async"
    path.write_text(written(path, replace(mapping, schedule="sync")))
    assert load_config(path).schedule.kind == "sync"


def test_roles_of_one_section_may_have_pools_of_their_own(folder: Path) -> None:
    path = file_of(folder, "critics", "safe_rlhf")
    rest = tuple(role.name for role in task_graph(load_config(path)).roles if role.name != "cost_critic")
    pools = (Pool("rest", MACHINE, 4, rest), Pool("costs", MACHINE, 2, ("cost_critic",)))
    strategies = {**dict.fromkeys(rest, Strategy(dp=4)), "critic": Strategy(1, 2, 2), "cost_critic": Strategy(1, 2, 1)}
    mapping = DeviceMapping(pools, strategies)
    path.write_text(written(path, mapping))
    assert mapping_of(load_config(path), CLUSTER) == mapping


def test_microbatches_that_are_given_stay(folder: Path) -> None:
    path = file_of(folder, "given", "grpo", train__token_budget=64, actor__activation_checkpointing=True)
    path.write_text(written(path, colocated(task_graph(load_config(path)), actor=Strategy(dp=4, rows=3))))
    config = load_config(path)
    assert (config.actor.token_budget, config.train.token_budget, config.actor.activation_checkpointing) == (None, 64, True)


def test_a_plan_with_overrides_is_written_for_runs_with_them(folder: Path) -> None:
    path, overrides = file_of(folder, "overridden", "grpo", kl=None), ["--kl.coef", "0.1"]
    mapping = colocated(task_graph(load_config(path, overrides)), reference=Strategy(1, 2, 2))
    with pytest.raises(ConfigError, match="reference is placed; expected each of reward, actor, sampler on one"):
        written(path, mapping)
    path.write_text(written(path, mapping, overrides))
    assert mapping_of(load_config(path, overrides), CLUSTER).strategies["reference"][:3] == (1, 2, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"schedule": "async"},
            'schedule = "async": reward, reference, cost, actor, critic, cost_critic would wait for',
        ),
        ({"practice": Practice("vanilla")}, "Practice(reshard='vanilla', kv_cache=True, batch=0"),
        ({"pools": (Pool("all", MACHINE, 4, ("actor",)),)}, "reward is on 0 pools; expected each of reward, reference, "),
        (
            {"pools": (Pool("all", MACHINE, 4, NAMES[1:]), Pool("h", PRESETS["h100"], 4, NAMES[:1]))},
            "pools on machines of several kinds (a100-80g, h100): a run takes machines as they come",
        ),
        ({"pools": (Pool("a b", MACHINE, 4, NAMES),)}, "pool 'a b': expected a name of letters, digits, - and _"),
        ({"pools": (Pool("all", MACHINE, 4, (*NAMES, "x")),)}, "x is placed; expected each of reward, reference, cost, "),
        ({"strategies": {"actor": Strategy(tp=2)}}, "actor has 2 of the 4 devices of its pool; a run uses all of them"),
        (
            {"strategies": {"reward": Strategy(dp=4, shard="fsdp")}},
            "reward is sharded by fsdp; a run shards what it trains",
        ),
        ({"strategies": {"cost_critic": Strategy(tp=4)}}, "cost_critic is cut otherwise than critic, but [critic] says "),
    ],
)
def test_mappings_that_no_run_can_have_are_told(folder: Path, change: dict[str, Any], said: str) -> None:
    path = file_of(folder, "impossible", "safe_rlhf")
    mapping = colocated(task_graph(load_config(path)))
    strategies = {**mapping.strategies, **change.pop("strategies", {})}
    with pytest.raises(ConfigError) as caught:
        written(path, replace(mapping, strategies=strategies, **change))
    assert str(caught.value).startswith(f"{path}: {said}") and "\n" not in str(caught.value)
