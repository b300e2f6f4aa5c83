"""What was measured of a machine, kept under ``$HYBRIDFLOW_HOME`` by what the machine is made of."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridflow.core.errors import ConfigError
from hybridflow.core.files import write_whole
from hybridflow.models.sources import cache_home

__all__ = ["Fingerprint", "Probe", "Share", "fingerprint", "kept", "load_probe", "save_probe"]


@dataclass(frozen=True)
class Fingerprint:
    """What measurements depend on. ``memory_gb``: whole GB, as a machine's differs a little from boot to boot."""

    processor: str
    cores: int
    memory_gb: int
    torch: str
    gpus: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where measurements of such machines are kept."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return cache_home() / "hardware" / digest[:16]


@dataclass(frozen=True)
class Share:
    """What one worker has: FLOP/s by dtype, bytes, bytes/s; ``launch_s`` as the probe's."""

    flops: dict[str, float]
    memory_bytes: float
    bandwidth: float
    launch_s: float


@dataclass(frozen=True)
class Probe:
    """Medians of what a machine reached. ``flops`` by dtype and ``bandwidth`` (bytes/s of weights that a product with few
    rows reads), each by number of threads of a process; on GPUs, of one GPU, with one entry. ``shared_bandwidth``: of
    processes side by side, together, which reach more than the threads of one. ``memory_bytes``: of the machine, or of a
    GPU. ``link``: bytes/s in which each of two processes sends in an all-reduce; ``link_latency_s``: of a message in it.
    ``launch_s``: that the kernels of a decoder's layer take besides, by number of threads: with one, of a layer with next
    to nothing to compute; with more also what dividing its kernels takes, and those that aren't divided."""

    machine: Fingerprint
    flops: Mapping[str, Mapping[int, float]]
    bandwidth: Mapping[int, float]
    shared_bandwidth: float
    memory_bytes: float
    link: float
    link_latency_s: float
    launch_s: Mapping[int, float]

    @property
    def gpus(self) -> int:
        return len(self.machine.gpus)

    def share(self, workers: int, threads: int = 0) -> Share:
        """Of each of ``workers``: a GPU, or a part of the cores, memory and bandwidth. A worker has its part of the cores
        as threads, or ``threads``; where there are more threads than cores, each has a part of a core's time."""
        if self.gpus:
            flops = {dtype: rate[1] for dtype, rate in self.flops.items()}
            return Share(flops, self.memory_bytes, self.bandwidth[1], self.launch_s[1])
        cores = self.machine.cores
        threads = min(cores, threads or max(1, cores // workers))
        time = min(1.0, cores / (workers * threads))
        flops = {dtype: time * _between(rates, threads) for dtype, rates in self.flops.items()}
        bandwidth = min(_between(self.bandwidth, threads), self.shared_bandwidth / workers)
        return Share(flops, self.memory_bytes / workers, bandwidth, _between(self.launch_s, threads))


def _between(rates: Mapping[int, float], threads: int) -> float:
    """On the line between what was measured with the fewest and with the most threads."""
    low, high = min(rates), max(rates)
    if low == high:
        return rates[low]
    return rates[low] + (rates[high] - rates[low]) * (threads - low) / (high - low)


def fingerprint() -> Fingerprint:
    """Of this machine."""
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    memory = round(psutil.virtual_memory().total / 1e9)
    return Fingerprint(_processor(), os.cpu_count() or 1, memory, version("torch"), gpus)


def _processor() -> str:
    """The model's name; Python knows it on some systems only."""
    path = Path("/proc/cpuinfo")
    names = path.read_text().splitlines() if path.exists() else []
    found = (line.partition(":")[2].strip() for line in names if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())


def kept(name: str) -> dict[str, Any] | None:
    """What a file of this machine's folder has; None if there is none."""
    path = fingerprint().folder / name
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def save_probe(probe: Probe) -> Path:
    """Keep it for ``load_probe``; where it is."""
    path = probe.machine.folder / "probe.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(probe), indent=2).encode())
    return path


def load_probe() -> Probe:
    """Of this machine. ConfigError: it was not measured, or other parts than it has now."""
    found = kept("probe.json")
    if found is None or {*found} != {one.name for one in fields(Probe)}:
        raise ConfigError(["this machine has not been measured as it is now; run: hybridflow probe"])
    threads = {key: {int(n): value for n, value in found[key].items()} for key in ("bandwidth", "launch_s")}
    flops = {dtype: {int(n): rate for n, rate in rates.items()} for dtype, rates in found["flops"].items()}
    machine = Fingerprint(**{**found["machine"], "gpus": tuple(found["machine"]["gpus"])})
    return Probe(**{**found, **threads, "flops": flops, "machine": machine})
