"""How much memory this process takes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

__all__ = ["MemoryMeter", "resident_bytes"]

STATUS = Path("/proc/self/status")


class MemoryMeter:
    """Measures from now on: what is resident already, the interpreter and its libraries, doesn't count."""

    def __init__(self) -> None:
        self.before = resident_bytes()

    @property
    def grown(self) -> int:
        """How far the peak of the resident memory is above what it was at first, in bytes; on a GPU, the peak of its
        tensors."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return int(torch.cuda.max_memory_allocated())
        return max(0, peak_bytes() - self.before)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most that was resident since the program started."""
    if STATUS.exists():  # getrusage would count what came before it in the same process
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
