"""``hybridflow auction explain`` as its users see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Outcome

from hybridflow.planner.allocation import Bidder
from hybridflow.planner.auction import Auction, ending
from hybridflow.telemetry.records import append_record
from hybridflow.telemetry.rundir import RunDirectory

Program = Callable[..., Outcome]


def bidders(sim: float, learn: float) -> list[Bidder]:
    works = {"sim": sim, "learn": learn}
    return [Bidder(name, {units: work / units for units in range(1, 9)}) for name, work in works.items()]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Of three rounds: nothing changes, the work moves to the learner, nobody knows yet what came of the last."""
    made = RunDirectory.create(tmp_path / "run", "")
    auction = Auction({"slots": 8}, units={"sim": 6, "learn": 2})
    for step, (sim, learn, measured) in {10: (12, 4, None), 20: (4, 12, 6.5), 30: (4, 12, 2.25)}.items():
        append_record(made.auction, auction.round(step, bidders(sim, learn), 0.5, measured).record())
    return made


def test_the_table_and_the_data_say_the_same(hybridflow: Program, run: RunDirectory) -> None:
    code, out, err = hybridflow("auction", "explain", run.path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{run.path}: 3 rounds, after steps 10 to 30; 8 slots"
    assert [line.split() for line in lines[2:8]] == [
        ["10", "learn", "learn", "2", "2", "2.29", "0.286", "2", "1.71", "2", "6.5"],
        ["sim", "sim", "6", "2", "11.4", "1.43", "10", "0.571"],
        ["20", "learn", "learn", "2", "->", "6", "2", "11.4", "1.43", "10", "0.486", "2", "2.25", "4.25"],
        ["sim", "sim", "6", "->", "2", "2", "2.29", "0.286", "2", "1.28"],
        ["30", "learn", "learn", "6", "2", "11.4", "1.43", "10", lines[6].split()[8], "2"],
        ["sim", "sim", "2", "2", "2.29", "0.286", "2", lines[7].split()[7]],
    ]
    assert lines[-1] == "1 of 3 rounds changed who has what; 1 of them promised 4 s a step in all, and 4.25 s were gained"
    told = json.loads(hybridflow("auction", "explain", run.path, "--json").out)["rounds"]
    assert [(one["step"], one["realised_s"], one["gained_s"], one["promised_s"]) for one in told] == [
        (10, 6.5, None, None),
        (20, 2.25, 4.25, 4.0),
        (30, None, None, None),
    ]
    assert told[1]["bids"][0] | {"name": "learn", "units": 6, "fair": 4} == told[1]["bids"][0]
    append_record(run.auction, ending(40, 2.0))
    assert json.loads(hybridflow("auction", "explain", run.path, "--json").out)["rounds"][2]["realised_s"] == 2.0


def test_where_predictions_come_from_is_told(hybridflow: Program, run: RunDirectory) -> None:
    known = [replace(one, source=source) for one, source in zip(bidders(4, 12), ("this run", "constants"), strict=True)]
    append_record(run.auction, Auction({"slots": 8}).round(40, known).record())
    lines = hybridflow("auction", "explain", run.path).out.splitlines()
    assert "from" in lines[1] and lines[8].split()[4:6] == ["constants", "2"] and "  this run  " in lines[9]


def test_who_could_not_pay_is_marked(hybridflow: Program, run: RunDirectory) -> None:
    auction = Auction({"slots": 8}, budgets={"learn": 0.0})
    append_record(run.auction, auction.round(40, bidders(4, 12)).record())
    lines = hybridflow("auction", "explain", run.path).out.splitlines()
    assert [line.split()[:4] for line in lines if "*" in line.partition(";")[0]][-1] == ["40", "learn", "learn", "4*"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no such file; the run held no auction"),
        ("", "no round of an auction in it yet"),
        ('{"step": 1, "bids', "no round of an auction in it yet"),
        ('{"step": 1}\n[]\n{"step": 2}\n', "line 2 is no JSON object with a step: the file is damaged; delete the line"),
        ('{"step": 1, "bids": []}\n', "line 1 is no round of an auction (units: Field required); delete the line"),
    ],
)
def test_what_can_t_be_explained_is_told_in_one_line(
    hybridflow: Program, tmp_path: Path, text: str | None, told: str
) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    if text is not None:
        run.auction.write_text(text)
    assert hybridflow("auction", "explain", run.path) == Outcome(2, "", f"error: {run.auction}: {told}\n")


def test_a_damaged_measurement_and_a_folder_without_a_run(hybridflow: Program, run: RunDirectory, tmp_path: Path) -> None:
    append_record(run.auction, {"step": 40, "measured_s": "soon"})
    code, out, err = hybridflow("auction", "explain", run.path)
    assert (code, out) == (2, "") and "line 4 is no round of an auction" in err and err.count("\n") == 1
    (tmp_path / "empty").mkdir()
    for folder, told in (("none", "no such run directory"), ("empty", "not a run directory, it has no config.toml")):
        assert hybridflow("auction", "explain", tmp_path / folder) == (2, "", f"error: {tmp_path / folder}: {told}\n")


def test_what_a_resumed_run_does_again_is_recorded_once(run: RunDirectory) -> None:
    run.keep_until(20)
    assert [json.loads(line)["step"] for line in run.auction.read_text().splitlines()] == [10, 20]
