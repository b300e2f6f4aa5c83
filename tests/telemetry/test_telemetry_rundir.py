"""Run directories: made once, opened, and cut back before a run resumes."""

from pathlib import Path

import pytest

from hybridflow.core.errors import CheckpointError
from hybridflow.core.metrics import Span
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import Timeline, read_timeline
from hybridflow.telemetry.tracker import Tracker

CONFIG = 'algorithm = "ppo"\n'


def one_line(error: pytest.ExceptionInfo[CheckpointError], *words: str) -> bool:
    text = str(error.value)
    return "\n" not in text and all(word in text for word in words)


def test_create_then_open(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a" / "b", CONFIG)
    assert run.config.read_text() == CONFIG
    assert run.checkpoints.is_dir() and run.tensorboard.is_dir()
    assert RunDirectory.open(run.path) == run


def test_create_in_an_empty_folder(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path, CONFIG).config.exists()


def test_create_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG)
    with pytest.raises(CheckpointError) as error:
        RunDirectory.create(tmp_path, "other = 1\n")
    assert one_line(error, str(tmp_path), "--resume", "another run_dir")
    assert (tmp_path / "config.toml").read_text() == CONFIG


def test_create_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError) as error:
        RunDirectory.create(tmp_path, CONFIG)
    assert one_line(error, "thesis.tex", "another run_dir")
    with pytest.raises(CheckpointError) as error:
        RunDirectory.create(tmp_path / "thesis.tex", CONFIG)
    assert one_line(error, "is a file")


def test_create_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as error:
        RunDirectory.create(tmp_path / "file" / "run", CONFIG)
    assert one_line(error, "can't be made", "another run_dir")


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        RunDirectory.open(tmp_path / "nothing")
    assert one_line(error, "nothing", "no such run directory")
    with pytest.raises(CheckpointError) as error:
        RunDirectory.open(tmp_path)
    assert one_line(error, "config.toml")


def record(run: RunDirectory, steps: range) -> None:
    with Tracker(run, step=steps.start - 1) as tracker, Timeline(run.timeline) as timeline:
        for step in steps:
            tracker.log(step, {"reward/mean": step / 3, "kl": 1e-4 * step})
            tracker.log_samples(step, [{"prompt": "é", "response": "x\ny", "score": float(step)}] * 2)
            timeline.add(step, [Span("actor.update", "train", step * 2.0, 1.0)])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, resumed = (RunDirectory.create(tmp_path / name, CONFIG) for name in ("whole", "resumed"))
    record(whole, range(1, 8))
    record(resumed, range(1, 6))
    with resumed.metrics.open("a") as file:
        file.write('{"step": 6, "rew')  # killed in the middle of a write
    resumed.timeline.write_text(resumed.timeline.read_text().removesuffix("\n]\n") + ',\n{"name": "ac')
    resumed.keep_until(3)
    record(resumed, range(4, 8))
    assert resumed.metrics.read_bytes() == whole.metrics.read_bytes()
    assert resumed.samples.read_bytes() == whole.samples.read_bytes()
    steps = [
        [event["args"]["step"] for event in read_timeline(run.timeline) if event["ph"] == "X"] for run in (whole, resumed)
    ]
    assert steps[0] == steps[1] == list(range(1, 8))


def test_keep_until_without_files_and_with_a_complete_last_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    run.keep_until(3)
    run.metrics.write_text('{"step": 1}\n{"step": 2}')  # the record is whole, its newline is missing
    run.keep_until(2)
    assert run.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    run.metrics.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(CheckpointError) as error:
        run.keep_until(3)
    assert one_line(error, "metrics.jsonl", "line 2")
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_records(run.metrics) == [{"step": 1}, {"step": 2}]
