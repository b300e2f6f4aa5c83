"""Which cores of its machine a worker runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Share", "cores_of", "node_cores", "stay"]

NODES = Path("/sys/devices/system/node")


class Share(NamedTuple):
    """Worker ``number`` of ``workers`` on a machine, over all pools."""

    number: int
    workers: int

    @property
    def threads(self) -> int:
        return max(1, (os.cpu_count() or 1) // self.workers)


def node_cores(folder: Path = NODES) -> list[set[int]]:
    """The cores of each NUMA node, as far as this process may use them; nothing where Linux doesn't say."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()  # not on macOS
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    nodes = [_cores(file.read_text()) & allowed for file in lists]
    return [cores for cores in nodes if cores]


def _cores(text: str) -> set[int]:
    """Of a list as the kernel writes it: "0-3,8"."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}


def cores_of(share: Share, nodes: Sequence[set[int]]) -> set[int] | None:
    """Those of one node, which neighbours share, so that what a worker allocates stays near its cores. None if there is but
    one node, or workers are fewer: each should use several then."""
    if len(nodes) < 2 or share.workers < len(nodes):
        return None
    return nodes[share.number * len(nodes) // share.workers]


def stay(share: Share) -> None:
    """Bind this thread, and those that it starts, to the worker's node."""
    cores = cores_of(share, node_cores())
    if cores is not None:
        os.sched_setaffinity(0, cores)
