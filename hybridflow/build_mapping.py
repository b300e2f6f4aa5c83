"""Between a run's configuration and the planner: what its step does, where its roles are, and where a planner wants them.

    RunConfig ──task_graph──> TaskGraph          who computes what on how many tokens
    RunConfig ──mapping_of──> DeviceMapping      where its own [placement] and meshes put the roles
    DeviceMapping ──written──> the TOML file     [runtime], [placement] and meshes of another mapping

A graph comes from the trace of the run's own program, so any algorithm on text has one.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, cast

from hybridflow.build_plan import stage_of
from hybridflow.build_trace import held, traced
from hybridflow.config import RunConfig, load_config, validate
from hybridflow.config_runtime import FOLLOWS
from hybridflow.config_sections import TrainedMeshConfig, section_of
from hybridflow.controller.trace_runtime import TraceRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.config import apply_overrides, read_toml
from hybridflow.core.errors import ConfigError
from hybridflow.core.fields import FIELDS
from hybridflow.core.graph import Call
from hybridflow.core.placement import ResourcePool
from hybridflow.core.roles import Kind, Role
from hybridflow.core.toml_edit import edit_toml
from hybridflow.planner.cluster import Cluster, Machine
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.mapping import OURS, DeviceMapping, Pool, Strategy
from hybridflow.planner.sizes import ModelSize
from hybridflow.workers.parts import WHOLE

__all__ = ["mapping_of", "task_graph", "written"]


def task_graph(config: RunConfig, response_tokens: float | None = None) -> TaskGraph:
    """What a step of the run does, for a planner. No weights are read; mistakes in data and models are told as a run tells
    them. Microbatches and recomputing of a role are left to the planner unless a ``token_budget`` is set.

    ``response_tokens``: mean length of a response; the longest that is allowed if None.
    """
    if config.environment is not None:
        raise ConfigError([f"{config.algorithm} in {config.environment.id}: a planner knows language models only"])
    if response_tokens is not None and response_tokens <= 0:
        raise ConfigError([f"responses of {response_tokens:g} tokens in the mean: expected more than 0"])
    runtime, first = traced(config, response_tokens)
    calls = [call for call in runtime.graph.calls if call.kind != "source"]
    names = dict(zip((call.number for call in calls), _names(calls), strict=True))
    share = _response_share(calls, first)
    tasks = tuple(_task(names[call.number], call, runtime.roles[call.role], share, config) for call in calls)
    return TaskGraph(_roles(config, runtime, calls), tasks, _edges(runtime, names))


def _names(calls: Sequence[Call]) -> list[str]:
    """Of tasks: the role and its verb; if there are several such calls, by the function that they run or a number."""
    total, seen, names = Counter(call.name for call in calls), Counter[str](), []
    functions = Counter((call.name, call.function) for call in calls)
    for call in calls:
        seen[call.name] += 1
        told = call.function if functions[call.name, call.function] == 1 and call.function else str(seen[call.name])
        names.append(call.name if total[call.name] == 1 else f"{call.name} {told}")
    return names


def _response_share(calls: Sequence[Call], first: Batch) -> float:
    """Of the tokens of a row, those of its response: of what is drawn, or else of the data."""
    drawn = [call for call in calls if call.kind == "generate"]
    if tokens := sum(call.tokens_in + call.tokens_out for call in drawn):
        return sum(call.tokens_out for call in drawn) / tokens
    return float(first.ragged("response_mask").values.mean())


def _task(name: str, call: Call, role: Role[Any], share: float, config: RunConfig) -> Task:
    rows, length = max(1, call.rows), call.tokens_in / max(1, call.rows)
    task = Task(name, call.role, cast(Kind, call.kind), rows, length - share * length, share * length, call.times)
    if call.kind == "generate":
        response, generation = call.tokens_out / rows, config.generation
        longest = float(generation.max_new_tokens) if response < generation.max_new_tokens else 0.0
        task = replace(task, prompt=length, response=response, longest=longest, slots=generation.max_slots)
        return replace(task, group=config.train.group_size)
    if call.kind == "train":
        return replace(task, minibatches=role.args["plan"].minibatches, epochs=role.args["plan"].epochs)
    return task


def _edges(runtime: TraceRuntime, names: Mapping[int, str]) -> tuple[Edge, ...]:
    """Between tasks. Text and objects have no bytes, and what comes from the data is no edge."""
    total, by_row = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for edge in runtime.graph.edges:
        if edge.writer in names:
            way = names[edge.writer], names[edge.reader]
            size = (edge.bytes or 0) * runtime.graph.calls[edge.writer].times
            total[way] += size
            by_row[way] += size if FIELDS[edge.column].axis == "row" else 0
    return tuple(Edge(*way, size, by_row[way]) for way, size in total.items())


def _roles(config: RunConfig, runtime: TraceRuntime, calls: Sequence[Call]) -> tuple[ModelRole, ...]:
    """Those that have a model, and the samplers that draw in a step: others only evaluate."""
    learners = {role.name: found for role in runtime.roles.values() if (found := _model_role(config, role)) is not None}
    draws = {call.role for call in calls if call.kind == "generate"}
    samplers = [
        ModelRole(sampler, learners[of].size, itemsize=_rollout_itemsize(config, learners[of]), weights_of=of)
        for sampler, of in runtime.shared.items()
        if sampler in draws
    ]
    return (*learners.values(), *samplers)


def _rollout_itemsize(config: RunConfig, learner: ModelRole) -> int:
    return 2 if config.generation.precision == "bfloat16" else learner.itemsize


def _model_role(config: RunConfig, role: Role[Any]) -> ModelRole | None:
    args = role.args
    if "networks" not in args or (stage := stage_of(args, WHOLE, config.torch_device.type)) is None:
        return None
    size = ModelSize(args["networks"].model, stage.spec)
    budget = args["plan"].token_budget if "plan" in args else args["token_budget"]
    found = ModelRole(
        role.name,
        size,
        stage.head,
        stage.itemsize,
        token_budget=budget if _is_given(config, role.name) else None,
    )
    if "optimizer" not in args:
        return found
    held_bytes = held(args, WHOLE)
    trained = size.trained_parameters(stage.head, stage.frozen, stage.trains_head)
    return replace(
        found,
        gradient_bytes=held_bytes.gradient_bytes / trained,
        optimizer_bytes=held_bytes.optimizer_bytes / trained,
        frozen=stage.frozen,
        trains_head=stage.trains_head,
        recompute=stage.checkpointing,
    )


def _is_given(config: RunConfig, role: str) -> bool:
    """Whether the file says how large microbatches of a role are."""
    return "token_budget" in config.train.model_fields_set or config.model_sections[role].token_budget is not None


# ------------------------------------------------------------------------------------------- what a configuration says


def mapping_of(config: RunConfig, cluster: Cluster, graph: TaskGraph | None = None) -> DeviceMapping:
    """Where the configuration puts the roles of its ``graph``, on the first machines of the cluster that have room. In one
    process everything is on one device. ConfigError: there is no room, or it uses what a planner doesn't know."""
    if problems := [*_unknown(config)]:
        raise ConfigError(problems)
    graph = task_graph(config) if graph is None else graph
    placed, names = config.placed, [role.name for role in graph.roles]
    there = {pool.name: tuple(name for name in names if placed.pool_of(name) == pool) for pool in placed.pools}
    machines = _machines([pool for pool in placed.pools if there[pool.name]], cluster)
    pools = tuple(Pool(pool.name, machine, pool.size, there[pool.name]) for pool, machine in machines)
    ahead, strategies = config.schedule.ahead, {role.name: _strategy(config, role, graph) for role in graph.roles}
    return DeviceMapping(pools, strategies, "async" if ahead else "sync", staleness=max(1, ahead))


def _unknown(config: RunConfig) -> Iterator[str]:
    """What a planner counts otherwise than a run would do it."""
    for role, section in config.model_sections.items():
        axes = {"cp": 1, "chunks": 1, "shard_ranks": 0}
        for axis in (name for name, plain in axes.items() if getattr(section.mesh, name, plain) != plain):
            value = getattr(section.mesh, axis)
            yield f"{section_of(role)}.mesh.{axis} = {value}: a planner knows tp, pp and shard only; leave it out"
    if config.placement.offload and config.runtime.kind == "ray":
        yield "placement.offload: a planner keeps the weights of all roles in memory; leave it out"
    if config.generation.engine != "hybridflow" and "sampler" in config.roles():
        yield f'generation.engine = {config.generation.engine!r}: a planner knows "hybridflow" only'


def _machines(pools: Sequence[ResourcePool], cluster: Cluster) -> Iterator[tuple[ResourcePool, Machine]]:
    """Of each pool."""
    left = [number * machine.devices for number, machine in cluster.machines]
    for pool in pools:
        fits = [max(pool.nodes) <= machine.devices for _, machine in cluster.machines]
        kind = next((n for n, room in enumerate(left) if fits[n] and room >= pool.size), None)
        if kind is None:
            sizes = " + ".join(f"{number}x{machine.devices}" for number, machine in cluster.machines)
            shown = pool.nodes[0] if len(pool.nodes) == 1 else [*pool.nodes]
            hint = "" if any(fits) else "; give a list with its workers on each machine"
            raise ConfigError([f"placement.pools.{pool.name} = {shown}: there is no room on {sizes} devices{hint}"])
        left[kind] -= pool.size
        yield pool, cluster.machines[kind][1]


def _strategy(config: RunConfig, role: ModelRole, graph: TaskGraph) -> Strategy:
    mesh = config.placed.mesh_of(role.name, None)
    if role.weights_of:
        mesh = mesh.while_generating
        return Strategy(mesh.pp, mesh.tp, mesh.dp)
    section = config.model_sections[role.name]
    shard = section.mesh.shard if isinstance(section.mesh, TrainedMeshConfig) and role.trained else "none"
    rows = max(1, config.token_budget_of(section) // _longest(role.name, graph))
    return Strategy(mesh.pp, mesh.tp, mesh.dp, shard, role.recompute, rows)


def _longest(role: str, graph: TaskGraph) -> int:
    """Mean tokens of a row in that of a role's tasks where they are longest."""
    return max((ceil(task.prompt + task.response) for task in graph.tasks if task.role == role), default=1) or 1


# ------------------------------------------------------------------------------------------------ what a planner wants


def written(path: Path, mapping: DeviceMapping, overrides: Sequence[str] = ()) -> str:
    """The text of the configuration at ``path`` with the ``mapping`` in its [runtime], [placement] and meshes, and
    recomputing and microbatches of roles that left them open; all else stays. ConfigError: a run can't be mapped so.

    ``overrides``: with which it was planned, and will be run.
    """
    config = load_config(path, overrides)
    graph = task_graph(config)
    if problems := [f"{path}: {problem}" for problem in _impossible(mapping, graph)]:
        raise ConfigError(problems)
    keys = [*_runtime_keys(config, mapping), *_placement_keys(config, mapping)]
    for role in graph.roles:
        keys += _role_keys(config, role, mapping.strategies[role.name], _longest(role.name, graph))
    data = read_toml(path)
    values = {key: value for key, value, default in keys if value != default or _is_set(data, key)}
    try:
        text = edit_toml(path.read_bytes().decode(), values, [("placement", "pools"), ("placement", "roles")])
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    validate(apply_overrides(tomllib.loads(text), overrides), str(path))
    return text


Keys = Iterator[tuple[tuple[str, ...], Any, Any]]
"""(path of a key, value, default); None: no value"""


def _is_set(data: Any, key: tuple[str, ...]) -> bool:
    for name in key:
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return True


def _runtime_keys(config: RunConfig, mapping: DeviceMapping) -> Keys:
    """Several machines are a Ray cluster that is there. A planner's "async" is one step stale."""
    yield ("runtime", "kind"), "ray", "local"
    stale = config.schedule.kind if config.schedule.ahead else "one_step_off"
    yield ("schedule", "kind"), stale if mapping.schedule == "async" else "sync", "sync"
    total, machine = sum(pool.devices for pool in mapping.pools), mapping.pools[0].machine
    if total > machine.devices and config.runtime.address is None:
        yield ("runtime", "address"), "auto", None


def _placement_keys(config: RunConfig, mapping: DeviceMapping) -> Keys:
    for pool in mapping.pools:
        full, rest = divmod(pool.devices, pool.machine.devices)
        nodes = [pool.machine.devices] * full + [rest] * (rest > 0)
        yield ("placement", "pools", pool.name), nodes[0] if len(nodes) == 1 else nodes, None
    yield ("placement", "offload"), None, None
    if len(mapping.pools) == 1:
        return
    pools = {role: pool.name for pool in mapping.pools for role in pool.roles}
    for role, name in pools.items():
        if pools.get(FOLLOWS.get(role, "")) != name:
            yield ("placement", "roles", role), name, None
    nearest = "sampler" if mapping.schedule == "sync" else "actor"  # who stays ahead waits for nobody
    near = pools.get(nearest, mapping.pools[0].name)  # functions score what is drawn there
    for role, certain in config.roles().items():
        if certain and role not in FOLLOWS and role not in pools:
            yield ("placement", "roles", role), near, None


def _role_keys(config: RunConfig, role: ModelRole, strategy: Strategy, longest: int) -> Keys:
    section = "actor" if role.weights_of else section_of(role.name)
    mesh = section, "generation_mesh" if role.weights_of else "mesh"
    if role.token_budget is None and not role.weights_of:
        yield (section, "token_budget"), strategy.rows * longest, None
        if role.trained:
            yield (section, "activation_checkpointing"), strategy.recompute, False
    yield (*mesh, "tp"), strategy.tp, 1
    yield (*mesh, "pp"), strategy.pp, 1
    if role.weights_of:
        return
    yield from (((*mesh, axis), None, None) for axis in ("cp", "chunks", "shard_ranks"))
    if role.trained:
        yield (*mesh, "shard"), strategy.shard, "none"
        yield (*mesh, "sequence_parallel"), strategy.tp > 1, False


def _impossible(mapping: DeviceMapping, graph: TaskGraph) -> Iterator[str]:
    """What no configuration says."""
    beside = [role for pool in mapping.pools if "sampler" in pool.roles for role in pool.roles if role != "sampler"]
    if mapping.schedule == "async" and beside:
        yield f'schedule = "async": {", ".join(beside)} would wait for rollouts; the sampler needs a pool of its own'
    if mapping.practice != OURS:
        yield f"{mapping.practice}: a run has practices of its own, {OURS}"
    kinds = dict.fromkeys(pool.machine.device.name for pool in mapping.pools)
    if any(pool.machine != mapping.pools[0].machine for pool in mapping.pools):
        yield f"pools on machines of several kinds ({', '.join(kinds)}): a run takes machines as they come"
    roles = [role.name for role in graph.roles]
    placed = Counter(role for pool in mapping.pools for role in pool.roles)
    for role in dict.fromkeys((*roles, *placed)):
        if role not in roles or placed[role] != 1:
            found = f"is on {placed[role]} pools" if role in roles else "is placed"
            yield f"{role} {found}; expected each of {', '.join(roles)} on one"
            return
    yield from (problem for pool in mapping.pools for problem in _unlike(mapping, pool, graph))
    cuts = {role: strategy._replace(dp=1) for role, strategy in mapping.strategies.items()}
    for role in (name for name in roles if section_of(name) != name):
        if cuts[role] != cuts[section_of(role)]:
            yield f"{role} is cut otherwise than {section_of(role)}, but [{section_of(role)}] says how both are, all but dp"


def _unlike(mapping: DeviceMapping, pool: Pool, graph: TaskGraph) -> Iterator[str]:
    if not re.fullmatch(r"[\w-]+", pool.name):
        yield f"pool {pool.name!r}: expected a name of letters, digits, - and _"
    for role in (role for role in graph.roles if role.name in pool.roles):
        strategy = mapping.strategies[role.name]
        if strategy.devices != pool.devices:
            yield f"{role.name} has {strategy.devices} of the {pool.devices} devices of its pool; a run uses all of them"
        if strategy.shard != "none" and not role.trained:
            yield f"{role.name} is sharded by {strategy.shard}; a run shards what it trains"
