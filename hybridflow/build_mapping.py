"""Between a run's configuration and the planner: what its step does, where its roles are, and where a planner wants them.

    RunConfig ──task_graph──> TaskGraph          who computes what on how many tokens
    RunConfig ──mapping_of──> DeviceMapping      where its own [placement] and meshes put the roles
    DeviceMapping ──write──> the TOML file       [runtime], [placement] and meshes of another mapping

A graph comes from the trace of the run's own program, so any algorithm on text has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from hybridflow.build_plan import stage_of
from hybridflow.build_trace import held, traced
from hybridflow.config import RunConfig
from hybridflow.controller.trace_runtime import TraceRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ConfigError
from hybridflow.core.fields import FIELDS
from hybridflow.core.graph import Call
from hybridflow.core.roles import Kind, Role
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.sizes import ModelSize
from hybridflow.workers.parts import WHOLE

__all__ = ["task_graph"]


def task_graph(config: RunConfig, response_tokens: float | None = None) -> TaskGraph:
    """What a step of the run does, for a planner. No weights are read; mistakes in data and models are told as a run tells
    them. Microbatches and recomputing are left to the planner unless ``train.token_budget`` is set.

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
        token_budget=budget if "token_budget" in config.train.model_fields_set else None,
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
