"""kill -9 in the middle of saving: the next start finds the newest complete checkpoint, and nothing of others is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow import checkpoint
from hybridflow.core.errors import CheckpointError
from hybridflow.core.files import written


def starts(*arguments: object) -> list[dict[str, Any]]:
    """What the start after each kill found."""
    program = Path(__file__).parent / "saving.py"
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, Any]]) -> None:
    """The newest complete one may be the one that the child was about to tell of."""
    assert [start for start in found if not start["whole"] or start["left"]] == []
    assert [start for start in found if start["newest"] not in (start["told"], start["told"] + 1)] == []


def test_killed_before_every_operation_on_the_file_system(tmp_path: Path) -> None:
    found = starts("every", tmp_path / "checkpoints")
    assert len(found) > 50
    check(found)
    assert sorted({start["newest"] for start in found}) == [0, 1, 2], "made, made once more, and in the place of another"


@pytest.mark.slow
def test_killed_at_two_hundred_random_points(tmp_path: Path) -> None:
    found = starts("random", tmp_path / "checkpoints", 200)
    assert len(found) == 200
    check(found)
    assert len({start["newest"] for start in found}) > 50, "it got on between kills"


def save(folder: Path, step: int, keep: int = 2, **metrics: float) -> Path:
    writing = checkpoint.Writing(folder, step, {f"eval/{name}": value for name, value in metrics.items()})
    (writing.partial / "actor").mkdir()
    (writing.partial / "actor" / "0").write_text(str(step))
    writing.add("trainer", {"step": step})
    return writing.commit({"actor": [written(writing.partial, "actor/0")]}, keep, "eval/score")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_best_of_those_that_were_evaluated_remains(tmp_path: Path) -> None:
    for step, score in ((1, 0.2), (2, 0.7), (3, float("nan")), (4, 0.7), (5, 0.1)):
        save(tmp_path, step, 1, score=score)
    assert names(tmp_path) == ["step-00000004", "step-00000005"], "of equals the newest"
    save(tmp_path, 6, 1)  # not evaluated
    save(tmp_path, 7, 1, other=9.0)
    assert names(tmp_path) == ["step-00000004", "step-00000007"]


def test_nothing_that_is_committed_is_removed_for_others(tmp_path: Path) -> None:
    """Whoever goes back to an older one without a run directory, as programs may, keeps what he saves."""
    for step in (7, 8, 3):
        assert save(tmp_path, step).is_dir()
    assert names(tmp_path) == ["step-00000003", "step-00000007", "step-00000008"]
    (tmp_path / "step-00000008" / "manifest.json").unlink()
    save(tmp_path, 9)
    assert names(tmp_path) == ["step-00000007", "step-00000008", "step-00000009"], "one of the newest two isn't complete"


def test_later_checkpoints_are_no_past_of_what_goes_on_from_an_earlier_one(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, 3)
    assert checkpoint.set_aside(tmp_path, 2) == ["superseded-step-00000004", "superseded-step-00000006"]
    assert checkpoint.latest(tmp_path).name == "step-00000002"
    save(tmp_path, 4, 3)
    assert checkpoint.set_aside(tmp_path, 2) == ["superseded-step-00000004"], "once more"
    assert checkpoint.set_aside(tmp_path, 2) == []


def test_the_newest_that_is_whole_is_found_by_the_content_of_all_files(tmp_path: Path) -> None:
    assert checkpoint.intact(tmp_path) == (None, [])
    for step in (1, 2, 3):
        save(tmp_path, step, 3)
    (tmp_path / "step-00000003" / "actor" / "0").write_text("4")
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    found, damaged = checkpoint.intact(tmp_path)
    assert found is not None and found.step == 1
    assert "step-00000003/actor/0: missing or damaged" in damaged[0] and "step-00000002/manifest.json" in damaged[1]
    (tmp_path / "step-00000001" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole \(.*start the run anew elsewhere"):
        checkpoint.intact(tmp_path)
