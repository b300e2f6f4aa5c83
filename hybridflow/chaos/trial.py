"""A run under faults: each is made to happen when its time has come, and then it is watched what becomes of the run.

    fault ──> a line that tells of it ──> what was paused or full is so no more ──> two more steps done than ever before
          detect_s
          recover_s ────────────────────────────────────────────────────────────────────────────────────────────────────

The first of these steps may have been under way already. Steps that have to be done again count as time, not as progress.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from hybridflow.chaos.disk import Disk
from hybridflow.chaos.kinds import KINDS, PAUSE_S, Heal, Kind, Scene
from hybridflow.chaos.nodes import Nodes
from hybridflow.chaos.processes import Processes, kill_all, name_of, remaining
from hybridflow.chaos.schedule import STEPS, Fault
from hybridflow.chaos.training import Training, newest_step

__all__ = ["LIMIT_S", "Befallen", "Trial"]

LIMIT_S = 180.0
"""a run in which nothing gets done for so long hangs"""
POLL_S = 0.005
LEFT_S = 90.0
"""agents of a Ray that was killed end by themselves, but outlive it by up to a minute"""
TOLD = re.compile(r"^error: |: restart \d+ of \d+|recovered in ([\d.]+) s, back after step")
"""a line after a fault was seen; the last one is printed when that is mended already, and says how long it took"""


@dataclass(frozen=True)
class Befallen:
    """What became of a fault. ``step``: that were done then. ``detect_s``: None if nothing was said. ``recover_s``: None if
    the run didn't go on; then ``problem`` says why. ``told``: the message that the run ended with, rightly."""

    kind: str
    step: int
    detect_s: float | None = None
    recover_s: float | None = None
    told: str = ""
    problem: str = ""


class Trial:
    """``arguments``: of ``hybridflow train``; ``step_s``: what a step takes."""

    def __init__(
        self, arguments: Sequence[str], run_dir: Path, disk: Disk, nodes: Nodes | None, log: Path, step_s: float
    ) -> None:
        self.arguments, self.disk, self.nodes, self.log, self.step_s = arguments, disk, nodes, log, step_s
        self.metrics, self.checkpoints = disk.seen(run_dir) / "metrics.jsonl", disk.seen(run_dir) / "checkpoints"
        self.left: list[str] = []
        self._seen: set[psutil.Process] = set()

    def run(self, faults: Sequence[Fault]) -> Iterator[Befallen]:
        """What becomes of each, until one is not recovered from. Then ``left`` are processes that the run left behind."""
        self._start()
        try:
            for fault in faults:
                befallen = self._befall(fault)
                yield befallen
                if befallen.problem:
                    return
            self._until(lambda: self._training.code is not None)
            if self._training.code != 0:
                yield Befallen("", self._step, problem=f"after the last fault: {self._state()}")
            self.left = [name_of(process) for process in remaining(self._seen, LEFT_S)]
        finally:
            kill_all([*self._seen, *self._processes.own()])

    def _start(self, *resume: str) -> None:
        self._training = Training([*self.arguments, *resume], self.disk.enter, self.log)
        self._processes = Processes(self._training.pid, self.nodes.pid if self.nodes else None)

    @property
    def _step(self) -> int:
        return newest_step(self.metrics)

    def _befall(self, fault: Fault) -> Befallen:
        kind = KINDS[fault.kind]
        scene = Scene(self._processes, self.checkpoints, self.disk, self.nodes, fault.draw)
        if not self._until(lambda: self._step >= fault.step):
            return Befallen(fault.kind, self._step, problem=f"could not be made: {self._state()}")
        time.sleep(fault.delay * self.step_s)
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and self._training.code is None:
            if kind.when(scene):
                self._seen.update(self._processes.own())
                step, since_s = self._step, time.monotonic()
                try:
                    return self._watch(kind, Befallen(fault.kind, step), since_s, kind.befall(scene))
                except (psutil.NoSuchProcess, IndexError):
                    pass  # nobody is there just now
            time.sleep(POLL_S)
        return Befallen(fault.kind, self._step, problem=f"could not be made: {self._state()}")

    def _watch(self, kind: Kind, befallen: Befallen, since_s: float, heal: Heal | None) -> Befallen:
        done = self._step
        while heal is not None or not (self._step >= done + STEPS or self._training.code == 0):
            if heal is not None and time.monotonic() > since_s + PAUSE_S:
                heal, done = heal(), self._step
            if heal is None and self._training.code:
                befallen = self._ended(kind, befallen, since_s)
            if time.monotonic() > since_s + LIMIT_S:
                befallen = replace(befallen, problem=self._state())
            if befallen.problem:
                return befallen
            time.sleep(POLL_S)
        return replace(self._detected(befallen, since_s), recover_s=time.monotonic() - since_s)

    def _ended(self, kind: Kind, befallen: Befallen, since_s: float) -> Befallen:
        """The run has ended by itself: whether it should have, and is started again."""
        befallen, told = self._detected(befallen, since_s), self._message(since_s)
        if kind.ends == "dead" or (kind.ends == "told" and told):
            self._start("--resume", "auto")
            return replace(befallen, told=told)
        return replace(befallen, problem=self._state())

    def _detected(self, befallen: Befallen, since_s: float) -> Befallen:
        told = [(line.at_s, TOLD.search(line.text)) for line in self._training.lines if line.at_s > since_s]
        seen_s = [at_s - float(found[1] or 0) - since_s for at_s, found in told if found is not None]
        return replace(befallen, detect_s=max(0.0, seen_s[0])) if seen_s and befallen.detect_s is None else befallen

    def _message(self, since_s: float) -> str:
        lines = [line.text for line in self._training.lines if line.at_s > since_s and line.text.startswith("error: ")]
        return lines[0] if lines else ""

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for it; False: the run ends, or hangs, before."""
        step, since_s = self._step, time.monotonic()
        while not condition():
            if self._training.code is not None or time.monotonic() > since_s + LIMIT_S:
                return condition()
            if self._step != step:
                step, since_s = self._step, time.monotonic()
            time.sleep(POLL_S)
        return True

    def _state(self) -> str:
        """Of a run that isn't as it should be."""
        code, last = self._training.code, self._training.lines[-1].text if self._training.lines else ""
        if code == 0:
            return "the run had ended, give it more steps with --train.steps"
        state = f"no step got done within {LIMIT_S:g} s" if code is None else f"the run ended with exit code {code}"
        return f"{state}, after step {self._step}: {last}; see {self.log}"
