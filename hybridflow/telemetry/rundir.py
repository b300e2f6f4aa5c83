"""A run directory: everything that one run leaves behind.

config.toml      the resolved configuration
metrics.jsonl    one object a step; its keys are those of ``telemetry.metrics.METRICS`` and any others
samples.jsonl    a few responses of every step
timeline.json    when each role ran (Chrome trace; opens in Perfetto)
ledger.sqlite    what became of every sample
auction.jsonl    one line for each round of the auction of resources, if there is one
arrivals.jsonl   what came when, where that is up to the machine
recoveries.jsonl one line for each time that workers were lost and the run went on
result.json      the outcome of an evaluation
checkpoints/     what a run resumes from
model/           what it has trained
tensorboard/     event files
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybridflow.core.errors import CheckpointError
from hybridflow.core.files import write_whole
from hybridflow.telemetry.records import keep_until
from hybridflow.telemetry.timeline import keep_events_until

__all__ = ["RunDirectory"]

LOCK = ".lock"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run. Made by ``create`` (a new run) or ``open`` (one that exists)."""

    path: Path

    @staticmethod
    def create(path: Path, config_toml: str) -> RunDirectory:
        """Make the folder and write ``config.toml``. CheckpointError if the folder is in use."""
        run = RunDirectory(Path(path))
        try:
            RunDirectory.refuse_used(run.path)
            run.path.mkdir(parents=True, exist_ok=True)
            write_whole(run.config, config_toml.encode())
            run.checkpoints.mkdir()
            run.tensorboard.mkdir()
        except OSError as error:
            raise CheckpointError(f"run_dir {path}: can't be made ({error.strerror}); choose another run_dir") from None
        return run

    @staticmethod
    def refuse_used(path: Path) -> None:
        """CheckpointError if the folder holds a run, or anything else."""
        run = RunDirectory(path)
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"run_dir {path}: is a file, expected a folder; choose another run_dir")
        if run.config.exists():
            hint = "continue it with --resume or choose another run_dir"
            raise CheckpointError(f"run_dir {path}: holds a run already; {hint}")
        others = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
        # a kill before config.toml was written leaves these, empty
        others = [name for name in others if name not in ("checkpoints", "tensorboard", "config.toml.tmp", LOCK)]
        if others:
            found = f"holds other files ({others[0]}, {len(others)} in all) and no run"
            raise CheckpointError(f"run_dir {path}: {found}; choose another run_dir")

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """The run in a folder; CheckpointError if it holds none."""
        run = RunDirectory(Path(path))
        if not run.path.is_dir():
            raise CheckpointError(f"{path}: no such run directory")
        if not run.config.is_file():
            raise CheckpointError(f"{path}: not a run directory, it has no config.toml")
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else trains in the folder meanwhile; CheckpointError if somebody does. A kill ends it, too."""
        if not self.path.is_dir():
            yield
            return
        with (self.path / LOCK).open("w") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    hint = "wait until it has ended, or end it"
                    raise CheckpointError(f"run_dir {self.path}: another process trains there; {hint}") from None
            yield

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def recoveries(self) -> Path:
        return self.path / "recoveries.jsonl"

    @property
    def auction(self) -> Path:
        return self.path / "auction.jsonl"

    @property
    def arrivals(self) -> Path:
        return self.path / "arrivals.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def clear(self) -> None:
        """Drop what an earlier attempt has measured, before the run starts anew."""
        self.keep_until(-1)
        for events in self.tensorboard.glob("events*"):
            events.unlink()

    def keep_until(self, step: int) -> None:
        """Drop what was recorded of later steps, before the run resumes after ``step``."""
        keep_until(self.metrics, step)
        keep_until(self.samples, step)
        keep_until(self.auction, step)
        keep_until(self.arrivals, step)
        keep_events_until(self.timeline, step)
