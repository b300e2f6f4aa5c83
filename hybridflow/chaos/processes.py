"""Which processes a run consists of, found from outside: by whose child each is, and what its command line says.

    train --restarts N                the supervisor
        train [--resume auto]         the driver
            reward_process            calls reward functions
            multiprocessing.spawn     steps environments
            gcs_server, raylet        Ray, if the run has started one
                ray::Process          workers, which may have such children themselves

With ``--nodes`` the raylets are children of another program, ``controller/ray_nodes.py``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import psutil

__all__ = ["Processes", "descendants", "kill_all", "name_of", "pool_of", "remaining"]

WORKER = "HYBRIDFLOW_WORKER"
END_S = 5.0
POLL_S = 0.02


class Processes:
    """Of a training whose supervisor is ``root``; ``nodes``: the program that has started Ray's nodes, if there is one."""

    def __init__(self, root: int, nodes: int | None) -> None:
        self.root = psutil.Process(root)
        self.nodes = None if nodes is None else psutil.Process(nodes)

    @property
    def driver(self) -> psutil.Process | None:
        """None while it is being started again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self.root.children():
                if "hybridflow.cli" in _words(child) and child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    def workers(self) -> list[psutil.Process]:
        """Ray's worker processes of this run that a role lives in, by pool and rank."""
        found = [process for process in self.all() if _title(process).startswith("ray::Process")]
        return sorted(found, key=lambda process: (pool_of(process), process.create_time()))

    def raylets(self) -> list[psutil.Process]:
        """By age: the head's first."""
        found = [process for process in self.all() if Path(_title(process)).name == "raylet"]
        return sorted(found, key=lambda process: process.create_time())

    def rewards(self) -> list[psutil.Process]:
        return [process for process in self.all() if "hybridflow.rollout.reward_process" in " ".join(_words(process))]

    def environments(self) -> list[psutil.Process]:
        return [process for process in self.all() if "multiprocessing.spawn import spawn_main" in " ".join(_words(process))]

    def own(self) -> list[psutil.Process]:
        """What the run has started itself, and is alive."""
        return [*_alive([self.root, *descendants(self.root)])]

    def all(self) -> list[psutil.Process]:
        """With those of the nodes that it runs on."""
        return [*self.own(), *(_alive(descendants(self.nodes)) if self.nodes else ())]


def pool_of(process: psutil.Process) -> tuple[str, int]:
    """(pool, rank) of a worker."""
    with contextlib.suppress(psutil.Error):
        pool, _, rank = process.environ().get(WORKER, "").rpartition("/")
        return pool, int(rank or 0)
    return "", 0


def name_of(process: psutil.Process) -> str:
    """For people: its id and what was started."""
    return f"{process.pid} ({' '.join(_words(process))[:80]})"


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """At once, and whatever state they are in; wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    remaining(processes, END_S)


def remaining(processes: Collection[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that don't end within ``timeout_s``. Their exit codes are left to their parents."""
    end_s, left = time.monotonic() + timeout_s, [*_alive(processes)]
    while left and time.monotonic() < end_s:
        time.sleep(POLL_S)
        left = [*_alive(left)]
    return left


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Its children, and theirs; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    return []


def _alive(processes: Collection[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        words: list[str] = process.cmdline()
        return words
    return []


def _title(process: psutil.Process) -> str:
    return (_words(process) or [""])[0]
