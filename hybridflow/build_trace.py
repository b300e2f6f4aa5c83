"""The call graph of a run's step, from its configuration alone: every part is made as for training, on the trace runtime.

Models are built on the device "meta", where they have sizes and no weights, so a graph takes a second for any model. Data
and tokenizer are the real ones: the rows of the first step say how many and how long prompts are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from hybridflow.algorithms import ALGORITHMS
from hybridflow.build import make_algorithm, make_makers, make_parts
from hybridflow.build_environment import EnvironmentParts
from hybridflow.build_replay import replay_role
from hybridflow.config import RunConfig
from hybridflow.controller.trace_runtime import TraceRuntime, Workload
from hybridflow.core.batch import Batch
from hybridflow.core.graph import DRIVER, Graph, PoolSize, RoleSize
from hybridflow.core.placement import Mesh, Placement, ResourcePool
from hybridflow.core.roles import Role
from hybridflow.data.agents import agents_of
from hybridflow.data.envs import entry_types, spaces_of
from hybridflow.models.memory import memory_size
from hybridflow.parallel.mesh import Line
from hybridflow.reshard.plan import make_plan
from hybridflow.rollout.replay import REPLAYED, SAMPLED
from hybridflow.workers.fsdp import fsdp_bytes
from hybridflow.workers.optimizer import freeze, training_bytes
from hybridflow.workers.parts import Lines
from hybridflow.workers.zero import ShardMode, sharded_bytes

__all__ = ["held", "place", "places_of", "trace", "traced", "workload"]


def trace(config: RunConfig, response_tokens: float | None = None) -> Graph:
    """What one step of a run calls. No weights are read; mistakes in data and models are told as a run tells them.

    ``response_tokens``: mean length of a response; the longest that is allowed if None.
    """
    return traced(config, response_tokens)[0].graph


def traced(config: RunConfig, response_tokens: float | None = None) -> tuple[TraceRuntime, Batch]:
    """The runtime of ``trace``, with the roles, and the rows that the step starts from."""
    runtime = TraceRuntime(workload(config, response_tokens))
    sizes_only = config.model_copy(update={"device": "meta"})
    parts = make_parts(sizes_only, runtime)
    makers = make_makers(sizes_only, parts, runtime)
    algorithm = make_algorithm(sizes_only, makers | _demonstrations(makers, runtime))
    given = ("environment", "slots") if config.environment is not None else ("data", ALGORITHMS[config.algorithm].records)
    first = parts.source(1)
    if isinstance(parts, EnvironmentParts) and parts.environment.workers:
        first = first.rows(parts.shares[0])
        runtime.workload = replace(runtime.workload, types={**runtime.workload.types, "gradients": _gradients(runtime)})
    batch = algorithm.rollout(runtime.source(*given, first))
    if config.replays and config.environment is not None:
        runtime.role(replay_role(config, spaces_of(config.environment)))
        draws = config.draws_per_update
        runtime.times = config.updates_per_step // draws
        memory, rows = config.actor.net.remembered, draws * config.replay.batch_size
        seen, drawn, steps = batch.select((*REPLAYED, *memory)), (*SAMPLED, *memory), float(config.replay.sequence)
        batch = runtime.resample("replay", "sample", seen, drawn, rows, steps)
    algorithm.learn(batch)
    place(runtime, config)
    return runtime, first


def workload(config: RunConfig, response_tokens: float | None = None) -> Workload:
    """What the trace of a run assumes."""
    if config.environment is not None:
        spaces, seats = spaces_of(config.environment), 1
        types = {**entry_types(spaces), "memory": np.dtype((np.float32, (memory_size(spaces[0], config.actor.net),)))}
        if config.environment.shared:
            agents = agents_of(config.environment)
            states = np.dtype((np.float32, agents.state_space.shape))
            types, seats = types | {"states": states, "final_states": states}, len(agents.names)
        return Workload(config.environment.steps_per_rollout, types, seats)
    return Workload(config.generation.max_new_tokens if response_tokens is None else response_tokens)


def _gradients(runtime: TraceRuntime) -> np.dtype[Any]:
    """Those of all parameters of the actor."""
    networks = runtime.roles["actor"].args["networks"]
    size = sum(parameter.numel() for parameter in networks.build()[networks.main].parameters())
    return np.dtype((np.float32, (size,)))


def _demonstrations(makers: Mapping[str, Callable[[], Any]], runtime: TraceRuntime) -> dict[str, Callable[[], Any]]:
    """The demonstrations that an algorithm asks for in ``learn``, as a source of the graph."""

    def make() -> Callable[[int], Batch]:
        draw = makers["demonstrations"]()
        return lambda update: runtime.source("data", "demonstrations", draw(update))

    return {"demonstrations": make}


def place(runtime: TraceRuntime, config: RunConfig) -> None:
    """What the roles hold and where, into the graph."""
    placed, graph, where = config.placed, runtime.graph, str(config.torch_device)
    for role in runtime.roles.values():
        pool, mesh = placed.pool_of(role.name), placed.mesh_of(role.name, role.max_workers)
        size, shown = _role_size(role, runtime, where, mesh), mesh
        if role.name in runtime.shared:
            size, shown = _sampler_size(size, runtime.roles[runtime.shared[role.name]], placed, mesh), mesh.while_generating
        if size.where == DRIVER and config.runtime.kind == "ray":
            size = replace(size, where="cpu")
        graph.roles.append(replace(size, pool=pool.name, mesh=str(shown)))
    if config.runtime.kind == "ray":
        graph.pools = [_pool_size(pool, graph.roles) for pool in placed.pools]


def _sampler_size(size: RoleSize, learner: Role[Any], placed: Placement, mesh: Mesh) -> RoleSize:
    """What a sampler on this ``mesh`` holds besides the weights of a learner: nothing, what its generation slices have more
    than the training slices, what FSDP gathers, or a copy."""
    networks, theirs = learner.args["networks"], placed.mesh_of(learner.name, learner.max_workers)
    parts = [networks.at(lines)[networks.main].parameters() for lines in places_of(mesh)]
    copied = max(sum(parameter.nbytes for parameter in part) for part in parts)
    if placed.pool_of(learner.name) != placed.pool_of(size.name) or theirs.by_copies != mesh:
        return replace(size, model=f"a copy of the {learner.name}'s", copy_of=learner.name, weight_bytes=copied)
    if learner.args["shard"] == "fsdp" and theirs.copies > 1:
        return replace(size, model=f"the {learner.name}'s, gathered for each rollout", weight_bytes=copied)
    if theirs.tp * theirs.pp == 1:
        return size
    decoder = networks.build()[networks.main].decoder
    accounts = make_plan(decoder.spec, theirs.by_copies, itemsizes=(decoder.anchor.itemsize,) * 2).accounts
    more = max(account.generation.total - account.in_place.total for account in accounts)
    return replace(size, copy_of=learner.name if more else "", weight_bytes=more)


def _pool_size(pool: ResourcePool, roles: Sequence[RoleSize]) -> PoolSize:
    there = [role for role in roles if role.pool == pool.name]
    sizes = (sum(getattr(role, f"{name}_bytes") for role in there) for name in ("weight", "gradient", "optimizer"))
    return PoolSize(pool.name, pool.nodes, tuple(role.name for role in there), *sizes)


def _role_size(role: Role[Any], runtime: TraceRuntime, where: str, mesh: Mesh) -> RoleSize:
    worker = role.worker.__name__
    if role.name in runtime.shared:
        place = "own process (vLLM)" if role.args.get("engine") == "vllm" else where
        return RoleSize(role.name, worker, place, f"the {runtime.shared[role.name]}'s, in place")
    if "specs" in role.args:
        return RoleSize(role.name, worker, "own processes", ", ".join(spec.function for spec in role.args["specs"]))
    if "networks" not in role.args:
        rows = f"{role.args['capacity']:,} rows" if role.name == "replay" else ""
        return RoleSize(role.name, worker, DRIVER, rows)
    return _with_networks(RoleSize(role.name, worker, where, role.args["networks"].model), role.args, mesh)


def _with_networks(size: RoleSize, args: Mapping[str, Any], mesh: Mesh) -> RoleSize:
    """Parameters are those of the whole model; bytes those of the rank that holds most of it."""
    whole = held(args, Lines(dp_cp=Line(mesh.copies), shard=Line(mesh.sharing)))
    places = places_of(mesh)
    ranks = [held(args, lines) for lines in places] if len(places) > 1 else []
    most = max(ranks, key=lambda rank: rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes, default=whole)
    plan = {"minibatches": args["plan"].minibatches, "epochs": args["plan"].epochs} if "plan" in args else {}
    return replace(
        size,
        parameters=whole.parameters,
        trained=whole.trained,
        dtype=whole.dtype,
        weight_bytes=most.weight_bytes,
        gradient_bytes=most.gradient_bytes,
        optimizer_bytes=most.optimizer_bytes,
        **plan,
    )


def places_of(mesh: Mesh) -> list[Lines]:
    """The ranks of one copy of a model."""
    copies, shard, places = Line(mesh.copies), Line(mesh.sharing), itertools.product(range(mesh.tp), range(mesh.pp))
    lines = Lines(dp_cp=copies, shard=shard, chunks=mesh.chunks)
    return [replace(lines, tp=Line(mesh.tp, t), pp=Line(mesh.pp, p)) for t, p in places]


def held(args: Mapping[str, Any], lines: Lines) -> RoleSize:
    """What the rank at this place of a mesh holds."""
    built = args["networks"].at(lines)
    parameters = [parameter for network in built.values() for parameter in network.parameters()]
    size = RoleSize(
        name="",
        worker="",
        where="",
        model="",
        parameters=sum(parameter.numel() for parameter in parameters),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        weight_bytes=sum(parameter.nbytes for parameter in parameters),
    )
    if "optimizer" not in args:
        return size
    networks, others = args["networks"], args.get("others", {})
    optimizers = {networks.main: args["optimizer"], **{name: trained.optimizer for name, trained in others.items()}}
    for name, config in optimizers.items():
        freeze(built[name], config.freeze, lines.whole)
        size = _with_training(size, built[name], args["shard"], lines.shard.size)
    if args["shard"] == "fsdp" and lines.shard.size > 1:
        weights, gradients, states = fsdp_bytes(built[networks.main], lines.shard.size)
        size = replace(size, weight_bytes=weights, gradient_bytes=gradients, optimizer_bytes=states)
    return size


def _with_training(size: RoleSize, network: nn.Module, shard: ShardMode, ranks: int) -> RoleSize:
    """What training one more network takes."""
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    gradients, states = training_bytes(network)
    states = sharded_bytes(network, ranks) if shard == "zero1" else states
    return replace(
        size,
        trained=size.trained + trained,
        gradient_bytes=size.gradient_bytes + gradients,
        optimizer_bytes=size.optimizer_bytes + states,
    )
