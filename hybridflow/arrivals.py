"""What came when, where that is up to the machine: recorded in every such run, and repeated by ``train --replay RUN``.

    schedule.kind = "async" on Ray      arrivals.jsonl  to which sampler each call went, and the tape of its stream
    environment.workers on Ray          metrics.jsonl   ``worker``: whose rollout each step learned from

All else of a step follows from these, so a run that repeats them is the recorded one, bit for bit.
"""

from __future__ import annotations

import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hybridflow.build import Run
from hybridflow.build_text import TextParts
from hybridflow.config import RunConfig, resolved
from hybridflow.controller.actor import StreamingActor
from hybridflow.core.config import differences, read_toml
from hybridflow.core.errors import UserError
from hybridflow.generation.stream import Entry
from hybridflow.rollout.schedule import Asynchronous
from hybridflow.telemetry.records import append_record, read_records
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.train import Step

if TYPE_CHECKING:
    from hybridflow.controller.ray_runtime import RayRuntime

__all__ = ["Arrivals", "Recording", "direct", "read_recording"]

UNSEEN = (
    "run_dir",
    "train.steps",
    "runtime.address",
    "runtime.timeout_s",
    "checkpoint.keep",
    "checkpoint.keep_best",
    "checkpoint.export_every",
    "checkpoint.deadline_s",
    "recovery.",
)
"""keys on which no number of a step depends"""


@dataclass(frozen=True)
class Recording:
    """What the ``run`` has told of its steps, 1 to ``steps``. ``order``: whose rollout was learned from in each; ``dealt``,
    ``tapes`` and ``rests``: see ``StreamingActor`` and ``Stream``; ``waits``: the steps after which it waited for all that
    was under way, to be saved or evaluated."""

    run: Path
    steps: int
    order: Mapping[int, int] = field(default_factory=dict)
    dealt: Sequence[int] = ()
    tapes: Sequence[Sequence[Entry]] = ()
    rests: Sequence[int] = ()
    waits: frozenset[int] = frozenset()


def read_recording(path: Path, config: RunConfig) -> Recording:
    """Of the run in a folder, for a run of ``config``. UserError: there is none, or it can't be repeated so."""
    directory, asked = RunDirectory.open(path), f"--replay {path}"
    environment = config.environment
    workers = environment is not None and environment.workers > 1
    if config.runtime.kind == "local" or not (workers or (environment is None and config.schedule.kind == "async")):
        raise UserError(f"{asked}: the order of such a run is fixed, so it repeats itself; leave --replay out")
    if config.threads == "auction":
        raise UserError(f'{asked}: threads = "auction" moves workers by the seconds that they take, so no run is repeated')
    schedules = {section.optimizer.schedule for section in config.trained_sections.values()}
    unseen = UNSEEN if schedules == {"constant"} else tuple(key for key in UNSEEN if key != "train.steps")
    for key, was, now in differences(read_toml(directory.config), tomllib.loads(resolved(config))):
        if not key.startswith(unseen):
            raise UserError(f"{asked}: {key} = {now!r}, but in that run {was!r}; expected the configuration of that run")
    found = _of_workers(directory) if workers else _of_streams(directory)
    if found.steps == 0:
        raise UserError(f"{asked}: it has recorded no step; expected a run that made some")
    return found


def _of_workers(directory: RunDirectory) -> Recording:
    order = {record["step"]: int(record["worker"]) for record in read_records(directory.metrics) if "worker" in record}
    return Recording(directory.path, max(order, default=0), order)


def _of_streams(directory: RunDirectory) -> Recording:
    records = read_records(directory.arrivals)
    told = [record for record in records if "tapes" in record]
    tapes = [
        [Entry(*entry) for tape in ranks for entry in tape] for ranks in zip(*(line["tapes"] for line in told), strict=True)
    ]
    dealt = [worker for line in told for worker in line["dealt"]]
    waits = frozenset(record["step"] for record in records if "waits" in record)
    steps, rests = (told[-1]["step"], told[-1]["rests"]) if told else (0, [])
    return Recording(directory.path, steps, {}, dealt, tapes, rests, waits)


def direct(run: Run, directory: RunDirectory, recording: Recording | None, note: Callable[[str], None]) -> list[Arrivals]:
    """Let a run record what comes when, if that isn't fixed, and repeat a ``recording``; the hook that it takes, if any."""
    if recording is not None:
        known = min(recording.steps, run.config.train.steps)
        later = "; later ones go their own way" if known < run.config.train.steps else ""
        note(f"a replay of {recording.run}: steps 1 to {known} are repeated{later}")
    if isinstance(run.trainer.schedule, Asynchronous) and recording is not None:
        run.trainer.schedule.order = recording.order
    if not isinstance(run.parts, TextParts) or not isinstance(run.parts.actor, StreamingActor):
        return []
    arrivals = Arrivals(directory.arrivals, run, run.parts.actor, recording, note)
    run.waiting = arrivals.waiting
    return [arrivals]


class Arrivals:
    """A hook that records in the file ``path`` what streams have taken in: after every step, and when all of it was waited
    for, so that a checkpoint goes on where the file ends."""

    def __init__(
        self, path: Path, run: Run, actor: StreamingActor, recording: Recording | None, note: Callable[[str], None]
    ) -> None:
        self.path, self.trainer, self.actor, self.recording, self.note = path, run.trainer, actor, recording, note
        self.runtime = cast("RayRuntime", run.runtime)
        if recording is not None:
            self._follow(recording.dealt, recording.tapes, recording.rests)

    def __call__(self, step: Step) -> None:
        self._write(step.number)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for all that is under way. If the run that is repeated didn't then, this one can't do it with
        the weights that came later there: it goes on freely."""
        step, recording = self.trainer.step, self.recording
        append_record(self.path, {"step": step, "waits": True})
        if recording is not None and step < recording.steps and step not in recording.waits:
            self.note(f"{recording.run} didn't save or evaluate after step {step}: now the replay goes its own way")
            self._follow((), [()] * len(recording.tapes), [0] * len(recording.tapes))
        yield
        self._write(step)

    def rewind(self, step: int) -> None:
        """The run goes on after ``step`` again."""
        self.actor.dealt = []

    def _follow(self, dealt: Sequence[int], tapes: Sequence[Sequence[Entry]], rests: Sequence[int]) -> None:
        self.actor.directed = deque(dealt)
        self.runtime.aside("sampler", "follow", tapes, rests)

    def _write(self, step: int) -> None:
        dealt, self.actor.dealt = self.actor.dealt, []
        tapes, rests = zip(*self.runtime.aside("sampler", "recorded"), strict=True)
        append_record(self.path, {"step": step, "dealt": dealt, "tapes": tapes, "rests": rests})
