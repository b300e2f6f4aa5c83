"""Kinds of faults: what each needs, and what it does to a run's processes and files, from outside."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from hybridflow.chaos.disk import Disk, SmallDisk
from hybridflow.chaos.nodes import Nodes
from hybridflow.chaos.processes import Processes, kill_all, pool_of

__all__ = ["KINDS", "PAUSE_S", "Heal", "Kind", "Scene"]

PAUSE_S = 3.0
"""how long what is paused, slowed or disconnected stays so"""
BEAT_S = 0.1
LATER = f"another one comes {PAUSE_S:g} s later"

T = TypeVar("T")
Heal = Callable[[], None]
"""undoes a fault"""


@dataclass(frozen=True)
class Scene:
    """A run that something is about to befall. ``draw`` (0 to 1) chooses what."""

    processes: Processes
    checkpoints: Path
    disk: Disk
    nodes: Nodes | None
    draw: float

    def one(self, found: Sequence[T]) -> T:
        return found[int(self.draw * len(found))]

    @property
    def driver(self) -> psutil.Process:
        driver = self.processes.driver
        if driver is None:
            raise psutil.NoSuchProcess(0)
        return driver

    @property
    def complete(self) -> list[Path]:
        """Checkpoints, the newest last."""
        found = sorted(self.checkpoints.glob("step-*"))
        return [path for path in found if (path / "manifest.json").exists()]

    @property
    def saving(self) -> bool:
        """Whether files of a checkpoint are being written, which isn't there yet."""
        return any(self.checkpoints.glob(".step-*.partial/*"))


@dataclass(frozen=True)
class Kind:
    """``befall`` returns how to undo it afterwards, or None; psutil.NoSuchProcess: there is nobody any more.

    ``needs``: of a run, see ``abilities`` in ``commands/chaos.py``. ``when``: the state of the run that is waited for.
    ``ends``: "never", the run goes on by itself; "told", it may also end with a message to its user, who mends what it says
    and starts it again; "dead", it is dead and just started again.
    """

    text: str
    befall: Callable[[Scene], Heal | None]
    needs: str = ""
    when: Callable[[Scene], bool] = lambda scene: True
    ends: Literal["never", "told", "dead"] = "never"


def _kill_driver(scene: Scene) -> None:
    scene.driver.kill()


def _terminate_driver(scene: Scene) -> None:
    scene.driver.terminate()


def _kill_everything(scene: Scene) -> None:
    kill_all(scene.processes.own())


def _pause(processes: Sequence[psutil.Process]) -> Heal:
    for process in processes:
        process.suspend()

    def go_on() -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    return go_on


def _stop_for_ever(process: psutil.Process) -> None:
    process.suspend()


def _slow(process: psutil.Process) -> None:
    """A tenth of the time it may run, for ``PAUSE_S``."""
    end = time.monotonic() + PAUSE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while time.monotonic() < end:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.9 * BEAT_S)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1 * BEAT_S)


def _kill_pool(scene: Scene) -> None:
    workers = scene.processes.workers()
    pool, _ = pool_of(scene.one(workers))
    kill_all([worker for worker in workers if pool_of(worker)[0] == pool])


def _node(scene: Scene) -> psutil.Process:
    """One that has workers, but not the head, without which there is no Ray."""
    homes = {worker.ppid() for worker in scene.processes.workers()}
    return scene.one([raylet for raylet in scene.processes.raylets()[1:] if raylet.pid in homes])


def _kill_node(scene: Scene) -> Heal:
    raylet = _node(scene)
    kill_all([raylet, *raylet.children(recursive=True)])
    return _another(scene)


def _disconnect_node(scene: Scene) -> Heal:
    raylet = _node(scene)
    _pause([raylet, *raylet.children(recursive=True)])
    return _another(scene)


def _another(scene: Scene) -> Heal:
    assert scene.nodes is not None, "kinds of nodes need them"
    return scene.nodes.add


def _damaged(harm: Callable[[Path], None]) -> Callable[[Scene], None]:
    """The newest checkpoint, and then the driver dies, so that it is needed."""

    def befall(scene: Scene) -> None:
        driver = scene.driver
        driver.suspend()  # or it might save another one in between
        newest = scene.complete[-1]
        files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.name != "manifest.json"]
        harm(scene.one(files))
        driver.kill()

    return befall


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _delete_manifest(file: Path) -> None:
    folder = next(parent for parent in file.parents if parent.name.startswith("step-"))
    (folder / "manifest.json").unlink()


def _fill_disk(scene: Scene) -> Heal:
    assert isinstance(scene.disk, SmallDisk), "fill-disk needs one"
    scene.disk.fill()
    return scene.disk.free


def _has_spare(scene: Scene) -> bool:
    return len(scene.complete) > 1


def _in(
    found: Callable[[Processes], Sequence[psutil.Process]], act: Callable[[psutil.Process], None]
) -> Callable[[Scene], None]:
    return lambda scene: act(scene.one(found(scene.processes)))


def _kill(process: psutil.Process) -> None:
    process.kill()


KINDS: dict[str, Kind] = {
    "kill-driver": Kind("SIGKILL to the driver", _kill_driver),
    "kill-driver-saving": Kind(
        "SIGKILL to the driver while a checkpoint is written", _kill_driver, when=lambda s: s.saving
    ),
    "terminate-driver": Kind("SIGTERM to the driver, as before a machine is taken away", _terminate_driver),
    "pause-driver": Kind(f"SIGSTOP to the driver for {PAUSE_S:g} s", lambda scene: _pause([scene.driver])),
    "kill-everything": Kind(
        "SIGKILL to every process, as in a power cut; then it is started again", _kill_everything, ends="dead"
    ),
    "flip-checkpoint": Kind(
        "a bit of the newest checkpoint flips, and the driver dies", _damaged(_flip), "spare", _has_spare
    ),
    "truncate-checkpoint": Kind(
        "a file of the newest checkpoint loses its end, and the driver dies", _damaged(_truncate), "spare", _has_spare
    ),
    "delete-checkpoint-file": Kind(
        "a file of the newest checkpoint is gone, and the driver dies", _damaged(Path.unlink), "spare", _has_spare
    ),
    "delete-manifest": Kind(
        "the manifest of the newest checkpoint is gone, and the driver dies",
        _damaged(_delete_manifest),
        "spare",
        _has_spare,
    ),
    "fill-disk": Kind(f"the disk of the run directory is full for {PAUSE_S:g} s", _fill_disk, "disk", ends="told"),
    "kill-reward": Kind("SIGKILL to a process of reward functions", _in(Processes.rewards, _kill), "rewards", ends="told"),
    "stop-reward": Kind(
        "SIGSTOP to a process of reward functions, for ever", _in(Processes.rewards, _stop_for_ever), "rewards", ends="told"
    ),
    "kill-environment": Kind("SIGKILL to a process of environments", _in(Processes.environments, _kill), "environments"),
    "stop-environment": Kind(
        "SIGSTOP to a process of environments, for ever", _in(Processes.environments, _stop_for_ever), "environments"
    ),
    "kill-worker": Kind("SIGKILL to a worker", _in(Processes.workers, _kill), "ray"),
    "kill-worker-saving": Kind(
        "SIGKILL to a worker while a checkpoint is written", _in(Processes.workers, _kill), "ray", lambda s: s.saving
    ),
    "stop-worker": Kind("SIGSTOP to a worker, for ever", _in(Processes.workers, _stop_for_ever), "ray"),
    "pause-worker": Kind(
        f"SIGSTOP to a worker for {PAUSE_S:g} s", lambda scene: _pause([scene.one(scene.processes.workers())]), "ray"
    ),
    "slow-worker": Kind(f"a worker runs a tenth of the time for {PAUSE_S:g} s", _in(Processes.workers, _slow), "ray"),
    "kill-pool": Kind("SIGKILL to all workers of a pool", _kill_pool, "ray"),
    "kill-node": Kind(f"SIGKILL to a node: its raylet and its workers; {LATER}", _kill_node, "nodes"),
    "disconnect-node": Kind(f"SIGSTOP to a node, for ever; {LATER}", _disconnect_node, "nodes"),
}
