"""A long run of small steps takes no more of the machine at its end than at its beginning.

    python benchmarks/soak.py local 2000
    python benchmarks/soak.py ray 2000

GRPO on reversing three digits, with checkpoints and evaluations. After every so many steps, of every process of the run:
resident memory, open file handles, threads, and the Ray objects that it refers to. A line for each process compares the
second half of the steps with the first, without its beginning.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from hybridflow import launch
from hybridflow.config import validate
from hybridflow.hooks import Watch
from hybridflow.train import Step

CONFIG: dict[str, Any] = {
    "algorithm": "grpo",
    "threads": 1,
    "actor": {"fresh": {"hidden_size": 16, "num_layers": 1, "num_heads": 2}, "optimizer": {"lr": 1e-3}},
    "data": {"task": "reverse", "options": {"length": 3}},
    "generation": {"max_new_tokens": 4},
    "kl": {"coef": 0.001},
    "reward": {"workers": 1},
    "train": {"prompts_per_step": 2, "group_size": 4},
    "evaluation": {"limit": 4},
}
ON_RAY = {"runtime": {"kind": "ray"}, "placement": {"pools": {"main": 2}}}


@dataclass
class Use:
    """Of one process, or of Ray, at every sample."""

    name: str
    rss_mb: list[float] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)


class Sampling(Watch):
    """Looks at the run's processes after every ``every`` steps, besides what ``Watch`` does."""

    def __init__(self, found: dict[int, Use], every: int, *watching: Any) -> None:
        super().__init__(*watching)
        self.found, self.every = found, every

    def __call__(self, step: Step) -> None:
        super().__call__(step)
        if step.number % self.every == 0:
            self.sample()

    def sample(self) -> None:
        own, objects = psutil.Process(), ray_objects()
        for process in (own, *own.children(recursive=True)):
            try:
                with process.oneshot():
                    name = "driver" if process == own else process.name()
                    use = self.found.setdefault(process.pid, Use(name))
                    use.rss_mb.append(process.memory_info().rss / 1e6)
                    use.handles.append(process.num_fds())
                    use.threads.append(process.num_threads())
                    use.objects += [objects[process.pid]] if process.pid in objects else []
            except psutil.NoSuchProcess:
                continue


def ray_objects() -> dict[int, int]:
    """How many objects each process on this machine refers to, also in garbage that Python hasn't collected yet."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    from ray._private.internal_api import node_stats

    (here,) = [node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()]
    told = node_stats(here["NodeManagerAddress"], here["NodeManagerPort"], include_memory_info=False)
    return {process.pid: process.num_object_refs_in_scope for process in told.core_workers_stats}


def soak(kind: str, steps: int, every: int, folder: Path) -> list[Use]:
    """Train; what every process that lived as long as the run took, at every ``every``-th step."""
    found: dict[int, Use] = {}
    saving = {"checkpoint": {"every": every // 2}, "evaluation": {"limit": 4, "every": every // 2}}
    data = {**CONFIG, **saving, **(ON_RAY if kind == "ray" else {}), "run_dir": str(folder / "run")}
    data["train"] = {**data["train"], "steps": steps}
    with mock.patch.object(launch, "Watch", partial(Sampling, found, every)):
        assert launch.train(validate(data, "soak")) == 0
    return [use for use in found.values() if len(use.rss_mb) == steps // every]


def halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first half, without the first fifth of all, in which caches fill; and the second."""
    return values[len(values) // 5 : len(values) // 2], values[len(values) // 2 :]


def rows(uses: Sequence[Use]) -> list[dict[str, Any]]:
    """The medians of each half: a file that is open just then, as samples are written to profiles, is no leak."""
    table = []
    for use in uses:
        row: dict[str, Any] = {"process": use.name}
        for what in ("handles", "threads", "objects"):
            if values := getattr(use, what):
                row[what] = [statistics.median(half) for half in halves(values)]
        row["rss_mb"] = [round(statistics.median(half), 1) for half in halves(use.rss_mb)]
        table.append(row)
    return table


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, mock.patch("sys.stdout", nowhere):
        uses = soak(kind, steps, steps // 40, Path(folder))
    for row in rows(uses):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
