"""``hybridflow graph``: which role runs where and how large it is, and what one step calls, without loading a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from hybridflow.build_trace import trace
from hybridflow.config import RunConfig, load_config
from hybridflow.core.errors import UserError
from hybridflow.core.files import write_whole
from hybridflow.core.graph import Call, Graph, RoleSize
from hybridflow.telemetry.graph_picture import dot, graph_page
from hybridflow.telemetry.graph_tables import (
    HELD,
    MEMORY,
    PASSES,
    STAGES,
    aligned,
    call_size,
    memory,
    pool_table,
    role_table,
    stage_table,
    transfer_table,
)

__all__ = ["graph"]

Form = Literal["text", "json", "dot"]


def graph(path: Path, overrides: Sequence[str], form: Form, html: Path | None) -> None:
    """Print the graph of a configuration, or write it as a page to ``html``."""
    config = load_config(path, overrides)
    traced = trace(config)
    if html is not None:
        page = graph_page(traced, f"{config.algorithm}: one step", _headline(config, traced))
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            write_whole(html, page.encode())
        except OSError as error:
            raise UserError(f"graph: can't write {html} ({error.strerror}); choose another output file") from None
        print(html)
    elif form == "json":
        print(json.dumps(_data(config, traced), indent=2))
    elif form == "dot":
        print(dot(traced, config.algorithm))
    else:
        print("\n".join(_text(config, traced)))


def _data(config: RunConfig, traced: Graph) -> dict[str, Any]:
    """The graph, and what follows from it: the numbers of the calls of each stage, and what passes between pools."""
    stages = [[call.number for call in stage] for stage in traced.stages()]
    transfers = [asdict(transfer) for transfer in traced.transfers()]
    return {"algorithm": config.algorithm, **asdict(traced), "stages": stages, "transfers": transfers}


def _text(config: RunConfig, traced: Graph) -> Iterator[str]:
    yield _headline(config, traced)
    if ahead := config.schedule.ahead:
        steps = "one step" if ahead == 1 else f"{ahead} steps"
        yield f'A rollout begins {steps} before its update, beside others (schedule.kind = "{config.schedule.kind}").'
    yield ""
    yield from aligned(role_table(traced), right=("parameters", "trained", *MEMORY))
    called = {call.role for call in traced.calls}
    idle = [role.name for role in traced.roles if role.name not in called]
    if idle:
        yield f"not called in a step: {', '.join(idle)}"
    if traced.pools:
        yield from _pools(traced)
    yield ""
    yield "The calls of one step, in order. Bytes leave out text."
    for call in traced.calls:
        yield from _call_lines(call, traced)


def _pools(traced: Graph) -> Iterator[str]:
    """The physical graph, and who runs when."""
    for title, rows in ((HELD, pool_table(traced)), (PASSES, transfer_table(traced)), (STAGES, stage_table(traced))):
        yield ""
        yield title
        yield from aligned(rows, right=(*MEMORY, "bytes"))


def _headline(config: RunConfig, traced: Graph) -> str:
    source, train = traced.calls[0], config.train
    if config.environment is not None:
        work = f"{source.rows} environments, {config.environment.steps_per_rollout} steps of each"
        return f"{config.algorithm} in {config.environment.id}: a step is {work}. A row is a piece of an episode."
    rollouts = [call for call in traced.calls if call.kind == "generate"]
    if not rollouts:
        return f"{config.algorithm}: a step is {source.rows} rows of the data."
    groups = f"{train.prompts_per_step} prompts" + (
        f", {train.group_size} responses to each" if train.group_size > 1 else ""
    )
    prompt, response = rollouts[0].tokens_in / rollouts[0].rows, config.generation.max_new_tokens
    lengths = (
        f"Prompts have {prompt:.0f} tokens on average; responses are taken to be as long as they may, {response} tokens."
    )
    return f"{config.algorithm}: a step is {groups}. {lengths}"


def _call_lines(call: Call, traced: Graph) -> Iterator[str]:
    protocol = f", {call.protocol}" if traced.pools and call.protocol else ""
    yield f"{call.number:2}  {call.name}  {call.kind}, {call_size(call, traced.unit)}{protocol}"
    for writer, edges in traced.read_by(call):
        size, there = memory(sum(edge.bytes or 0 for edge in edges)) or "text", traced.pool_of(writer)
        where = f" on {there}" if traced.pools and there != traced.pool_of(call) else ""
        yield f"      reads {', '.join(edge.column for edge in edges)} from {writer.number} {writer.name}{where}, {size}"
    if call.function:
        yield f"      runs {call.function}{_passes(call, traced.roles)}"
    if call.writes:
        yield f"      writes {', '.join(call.writes)}"


def _passes(call: Call, roles: Sequence[RoleSize]) -> str:
    """How often an update goes through its batch."""
    role = next(role for role in roles if role.name == call.role)
    if call.kind != "train" or not role.epochs:
        return ""
    return f", minibatches: {role.minibatches}, epochs: {role.epochs}"
