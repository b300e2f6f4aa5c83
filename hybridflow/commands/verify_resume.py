"""``hybridflow verify-resume CONFIG``: whether a configuration resumes exactly, shown on itself.

    whole      steps 1 to M in one process
    halves     steps 1 to N in one process, N + 1 to M in another, from the checkpoint

Compared, bit for bit: all that the last checkpoints have (weights, optimizer, the loop, buffers), tensor by tensor, and
every metric of every step, but for what measures the machine.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from hybridflow import checkpoint
from hybridflow.config import RunConfig
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import UserError, WorkerError
from hybridflow.launch import train
from hybridflow.telemetry.records import is_measured, read_records

__all__ = ["Compared", "compare", "verify_resume"]

MEASURED = {"auction"}
"""states that come of how long calls took"""


class Compared(NamedTuple):
    """``what`` was compared, how many parts it has, and the first that differs, "" if none does."""

    what: str
    num_parts: int
    differs: str


def verify_resume(config: RunConfig, at: int, steps: int) -> int:
    """Train both ways and print what is equal; 1 if not all of it is."""
    if not 0 < at < steps:
        raise UserError(f"verify-resume: --at {at} --steps {steps}: expected 0 < at < steps")
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
        whole, halves = Path(folder) / "whole", Path(folder) / "halves"
        for run_dir, resume, until in ((whole, None, steps), (halves, None, at), (halves, "latest", steps)):
            _in_a_process_of_its_own(_short(config, run_dir, steps), resume, until)
        found = compare(whole, halves)
        learned = read_records(whole / "metrics.jsonl")[-1].get("policy_version", 0) > 0
    table = Table("compared", "parts", "equal")
    for what, count, differs in found:
        table.add_row(what, f"{count:,}", "yes" if not differs else f"no: {differs}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    first = next((f"{what}, {differs}" for what, _, differs in found if differs), "")
    if not learned:
        console.print("nothing was learned in so few steps: the buffer was warming up; raise --steps", style="yellow")
    told = f"steps 1 to {at}, and {at + 1} to {steps} in another process"
    if first:
        console.print(f"not exact: {told} differ from {steps} steps without a break, first in {first}", style="red")
        return 1
    console.print(f"exact: {told} are {steps} steps without a break, bit for bit", style="green")
    return 0


def _short(config: RunConfig, run_dir: Path, steps: int) -> RunConfig:
    """The same run of so many steps, which saves its last one."""
    train = config.train.model_copy(update={"steps": steps})
    saving = config.checkpoint.model_copy(update={"every": steps, "keep": 2, "keep_best": None, "export_every": 0})
    return config.model_copy(update={"train": train, "checkpoint": saving, "run_dir": str(run_dir)})


def _in_a_process_of_its_own(config: RunConfig, resume: str | None, until: int) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(config, resume, until))
    process.start()
    process.join()
    if process.exitcode:
        part = f"the run {'until' if resume is None else 'resumed until'} step {until}"
        raise WorkerError(f"verify-resume: {part} ended with exit code {process.exitcode}; its message is above")


def _train(config: RunConfig, resume: str | None, until: int) -> None:
    raise SystemExit(train(config, resume, until))


def compare(one: Path, other: Path) -> list[Compared]:
    """Two run directories: the metrics of all steps, and each part of the newest checkpoints."""
    paths = [checkpoint.latest(run / "checkpoints") for run in (one, other)]
    states = [checkpoint.load(path) for path in paths]
    found = [_metrics(*(read_records(run / "metrics.jsonl") for run in (one, other)))]
    for name in sorted((states[0].state.keys() | states[1].state.keys()) - MEASURED):
        values = [dict(_leaves(saved.state.get(name, {}))) for saved in states]
        found.append(_compared(f"state of {'the loop' if name == 'trainer' else name}", *values))
    for role in sorted(states[0].files.keys() | states[1].files.keys()):
        found.append(_compared(f"tensors of {role}", *(_tensors(path / role) for path in paths)))
    return found


def _metrics(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Compared:
    values = [
        {
            f"step {record['step']}: {name}": value
            for record in records
            for name, value in record.items()
            if not is_measured(name)
        }
        for records in (one, other)
    ]
    return _compared("metrics", *values)


def _compared(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Compared:
    names = [*one, *(name for name in other if name not in one)]
    for name in names:
        if name not in one or name not in other:
            return Compared(what, len(names), f"{name} is in one of them alone")
        if not _same(one[name], other[name]):
            return Compared(what, len(names), name)
    return Compared(what, len(names), "")


def _same(one: Any, other: Any) -> bool:
    """Bit for bit: NaN is itself, and 0.0 isn't -0.0."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and (one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes())
    return type(one) is type(other) and repr(one) == repr(other)


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and array of a state, by its path."""
    match value:
        case Mapping():
            for name, item in value.items():
                yield from _leaves(item, f"{where}.{name}" if where else str(name))
        case list() | tuple():
            for place, item in enumerate(value):
                yield from _leaves(item, f"{where}[{place}]")
        case Batch():
            yield from _leaves(value.columns, where)
        case Ragged():
            yield from _leaves({"values": value.values, "lengths": value.lengths}, where)
        case _:
            yield where, value


def _tensors(folder: Path) -> dict[str, str]:
    """What ranks wrote, by name and file: what identifies it."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*")):
        if path.suffix != ".safetensors":
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                kind = f"{tensor.dtype} {list(tensor.shape)}"
                found[f"{name} ({path.name})"] = f"{kind} {hashlib.sha256(data).hexdigest()}"
    return found
