"""What calls take of their process besides time: looked at now and then, so that it costs next to nothing.

A look takes some 100 µs: processor time of child processes, the peak of memory, bytes of columns. A call is looked at if
looks at calls of its verb have taken less than ``SHARE`` of these calls' time so far. So all looks together take no more
of a run than that, however short its calls are. The first call of a verb is never looked at: much happens there once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import torch

from hybridflow.core.batch import Batch
from hybridflow.core.columns import Lazy, num_bytes
from hybridflow.core.fields import FIELDS
from hybridflow.core.metrics import Effort
from hybridflow.core.resident import MemoryMeter
from hybridflow.core.traced import Traced

__all__ = ["Measured", "Meter"]

SHARE = 0.003
SEARCH_S, SEARCH_SHARE = 10.0, 0.001
"""how often child processes are looked for, or more seldom: with thousands of processes that takes long"""


class Look(NamedTuple):
    """At a process: seconds of processor time, bytes, and what was counted if ``Meter.counts`` is set."""

    cpu_s: float
    memory_bytes: int
    flops: float = 0.0
    gpu_s: float = 0.0


class Meter:
    """Of one process, from when there is no model in it yet. ``share``: see above. ``counts``: count floating-point
    operations and seconds of GPU kernels as well, which makes calls slower, so that their seconds say nothing."""

    def __init__(self, share: float = SHARE) -> None:
        self.share, self.counts, self.memory = share, False, MemoryMeter()
        self.took: dict[str, float] = {}
        self.looking: dict[str, float] = {}
        self._children: list[psutil.Process] = []
        self._search_s = 0.0

    def call(self, name: str) -> Measured:
        """A context for a call of this name."""
        return Measured(self, name)

    def look(self) -> Look:
        return Look(time.process_time() + self._children_s(), self.memory.recent)

    def _children_s(self) -> float:
        if (begun := time.monotonic()) >= self._search_s:
            self._children = [*_child_processes()]
            self._search_s = begun + max(SEARCH_S, (time.monotonic() - begun) / SEARCH_SHARE)
        total = 0.0
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                total += times.user + times.system
        return total


class Measured:
    """A call. ``start_s``, ``duration_s``: by ``time.perf_counter``."""

    def __init__(self, meter: Meter, name: str) -> None:
        self.meter, self.name = meter, name
        self.start_s = self.duration_s = 0.0
        self._before: Look | None = None
        self._after = Look(0.0, 0)
        self._counting = contextlib.ExitStack()

    def __enter__(self) -> Self:
        meter, name = self.meter, self.name
        if name in meter.took and meter.looking[name] <= meter.share * meter.took[name]:
            begun = time.perf_counter()
            meter.memory.restart()
            self._before = meter.look()
            if meter.counts:
                self._count()
            meter.looking[name] += time.perf_counter() - begun
        self.start_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.duration_s = time.perf_counter() - self.start_s
        self._counting.close()
        meter, name = self.meter, self.name
        if self._before is not None:
            begun = time.perf_counter()
            self._after = meter.look()
            meter.looking[name] += time.perf_counter() - begun
        meter.looking.setdefault(name, 0.0)
        meter.took[name] = meter.took.get(name, 0.0) + self.duration_s

    def _count(self) -> None:
        from torch.profiler import ProfilerActivity, profile  # nobody else needs them
        from torch.utils.flop_counter import FlopCounterMode

        self._flops = self._counting.enter_context(FlopCounterMode(display=False))
        gpu = torch.cuda.is_available()
        self._kernels = self._counting.enter_context(profile(activities=[ProfilerActivity.CUDA])) if gpu else None

    def effort(
        self,
        read: Batch,
        new: Batch,
        processes: int = 1,
        workers: int = 1,
        view: bool = False,
        pulled_bytes: int | None = None,
    ) -> Effort | None:
        """None: it wasn't looked at. ``read``, ``new``: what this worker was given and made; ``view``: it was shown all
        rows, of which it has a share; ``processes``: its children, if they are workers, too. ``pulled_bytes``: what of it
        came from elsewhere, where that is known."""
        if self._before is None:
            return None
        begun, share = time.perf_counter(), 1 / (processes * (workers if view else 1))
        found = Effort(
            cpu_s=max(0.0, self._after.cpu_s - self._before.cpu_s) / processes,
            memory_bytes=self._after.memory_bytes,
            rows=share * len(read),
            tokens=share * max(_tokens(read), _tokens(new)),
            threads=torch.get_num_threads(),
            workers=workers * processes,
            read_bytes=_bytes(read) if pulled_bytes is None else pulled_bytes,
            written_bytes=_bytes(new),
            gpu_s=self._gpu_s(),
            flops=float(self._flops.get_total_flops()) if self.meter.counts else None,
        )
        self.meter.looking[self.name] += time.perf_counter() - begun
        return found

    def _gpu_s(self) -> float:
        if not self.meter.counts or self._kernels is None:
            return 0.0
        kernels: Any = self._kernels.key_averages()
        return sum(float(kernel.self_device_time_total) for kernel in kernels) / 1e6


def _child_processes() -> Iterator[psutil.Process]:
    """Of this one; where Linux lists them, without a look at every process of the machine."""
    lists = [*Path("/proc/self/task").glob("*/children")]
    if not lists:
        yield from psutil.Process().children()
    for file in lists:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # threads and children may end meanwhile
            yield from map(psutil.Process, map(int, file.read_text().split()))


def _tokens(batch: Batch) -> int:
    """Entries on the time axis, 0 if there is none."""
    return int(batch.lengths.sum()) if any(FIELDS[name].axis == "time" for name in batch.columns) else 0


def _bytes(batch: Batch) -> int:
    """Of the columns that are here."""
    return sum(num_bytes(column) for column in batch.columns.values() if not isinstance(column, (Lazy, Traced)))
