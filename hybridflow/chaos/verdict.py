"""Whether a run under faults ended as the one without: checkpoint, metrics and the balance of samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.telemetry.records import is_measured, read_records

__all__ = ["differences"]


def differences(clean: Path, other: Path) -> list[str]:
    """Between two run directories, a line each; none if they are equal bit for bit."""
    return [*_of_checkpoints(clean, other), *_of_metrics(clean, other)]


def _of_checkpoints(clean: Path, other: Path) -> Iterator[str]:
    """Of the newest, every file: weights, optimizer, data, buffer and the loop's own state."""
    (name, expected), (other_name, found) = _newest(clean), _newest(other)
    if name != other_name:
        yield f"the last checkpoint is {other_name or 'missing'}, not {name}"
        return
    for file in sorted(expected.keys() | found.keys()):
        if expected.get(file) != found.get(file):
            yield f"{name}/{file} differs"


def _newest(run: Path) -> tuple[str, dict[str, Any]]:
    manifests = sorted(run.glob("checkpoints/step-*/manifest.json"))
    return (manifests[-1].parent.name, json.loads(manifests[-1].read_text())["files"]) if manifests else ("", {})


def _of_metrics(clean: Path, other: Path) -> Iterator[str]:
    expected, found = (read_records(run / "metrics.jsonl") for run in (clean, other))
    steps, others = [record["step"] for record in expected], [record["step"] for record in found]
    if steps != others:
        yield f"metrics of {len(others)} steps, not {len(steps)}"
        return
    for one, two in zip(expected, found, strict=True):
        learned = [name for name in sorted(one.keys() | two.keys()) if not is_measured(name)]
        if names := [name for name in learned if one.get(name) != two.get(name)]:
            yield f"step {one['step']}: {', '.join(names[:3])} differ"
            return
