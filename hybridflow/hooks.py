"""What happens after a step: report, evaluate, save. The loop knows nothing of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow import checkpoint
from hybridflow.core.batch import Batch
from hybridflow.core.errors import HybridFlowError, NonFiniteError
from hybridflow.core.files import Written
from hybridflow.core.metrics import Span
from hybridflow.core.resident import MemoryMeter, resident_bytes
from hybridflow.telemetry.console import RunConsole
from hybridflow.telemetry.guards import Guards, stop
from hybridflow.telemetry.timeline import Timeline, time_split
from hybridflow.telemetry.tracker import Tracker
from hybridflow.train import Step

__all__ = ["Checkpointer", "Evaluation", "Evaluator", "Exporter", "Reporter", "Watch", "describe"]

# What workers measure -> the documented name; other metrics keep the name of their role and themselves.
NAMES = {
    "sampler/prompt_length": "prompt_length/mean",
    "sampler/response_length": "response_length/mean",
    "sampler/response_length_std": "response_length/std",
    "sampler/response_length_max": "response_length/max",
    "sampler/truncated": "response_length/truncated",
    "sampler/episode_return": "episode_return/mean",
    "sampler/episode_length": "episode_length/mean",
    "reference/kl": "kl",
    "actor/entropy": "entropy",
    "actor/loss": "loss/policy",
    "critic/loss": "loss/value",
    "sampler/reinforce": "loss/policy",
    "sampler/value_loss": "loss/value",
    "sampler/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/learning_rate": "learning_rate",
    "actor/ratio": "ratio/mean",
    "actor/clipped": "clip_fraction",
}
SPEEDS = {
    "sampler/tokens": "tokens_per_s",
    "sampler/steps": "env_steps_per_s",
    "replay/inserted": "replay/inserted_per_s",
    "replay/drawn": "replay/drawn_per_s",
}
SAMPLES_PER_STEP = 4


def describe(metrics: Mapping[str, float], spans: list[Span], memory: MemoryMeter) -> dict[str, float]:
    """The record of a step: documented names, time split, throughput, memory. ``memory`` of this process, where the models
    are unless workers have told theirs."""
    record = {NAMES.get(name, name): value for name, value in metrics.items() if name not in SPEEDS}
    record |= {speed: metrics[name] / metrics["time/step_s"] for name, speed in SPEEDS.items() if name in metrics}
    record.setdefault("memory/grown_gb", memory.grown / 1e9)
    return {**record, **time_split(spans), "memory/rss_gb": resident_bytes() / 1e9}


@dataclass
class Reporter:
    """Writes and shows every step."""

    tracker: Tracker
    console: RunConsole
    timeline: Timeline
    memory: MemoryMeter

    def __call__(self, step: Step) -> None:
        record = describe(step.metrics, list(step.spans), self.memory)
        self.tracker.log(step.number, record)
        self.timeline.add(step.number, step.spans)
        if step.batch is not None and "response" in step.batch:
            self.tracker.log_samples(step.number, samples(step.batch))
        self.console.step(step.number, record)


def samples(batch: Batch, count: int = SAMPLES_PER_STEP) -> list[dict[str, Any]]:
    """The first ``count`` responses as plain data."""
    shown = batch.rows(range(min(count, len(batch))))
    scored = ~shown["score_failed"] if "scores" in shown else np.zeros(len(shown), bool)
    versions = [int(version.max(initial=0)) for version in shown.ragged("policy_version")]
    lengths = [int(mask.sum()) for mask in shown.ragged("response_mask")]
    return [
        {
            "sample_id": int(shown["sample_id"][i]),
            "group_id": shown["group_id"][i].item(),
            "prompt": shown["prompt_text"][i],
            "response": shown["response"][i],
            "tokens": lengths[i],
            "score": float(shown["scores"][i]) if scored[i] else None,
            "policy_version": versions[i],
        }
        for i in range(len(shown))
    ]


@dataclass
class Watch:
    """Looks at every step with the guards. GuardError if one of them stops the run."""

    guards: Guards
    console: RunConsole

    def __call__(self, step: Step) -> None:
        found = self.guards.look(step.number, {NAMES.get(name, name): value for name, value in step.metrics.items()})
        for finding in found:
            if not finding.stops:
                self.console.note(finding.text, style="yellow")
        stop(found)


@dataclass(frozen=True)
class Evaluation:
    """A score on held-out prompts or fresh episodes, with its 95 % confidence interval, and what else was measured."""

    score: float
    low: float
    high: float
    count: int
    others: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        own = {"score": self.score, "low": self.low, "high": self.high, "count": self.count}
        return {f"eval/{name}": value for name, value in {**own, **self.others}.items()}


@dataclass
class Evaluator:
    """Evaluates every ``every`` steps (0: never in between) and after the last.

    It comes before the reporter, whose record then holds the evaluation too.
    """

    evaluate: Callable[[], Evaluation]
    every: int
    last_step: int
    console: RunConsole
    timeline: Timeline

    def __call__(self, step: Step) -> None:
        if step.number == self.last_step or (self.every and step.number % self.every == 0):
            step.metrics.update(self.run(step.number).metrics())

    def run(self, step: int) -> Evaluation:
        """Evaluate now."""
        start = time.perf_counter()
        result = self.evaluate()
        self.timeline.add(step, [Span("evaluation.run", "evaluate", start, time.perf_counter() - start)])
        self.console.evaluation(step, result.metrics())
        return result


@dataclass
class Exporter:
    """Writes the policy to ``folder`` every ``every`` steps, for whoever acts with it while it is trained, but not after a
    step that the guards find ``doubtful``."""

    export: Callable[[Path], None]
    folder: Path
    every: int
    timeline: Timeline
    doubtful: Callable[[], bool]

    def __call__(self, step: Step) -> None:
        if step.number % self.every == 0 and not self.doubtful():
            self.run(step.number)

    def run(self, step: int) -> None:
        """Write it now."""
        start = time.perf_counter()
        self.export(self.folder)
        self.timeline.add(step, [Span("policy.export", "checkpoint", start, time.perf_counter() - start)])


@dataclass
class Checkpointer:
    """Saves every ``every`` steps (0: only when asked), while the next steps run. A context: what is being saved when a run
    ends is finished, also when it ends by an error. Not saved is a step that the guards find ``doubtful``, and one after
    which the next was not finite.

    ``begin``: the run's state, and roles begin to write to a folder; ``saved``: what they have written, None while they are
    at it. At most one checkpoint is under way. The newest ``keep`` remain, and the one with the largest metric
    ``keep_best``, among the steps that were evaluated. ``last``: the step of the last one that was begun, -1 for none.
    """

    begin: Callable[[Path], Mapping[str, Any]]
    saved: Callable[[bool], Mapping[str, Sequence[Written]] | None]
    folder: Path
    every: int
    keep: int
    timeline: Timeline
    keep_best: str | None = None
    last: int = -1
    doubtful: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._now = -1
        self._evaluation: dict[str, float] = {}
        self._writing: checkpoint.Writing | None = None

    def __call__(self, step: Step) -> None:
        self._now = step.number
        self.finish(step.number, wait=False)
        self._evaluation = {name: value for name, value in step.metrics.items() if name.startswith("eval/")}
        if self.every and step.number % self.every == 0 and not self.doubtful():
            self.save(step.number)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._writing is not None

    def forget(self) -> None:
        """Drop the checkpoint under way, which can't be completed any more; steps may come again."""
        if self._writing is not None:
            shutil.rmtree(self._writing.partial, ignore_errors=True)
        self.last, self._writing = -1, None

    def save(self, step: int) -> None:
        """Begin to save after ``step``, the last one that was made, once."""
        if step == self.last:
            return
        self.finish(step)
        with self._timed(step, "checkpoint.save"):
            writing = checkpoint.Writing(self.folder, step, self._evaluation)
            with writing.discarded_on_error():
                for name, state in self.begin(writing.partial).items():
                    writing.add(name, state)
        self.last, self._writing = step, writing

    def finish(self, step: int, wait: bool = True) -> None:
        """Make the checkpoint under way appear, if all of it has been written. The cause is raised if it couldn't be."""
        writing = self._writing
        if writing is None:
            return
        self._writing = None
        with writing.discarded_on_error(), self._timed(step, "checkpoint.finish"):
            files = self.saved(wait)
            if files is None:
                self._writing = writing
            else:
                writing.commit(files, self.keep, self.keep_best)

    def _discard(self) -> None:
        """Of the step before the one that isn't finite: that comes of its weights, more likely than of anything else."""
        if self._writing is not None:
            with suppress(HybridFlowError, OSError):
                self.saved(True)
            shutil.rmtree(self._writing.partial, ignore_errors=True)
            self._writing = None

    @contextmanager
    def _timed(self, step: int, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timeline.add(step, [Span(what, "checkpoint", start, time.perf_counter() - start)])

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish(self.last)
        elif issubclass(kind, NonFiniteError) and self._now == self.last:
            self._discard()
        elif issubclass(kind, Exception):  # what can't be saved any more is not what ended the run
            with suppress(HybridFlowError, OSError):
                self.finish(self.last)
