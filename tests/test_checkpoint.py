"""Checkpoints appear when all of them is there, while the run goes on; what can't be saved says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REVERSE, with_keys
from test_runs import assert_equal, records, run, state

from hybridflow import checkpoint, hooks
from hybridflow.config import validate
from hybridflow.core.errors import CheckpointError, ContractError, NonFiniteError, WorkerError
from hybridflow.core.files import Written, written
from hybridflow.hooks import Checkpointer
from hybridflow.launch import train
from hybridflow.telemetry.timeline import Timeline
from hybridflow.train import Step
from hybridflow.workers import checkpoint as pieces
from hybridflow.workers.learner import Learner


class Roles:
    """Roles whose files are there when they are told to be."""

    def __init__(self, folder: Path, timeline: Timeline) -> None:
        self.folder, self.done, self.waited, self.step = folder, True, list[bool](), 0
        self.error: Exception | None = None
        self.checkpointer = Checkpointer(self.begin, self.saved, folder, 2, 2, timeline)

    def begin(self, folder: Path) -> Mapping[str, Any]:
        (folder / "actor").mkdir()
        (folder / "actor" / "0").write_text(str(self.step))
        self.files = {"actor": [written(folder, "actor/0")]}
        return {"trainer": {"step": self.step}, "actor": {"version": self.step}}

    def saved(self, wait: bool) -> Mapping[str, Sequence[Written]] | None:
        self.waited.append(wait)
        if self.error is not None:
            raise self.error
        return self.files if self.done or wait else None

    def run(self, steps: int) -> list[str]:
        """The folders that are there after some more steps."""
        for _ in range(steps):
            self.step += 1
            self.checkpointer(Step(self.step, {}, [], None))
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    with Timeline(tmp_path / "timeline.json") as timeline:
        yield Roles(tmp_path, timeline)


def test_a_checkpoint_appears_at_the_first_step_after_it_is_written(roles: Roles, tmp_path: Path) -> None:
    with roles.checkpointer:
        assert roles.run(2) == [".step-00000002.partial"]
        assert roles.run(1) == ["step-00000002"]
        roles.done = False
        assert roles.run(1) == [".step-00000004.partial", "step-00000002"]
        assert roles.run(1) == [".step-00000004.partial", "step-00000002"]
        assert roles.waited == [False, False]
        assert roles.run(1) == [".step-00000006.partial", "step-00000002", "step-00000004"], "one is under way at most"
        assert roles.waited == [False, False, False, True]
    assert roles.run(0) == ["step-00000004", "step-00000006"], "the end of a run waits; the newest two remain"
    last = checkpoint.load(checkpoint.latest(tmp_path))
    assert last.step == 6 and last.state == {"trainer": {"step": 6}, "actor": {"version": 6}}
    assert last.files == roles.files


def test_what_is_under_way_is_finished_when_a_run_fails(roles: Roles) -> None:
    with pytest.raises(WorkerError), roles.checkpointer:
        roles.run(2)
        raise WorkerError("a worker")
    assert roles.run(0) == ["step-00000002"]
    roles.error = CheckpointError("a disk")
    with pytest.raises(WorkerError), roles.checkpointer:
        roles.run(2)
        raise WorkerError("a worker")
    assert roles.run(0) == ["step-00000002"], "nor is anything left of what can't be saved"


def test_what_the_step_before_one_that_is_not_finite_has_left_is_not_saved(roles: Roles) -> None:
    with pytest.raises(NonFiniteError), roles.checkpointer:
        roles.run(2)
        raise NonFiniteError("a loss")
    assert roles.run(0) == []
    with pytest.raises(NonFiniteError), roles.checkpointer:
        roles.run(2)
        roles.done = False
        roles.run(1)
        raise NonFiniteError("a loss")
    assert roles.run(0) == ["step-00000004"], "the fifth step was right, so the fourth was"


def test_what_can_not_be_written_ends_the_run_and_leaves_nothing(roles: Roles) -> None:
    with pytest.raises(CheckpointError, match="a disk"), roles.checkpointer:
        roles.run(2)
        roles.error = CheckpointError("a disk")
        roles.run(1)
    assert roles.run(0) == []


def test_a_state_that_is_no_plain_data_is_told_and_leaves_nothing(roles: Roles) -> None:
    roles.checkpointer.begin = lambda folder: {"trainer": {"odd": object()}}
    with pytest.raises(ContractError, match=r"object .* can't be saved"), roles.checkpointer:
        roles.run(2)
    assert roles.run(0) == []


def test_a_run_trains_on_while_a_slow_disk_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 1 is written when step 3 is over, and is that of step 1 all the same."""
    go, write_tensors, told = threading.Event(), pieces.write_tensors, list[tuple[int, list[str]]]()

    def write(*args: Any) -> Any:
        assert go.wait(60)
        return write_tensors(*args)

    def report(reporter: Any, step: Step) -> None:
        original(reporter, step)
        folder = tmp_path / "run" / "checkpoints"
        told.append((step.number, sorted(path.name for path in folder.iterdir())))
        if step.number == 3:
            go.set()

    original = hooks.Reporter.__call__
    whole = run(with_keys(REVERSE, train__steps=1, checkpoint={"every": 1}), tmp_path / "whole")
    monkeypatch.setattr(hooks.Reporter, "__call__", report)
    monkeypatch.setattr(pieces, "write_tensors", write)
    data = with_keys(REVERSE, train__steps=5, checkpoint={"every": 4, "keep": 5})
    monkeypatch.setattr(Checkpointer, "__call__", _also_after_the_first(Checkpointer.__call__))
    slow = run(data, tmp_path / "run")
    partial = ".step-00000001.partial"
    assert told[:3] == [(1, []), (2, [partial]), (3, [partial])]
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").is_dir()
    first = checkpoint.load(slow / "checkpoints" / "step-00000001")
    assert_equal(first.state["trainer"], state(whole)["trainer"])
    with pieces.PieceReader(first.path / "actor") as one:
        expected = state(whole)["tensors"]["actor"]
        assert one.names() == sorted(expected)
        assert all(torch.equal(one.full(name), tensor) for name, tensor in expected.items())


def _also_after_the_first(call: Any) -> Any:
    def checkpointer(self: Checkpointer, step: Step) -> None:
        call(self, step)
        if step.number == 1:
            self.save(1)

    return checkpointer


def test_a_run_whose_workers_do_not_see_the_folder_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "sees", _blind)
    with pytest.raises(CheckpointError, match="all machines share"):
        train(validate(with_keys(REVERSE, run_dir=str(tmp_path / "run")), "test"))
    assert not (tmp_path / "run").exists(), "the name stays free"


def _blind(self: Learner, file: Path) -> None:
    assert file.is_file() and file.is_absolute()
    raise CheckpointError("use a run_dir that all machines share")


_blind.control = True  # type: ignore[attr-defined]


def test_resuming_with_another_algorithm_is_told(tmp_path: Path) -> None:
    run(with_keys(REVERSE, checkpoint={"every": 2}), tmp_path / "run")
    assert records(tmp_path / "run")[-1]["step"] == 2
    ppo = with_keys(REVERSE, algorithm="ppo", train={"steps": 3, "group_size": 1}, run_dir=str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="it has no state of critic; resume with the same algorithm"):
        train(validate(ppo, "test"), "latest")
