"""Seconds of weights on their way from training to generation, on one pool or to another."""

from __future__ import annotations

from typing import NamedTuple

from hybridflow.planner.mapping import Strategy
from hybridflow.reshard.plan import Strategy as Reshard

__all__ = ["Traffic", "nested", "reshard_traffic"]


class Traffic(NamedTuple):
    """Of a device, in units of the model: what it ``receives``, of that ``outside``: from other machines; what is
    ``assembled`` on it; and by how many devices of its machine the same numbers from outside are ``wanted``."""

    received: float
    outside: float
    assembled: float
    wanted: float = 1.0


def nested(training: Strategy, generation: Strategy) -> bool:
    """Whether each training slice is a part of the generation slice in the same place."""
    return training.tp % generation.tp == 0 and training.pp % generation.pp == 0 and not _shared_out(training)


def _shared_out(training: Strategy) -> bool:
    return training.shard == "fsdp" and training.dp > 1


def reshard_traffic(training: Strategy, generation: Strategy, reshard: Reshard, machine: int) -> Traffic:
    """Table 2 of the paper, by what stays in a machine of so many devices. ``machine`` is divided by tp, or the other way
    round."""
    block = training.pp * training.tp
    if reshard == "gather_all" or _shared_out(training):
        return _gathered(block * training.dp, machine)
    if reshard == "vanilla":
        return _gathered(block, machine)
    own = 1 / (generation.pp * generation.tp)
    group = round(block * own)
    if group == 1 and nested(training, generation):
        return Traffic(0.0, 0.0, 0.0)
    # a group is of neighbouring slices of p / p_g neighbouring stages, of which a machine has some
    stages = max(1, training.pp // generation.pp)
    there = max(1, min(stages, machine // training.tp))
    near = min(group, there * max(1, training.tp // generation.tp))
    return Traffic((group - 1) / block, (group - near) / block, own, near)


def _gathered(ranks: int, machine: int) -> Traffic:
    """The whole model, from all ranks that have parts of it."""
    near = min(ranks, machine)
    return Traffic((ranks - 1) / ranks, (ranks - near) / ranks, 1.0, near)
