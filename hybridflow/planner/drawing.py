"""Seconds of drawing responses, token by token, from a key-value cache, or without one."""

from __future__ import annotations

from math import ceil, log, sqrt
from typing import NamedTuple

from hybridflow.generation.weights import MIN_STEPS
from hybridflow.planner.flops import decode_flops, forward_flops
from hybridflow.planner.graph import Task
from hybridflow.planner.links import Links
from hybridflow.planner.mapping import Strategy
from hybridflow.planner.passes import ACTIVATIONS, REORDERS, Speeds
from hybridflow.planner.profile import Profile

__all__ = ["CHUNK_TOKENS", "Pace", "cacheless_parts", "draw_parts", "least_bytes"]

CHUNK_TOKENS = 2048
"""of prompts that go through the layers at once"""


class Pace(NamedTuple):
    """Seconds of a decode step, and of each row in it, besides reading memory, computing and sending. ``copy``: bytes/s at
    which weights are packed for a rollout, on a CPU."""

    step: float
    row: float
    copy: float


class _Rows(NamedTuple):
    """Of a replica: how many it draws in all, and steps until the last is done."""

    total: int
    steps: float


def draw_parts(
    profile: Profile, task: Task, s: Strategy, speeds: Speeds, links: Links, pace: Pace, free: float
) -> dict[str, float] | None:
    """Stages of a pipeline take turns: what they hold is divided, what they do is not. None: ``free`` bytes don't hold the
    weights and one response."""
    room, position = free - profile.numbers(s.pp, s.tp) * profile.role.itemsize, _position_bytes(profile, s)
    if room < position * (task.prompt + max(task.response, task.longest)):
        return None
    rows = _rows(task, s, room / (position * max(1.0, task.prompt / task.group + task.response)))
    parts = _prefill_parts(profile, task, s, rows.total, speeds, links)
    if task.response > 1:
        parts |= _decode_parts(profile, task, s, rows, speeds, pace)
        size = rows.total * (task.response - 1) / rows.steps * profile.hidden * profile.role.itemsize
        parts["tensor"] += rows.steps * 2 * profile.layers * links.all_reduce(size, s.tp)
        if s.pp > 1:
            parts["pipeline"] += rows.steps * s.pp * links.message(size, s.pp * s.tp)
    if speeds.serial and _packs(task):
        parts["copy"] = profile.numbers(s.pp, s.tp) * profile.role.itemsize / pace.copy
    parts["call"] = speeds.call
    return {name: seconds * task.times for name, seconds in parts.items()}


def _packs(task: Task) -> bool:
    """Whether the engine packs weights for the rollout, on a CPU: if it may take many steps."""
    return max(task.longest, task.response) > MIN_STEPS


def least_bytes(profile: Profile, task: Task, s: Strategy) -> float:
    """That a device needs for its weights and the longest response."""
    longest = task.prompt + max(task.response, task.longest)
    return profile.numbers(s.pp, s.tp) * profile.role.itemsize + _position_bytes(profile, s) * longest


def _position_bytes(profile: Profile, s: Strategy) -> float:
    """Keys and values of a token on a device."""
    return ceil(profile.layers / s.pp) * profile.cut(s.tp).position


def _rows(task: Task, s: Strategy, fit: float) -> _Rows:
    """Continuous batching: a row that is done makes room for the next, so that n rows side by side take total / n times the
    mean length. At the end they wait for the longest: mean + deviation sqrt(2 ln rows), as if lengths were normal, but not
    over ``longest``. Equally long rows of full slots begin and end together. The first token of a response comes with its
    prompt."""
    total, mean = ceil(task.rows / s.dp), max(0.0, task.response - 1)
    beside = min(total, fit, task.slots or total)
    if not task.deviation:
        return _Rows(total, mean * max(total / beside, ceil(total / task.slots) if task.slots else 1))
    wait = task.deviation * sqrt(2 * log(max(1, total * s.dp)))
    if task.longest:
        wait = min(wait, max(0.0, task.longest - task.response))
    return _Rows(total, total / beside * mean + wait)


def _decode_parts(profile: Profile, task: Task, s: Strategy, rows: _Rows, speeds: Speeds, pace: Pace) -> dict[str, float]:
    """Each step reads the weights and the cache, or computes for longer. A row that is drawn for long is read for long, so
    that the mean context is that of a token, not of a row."""
    mean, drawn = task.response, rows.total * (task.response - 1)
    cut, itemsize, layers = profile.cut(s.tp), profile.role.itemsize, profile.layers
    context = task.prompt + (mean + task.deviation**2 / mean) / 2
    n = drawn / rows.steps
    weights = (layers * profile.touched(s.tp, n) + cut.head) * itemsize
    cache = layers * cut.position * context
    if speeds.serial:
        weights *= 1 if _packs(task) else REORDERS
        cache += layers * ACTIVATIONS * profile.hidden / s.tp * itemsize
    memory = (rows.steps * weights + drawn * cache) / speeds.bandwidth
    products = drawn * decode_flops(profile.active, context, 1, 1) * cut.share / speeds.flops
    step = pace.step + layers * speeds.launch * speeds.serial
    return {"decode": speeds.together(memory, products), "steps": rows.steps * step, "rows": drawn * pace.row}


def _prefill_parts(profile: Profile, task: Task, s: Strategy, rows: int, speeds: Speeds, links: Links) -> dict[str, float]:
    """A prompt that rows share goes through the layers once."""
    tokens = ceil(rows / task.group) * task.prompt
    chunks = ceil(tokens / CHUNK_TOKENS)
    cut, itemsize, layers = profile.cut(s.tp), profile.role.itemsize, profile.layers
    products = forward_flops(profile.active, tokens, rows, task.prompt, True) * cut.share / speeds.flops
    read = layers * profile.touched(s.tp, CHUNK_TOKENS) * itemsize / speeds.bandwidth * chunks
    read += layers * ACTIVATIONS * tokens * profile.hidden / s.tp * itemsize / speeds.bandwidth
    size = tokens * profile.hidden * itemsize
    return {
        "prefill": speeds.together(products, read),
        "launch": chunks * layers * speeds.launch,
        "tensor": chunks * 2 * layers * links.all_reduce(size / max(1, chunks), s.tp),
        "pipeline": chunks * s.pp * links.message(size / max(1, chunks), s.pp * s.tp) if s.pp > 1 else 0.0,
    }


def cacheless_parts(profile: Profile, task: Task, s: Strategy, speeds: Speeds, pace: Pace) -> dict[str, float]:
    """Each token costs a pass over all that are before it."""
    total, drawn = ceil(task.rows / s.dp), ceil(task.rows / s.dp) * task.response
    context = task.prompt + task.response / 2
    products = drawn * forward_flops(profile.active, context, 1, context, True) * profile.cut(s.tp).share / speeds.flops
    parts = {"decode": products, "steps": task.response * pace.step, "rows": drawn * pace.row, "call": speeds.call}
    return {name: seconds * task.times for name, seconds in (parts if total else {}).items()}
