"""The timeline of a run, real or simulated: a Chrome trace, which Perfetto and chrome://tracing open.

The file is a JSON array with one event a line. Two kinds of event, times in microseconds since the run began:

    {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "actor"}}
    {"name": "actor.update", "cat": "train", "ph": "X", "ts": 81.5, "dur": 12.0, "pid": 1, "tid": 2, "args": {"step": 3}}

``pid`` 1 is the process of the timeline ("run", "simulation" ...), and each role has one ``tid``, by first use.
Events are appended, so a killed run leaves an array without its end, which viewers and ``read_timeline`` accept.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hybridflow.core.errors import CheckpointError
from hybridflow.core.files import write_whole
from hybridflow.core.metrics import Span
from hybridflow.telemetry.records import to_json

__all__ = ["Timeline", "keep_events_until", "read_timeline", "time_split"]

Event = dict[str, Any]
PID = 1
SPLIT = {
    "generate": "time/generate_s",
    "reward": "time/reward_s",
    "forward": "time/forward_s",
    "train": "time/learn_s",
    "compute": "time/learn_s",
}


def time_split(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each part of a step, by the spans' kinds; other kinds (evaluation, checkpoint) belong to no step."""
    split: dict[str, float] = {}
    for span in spans:
        if span.kind in SPLIT:
            split[SPLIT[span.kind]] = split.get(SPLIT[span.kind], 0.0) + span.duration_s
    return split


class Timeline:
    """Appends spans to a file. An existing file is continued: new spans follow its last event."""

    def __init__(self, path: Path, process: str = "run") -> None:
        events = read_timeline(path) if path.exists() else []
        self._threads = {e["args"]["name"]: int(e["tid"]) for e in events if e["name"] == "thread_name"}
        self._origin_us = max((e["ts"] + e["dur"] for e in events if e["ph"] == "X"), default=0.0)
        self._start_s: float | None = None
        if not events:
            events = [{"name": "process_name", "ph": "M", "pid": PID, "tid": 0, "args": {"name": process}}]
        _write(path, events)
        self._file = path.open("a", encoding="utf-8")

    def add(self, step: int, spans: Sequence[Span]) -> None:
        """Append the spans of a step. A span called ``actor.update`` belongs to the row of the role ``actor``."""
        if self._start_s is None:
            self._start_s = min((span.start_s for span in spans), default=None)
        events = [event for span in spans for event in self._events(step, span)]
        self._file.write("".join(f",\n{to_json(event)}" for event in events))
        self._file.flush()

    def close(self) -> None:
        """End the array, so that the file is plain JSON."""
        self._file.write("\n]\n")
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _events(self, step: int, span: Span) -> list[Event]:
        role = span.name.rpartition(".")[0] or span.name
        new = role not in self._threads
        tid = self._threads.setdefault(role, len(self._threads) + 1)
        start_us = self._origin_us + (span.start_s - (self._start_s or 0.0)) * 1e6
        event: Event = {"name": span.name, "cat": span.kind, "ph": "X", "ts": round(start_us, 3)}
        event |= {"dur": round(span.duration_s * 1e6, 3), "pid": PID, "tid": tid, "args": {"step": step}}
        return [*(_naming(role, tid) if new else []), event]


def read_timeline(path: Path) -> list[Event]:
    """The events of a Chrome trace: an array, ended or not, or an object with ``traceEvents``.

    A damaged last line, which a kill in the middle of a write leaves, is left out. CheckpointError for another file.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such timeline") from None
    try:
        trace = json.loads(text)
    except ValueError:
        trace = _unfinished(text)
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(event, dict) and "ph" in event for event in events):
        raise CheckpointError(f"{path}: not a Chrome trace: expected a JSON array of events, one a line")
    return events


def keep_events_until(path: Path, step: int) -> None:
    """Drop the events of steps after ``step``; does nothing if there is no such file."""
    if path.exists():
        _write(path, [event for event in read_timeline(path) if event.get("args", {}).get("step", step) <= step])


def _naming(role: str, tid: int) -> list[Event]:
    shared = {"ph": "M", "pid": PID, "tid": tid}
    return [
        {"name": "thread_name", **shared, "args": {"name": role}},
        {"name": "thread_sort_index", **shared, "args": {"sort_index": tid}},
    ]


def _write(path: Path, events: Sequence[Event]) -> None:
    """An array without its end, so that more can be appended."""
    write_whole(path, ("[\n" + ",\n".join(map(to_json, events))).encode())


def _unfinished(text: str) -> list[Event] | None:
    """The events of an array without its end; None if a line other than the last is damaged."""
    first, *lines = text.splitlines() or [""]
    if first != "[":
        return None
    try:
        events = [json.loads(line.removesuffix(",")) for line in lines[:-1]]
    except ValueError:
        return None
    try:
        return [*events, *(json.loads(line) for line in lines[-1:])]
    except ValueError:
        return events
