"""When what happens: plain data, a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SPARE_STEPS", "STEPS", "Fault", "schedule"]

STEPS = 2
"""that a run does after a fault before it counts as recovered"""
SPARE_STEPS = 1 + STEPS
"""before the first fault, and after the last"""


class Fault(NamedTuple):
    """The fault of this ``kind``, as soon as ``step`` steps are done and ``delay`` (0 to 1) of the next one; ``draw`` (0 to
    1) chooses among the processes or files that it could befall."""

    step: int
    kind: str
    delay: float
    draw: float


def schedule(kinds: Sequence[str], faults: int, steps: int, seed: int) -> list[Fault]:
    """Spread over the steps, one in each of as many stretches; every kind once before any comes again."""
    rng = random.Random(seed)
    dealt: list[str] = []
    while len(dealt) < faults:
        dealt += rng.sample(list(kinds), len(kinds))
    room = steps - SPARE_STEPS
    ends = [1 + number * room // faults for number in range(faults + 1)]
    return [
        Fault(rng.randrange(ends[number], ends[number + 1]), kind, rng.random(), rng.random())
        for number, kind in enumerate(dealt[:faults])
    ]
