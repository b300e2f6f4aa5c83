"""A run that goes on when worker processes are lost.

What a step does follows from the state after the step before. So lost workers are made anew, the state of the newest
snapshot or checkpoint is loaded into all of them, and the steps since then are done again: a synchronous run ends with the
weights, to the bit, with which it would have ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rich.console import Console

from hybridflow import checkpoint
from hybridflow.build import Run, build
from hybridflow.config import RunConfig
from hybridflow.core.errors import CheckpointError, LostWorkersError, WorkerError
from hybridflow.hooks import Checkpointer
from hybridflow.train import Step

if TYPE_CHECKING:
    from hybridflow.controller.ray_runtime import RayRuntime
    from hybridflow.snapshots import Snapshots

__all__ = ["Recovery", "build_again"]

T = TypeVar("T")


def build_again(config: RunConfig) -> Run:
    """As ``build``, once more whenever workers are lost meanwhile."""
    lost = 0
    while True:
        try:
            return build(config)
        except LostWorkersError as error:
            lost += 1
            _check(lost, config, error)
            _print(f"{_line(error)}; starting again", "yellow")


class Recovery:
    """Lets ``run`` go on from its newest snapshot or checkpoint, on the Ray runtime and unless recovery.max_restarts is 0.

    ``events``: a file that gets a line for each recovery.
    """

    def __init__(self, run: Run, events: Path, checkpoints: Path) -> None:
        self.run, self.events, self.checkpoints = run, events, checkpoints
        self._note: Callable[[str, str], None] = _print
        self._rewound: Sequence[Callable[[int], None]] = ()
        self._checkpointer: Checkpointer | None = None
        self._snapshots: Snapshots | None = None
        if run.config.runtime.kind == "ray" and run.config.recovery.max_restarts:
            from hybridflow.snapshots import Snapshots

            self._snapshots = Snapshots(run, self._runtime)
        self._furthest, self._in_a_row = -1, 0

    @property
    def _runtime(self) -> RayRuntime:
        return cast("RayRuntime", self.run.runtime)

    def begin(self, load: Callable[[], None]) -> None:
        """Bring the run to its first state by ``load``; from then on it can be recovered."""
        while True:
            try:
                load()
                if self._snapshots is not None:
                    self._snapshots.take(self.run.trainer.step, wait=True)
                return
            except LostWorkersError as lost:
                self._forget()
                self._mend(lost, every_pool=True)

    def watch(self, checkpointer: Checkpointer, note: Callable[[str, str], None], *rewound: Callable[[int], None]) -> None:
        """``rewound`` are told the step that the run is set back to, ``note`` prints a line in a style."""
        self._checkpointer, self._note, self._rewound = checkpointer, note, rewound

    def go_on(self, work: Callable[[], T]) -> T:
        """Do ``work``, which goes on from wherever the run stands, until it is done; its result."""
        while True:
            try:
                return work()
            except LostWorkersError as lost:
                self._recover(lost)

    def save(self, folder: Path) -> Mapping[str, Any]:
        """As ``Run.save``. Ranks write one thing at a time."""
        if self._snapshots is not None:
            self._snapshots.finish(wait=True)
        return self.run.save(folder)

    def __call__(self, step: Step) -> None:
        """After a step: a snapshot, if one is due."""
        if self._snapshots is None:
            return
        self._snapshots.finish()
        if self._snapshots.due and not (self._checkpointer and self._checkpointer.busy):
            self._snapshots.take(step.number)

    def close(self) -> None:
        if self._snapshots is not None:
            self._snapshots.close()

    def _recover(self, lost: LostWorkersError) -> None:
        start, after = time.monotonic(), self.run.trainer.step
        self._forget()
        while True:
            self._mend(lost)
            try:
                self._rewind(lost)
                break
            except LostWorkersError as again:
                lost = again
        step, took_s = self.run.trainer.step, time.monotonic() - start
        for rewind in self._rewound:
            rewind(step)
        times = {"seen_s": lost.seen_s, "recovered_s": took_s, "unix_s": time.time()}
        event = {"step": step, "after": after, "lost": str(lost), **times}
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")
        told = f"{_line(lost)}; seen within {lost.seen_s:.1f} s, recovered in {took_s:.1f} s, back after step {step}"
        self._note(told if step == after else f"{told} (of {after})", "yellow")

    def _forget(self) -> None:
        """Whatever was being written: it can't be completed any more."""
        if self._checkpointer is not None:
            self._checkpointer.forget()
        if self._snapshots is not None:
            self._snapshots.forget()

    def _mend(self, lost: LostWorkersError, every_pool: bool = False) -> None:
        """Make the lost workers anew, however often it takes."""
        step = self.run.trainer.step
        if step > self._furthest:
            self._furthest, self._in_a_row = step, 0
        while True:
            self._in_a_row += 1
            _check(self._in_a_row, self.run.config, lost)
            try:
                return self._runtime.mend(self._runtime.groups if every_pool else lost.pools)
            except LostWorkersError as again:
                lost = again

    def _rewind(self, lost: LostWorkersError) -> None:
        """To the newest snapshot, or a checkpoint that is newer."""
        snapshot = None if self._snapshots is None else self._snapshots.step
        try:
            newest = checkpoint.load(checkpoint.latest(self.checkpoints))
        except CheckpointError:
            newest = None
        if newest is not None and newest.step > (-1 if snapshot is None else snapshot):
            self.run.load(newest)
        elif self._snapshots is not None and snapshot is not None:
            self._snapshots.restore()
        else:
            raise WorkerError(f"{lost}; there is neither a checkpoint nor room for snapshots to go on from") from lost
        checkpoint.set_aside(self.checkpoints, self.run.trainer.step)


def _check(times: int, config: RunConfig, lost: LostWorkersError) -> None:
    """WorkerError: that was once too often."""
    if times > config.recovery.max_restarts:
        again = (
            f"; it is the loss number {times} without a new step getting done (recovery.max_restarts)" if times > 1 else ""
        )
        raise WorkerError(f"{lost}{again}") from lost


def _print(text: str, style: str) -> None:
    Console().print(text, style=style, markup=False, soft_wrap=True)


def _line(lost: LostWorkersError) -> str:
    return str(lost).splitlines()[0]
