"""Workers that say when they are told to put away and to take back what they hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hybridflow.controller.protocols import ONE_TO_ALL
from hybridflow.core.batch import Batch
from hybridflow.core.roles import MemoryPart, WorkerContext, control, remote

LOG: list[str] = []
"""Of all workers of this process."""


class Reader:
    """Has no model; as a sampler it reads that of another."""

    def __init__(self, context: WorkerContext, name: str = "") -> None:
        self.name = name
        LOG.append(f"{name} is built")

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("slot",))
    def work(self, batch: Batch, /) -> Batch:
        LOG.append(f"{self.name} works")
        return Batch({"slot": batch["sample_id"]})

    @control
    def attach(self, source: Any) -> None:
        LOG.append(f"{self.name} is attached")

    @control
    def state_dict(self) -> dict[str, Any]:
        return {}

    @control
    def log(self) -> list[str]:
        """What happened since this was called last."""
        told = LOG[:]
        LOG.clear()
        return told


class Keeper(Reader):
    """Holds weights and an optimizer."""

    def __init__(self, context: WorkerContext, name: str = "") -> None:
        super().__init__(context, name)
        self.held: set[MemoryPart] = {"weights", "optimizer"}

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("slot",))
    def update(self, batch: Batch, /) -> Batch:
        return self.work(batch)

    def offload(self, keep: Collection[MemoryPart] = ()) -> int:
        return self._move(self.held - set(keep), "puts away", self.held.difference_update)

    def onload(self, method: str) -> int:
        needed: set[MemoryPart] = {"weights", "optimizer"} if method in ("update", "state_dict") else {"weights"}
        return self._move(needed - self.held, "takes back", self.held.update)

    def _move(self, parts: set[MemoryPart], what: str, change: Any) -> int:
        change(set(parts))
        LOG.extend(f"{self.name} {what} {part}" for part in sorted(parts, reverse=True))
        return len(parts)
