"""How much memory this process takes."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil
import torch

__all__ = ["MemoryMeter", "resident_bytes"]

STATUS = Path("/proc/self/status")
FORGET = Path("/proc/self/clear_refs")
"""writing a 5 there sets the peak to what is resident"""
_earlier = {"resident": 0, "gpu": 0}
"""peaks of this process, before they were set back"""


class MemoryMeter:
    """Measures from now on: what is resident already, the interpreter and its libraries, doesn't count."""

    def __init__(self) -> None:
        self.before = resident_bytes()

    @property
    def grown(self) -> int:
        """How far the peak of the resident memory is above what it was at first, in bytes; on a GPU, the peak of its
        tensors."""
        if _on_gpu():
            return max(_earlier["gpu"], self.recent)
        return max(0, _earlier["resident"] - self.before, self.recent)

    @property
    def recent(self) -> int:
        """As ``grown``, since the last ``restart``, on systems that can tell; on others, since the program started."""
        return int(torch.cuda.max_memory_allocated()) if _on_gpu() else max(0, peak_bytes() - self.before)

    def restart(self) -> None:
        """``recent`` counts from here on."""
        if _on_gpu():
            _earlier["gpu"] = max(_earlier["gpu"], int(torch.cuda.max_memory_allocated()))
            torch.cuda.reset_peak_memory_stats()
        elif os.access(FORGET, os.W_OK):
            _earlier["resident"] = max(_earlier["resident"], peak_bytes())
            FORGET.write_text("5")


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most that was resident since the program started, or since a meter was restarted."""
    if STATUS.exists():  # getrusage would count what came before it in the same process
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
