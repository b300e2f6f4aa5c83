"""Trainings that are killed, preempted and go on are the training that nobody touched."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REVERSE, with_keys, written
from test_runs import ENVIRONMENTS, assert_equal, records, run, state
from test_worker_groups import learned

from hybridflow.commands.ledger import balance
from hybridflow.config import validate
from hybridflow.core.errors import CheckpointError
from hybridflow.launch import train


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hybridflow.cli", "train", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the metrics of a step are there."""
    end = time.monotonic() + 100
    while not (run_dir / "metrics.jsonl").is_file() or records(run_dir)[-1:] == [] or records(run_dir)[-1]["step"] < step:
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def kill_training(supervisor: subprocess.Popen[str]) -> None:
    """Of a supervisor."""
    (child,) = [child for child in psutil.Process(supervisor.pid).children() if "train" in child.cmdline()]
    child.kill()
    child.wait(30)


@pytest.mark.slow
def test_kills_a_preemption_and_a_damaged_checkpoint_change_nothing(tmp_path: Path) -> None:
    data = with_keys(REVERSE, train__steps=240, checkpoint={"every": 25}, evaluation__every=50)
    path, cut = written(tmp_path, data), tmp_path / "run"
    process = started(path, "--restarts", 3)
    wait_for_step(cut, 3, process)
    kill_training(process)  # before the first checkpoint
    time.sleep(0.5)
    wait_for_step(cut, 80, process)
    kill_training(process)
    wait_for_step(cut, 120, process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 143, out
    assert out.count("the training was killed by SIGKILL: restart") == 2 and "restart 3" not in out
    assert "going on from the start: there is no checkpoint yet" in out
    assert "going on from step-00000075, the newest checkpoint that is whole" in out
    assert "SIGTERM: finishing the step" in out and "preempted after step" in out and "Traceback" not in out
    newest = sorted((cut / "checkpoints").glob("step-*"))[-1]
    (newest / "actor" / "0.safetensors").write_bytes(b"damaged")
    resumed = started(path, "--resume", "auto")
    out = resumed.communicate(timeout=100)[0]
    assert resumed.returncode == 0, out
    assert f"passed over: {newest}/actor/0.safetensors: missing or damaged" in out
    whole = run(with_keys(data, run_dir=None), tmp_path / "whole")
    assert_equal(state(whole), state(cut))
    assert records(whole) == records(cut)
    assert (whole / "samples.jsonl").read_bytes() == (cut / "samples.jsonl").read_bytes()
    accounts, expected = balance(cut / "ledger.sqlite"), balance(whole / "ledger.sqlite")
    assert accounts.problems == [] and accounts.counts == expected.counts
    assert accounts.counts["trained"] == 240 * 16 and accounts.attempts == 4 and accounts.redone > 0


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_driver_of_workers_with_a_replay_changes_nothing(
    hybridflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers end with it, and those of the next one find room and the replay's rows."""
    import ray

    data = with_keys(ENVIRONMENTS["dqn-switches"], train__steps=60, replay__shards=2, checkpoint={"every": 10})
    data = with_keys(data, runtime={"kind": "ray"}, placement={"pools": {"main": 2}})
    address = ray.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # which a Ray that a program starts for itself has
    cut, process = tmp_path / "run", started(written(tmp_path, with_keys(data, runtime__address=address)), "--restarts", 2)
    for step in (3, 25):  # before the first checkpoint, and after one
        wait_for_step(cut, step, process)
        kill_training(process)
        time.sleep(0.5)
    out = process.communicate(timeout=100)[0]
    assert process.returncode == 0, out
    assert out.count("the training was killed by SIGKILL: restart") == 2
    assert "going on from step-00000020, the newest checkpoint that is whole" in out
    whole = run(data, tmp_path / "whole")
    assert_equal(state(whole), state(cut))
    assert learned(whole) == learned(cut)
    accounts, expected = balance(cut / "ledger.sqlite"), balance(whole / "ledger.sqlite")
    assert (accounts.problems, accounts.counts, accounts.attempts) == ([], expected.counts, 3)
    assert accounts.counts["rows drawn"] > 1000
    told = hybridflow("ledger", cut)
    assert told.code == 0 and "closed: every sample is accounted for once" in told.out


def test_a_failure_before_the_first_step_of_a_resumed_run_leaves_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(*_: Any) -> None:
        raise CheckpointError("this worker doesn't see the folder")

    data = with_keys(REVERSE, checkpoint={"every": 1})
    cut = run(data, tmp_path / "run")
    before = sorted(path.name for path in (cut / "checkpoints").glob("step-*"))
    monkeypatch.setattr("hybridflow.controller.local_runtime.LocalRuntime.sees", blind)
    with pytest.raises(CheckpointError, match="see the folder"):
        run(data, cut, "latest", train__steps=3)
    assert sorted(path.name for path in (cut / "checkpoints").glob("step-*")) == before


def test_a_run_that_died_after_its_last_checkpoint_is_finished(tmp_path: Path) -> None:
    data = with_keys(REVERSE, checkpoint={"every": 1})
    cut = run(data, tmp_path / "run")
    model = (cut / "model" / "model.safetensors").read_bytes()
    for path in (cut / "result.json", cut / "model" / "model.safetensors"):
        path.unlink()
    run(data, cut, "auto")
    assert (cut / "result.json").is_file() and (cut / "model" / "model.safetensors").read_bytes() == model


def test_going_on_from_an_earlier_checkpoint_leaves_the_later_ones_aside(tmp_path: Path) -> None:
    data = with_keys(REVERSE, train__steps=4, checkpoint={"every": 1, "keep": 4})
    cut = run(data, tmp_path / "run")
    run(data, cut, str(cut / "checkpoints" / "step-00000002"), train__steps=3)
    names = sorted(path.name for path in (cut / "checkpoints").iterdir())
    assert names == [
        *(f"step-0000000{step}" for step in (1, 2, 3)),
        *(f"superseded-step-0000000{step}" for step in (3, 4)),
    ]


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    data = with_keys(REVERSE, checkpoint={"every": 1})
    cut = run(data, tmp_path / "run")
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-S", "-c", holding, str(cut / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "1\n"
        more = validate(with_keys(data, run_dir=str(cut), train__steps=3), "test")
        with pytest.raises(CheckpointError, match="another process trains there; wait until it has ended"):
            train(more, "latest")
        other.communicate("\n")
    assert train(more, "latest") == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"keep_best": "reward/mean", "every": 2}, "expected a metric of evaluations"),
        ({"keep_best": "eval/score", "every": 3}, "every checkpoint needs an evaluation to compare by"),
        ({"keep_best": "eval/scores", "every": 2}, "evaluations have eval/count, eval/high, eval/low, eval/score"),
    ],
)
def test_a_best_checkpoint_by_nothing_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path, hybridflow: Any
) -> None:
    path = written(tmp_path, with_keys(REVERSE, evaluation__every=2))
    arguments = [part for key, value in keys.items() for part in (f"--checkpoint.{key}", value)]
    outcome = hybridflow("train", path, *arguments)
    assert outcome.code == 2 and message in outcome.err and not (tmp_path / "run").exists()
