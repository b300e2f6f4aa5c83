"""Which roles can work in more or fewer processes of their pool than before, while a run goes on."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.controller.protocols import blocks
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import HandsOver, Role, is_control, verb_of

__all__ = ["hands_over", "has_own_workers", "home", "members_of", "obstacle"]


def has_own_workers(role: Role[Any]) -> bool:
    """Whether the role's work is done by processes that its worker starts: ``num_workers``, a control method, says how
    many, and ``resize`` changes that."""
    return is_control(getattr(role.worker, "resize", None))


def hands_over(role: Role[Any]) -> bool:
    """Whether its workers have state that goes with rows."""
    return isinstance(role.worker, type) and issubclass(role.worker, HandsOver)


def members_of(workers: int, members: int) -> list[int]:
    """How many of the members, which roll out by themselves, from rows of their own, take turns in each of so many
    workers."""
    return [len(part) for part in blocks(np.ones(members, np.int64), workers)]


def home(member: int, workers: int, members: int) -> int:
    """In which of so many workers a member is."""
    return int(np.searchsorted(np.cumsum(members_of(workers, members)), member, side="right"))


def obstacle(role: Role[Any], widest: Mesh) -> str | None:
    """Why the role can't work on some of the ranks of ``widest`` alone; None: it can. Each rank must have rows of its own,
    and nothing else but what goes with them (``HandsOver``)."""
    methods = [getattr(role.worker, name) for name in dir(role.worker)]
    if any(verb.protocol.view for verb in map(verb_of, methods) if verb is not None):
        return "its workers share out what they learn or keep"
    if widest.size > widest.dp:
        return f"its model is cut ({widest})"
    if is_control(getattr(role.worker, "state_dict", None)) and not hands_over(role):
        return "its state has no hand_over and take_over"
    return None
