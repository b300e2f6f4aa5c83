"""The timeline: a Chrome trace that is loadable at any time."""

import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import CheckpointError
from hybridflow.core.metrics import Span
from hybridflow.telemetry.metrics import METRICS
from hybridflow.telemetry.timeline import Timeline, keep_events_until, read_timeline, time_split

SPANS = [
    Span("actor.rollout", "generate", 100.0, 2.0),
    Span("reward.score", "reward", 102.0, 0.5),
    Span("checkpoint", "checkpoint", 102.5, 0.25),
]


def test_a_finished_file_is_plain_json_with_a_row_for_each_role(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with Timeline(path, process="simulation") as timeline:
        timeline.add(1, SPANS)
        timeline.add(2, [Span("actor.update", "train", 103.0, 1.5)])
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = [event for event in events if event["ph"] == "X"]
    assert names == {1: "actor", 2: "reward", 3: "checkpoint"}
    assert events[0]["args"] == {"name": "simulation"}
    assert [(e["name"], e["cat"], e["ts"], e["dur"], e["tid"], e["args"]["step"]) for e in found] == [
        ("actor.rollout", "generate", 0.0, 2e6, 1, 1),
        ("reward.score", "reward", 2e6, 5e5, 2, 1),
        ("checkpoint", "checkpoint", 2.5e6, 2.5e5, 3, 1),
        ("actor.update", "train", 3e6, 1.5e6, 1, 2),
    ]
    assert read_timeline(path) == events


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_a_killed_run_leaves_a_readable_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    timeline.add(1, SPANS)
    written = path.read_text()
    path.write_text(written[: len(written) - cut])
    names = [event["name"] for event in read_timeline(path) if event["ph"] == "X"]
    assert names == [span.name for span in SPANS][: 3 if cut == 0 else 2]
    timeline.close()


def test_a_resumed_run_goes_on_after_the_last_event(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with Timeline(path) as timeline:
        timeline.add(1, SPANS)
        timeline.add(2, [Span("actor.update", "train", 103.0, 1.5)])
    keep_events_until(path, 1)
    with Timeline(path) as timeline:  # another process: its clock started anew
        timeline.add(2, [Span("critic.update", "train", 3.0, 1.0), Span("actor.update", "train", 4.0, 1.0)])
    last = json.loads(path.read_text())[-1]
    assert (last["name"], last["ts"], last["tid"]) == ("actor.update", 2.75e6 + 1e6, 1)


def drawn(path: Path) -> list[tuple[str, ...]]:
    """(process, row, name, category) of every event, by its names."""
    events = read_timeline(path)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(processes[e["pid"]], rows[e["pid"], e["tid"]], e["name"], e["cat"]) for e in events if e["ph"] == "X"]


def worker_spans(worker: str, start_s: float) -> list[Span]:
    """A call in a worker process."""
    return [
        Span("actor.update", "queue", start_s, 0.5, worker),
        Span("actor.update", "transfer", start_s + 0.5, 0.25, worker),
        Span("actor.update", "train", start_s + 0.75, 1.0, worker),
    ]


def test_each_pool_is_a_process_and_each_worker_a_row(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with Timeline(path) as timeline:
        timeline.add(1, [*SPANS, *worker_spans("main/1", 102.0), *worker_spans("main/0", 102.0)])
        timeline.add(2, [Span("critic.compute_values", "forward", 105.0, 1.0, "critics/0")])
    calls = [("actor.update: queue", "queue"), ("actor.update: transfer", "transfer"), ("actor.update", "train")]
    assert drawn(path)[3:] == [
        *(("pool main", "worker 1", *call) for call in calls),
        *(("pool main", "worker 0", *call) for call in calls),
        ("pool critics", "worker 0", "critic.compute_values", "forward"),
    ]
    events = json.loads(path.read_text())
    last = events[-1]
    assert (last["pid"], last["tid"], last["args"]) == (3, 1, {"step": 2, "role": "critic"})
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"].endswith("_sort_index")}
    assert order[2, 1] < order[2, 2] and order[1, 0] < order[2, 0] < order[3, 0]  # ranks by number, the driver first


def test_a_resumed_run_finds_its_pools_again(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with Timeline(path) as timeline:
        timeline.add(1, [*SPANS, *worker_spans("main/1", 102.0), *worker_spans("critics/0", 102.0)])
        timeline.add(2, worker_spans("main/1", 104.0))
    keep_events_until(path, 1)
    before = drawn(path)
    assert len(before) == 9
    with Timeline(path) as timeline:
        timeline.add(2, [*worker_spans("critics/0", 1.0), *worker_spans("critics/1", 1.0), *worker_spans("more/0", 1.0)])
    rows = [(process, row) for process, row, *_ in drawn(path)[len(before) :: 3]]
    assert rows == [("pool critics", "worker 0"), ("pool critics", "worker 1"), ("pool more", "worker 0")]
    events = read_timeline(path)
    named = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert len(named) == len(set(named))
    assert {e["pid"] for e in events} == {1, 2, 3, 4}
    assert events[-1]["ts"] == 3.75e6 + 0.75e6  # step 1 ended after 3.75 s


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.floats(0, 1e6), st.lists(st.floats(0, 10), min_size=2, max_size=8))
def test_neighbours_in_a_row_never_overlap(start_s: float, durations_s: list[float]) -> None:
    """A viewer drops events that do; sums of floating-point seconds miss each other by nanoseconds."""
    starts_s = [start_s + sum(durations_s[:index]) for index in range(len(durations_s))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        with Timeline(path) as timeline:
            timeline.add(1, [Span("a.b", "train", *times) for times in zip(starts_s, durations_s, strict=True)])
        events = [event for event in read_timeline(path) if event["ph"] == "X"]
    assert all(isinstance(e["ts"], int) and isinstance(e["dur"], int) and e["dur"] >= 0 for e in events)
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(events))
    total_us = sum(durations_s) * 1e6
    assert abs(events[-1]["ts"] + events[-1]["dur"] - total_us) < 2


def test_both_forms_of_the_format_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = {"name": "a", "ph": "X", "ts": 0, "dur": 1}
    path.write_text(json.dumps({"traceEvents": [event]}))
    assert read_timeline(path) == [event]
    path.write_text(json.dumps([event], indent=1))
    assert read_timeline(path) == [event]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1, 2]", '[\n{"ph"\n,{"ph": "X"}', "3"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"trace\.json: not a Chrome trace") as error:
        read_timeline(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such timeline"):
        read_timeline(tmp_path / "none.json")


def test_time_split_sums_by_kind() -> None:
    spans = [*SPANS, Span("estimator.compute", "compute", 0, 0.25), Span("actor.update", "train", 0, 1.0)]
    assert time_split(spans) == {"time/generate_s": 2.0, "time/reward_s": 0.5, "time/learn_s": 1.25}


def test_time_split_counts_the_first_worker_of_each_pool() -> None:
    driver = [Span("estimator.compute", "compute", 0.0, 0.25), Span("checkpoint.save", "checkpoint", 0.0, 9.0)]
    others = [*worker_spans("main/1", 0.0), *worker_spans("critics/10", 0.0)]
    spans = [*driver, *worker_spans("main/0", 0.0), *others, Span("critic.update", "train", 0.0, 2.0, "critics/0")]
    assert time_split(spans) == {"time/queue_s": 0.5, "time/transfer_s": 0.25, "time/learn_s": 3.25}
    assert time_split(spans).keys() <= METRICS.keys()
