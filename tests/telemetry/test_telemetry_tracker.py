"""The tracker: one JSON object a step, samples, TensorBoard."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.tracker import Tracker


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "seed = 1\n")


def test_every_step_is_on_disk_at_once(run: RunDirectory) -> None:
    tracker = Tracker(run)
    tracker.log(1, {"reward/mean": 0.1 + 0.2, "policy_version": 0})
    tracker.log_samples(1, [{"prompt": "a", "group_id": np.int64(7), "score": np.float32(0.5), "tags": ("x", "y")}])
    assert json.loads(run.metrics.read_text()) == {"step": 1, "reward/mean": 0.1 + 0.2, "policy_version": 0}
    sample = json.loads(run.samples.read_text())
    assert sample == {"step": 1, "prompt": "a", "group_id": 7, "score": 0.5, "tags": ["x", "y"]}
    tracker.close()


def test_numbers_that_are_not_finite_are_null(run: RunDirectory) -> None:
    with Tracker(run) as tracker:
        tracker.log(1, {"kl": math.nan, "grad_norm": math.inf, "reward/mean": np.float64(-math.inf)})
        tracker.log_samples(1, [{"score": math.nan}])
    assert json.loads(run.metrics.read_text()) == {"step": 1, "kl": None, "grad_norm": None, "reward/mean": None}
    assert json.loads(run.samples.read_text()) == {"step": 1, "score": None}


def test_text_that_is_no_unicode_does_not_stop_a_run(run: RunDirectory) -> None:
    with Tracker(run) as tracker:
        tracker.log_samples(1, [{"response": "half a pair: \ud83d"}])
    assert json.loads(run.samples.read_text(encoding="utf-8"))["response"] == "half a pair: ?"


def test_tensorboard_forgets_what_a_resumed_run_repeats(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of one second are read in the order of their writers' numbers as text, which a tenth writer would break.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with Tracker(run) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"reward/mean": 1.0})
    with Tracker(run, step=2) as tracker:
        tracker.log(3, {"reward/mean": 2.0})
    events = EventAccumulator(str(run.tensorboard)).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 1.0), (3, 2.0)]
