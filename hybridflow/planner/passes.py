"""Seconds of passes over rows that are there: training and inference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from hybridflow.planner.graph import Task
from hybridflow.planner.links import Links
from hybridflow.planner.mapping import Strategy
from hybridflow.planner.profile import Profile

__all__ = ["ACTIVATIONS", "REORDERS", "Speeds", "forward_parts", "microbatches", "recomputes", "train_parts"]


ACTIVATIONS = 40
"""numbers that a layer writes and reads of a token, in units of the hidden size: norms, rotations, activation functions"""


REORDERS = 2.2
"""what a CPU takes to read a weight of a dense product, which packs it, in units of one that is packed already"""


class Speeds(NamedTuple):
    """Of a device, as reached: FLOP/s, bytes/s; seconds that a layer's kernels take besides (to start, and while the last
    blocks of each run alone), and of a call. ``overlap``: the share of computing during which weights of the next layers
    can arrive. ``serial``: reading and computing take turns, as on a CPU, instead of hiding behind each other."""

    flops: float
    bandwidth: float
    launch: float
    call: float
    overlap: float
    serial: bool

    def together(self, *seconds: float) -> float:
        """Of things that are done at the same time."""
        return sum(seconds) if self.serial else max(seconds)


def microbatches(profile: Profile, task: Task, strategy: Strategy) -> tuple[int, float, int]:
    """(rows of the fullest, of one in the mean, how many a replica takes in a minibatch)."""
    minibatches = task.minibatches if task.kind == "train" else 1
    block = ceil(ceil(task.rows / minibatches) / strategy.dp)
    budget = profile.role.token_budget
    rows = strategy.rows if budget is None else int(budget / max(1.0, task.prompt + task.response))
    rows = max(1, min(block, rows))
    count = ceil(block / rows)
    return rows, block / count, count


def _way(profile: Profile, task: Task, s: Strategy, rows: float, speeds: Speeds, back: bool = False) -> list[float]:
    """[pp] seconds of a microbatch on each stage, forward; ``back``: with twice the products, of gradients of inputs and
    weights, but for the frozen layers at the beginning."""
    role, cut = profile.role, profile.cut(s.tp)
    layer, last, head = profile.flops(*_lengths(profile, task))
    times, frozen = (2, role.frozen) if back else (1, 0)
    work, tokens = times * rows * cut.share / speeds.flops, rows * (task.prompt + task.response)
    moved = profile.touched(s.tp, tokens) * (REORDERS if speeds.serial else 1)
    moved += ACTIVATIONS * tokens * profile.hidden / s.tp
    read = times * moved * role.itemsize / speeds.bandwidth
    one, end = (speeds.together(flops * work, read) for flops in (layer, last))
    end += (times if role.trains_head else 1) * rows * head / (s.tp * speeds.flops)
    starts = [profile.layers * stage // s.pp for stage in range(s.pp + 1)]  # the last one has as many as any
    stages = [one * max(0, stop - max(start, frozen)) for start, stop in pairwise(starts)]
    stages[-1] += end - one if frozen < profile.layers else 0.0
    return stages


def _lengths(profile: Profile, task: Task) -> tuple[float, float]:
    """(of a row, how many of its tokens decide)."""
    length = task.prompt + task.response
    return length, 1.0 if profile.role.head == "score" else task.response or length


def _sent(profile: Profile, task: Task, s: Strategy, rows: float, links: Links) -> tuple[float, float]:
    """Seconds of (the two all-reduces of each layer of a stage, a message to the next stage), of a microbatch one way."""
    size = rows * (task.prompt + task.response) * profile.hidden * profile.role.itemsize
    tensor = 2 * ceil(profile.layers / s.pp) * links.all_reduce(size, s.tp)
    return tensor, links.message(size, s.pp * s.tp) if s.pp > 1 else 0.0


def forward_parts(profile: Profile, task: Task, s: Strategy, speeds: Speeds, links: Links) -> dict[str, float]:
    _, rows, count = microbatches(profile, task, s)
    way, sent = _way(profile, task, s, rows, speeds), _sent(profile, task, s, rows, links)
    parts = _pipelined(way, sent, ceil(profile.layers / s.pp) * speeds.launch, count, s.pp)
    if s.shard == "fsdp" and s.dp > 1:
        gathered = count * links.ring(profile.numbers(s.pp, s.tp) * profile.role.itemsize, s.pp * s.tp, s.dp)
        parts["data"] = max(0.0, gathered - speeds.overlap * parts["compute"])
    parts["call"] = speeds.call
    return {name: seconds * task.times for name, seconds in parts.items()}


def _pipelined(stages: Sequence[float], sent: tuple[float, float], launch: float, count: int, pp: int) -> dict[str, float]:
    """Of ``count`` microbatches: the slowest stage sets the pace, and one of them goes through all others besides."""
    (tensor, message), slowest, mean = sent, max(stages), sum(stages) / pp
    return {
        "compute": count * mean,
        "imbalance": count * (slowest - mean),
        "launch": count * launch,
        "tensor": count * tensor,
        "bubble": sum(stages) - slowest + (pp - 1) * (launch + tensor),
        "pipeline": (count + pp - 1) * message if pp > 1 else 0.0,
    }


def train_parts(profile: Profile, task: Task, s: Strategy, speeds: Speeds, links: Links) -> dict[str, float]:
    _, rows, count = microbatches(profile, task, s)
    there, back = (_way(profile, task, s, rows, speeds, way) for way in (False, True))
    tensor, message = _sent(profile, task, s, rows, links)
    again = recomputes(profile, s)
    both, sent = [sum(ways) for ways in zip(there, back, strict=True)], (tensor * (2 + again), 2 * message)
    layers = (1 + again) * profile.layers + 2 * (profile.layers - profile.role.frozen * (s.pp == 1))
    parts = _pipelined(both, sent, ceil(layers / s.pp) * speeds.launch, count, s.pp)
    parts["recompute"] = (count + s.pp - 1) * max(there) * again
    parts |= _update_parts(profile, s, count, parts["compute"], speeds, links)
    updates = task.minibatches * task.epochs * task.times
    return {name: seconds * updates for name, seconds in parts.items()}


def recomputes(profile: Profile, s: Strategy) -> bool:
    role = profile.role
    return s.recompute if role.token_budget is None else role.recompute


def _update_parts(
    profile: Profile, s: Strategy, count: int, compute: float, speeds: Speeds, links: Links
) -> dict[str, float]:
    """Gradients to their sums, the optimizer's step, and weights back to all. With fsdp no rank has gradients of all, so
    that they go to their sums in every microbatch (``workers/fsdp.py``, ZeRO-3)."""
    role, numbers, block = profile.role, profile.numbers(s.pp, s.tp), s.pp * s.tp
    trained = numbers * profile.trained
    weights, gradients = numbers * role.itemsize, trained * role.gradient_bytes
    moved = links.ring(gradients, block, s.dp)
    if s.shard == "none":
        moved *= 2  # an all-reduce
    elif s.shard == "zero1":
        moved += links.ring(trained * role.itemsize, block, s.dp)
    else:  # weights arrive for each microbatch's passes, while others are computed with
        gathered = (3 if recomputes(profile, s) else 2) * count * links.ring(weights, block, s.dp)
        moved = count * moved + max(0.0, gathered - speeds.overlap * compute)
    own = trained / (1 if s.shard == "none" else s.dp)
    # the norm reads gradients, the step reads them again, reads and writes its states, and writes weights
    optimizer = own * (2 * role.gradient_bytes + 2 * role.optimizer_bytes + role.itemsize) / speeds.bandwidth
    return {"data": moved, "optimizer": optimizer, "call": speeds.call}
