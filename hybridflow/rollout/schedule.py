"""A schedule decides who calls rollout and learn, and when."""

from collections.abc import Callable
from typing import Protocol

from hybridflow.core.batch import Batch
from hybridflow.core.roles import Algorithm
from hybridflow.rollout.buffer import Buffer

__all__ = ["Schedule", "Source", "Synchronous"]

Source = Callable[[int], Batch]
"""step (from 1) -> what ``rollout`` starts from; a pure function, so resuming needs no position"""


class Schedule(Protocol):
    """``version`` counts the updates of the learner."""

    version: int

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None: ...


class Synchronous:
    """Roll out with the newest weights, then learn ``updates`` times from the buffer."""

    def __init__(self, updates: int = 1) -> None:
        self.updates, self.version = updates, 0

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The last batch that was learned from; None while the buffer is warming up."""
        buffer.add(algorithm.rollout(source(step)), self.version)
        learned = None
        for _ in range(self.updates):
            batch = buffer.sample(self.version)
            if batch is not None:
                learned = algorithm.learn(batch)
                self.version += 1
        return learned
