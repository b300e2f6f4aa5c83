"""Files of records: one JSON object a line, each with the key ``step``.

JSON has no NaN and no infinity: a number that is not finite is written as null.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.core.errors import CheckpointError
from hybridflow.core.files import write_whole

__all__ = ["append_record", "is_measured", "keep_until", "read_records", "to_json"]

MACHINE = ("time/", "memory/", "workers/", "moved/", "driver/")
SECONDS = "_s"
"""ends what is in seconds, or per second"""


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of nested mappings, sequences, numbers (numpy's too) and strings."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """One line more, handed to the operating system at once."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(to_json(record) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, [] if there is no such file.

    A damaged last line is left out: it's what a kill in the middle of a write leaves. Another damaged line is a
    CheckpointError.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise CheckpointError(
                f"{path}: line {number} is no JSON object with a step: the file is damaged; delete the line"
            )
    return records


def is_measured(name: str) -> bool:
    """Whether a metric is of the machine (time, memory, traffic), so that equal runs differ in it."""
    return name.startswith(MACHINE) or name.endswith(SECONDS)


def keep_until(path: Path, step: int) -> None:
    """Drop the records after ``step`` and a damaged last line; the lines that stay keep their bytes."""
    read_records(path)  # refuses a file that is damaged elsewhere
    if path.exists():
        parsed = [(line, _parse(line)) for line in path.read_bytes().splitlines()]
        kept = [line + b"\n" for line, record in parsed if record is not None and record["step"] <= step]
        write_whole(path, b"".join(kept))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value
