"""Snapshots: checkpoints in the memory of the machines that run it, for going on when workers are lost.

They cost at most about ``SHARE`` of a run's time: how long the last one kept the loop says when the next is due.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.build import Run
from hybridflow.checkpoint import Checkpoint
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.controller.ray_shelves import Shelves
from hybridflow.core.errors import ResourceError
from hybridflow.core.files import Written
from hybridflow.core.state_file import read_state, write_state

__all__ = ["Snapshots"]

SHARE = 0.02
ROOM = 2
"""times what processes hold must still fit: the copy that they write from, and what they write"""


@dataclass
class _Snapshot:
    """``names``: of the states that the driver keeps; ``files``: of the roles, None until they are written."""

    name: str
    path: Path
    step: int
    names: list[str] = field(default_factory=list)
    files: dict[str, list[Written]] | None = None


class Snapshots:
    """The newest snapshot of ``run``, and the one that is being made.

    They lie in the machines' memory, on their disks where that is full, or nowhere if these are full too.
    """

    def __init__(self, run: Run, runtime: RayRuntime) -> None:
        self.run, self.runtime = run, runtime
        self._id, self._number = uuid.uuid4().hex[:12], 0
        self._shelves: Shelves | None = Shelves("@memory", self._id)
        self._newest: _Snapshot | None = None
        self._pending: _Snapshot | None = None
        self._cost_s, self._taken_s = 0.0, time.monotonic()

    @property
    def step(self) -> int | None:
        """After which the newest one was taken."""
        return None if self._newest is None else self._newest.step

    @property
    def due(self) -> bool:
        return self._shelves is not None and time.monotonic() - self._taken_s >= self._cost_s / SHARE

    def take(self, step: int, wait: bool = False) -> None:
        """Begin a snapshot of the run after ``step``; ranks write it while the next steps run. See ``finish``."""
        self.finish(wait=True)
        self._cost_s = 0.0
        with self._costs():
            if self._with_room():
                self._begin(step)
                self.finish(wait)
        self._taken_s = time.monotonic()

    def finish(self, wait: bool = False) -> None:
        """The one that is being made becomes the newest, if it is complete."""
        pending, shelves = self._pending, self._shelves
        if pending is None or shelves is None:
            return
        with self._costs(), self._elsewhere_if_full():
            if pending.files is None:
                pending.files = self.runtime.saved(wait)
                if pending.files is None:
                    return
                shelves.copy(pending.name)
            if shelves.copied(wait):
                old, self._newest, self._pending = self._newest, pending, None
                if old is not None:
                    shelves.remove(old.name)

    def forget(self) -> None:
        """The one that is being made: it can't be completed any more."""
        if self._shelves is not None and self._pending is not None:
            self._shelves.forget()
            self._shelves.remove(self._pending.name)
        self._pending = None

    def restore(self) -> None:
        """Set the run back to the newest snapshot."""
        newest, shelves = self._newest, self._shelves
        assert newest is not None and shelves is not None and newest.files is not None, "ask for its step before"
        shelves.open(self.runtime.nodes())
        wanted: dict[str, set[str]] = {}
        for role, files in newest.files.items():
            for node in self.runtime.nodes(role):
                wanted.setdefault(node, set()).update(file.name for file in files)
        shelves.bring(newest.name, wanted)
        folder = shelves.own.folder / newest.name
        state = {name: read_state(folder, name) for name in newest.names}
        self.run.load(Checkpoint(newest.path, newest.step, state, newest.files))

    def close(self) -> None:
        if self._shelves is not None:
            self._shelves.close()
        self._shelves = None

    def _with_room(self) -> bool:
        """Whether there is room for another one, here or on the disk."""
        while self._shelves is not None:
            self._shelves.open(self.runtime.nodes())
            room, held = self._shelves.room_bytes(), self.runtime.held_bytes()
            if all(room[node] > ROOM * held[node] for node in room):
                return True
            self._elsewhere()
        return False

    def _elsewhere(self) -> None:
        full, self._shelves = self._shelves, None
        self._newest = self._pending = None
        if full is not None:
            full.close()
            self._shelves = Shelves("@disk", self._id) if full.medium == "@memory" else None

    @contextmanager
    def _elsewhere_if_full(self) -> Iterator[None]:
        try:
            yield
        except ResourceError:
            self._elsewhere()

    def _begin(self, step: int) -> None:
        shelves = self._shelves
        assert shelves is not None, "there is room"
        self._number += 1
        name = f"snapshot-{self._number}"
        with self._elsewhere_if_full():
            snapshot = self._pending = _Snapshot(name, shelves.make(name), step)
            own = shelves.own.make(name)
            state: dict[str, Any] = self.run.save(snapshot.path)
            for part, value in state.items():
                write_state(own, part, value)
            snapshot.names = list(state)

    @contextmanager
    def _costs(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._cost_s += time.monotonic() - start
