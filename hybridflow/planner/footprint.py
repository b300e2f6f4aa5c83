"""Bytes of a role on a device, by how it is cut: what it holds, and what it takes at most on top while it works."""

from __future__ import annotations

from math import ceil

from hybridflow.planner.graph import Task
from hybridflow.planner.mapping import Strategy
from hybridflow.planner.memory import Microbatch
from hybridflow.planner.passes import microbatches, recomputes
from hybridflow.planner.profile import Profile

__all__ = ["held_bytes", "working_bytes"]


def held_bytes(profile: Profile, s: Strategy) -> float:
    """Weights and, of what is trained, gradients and optimizer. Where an optimizer has masters of weights (over 8 bytes a
    parameter), those are all that fsdp has of them."""
    role, numbers = profile.role, profile.numbers(s.pp, s.tp)
    trained, frozen = numbers * profile.trained, numbers * (1 - profile.trained)
    optimizer = trained * role.optimizer_bytes / (1 if s.shard == "none" else s.dp)
    if s.shard != "fsdp" or s.dp == 1:
        return numbers * role.itemsize + trained * role.gradient_bytes + optimizer
    own = role.gradient_bytes + (role.itemsize if role.optimizer_bytes <= 8 else 0)
    return (frozen * role.itemsize + trained * own) / s.dp + optimizer


def working_bytes(profile: Profile, task: Task, s: Strategy) -> float:
    """Of a forward or training task. Activations of a microbatch and gradients aren't there at the same time, but those of
    earlier ones are."""
    rows, _, count = microbatches(profile, task, s)
    length = max(1, ceil(task.prompt + task.response))
    actions = rows if profile.role.head == "score" else rows * (ceil(task.response) or length)
    batch = Microbatch(rows, length, rows * length, actions)
    ends, gathers = profile.ends(s.pp, s.tp, recomputes(profile, s), batch), s.shard == "fsdp" and s.dp > 1
    beside, summed = _gathered(profile, s) if gathers else (0.0, 0.0)
    if task.kind != "train":
        return beside + max(forward for _, forward in ends)
    gradients = profile.numbers(s.pp, s.tp) * profile.trained * profile.role.gradient_bytes
    if gathers:
        gradients /= s.dp
    elif s.dp > 1:
        summed = gradients * (1 if s.shard == "none" else 1 + 1 / s.dp)
    messages = 3 * profile.role.itemsize * batch.tokens * profile.hidden if s.pp > 1 else 0
    flights = (1, min(s.pp, count))
    learning = max(
        (flight - 1) * way.kept + way.peak(int(gradients), flight < count)
        for flight, (way, _) in zip(flights, ends, strict=False)
    )
    return max(0.0, max(learning + messages + beside, gradients + summed) - gradients)


def _gathered(profile: Profile, s: Strategy) -> tuple[float, float]:
    """What fsdp has whole at a time: (beside activations, at the end of the way back). Beside them the weights around the
    layers and of two layers, one of which comes before it is needed, and in fp32 what a layer's gradients are reduced from
    and what comes of others; at the end the same of what is around the layers."""
    layer, itemsize = profile.cut(s.tp).layer, profile.role.itemsize
    around = profile.numbers(s.pp, s.tp) - ceil(profile.layers / s.pp) * layer
    reduced = 8.0 if profile.role.trained else 0.0
    return itemsize * (around + 2 * layer) + reduced * layer, reduced * around * (1 + 1 / s.dp)
