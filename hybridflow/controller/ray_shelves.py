"""The shelves of a run: one on every machine that has processes of it, and what they hold of each other.

node a   0.safetensors, 1.safetensors  + copies of 2, 3     what the ranks of a machine write lies on it and on the next
node b   2.safetensors, 3.safetensors  + copies of 0, 1     one, so no machine is the only one that has something
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.shelf import Medium, Shelf
from hybridflow.core.errors import LostWorkersError, WorkerError

__all__ = ["Shelves"]

ANSWER_S = 30.0


class Shelves:
    """Folders of a name on several nodes. ``own``: the driver's. Raises LostWorkersError: a node doesn't answer."""

    def __init__(self, medium: Medium, run: str) -> None:
        self.medium, self.run = medium, run
        self.own = Shelf(medium, run, "driver")
        self._nodes: dict[str, Any] = {}
        self._copying: list[Any] = []

    def open(self, nodes: Collection[str]) -> None:
        """From now on these nodes; one whose shelf has died gets it again, with what lies there."""
        there = {node: shelf for node, shelf in self._nodes.items() if node in nodes and _lives(shelf)}
        here = [ray.get_runtime_context().get_node_id()]
        for node in nodes:
            if node not in there:
                there[node] = self._here(node) if list(nodes) == here else self._elsewhere(node)
        self._nodes = there

    def _here(self, node: str) -> Any:
        return _Local(Shelf(self.medium, self.run, node))

    def _elsewhere(self, node: str) -> Any:
        remote: Any = ray.remote(num_cpus=0)(Shelf)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return remote.options(scheduling_strategy=strategy).remote(self.medium, self.run, node)

    def make(self, name: str) -> Path:
        """An empty folder on every node; what all of them know it by."""
        self._each("make", name)
        return Path(self.medium, self.run, name)

    def room_bytes(self) -> dict[str, int]:
        return self._each("room_bytes")

    def copy(self, name: str) -> None:
        """Begin to send what each node has to the next one. Nothing happens on a single node."""
        nodes = list(self._nodes)
        if len(nodes) > 1:
            sizes = self._each("sizes", name)
            for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
                self._copying += [self._send(name, file, node, following) for file in sizes[node]]

    def copied(self, wait: bool) -> bool:
        """Whether all is sent."""
        if wait:
            _get(self._copying)
        ready, left = ray.wait(self._copying, num_returns=len(self._copying), timeout=0) if self._copying else ([], [])
        _get(ready)
        self._copying = left
        return not left

    def bring(self, name: str, wanted: Mapping[str, Collection[str]]) -> None:
        """Give each node those of the ``wanted`` files that it lacks. WorkerError: one is nowhere."""
        sizes = self._each("sizes", name)
        sent = []
        for node, files in wanted.items():
            for file in sorted(set(files) - sizes[node].keys()):
                holder = next((other for other in sizes if file in sizes[other]), None)
                if holder is None:
                    raise WorkerError(f"snapshot: {file} was on machines that are gone, and on no other one")
                sent.append(self._send(name, file, holder, node))
        _get(sent)

    def remove(self, name: str) -> None:
        """Doesn't wait."""
        self.own.remove(name)
        for shelf in self._nodes.values():
            shelf.remove.remote(name)

    def forget(self) -> None:
        """Whatever is under way."""
        self._copying = []

    def close(self) -> None:
        self.own.close()
        asked = [shelf.close.remote() for shelf in self._nodes.values()]
        ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S) if asked else None
        self._nodes = {}

    def _send(self, name: str, file: str, source: str, target: str) -> Any:
        content = self._nodes[source].read.remote(name, file)
        return self._nodes[target].write.remote(name, file, content)

    def _each(self, method: str, *arguments: Any) -> dict[str, Any]:
        asked = {node: getattr(shelf, method).remote(*arguments) for node, shelf in self._nodes.items()}
        return dict(zip(asked, _get(list(asked.values())), strict=True))


class _Local:
    """A shelf in this process, asked as one elsewhere: a run on one machine needs no process for it."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._shelf, name)
        return SimpleNamespace(remote=lambda *arguments: ray.put(method(*arguments)))


def _lives(shelf: Any) -> bool:
    try:
        ray.get(shelf.room_bytes.remote(), timeout=ANSWER_S)
    except RayError:
        return False
    return True


def _get(references: list[Any]) -> list[Any]:
    try:
        return ray.get(references, timeout=ANSWER_S)  # type: ignore[no-any-return]
    except (RayError, GetTimeoutError) as error:
        told = str(error).splitlines()[0]
        raise LostWorkersError(f"a machine that holds snapshots doesn't answer ({told})", ()) from None
