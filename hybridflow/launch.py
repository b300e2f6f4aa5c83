"""Runs a training run from start or checkpoint to its end: run directory, hooks, interruption, result."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridflow import checkpoint
from hybridflow.build import Run, build
from hybridflow.config import RunConfig, resolved
from hybridflow.core.config import read_toml
from hybridflow.core.errors import CheckpointError, RewardError
from hybridflow.core.resident import MemoryMeter
from hybridflow.hooks import Checkpointer, Evaluator, Exporter, Reporter
from hybridflow.telemetry.console import RunConsole
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.result import write_result
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import Timeline
from hybridflow.telemetry.tracker import Tracker
from hybridflow.train import Trainer

__all__ = ["INTERRUPTED", "train"]

INTERRUPTED = 130
EVALUATION = ("eval/score", "eval/low", "eval/high", "eval/count")


def train(config: RunConfig, resume: str | None = None) -> int:
    """Run to the end; the exit code: 0, or INTERRUPTED after Ctrl-C, which finishes the step and saves a checkpoint.

    ``resume``: a checkpoint folder, "latest" for the newest of the run directory, or None for a new run.
    """
    path = Path(config.run_dir)
    saved = None if resume is None else checkpoint.load(_checkpoint(path, resume))
    if saved is None:
        RunDirectory.refuse_used(path)
    elif saved.step >= config.train.steps:
        found = f"the checkpoint is after step {saved.step} and train.steps = {config.train.steps}"
        raise CheckpointError(f"{path}: {found}, so nothing is left to do; raise train.steps to go on")
    memory = MemoryMeter()
    run = build(config)
    try:
        return _train(run, _directory(path, config, saved is not None), saved, memory)
    except BaseException:
        if run.trainer.step == 0:
            shutil.rmtree(path, ignore_errors=True)  # made by this run, which has done nothing yet: the name stays free
        raise
    finally:
        run.runtime.stop()


def _train(run: Run, directory: RunDirectory, saved: checkpoint.Checkpoint | None, memory: MemoryMeter) -> int:
    trainer, config = run.trainer, run.config
    with checkpoint.marker(directory.checkpoints) as file:
        run.runtime.sees(file)
    if saved is not None:
        run.load(saved)
    start, steps = trainer.step, config.train.steps
    title = f"{config.algorithm} · {config.run_dir}"
    with (
        Tracker(directory, start) as tracker,
        Timeline(directory.timeline) as timeline,
        RunConsole(steps, start=start, title=title) as console,
    ):
        evaluator = _evaluator(run, console, timeline)
        every, keep = config.checkpoint.every, config.checkpoint.keep
        checkpointer = Checkpointer(run.save, run.runtime.saved, directory.checkpoints, every, keep, timeline)
        trainer.hooks = [*([evaluator] if evaluator else []), Reporter(tracker, console, timeline, memory), checkpointer]
        if every := config.checkpoint.export_every:
            exporter = Exporter(run.parts.export, directory.model, every, timeline)
            exporter.run(start)
            trainer.hooks = [*trainer.hooks, exporter]
        console.note(run.parts.describe())
        if evaluator and start == 0:
            tracker.log(0, evaluator.run(0).metrics())
        with checkpointer, _stop_on_interrupt(trainer, console), _save_on_reward_error(trainer, checkpointer, console):
            trainer.train(steps)
            if config.checkpoint.every or trainer.step < steps:
                checkpointer.save(trainer.step)
        if trainer.step < steps:
            console.note(f"interrupted after step {trainer.step}/{steps}; saved; go on with --resume")
            return INTERRUPTED
        _finish(run, directory, console)
    return 0


def _evaluator(run: Run, console: RunConsole, timeline: Timeline) -> Evaluator | None:
    evaluate = run.parts.evaluate
    if evaluate is None:
        return None

    def once() -> Any:
        result = evaluate()
        run.runtime.drain()  # what evaluating measured belongs to no step
        return result

    return Evaluator(once, run.config.evaluation.every, run.config.train.steps, console, timeline)


def _finish(run: Run, directory: RunDirectory, console: RunConsole) -> None:
    evaluations = [record for record in read_records(directory.metrics) if "eval/score" in record]
    kept = [{key: record[key] for key in ("step", *EVALUATION)} for record in evaluations]
    ends = {"before": kept[0], "after": kept[-1]} if kept else {}
    write_result(directory.path, {"steps": run.trainer.step, **ends, "evaluations": kept})
    if run.config.checkpoint.export:
        if run.config.environment is None:  # a policy's file is replaced, whoever reads it
            shutil.rmtree(directory.model, ignore_errors=True)  # of this very run, before it was resumed
        run.parts.export(directory.model)
        console.note(f"model: {directory.model}")


def _checkpoint(run_dir: Path, resume: str) -> Path:
    return checkpoint.latest(run_dir / "checkpoints") if resume == "latest" else Path(resume)


def _directory(path: Path, config: RunConfig, resumed: bool) -> RunDirectory:
    if not resumed:
        return RunDirectory.create(path, resolved(config))
    directory = RunDirectory.open(path)
    changed = _differences(read_toml(directory.config), tomllib.loads(resolved(config)))
    if changed:
        Console().print(f"resuming with other settings than before: {', '.join(changed)}", style="yellow")
    return directory


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            found += _differences(old[key], new[key], f"{prefix}{key}.")
        elif old.get(key) != new.get(key):
            found.append(f"{prefix}{key} = {new.get(key)!r} (was {old.get(key)!r})")
    return found


@contextlib.contextmanager
def _save_on_reward_error(trainer: Trainer, checkpointer: Checkpointer, console: RunConsole) -> Iterator[None]:
    """A reward fails before anything of its step is learned, so what was learned until then can be kept."""
    try:
        yield
    except RewardError:
        if trainer.step > 0:
            checkpointer.save(trainer.step)
            checkpointer.finish(trainer.step)
            console.note(f"saved after step {trainer.step}; mend the reward, then go on with --resume")
        raise


@contextlib.contextmanager
def _stop_on_interrupt(trainer: Trainer, console: RunConsole) -> Iterator[None]:
    """The first Ctrl-C ends the run after the step; a second one ends it at once."""

    def stop(*_: object) -> None:
        trainer.stop_requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.note("interrupted: finishing the step, then saving; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
