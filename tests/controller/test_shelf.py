"""Folders that live as long as the run that made them."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hybridflow.controller import shelf
from hybridflow.controller.shelf import Shelf, located


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shelf, "MEMORY", tmp_path)
    return tmp_path


def test_a_path_on_a_medium_is_another_one_on_every_node(memory: Path) -> None:
    path = Path("@memory", "abc", "snapshot-1", "actor", "0.safetensors")
    assert located(path, "n1") == memory / "hybridflow-abc-n1" / "snapshot-1" / "actor" / "0.safetensors"
    assert located(path, "n2") == memory / "hybridflow-abc-n2" / "snapshot-1" / "actor" / "0.safetensors"
    assert located(Path("@disk", "abc"), "n1") == Path(tempfile.gettempdir(), "hybridflow-abc-n1")
    for other in (Path("runs/x/checkpoints"), Path("/abs/@memory")):
        assert located(other, "n1") == other


def test_without_memory_shelves_are_on_the_disk(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "MEMORY", memory / "none")
    assert located(Path("@memory", "abc"), "n") == Path(tempfile.gettempdir(), "hybridflow-abc-n")


def test_files_go_from_one_shelf_to_another(memory: Path) -> None:
    one, other = Shelf("@memory", "abc", "n1"), Shelf("@memory", "abc", "n2")
    content = np.arange(7, dtype=np.uint8)
    (one.make("s") / "actor").mkdir()
    content.tofile(memory / "hybridflow-abc-n1" / "s" / "actor" / "0.safetensors")
    assert one.sizes("s") == {"actor/0.safetensors": 7}
    assert other.sizes("s") == {}
    other.write("s", "actor/0.safetensors", one.read("s", "actor/0.safetensors"))
    one.remove("s")
    assert (one.sizes("s"), other.sizes("s")) == ({}, {"actor/0.safetensors": 7})
    np.testing.assert_array_equal(other.read("s", "actor/0.safetensors"), content)
    assert 0 < one.room_bytes() <= 2**60
    for it in (one, other):
        it.close()
    assert list(memory.iterdir()) == []


def test_making_a_folder_again_empties_it(memory: Path) -> None:
    it = Shelf("@memory", "abc", "n")
    (it.make("s") / "old").touch()
    assert list(it.make("s").iterdir()) == []
    it.close()


def test_what_a_killed_run_left_is_removed_and_nothing_of_those_who_live(memory: Path) -> None:
    killed = f"""
import os, pathlib
from hybridflow.controller import shelf
shelf.MEMORY = pathlib.Path({str(memory)!r})
it = shelf.Shelf("@memory", "dead", "n")
(it.make("s") / "file").write_text("x")
os.kill(os.getpid(), 9)
"""
    living = Shelf("@memory", "living", "n")
    (memory / "hybridflow-not-a-shelf").mkdir()
    subprocess.run([sys.executable, "-c", killed], check=False)
    assert (memory / "hybridflow-dead-n" / "s" / "file").exists()
    new = Shelf("@memory", "new", "n")
    assert sorted(path.name for path in memory.iterdir()) == [
        "hybridflow-living-n",
        "hybridflow-new-n",
        "hybridflow-not-a-shelf",
    ]
    living.close()
    new.close()
