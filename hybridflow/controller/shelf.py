"""Folders in the memory of a machine, of which others need to know the name alone.

    @memory/<run>/step-00000012  ──located on node n──>  /dev/shm/hybridflow-<run>-n/step-00000012
    @disk/<run>/step-00000012                            /tmp/hybridflow-<run>-n/step-00000012

They live as long as the process that made them: whoever comes after it on the machine removes what a killed run has left.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
from numpy.typing import NDArray

__all__ = ["MEMORY", "Medium", "Shelf", "located"]

MEMORY = Path("/dev/shm")
Medium = Literal["@memory", "@disk"]
PREFIX, LOCK = "hybridflow-", ".lock"


def located(path: Path, node: str) -> Path:
    """Where on the machine ``node`` a path is that begins with a medium; other paths are the same everywhere."""
    medium, *rest = path.parts
    if medium not in ("@memory", "@disk"):
        return path
    run, *below = rest
    return _root(medium) / f"{PREFIX}{run}-{node}" / Path(*below)


def _root(medium: str) -> Path:
    return MEMORY if medium == "@memory" and MEMORY.is_dir() else Path(tempfile.gettempdir())


class Shelf:
    """The folder of a run on this machine; the shelves of runs that are dead are removed."""

    def __init__(self, medium: Medium, run: str, node: str) -> None:
        self.node, self.folder = node, located(Path(medium, run), node)
        for other in set(self.folder.parent.glob(f"{PREFIX}*")) - {self.folder}:
            _remove_if_dead(other)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        beside = self.folder / f"{LOCK}.new"
        self._lock = beside.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        beside.rename(self.folder / LOCK)  # it is locked when others see it

    def room_bytes(self) -> int:
        """What still fits: into the medium, and into memory if that is the medium."""
        free = shutil.disk_usage(self.folder).free
        return min(free, int(psutil.virtual_memory().available)) if self.folder.parent == MEMORY else free

    def make(self, name: str) -> Path:
        """An empty folder of this name."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        return self.folder / name

    def sizes(self, name: str) -> dict[str, int]:
        """Of each file of a folder, by its path in it."""
        folder = self.folder / name
        return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    def read(self, name: str, file: str) -> NDArray[np.uint8]:
        return np.fromfile(self.folder / name / file, np.uint8)

    def write(self, name: str, file: str, content: NDArray[np.uint8]) -> None:
        path = self.folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        content.tofile(path)

    def remove(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _remove_if_dead(folder: Path) -> None:
    """A shelf whose lock nobody holds."""
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its owner lives, or is just making it, or it is another user's
        return
