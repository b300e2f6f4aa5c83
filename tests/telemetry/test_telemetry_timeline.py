"""The timeline: a Chrome trace that is loadable at any time."""

import json
from pathlib import Path

import pytest

from hybridflow.core.errors import CheckpointError
from hybridflow.core.metrics import Span
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
    drawn = [event for event in events if event["ph"] == "X"]
    assert names == {1: "actor", 2: "reward", 3: "checkpoint"}
    assert events[0]["args"] == {"name": "simulation"}
    assert [(e["name"], e["cat"], e["ts"], e["dur"], e["tid"], e["args"]["step"]) for e in drawn] == [
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
    drawn = [event["name"] for event in read_timeline(path) if event["ph"] == "X"]
    assert drawn == [span.name for span in SPANS][: 3 if cut == 0 else 2]
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
