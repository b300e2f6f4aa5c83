"""``hybridflow probe``: measure this machine for the planner, and keep what came out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict

import psutil

from hybridflow.commands.show import print_table
from hybridflow.planner.hardware import Probe, save_probe
from hybridflow.planner.probe import measure

__all__ = ["probe"]


def probe(as_json: bool) -> None:
    """Measure, keep, and print a table. ResourceError: processes can't talk to each other here."""
    busy, start = psutil.cpu_percent(0.5) / 100 * (psutil.cpu_count() or 1), time.perf_counter()
    found = measure()
    path = save_probe(found)
    if as_json:
        print(json.dumps({**asdict(found), "file": str(path), "busy_cores": busy}, indent=2))
        return
    machine = found.machine
    parts = " + ".join(machine.gpus) or f"{machine.processor}, {machine.cores} cores"
    print(f"{parts}, {found.memory_bytes / 1e9:.0f} GB, torch {machine.torch}")
    print_table([{"measured": what, "median": value} for what, value in _lines(found)], as_json=False)
    print(f"in {time.perf_counter() - start:.0f} s; kept in {path}; cluster here:1xN of hybridflow plan reads it")
    if busy > 0.25:
        print(f"other work kept {busy:.1f} cores busy when this began: measure again when they are free")


def _lines(found: Probe) -> Iterator[tuple[str, str]]:
    for dtype, rates in found.flops.items():
        for threads, rate in rates.items():
            yield f"products, {dtype}{_who(found, threads)}", f"{rate / 1e9:,.0f} GFLOP/s"
    for threads, rate in found.bandwidth.items():
        yield f"weights read by few rows{_who(found, threads)}", f"{rate / 1e9:,.1f} GB/s"
    if not found.gpus:
        yield "weights read by processes side by side", f"{found.shared_bandwidth / 1e9:,.1f} GB/s"
    yield "all-reduce of two processes", f"{found.link / 1e9:,.2f} GB/s each way"
    yield "a message in it", f"{found.link_latency_s * 1e6:,.0f} µs"
    for threads, seconds in found.launch_s.items():
        yield f"a layer besides products{_who(found, threads)}", f"{seconds * 1e6:,.0f} µs"


def _who(found: Probe, threads: int) -> str:
    return "" if found.gpus else f", {threads} thread{'s' * (threads > 1)}"
