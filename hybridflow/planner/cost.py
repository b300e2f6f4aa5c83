"""Seconds and bytes of every task on its devices, from sizes alone: an analytic model with few efficiency constants."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.planner.cluster import Machine
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Strategy

__all__ = ["CostModel", "Efficiency", "Estimate"]


@dataclass(frozen=True)
class Efficiency:
    """What formulas can't know: shares of peaks that are reached, and seconds that a call takes besides. The first six are
    fitted (``calibrate``), the others are fixed."""

    compute: float = 0.5


@dataclass(frozen=True)
class Estimate:
    """Seconds of a task in a step, and what they are made of, by name."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class CostModel:
    """Times and bytes of a graph's tasks. Everything depends on a task, its strategy and its pool alone, so that what was
    worked out once holds for every mapping."""

    def __init__(self, graph: TaskGraph, efficiency: Efficiency) -> None: ...

    def strategies(self, role: ModelRole, machine: Machine, devices: int) -> list[Strategy]:
        """All that use all ``devices``, can be cut so and hold a microbatch in memory when alone."""
        raise NotImplementedError

    def resident_bytes(self, role: ModelRole, strategy: Strategy) -> float:
        """On a device, also while other roles of the pool work: weights, and of trained roles gradients and optimizer. A
        sampler has none of its own anywhere: its weights and cache are there while it generates only."""
        raise NotImplementedError

    def working_bytes(self, role: ModelRole, strategy: Strategy) -> float:
        """What the role takes at most on top while it works (activations, logits, buffers). 0 for a sampler: ``seconds``
        says whether it fits into what is free."""
        raise NotImplementedError

    def usable_bytes(self, machine: Machine) -> float:
        """Of a device's memory, for what is counted."""
        raise NotImplementedError

    def seconds(self, task: Task, strategy: Strategy, machine: Machine, free_bytes: float = 0.0) -> Estimate | None:
        """Of all ``times``. ``free_bytes``: what a sampler may take (its weights and cache): ``usable_bytes`` less what the
        roles of its pool hold, plus its ``shared_bytes``. More of it never makes it slower. None: it doesn't fit."""
        raise NotImplementedError

    def shared_bytes(self, sampler: ModelRole, training: Strategy, generation: Strategy) -> float:
        """Of a sampler's weights on a device, those that are the learner's in the same place, beside it on one pool."""
        raise NotImplementedError

    def transition(self, sampler: ModelRole, training: Strategy, generation: Strategy, machine: Machine) -> Estimate | None:
        """Of the weights, from training to generation and back, on one pool. None: what is trained so can't generate so
        (pp x tp of generation must divide that of training)."""
        raise NotImplementedError

    def publishing(self, sampler: ModelRole, generation: Strategy, machine: Machine) -> Estimate:
        """Of the weights, to a sampler on another pool; the pool that takes them is what limits it, so that a pool's cost
        depends on nothing but its own roles."""
        raise NotImplementedError

    def transfer(self, edge: Edge, machine: Machine, devices: int) -> float:
        """Seconds in which a pool pulls what it reads from another one."""
        raise NotImplementedError

    def estimates(self, mapping: DeviceMapping) -> dict[str, Estimate]:
        """Of every task, with its transitions and transfers as parts. ConfigError: a pool's roles don't fit its memory."""
        raise NotImplementedError
