"""A small disk for a run directory, that can be filled without harm to the machine and without privileges.

It is a tmpfs in a mount namespace of its own, which Linux lets every user make (util-linux: unshare, nsenter). Processes
that are started with ``enter`` see it; from outside it is found under /proc.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from hybridflow.core.errors import UserError

__all__ = ["Disk", "SmallDisk"]

HOLD = 'mount -t tmpfs -o size="$2" tmpfs "$1" && echo mounted && exec cat'
CHUNK = bytes(1 << 16)


class Disk:
    """The disk that a folder is on anyway; it can't be filled."""

    enter: Sequence[str] = ()
    """what a command begins with whose processes see the disk"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seen(self, path: Path) -> Path:
        """Where a path is found from outside."""
        return path


class SmallDisk(Disk):
    """``num_bytes`` on ``folder`` as long as the context lasts; then what is on it is copied there. UserError: namespaces
    are forbidden here."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        super().__init__(folder)
        command = [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            HOLD,
            "sh",
            str(self.folder),
            str(num_bytes),
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._holder = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        if self._holder.stdout.readline() != "mounted\n":
            told = self._holder.stderr.read().strip()
            raise UserError(
                f"chaos: fill-disk needs a mount namespace of its own, which is refused here ({told}); leave it out"
            )
        inside = ("nsenter", "--user", "--mount", "--preserve-credentials", "--target", str(self._holder.pid))
        self.enter = (*inside, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()))  # nsenter's --wd is a place outside

    def __exit__(self, *_: object) -> None:
        shutil.copytree(self.seen(self.folder), self.folder, dirs_exist_ok=True)
        self._holder.communicate()

    def seen(self, path: Path) -> Path:
        return Path(f"/proc/{self._holder.pid}/root", *path.absolute().parts[1:])

    def fill(self) -> None:
        """Until nothing more goes on it."""
        try:
            with self._filler.open("wb", buffering=0) as file:
                while True:
                    file.write(CHUNK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def free(self) -> None:
        """Undo ``fill``."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        return self.seen(self.folder / "filler")
