"""The timeline of a run, real or simulated: a Chrome trace, which Perfetto and chrome://tracing open.

The file is a JSON array with one event a line. Two kinds of event, times in whole microseconds since the run began:

    {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "actor"}}
    {"name": "actor.update", "cat": "train", "ph": "X", "ts": 81, "dur": 12, "pid": 1, "tid": 2, "args": {"step": 3}}

``pid`` 1 is the driver ("run", "simulation" ...), where each role has one ``tid``, by first use. Each pool is a process of
its own ("pool main"), with a ``tid`` for each of its workers ("worker 0"); before a worker's "actor.update" stand
"actor.update: queue" and "actor.update: transfer", and its ``args`` name the role too. Viewers drop an event that overlaps
its neighbour in a row, by however little: starts are rounded up and ends down.
Events are appended, so a killed run leaves an array without its end, which viewers and ``read_timeline`` accept.
"""

import json
import math
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
SPLIT = {
    "generate": "time/generate_s",
    "reward": "time/reward_s",
    "forward": "time/forward_s",
    "train": "time/learn_s",
    "compute": "time/learn_s",
    "queue": "time/queue_s",
    "transfer": "time/transfer_s",
}
WAITS = ("queue", "transfer")


def time_split(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each part of a step, by the spans' kinds; other kinds (evaluation, checkpoint) belong to no step.

    The workers of a pool run the same calls, so the first one stands for all; pools that run side by side add up.
    """
    split: dict[str, float] = {}
    for span in spans:
        if span.kind in SPLIT and span.worker.rpartition("/")[2] in ("", "0"):
            split[SPLIT[span.kind]] = split.get(SPLIT[span.kind], 0.0) + span.duration_s
    return split


class Timeline:
    """Appends spans to a file. An existing file is continued: new spans follow its last event."""

    def __init__(self, path: Path, process: str = "run") -> None:
        self._path, self._process_name = path, process
        self.open()

    def open(self) -> None:
        """Go on behind the last event of the file, also after ``close``."""
        path, process = self._path, self._process_name
        events = read_timeline(path) if path.exists() else []
        self._pids = {e["args"]["name"]: int(e["pid"]) for e in events if e["name"] == "process_name"}
        self._tids = {(int(e["pid"]), e["args"]["name"]): int(e["tid"]) for e in events if e["name"] == "thread_name"}
        self._driver = next(iter(self._pids), process)
        self._origin_us = max((e["ts"] + e["dur"] for e in events if e["ph"] == "X"), default=0)
        self._start_s: float | None = None
        _write(path, events or self._process(self._driver))
        self._file = path.open("a", encoding="utf-8")

    def add(self, step: int, spans: Sequence[Span]) -> None:
        """Append the spans of a step. In the driver, ``actor.update`` belongs to the row of the role ``actor``."""
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
        naming, pid, tid = self._row(role, span.worker)
        start_us = self._origin_us + (span.start_s - (self._start_s or 0.0)) * 1e6
        start, end = math.ceil(round(start_us, 3)), math.floor(round(start_us + span.duration_s * 1e6, 3))
        name = f"{span.name}: {span.kind}" if span.kind in WAITS else span.name
        args = {"step": step, "role": role} if span.worker else {"step": step}
        event: Event = {"name": name, "cat": span.kind, "ph": "X", "ts": start, "dur": max(end - start, 0)}
        return [*naming, event | {"pid": pid, "tid": tid, "args": args}]

    def _row(self, role: str, worker: str) -> tuple[list[Event], int, int]:
        """(events that name the row, where it is new; pid, tid)."""
        pool, _, rank = worker.rpartition("/")
        process, thread = (f"pool {pool}", f"worker {rank}") if worker else (self._driver, role)
        naming = [] if process in self._pids else self._process(process)
        pid = self._pids[process]
        if (pid, thread) not in self._tids:
            tid = int(rank) + 1 if worker else sum(other == pid for other, _ in self._tids) + 1
            self._tids[pid, thread] = tid
            naming += _naming("thread", pid, tid, thread, tid)
        return naming, pid, self._tids[pid, thread]

    def _process(self, name: str) -> list[Event]:
        pid = self._pids[name] = len(self._pids) + 1
        return _naming("process", pid, 0, name, pid)


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


def _naming(what: str, pid: int, tid: int, name: str, order: int) -> list[Event]:
    shared = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {"name": f"{what}_name", **shared, "args": {"name": name}},
        {"name": f"{what}_sort_index", **shared, "args": {"sort_index": order}},
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
