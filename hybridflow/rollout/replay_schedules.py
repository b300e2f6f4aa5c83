"""Schedules of methods that learn from a replay buffer, besides ``Synchronous``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.core.batch import Batch
from hybridflow.core.roles import Algorithm
from hybridflow.rollout.buffer import Buffer
from hybridflow.rollout.schedule import Source

__all__ = ["Offline", "Overlapping"]


class Offline:
    """Learn ``updates`` times a step from what the buffer began with; nothing is collected."""

    def __init__(self, updates: int) -> None:
        self.updates, self.version = updates, 0

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The last batch that was learned from; None if there is nothing to learn from."""
        learned = None
        for _ in range(self.updates):
            batch = buffer.sample(self.version)
            if batch is not None:
                learned = algorithm.learn(batch)
                buffer.learned(learned)
                self.version += 1
        return learned

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.version = state["version"]


class Overlapping(Offline):
    """Ask for the next rollout, then learn ``updates`` times: where the sampler has processes of its own, both happen at
    once.

    What a step learns from was collected with the weights from before the last step's updates, one step older than in
    ``Synchronous``. Who is faster changes nothing: a rollout is always added before the updates of the step after that in
    which it was asked for. The rollout that waits is part of the state.
    """

    def __init__(self, updates: int) -> None:
        super().__init__(updates)
        self._waiting: tuple[Batch, int] | None = None

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The last batch that was learned from; None while the buffer is warming up."""
        collected = self._waiting or (algorithm.rollout(source(step)), self.version)
        self._waiting = algorithm.rollout(source(step + 1)), self.version
        buffer.add(*collected)
        return super().step(step, algorithm, source, buffer)

    def state_dict(self) -> dict[str, Any]:
        waiting = None if self._waiting is None else {"rollout": self._waiting[0].load(), "version": self._waiting[1]}
        return {**super().state_dict(), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        super().load_state_dict(state)
        waiting = state["waiting"]
        self._waiting = None if waiting is None else (waiting["rollout"], waiting["version"])
