"""Runs a training run from start or checkpoint to its end: run directory, hooks, result."""

from __future__ import annotations

import contextlib
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridflow import checkpoint
from hybridflow.allocator import Allocator, make_allocator
from hybridflow.arrivals import Recording, direct
from hybridflow.build import Run
from hybridflow.build_profile import ProfileKeeper
from hybridflow.build_text import TextParts
from hybridflow.config import RunConfig, resolved
from hybridflow.core.config import differences, read_toml
from hybridflow.core.errors import CheckpointError, ConfigError, GuardError, NonFiniteError, RewardError
from hybridflow.core.resident import MemoryMeter
from hybridflow.hooks import Checkpointer, Evaluator, Exporter, Reporter, Watch
from hybridflow.ledger import Ledger
from hybridflow.recovery import Recovery, build_again
from hybridflow.stopping import Stopping
from hybridflow.telemetry.console import RunConsole
from hybridflow.telemetry.guards import Guards
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.result import write_result
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import Timeline
from hybridflow.telemetry.tracker import Tracker
from hybridflow.train import Trainer

__all__ = ["train"]

EVALUATION = ("eval/score", "eval/low", "eval/high", "eval/count")


def train(
    config: RunConfig, resume: str | None = None, until: int | None = None, recording: Recording | None = None
) -> int:
    """Run to the end, or until so many steps are done; the exit code: 0, or 128 and the number of the signal, SIGINT
    (Ctrl-C) or SIGTERM, that ended the run after a step, which was then saved.

    ``resume``: a checkpoint folder, "latest" for the newest of the run directory, "auto" for the newest that is whole or,
    if there is none yet, the start; None for a new run, which may repeat a ``recording``.
    """
    path = Path(config.run_dir)
    if recording is not None:  # to go on after a loss, it would have to wait where the recorded run didn't
        config = config.model_copy(update={"recovery": config.recovery.model_copy(update={"max_restarts": 0})})
    if resume is None or (resume == "auto" and not RunDirectory(path).config.exists()):
        RunDirectory.refuse_used(path)
        return _build_and_train(config, False, None, until, recording)
    with RunDirectory(path).locked():
        saved = _resumed(path, resume)
        if saved is not None and saved.step >= config.train.steps and resume != "auto":
            found = f"the checkpoint is after step {saved.step} and train.steps = {config.train.steps}"
            raise CheckpointError(f"{path}: {found}, so nothing is left to do; raise train.steps to go on")
        return _build_and_train(config, True, saved, until)


def _resumed(path: Path, resume: str) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from; what a kill has left of others is removed. None: from the start."""
    checkpoints = path / "checkpoints"
    checkpoint.tidy(checkpoints)
    if resume != "auto":
        return checkpoint.load(checkpoint.latest(checkpoints) if resume == "latest" else Path(resume))
    saved, damaged = checkpoint.intact(checkpoints)
    for problem in damaged:
        Console().print(f"passed over: {problem}", style="yellow", soft_wrap=True)
    where = f"{saved.path.name}, the newest checkpoint that is whole" if saved else "the start: there is no checkpoint yet"
    Console().print(f"going on from {where}", soft_wrap=True)
    return saved


def _build_and_train(
    config: RunConfig,
    exists: bool,
    saved: checkpoint.Checkpoint | None,
    until: int | None,
    recording: Recording | None = None,
) -> int:
    path, memory = Path(config.run_dir), MemoryMeter()
    run = build_again(config)
    try:
        directory = _directory(path, config, exists, recording)
        if saved is None:
            directory.clear()
        with contextlib.nullcontext() if exists else directory.locked():
            return _train(run, directory, saved, memory, until, recording)
    except BaseException:
        if not exists and run.trainer.step == 0:
            shutil.rmtree(path, ignore_errors=True)  # made by this run, which has done nothing yet: the name stays free
        raise
    finally:
        run.runtime.stop()


def _train(
    run: Run,
    directory: RunDirectory,
    saved: checkpoint.Checkpoint | None,
    memory: MemoryMeter,
    until: int | None,
    recording: Recording | None,
) -> int:
    recovery, aside = Recovery(run, directory.recoveries, directory.checkpoints), list[str]()
    with contextlib.closing(recovery):
        recovery.begin(lambda: _begin(run, directory, saved))
        if saved is not None:
            aside = checkpoint.set_aside(directory.checkpoints, saved.step)
        return _run(run, directory, memory, recovery, until, aside, recording)


def _begin(run: Run, directory: RunDirectory, saved: checkpoint.Checkpoint | None) -> None:
    with checkpoint.marker(directory.checkpoints) as file:
        run.runtime.sees(file)
    if run.config.threads == "auction" and "auction" not in run.beside:
        run.beside["auction"] = make_allocator(run, directory.auction)
    if saved is not None:
        run.load(saved)


def _run(
    run: Run,
    directory: RunDirectory,
    memory: MemoryMeter,
    recovery: Recovery,
    until: int | None,
    aside: list[str],
    recording: Recording | None,
) -> int:
    trainer, config, parts = run.trainer, run.config, run.parts
    start, steps = trainer.step, config.train.steps
    title = f"{config.algorithm} · {config.run_dir}"
    allocators = [one for one in run.beside.values() if isinstance(one, Allocator)]
    learned = [allocator.learned for allocator in allocators]
    with (
        Tracker(directory, start) as tracker,
        Timeline(directory.timeline) as timeline,
        RunConsole(steps, start=start, title=title) as console,
        Ledger(directory.ledger, trainer, run.parts.failures, config.environment is not None) as ledger,
        ProfileKeeper(config, directory.path, lambda line: console.note(line, "yellow"), *learned) as profiles,
    ):
        arrivals = direct(run, directory, recording, console.note)
        evaluator = _evaluator(run, console, timeline)
        given, folder, guards = config.checkpoint, directory.checkpoints, Guards(config.guards)
        saving = (folder, given.every, given.keep, timeline, given.keep_best, start or -1)
        checkpointer = Checkpointer(ledger.saving(recovery.save), run.runtime.saved, *saving, guards.doubtful)
        observe = [lambda step: parts.observe(step.batch)] if isinstance(parts, TextParts) else []
        watch = (ledger, Reporter(tracker, console, timeline, memory), profiles, Watch(guards, console))
        trainer.hooks = [*([evaluator] if evaluator else []), *watch, *observe, *allocators, checkpointer]
        rewinds = [ledger.rewind, *(hook.rewind for hook in allocators), *(hook.rewind for hook in arrivals)]
        recovery.watch(checkpointer, console.note, *rewinds, lambda step: _rewind(step, tracker, timeline, guards))
        if given.export_every:
            exporter = Exporter(run.parts.export, directory.model, given.export_every, timeline, guards.doubtful)
            recovery.go_on(lambda: exporter.run(start))
            trainer.hooks = [*trainer.hooks, exporter]
        trainer.hooks = [*trainer.hooks, recovery, *arrivals]
        console.note(recovery.go_on(run.parts.describe))
        if aside:
            console.note(f"later checkpoints are no past of this run any more: renamed to {', '.join(aside)}", "yellow")
        if evaluator and start == 0:
            metrics = recovery.go_on(lambda: evaluator.run(0)).metrics()
            _check_best(given.keep_best, metrics)
            tracker.log(0, metrics)

        def work() -> None:
            trainer.train(steps if until is None else min(until, steps))
            if given.every or trainer.step < steps:
                checkpointer.save(trainer.step)
                checkpointer.finish(trainer.step)
            if trainer.step >= steps:
                _finish(run, directory, console)

        stopping = Stopping(trainer, console, given.deadline_s, folder)
        with _saying_where_to_go_on(folder), checkpointer, stopping, _save_on_reward_error(trainer, checkpointer, console):
            recovery.go_on(work)
        for allocator in allocators:
            allocator.finish(trainer.step)
        if trainer.step < steps:
            console.note(f"{stopping.word} after step {trainer.step}/{steps}; saved; go on with --resume")
            return stopping.code
    return 0


def _check_best(name: str | None, metrics: Mapping[str, float]) -> None:
    if name is not None and name not in metrics:
        raise ConfigError([f"checkpoint.keep_best = {name!r}: evaluations have {', '.join(sorted(metrics))}"])


def _rewind(step: int, tracker: Tracker, timeline: Timeline, guards: Guards) -> None:
    """What is recorded of later steps is dropped: they come again."""
    timeline.close()
    tracker.rewind(step)
    timeline.open()
    guards.begin()


def _evaluator(run: Run, console: RunConsole, timeline: Timeline) -> Evaluator | None:
    evaluate = run.parts.evaluate
    if evaluate is None:
        return None

    def once() -> Any:
        with run.waiting():
            result = evaluate()
        run.runtime.drain()  # what evaluating measured belongs to no step
        return result

    return Evaluator(once, run.config.evaluation.every, run.config.train.steps, console, timeline)


def _finish(run: Run, directory: RunDirectory, console: RunConsole) -> None:
    evaluations = [record for record in read_records(directory.metrics) if "eval/score" in record]
    kept = [{key: record[key] for key in ("step", *EVALUATION)} for record in evaluations]
    ends = {"before": kept[0], "after": kept[-1]} if kept else {}
    write_result(directory.path, {"steps": run.trainer.step, **ends, "evaluations": kept})
    if run.config.environment is None:  # a policy's file is replaced, whoever reads it
        shutil.rmtree(directory.model, ignore_errors=True)  # of this very run, before it was resumed
    run.parts.export(directory.model)
    console.note(f"model: {directory.model}")


def _directory(path: Path, config: RunConfig, resumed: bool, recording: Recording | None) -> RunDirectory:
    if not resumed:
        replay = "" if recording is None else f"# a replay of {recording.run}\n"
        return RunDirectory.create(path, replay + resolved(config))
    directory = RunDirectory.open(path)
    found = differences(read_toml(directory.config), tomllib.loads(resolved(config)))
    if changed := [f"{key} = {now!r} (was {was!r})" for key, was, now in found]:
        Console().print(f"resuming with other settings than before: {', '.join(changed)}", style="yellow")
    return directory


@contextlib.contextmanager
def _saying_where_to_go_on(checkpoints: Path) -> Iterator[None]:
    """What a guard stopped isn't saved: the run goes on from before."""
    try:
        yield
    except (GuardError, NonFiniteError) as error:
        raise type(error)(f"{error}; {_where_to_go_on(checkpoints)}") from error


def _where_to_go_on(checkpoints: Path) -> str:
    try:
        return f"the step wasn't saved: go on with --resume {checkpoint.latest(checkpoints)}"
    except CheckpointError:
        return "nothing was saved to go on from; checkpoint.every saves every so many steps"


@contextlib.contextmanager
def _save_on_reward_error(trainer: Trainer, checkpointer: Checkpointer, console: RunConsole) -> Iterator[None]:
    """A reward fails before anything of its step is learned, so what was learned until then can be kept."""
    try:
        yield
    except RewardError:
        if trainer.step > 0:
            trainer.schedule.take_back()
            checkpointer.save(trainer.step)
            checkpointer.finish(trainer.step)
            console.note(f"saved after step {trainer.step}; mend the reward, then go on with --resume")
        raise
