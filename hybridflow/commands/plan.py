"""``hybridflow plan``: what a run needs, without loading a model, and what it took once it has run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.build_plan import Need, needs, pool_peaks
from hybridflow.config import RunConfig, load_config
from hybridflow.core.errors import UserError
from hybridflow.telemetry.graph_tables import aligned, memory
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["explain_memory", "predicted"]

MEASURED = "memory/grown_gb"
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "checkpointed": "(checkpointed)",
    "forward": "forward",
    "cache": "KV cache",
    "head": "logits",
    "communication": "sums",
    "repacked": "repacked",
    "peak": "at most",
}


def explain_memory(source: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Print what a configuration needs, or what that of a run does, beside what the run took."""
    directory = RunDirectory.open(source) if source.is_dir() else None
    config = load_config(source if directory is None else directory.config, overrides)
    found, measured = needs(config), None if directory is None else _measured(directory)
    peaks = pool_peaks(found)
    if as_json:
        roles = [{**asdict(need), "peak_bytes": need.footprint.peak} for need in found]
        print(json.dumps({"roles": roles, "peak_bytes": peaks, "measured_bytes": measured}, indent=2))
    else:
        print("\n".join(_text(config, found, peaks, measured)))


def predicted(run: Path) -> int | None:
    """The most that tensors should have taken in a process of a run; None if its models or data are gone or not counted."""
    try:
        found = needs(load_config(RunDirectory.open(run).config, []))
    except UserError:
        return None
    counted = any(need.footprint.working for need in found)
    return max(pool_peaks(found).values()) if counted else None


def _measured(directory: RunDirectory) -> int | None:
    values = [record[MEASURED] for record in read_records(directory.metrics) if MEASURED in record]
    return round(max(values) * 1e9) if values else None


def _text(config: RunConfig, found: Sequence[Need], peaks: dict[str, int], measured: int | None) -> Iterator[str]:
    yield f"{config.algorithm}: bytes in the process that holds most of a role; FLOPs of a step in all processes together."
    yield ""
    names = [name for name in PARTS if any(_bytes(need, name) for need in found)]
    header = ("role", "pool", "mesh", "where", *(PARTS[name] for name in names), "FLOPs a step", "microbatch")
    yield from aligned([header, *(_row(need, names) for need in found)], right=[*header[4:-1]])
    yield ""
    for pool, peak in peaks.items():
        yield f"{pool}: at most {memory(peak)} in a process, when all roles hold what they hold and one of them works"
    if measured is not None:
        share = measured / max(peaks.values())
        yield f"measured: {memory(measured)}, {share:.2f} of that, by the process whose memory has grown most"
    yield from _notes(config, found)


def _row(need: Need, names: Sequence[str]) -> tuple[str, ...]:
    flops = f"{need.flops:.3g}" if need.flops else ""
    batch = need.microbatch
    size = "" if batch is None else f"{batch.rows} x {batch.width} tokens, {batch.actions} decide"
    return (need.role, need.pool, need.mesh, need.where, *(memory(_bytes(need, name)) for name in names), flops, size)


def _bytes(need: Need, name: str) -> int:
    size: Any = getattr(need.footprint, name)
    return int(size)


def _notes(config: RunConfig, found: Sequence[Need]) -> Iterator[str]:
    yield ""
    yield "Responses are taken to be as long as they may, and rows of a microbatch to be equally long. Not counted: what"
    yield "libraries take, 0.2 GB of it when training begins; text, reward functions, and freed memory that malloc keeps;"
    yield "and, while a checkpoint is written, a copy of the weights and the optimizer's states that the process writes."
    if any(not need.footprint.working for need in found):
        yield "Of networks for environments and of vLLM, activations and caches are not counted."
