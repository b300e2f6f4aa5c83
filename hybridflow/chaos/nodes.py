"""Several Ray nodes on this machine, for runs on several machines: the program ``controller/ray_nodes.py`` has them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Self

import psutil

from hybridflow.chaos.processes import descendants, kill_all
from hybridflow.core.errors import WorkerError

__all__ = ["Nodes"]


class Nodes:
    """``count`` of them with ``slots`` workers each, as long as the context lasts. ``enter``: see ``Disk``."""

    def __init__(self, count: int, slots: int, enter: Sequence[str]) -> None:
        program = [sys.executable, "-m", "hybridflow.controller.ray_nodes", str(count), str(slots)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._popen = subprocess.Popen([*enter, *program], **pipes)  # type: ignore[call-overload]
        self.address = self._popen.stdout.readline().strip()
        if not self.address:
            raise WorkerError("chaos: Ray's nodes could not be started on this machine; see above")
        self._seen = set[psutil.Process]()

    @property
    def pid(self) -> int:
        """Of the process whose descendants the nodes are."""
        pid: int = self._popen.pid
        return pid

    def add(self) -> None:
        """Another one, which comes in a moment."""
        self._look()
        self._popen.stdin.write("add\n")
        self._popen.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        self._popen.communicate()
        kill_all([*self._seen])  # those that are stopped don't end with their node

    def _look(self) -> None:
        """What the nodes have started. A process whose parent dies later is nobody's descendant any more."""
        self._seen.update(descendants(psutil.Process(self.pid)))
