"""Runs on Ray that lose workers, and end as if nothing had happened."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CARTPOLE, REVERSE, Outcome, saved_tensors, with_keys, written
from worker_faults import Fault, striking

from hybridflow import checkpoint
from hybridflow.telemetry.records import is_measured, read_records

pytestmark = pytest.mark.usefixtures("ray_cluster")

ONE, TWO = {"main": 1}, {"main": 2}
APART = {"learning": 2, "sampling": 1}
Train = Callable[..., Outcome]


def on_ray(data: dict[str, Any], pools: Mapping[str, int], **keys: Any) -> dict[str, Any]:
    """``data`` on these pools of the session's Ray; the second pool, if there is one, has the sampler."""
    roles = dict.fromkeys(("actor", "critic", "reward"), "learning") | {"sampler": "sampling"}
    if "critic" not in data:
        del roles["critic"]
    if "data" not in data:
        del roles["reward"]
    placed = {"placement__roles": roles} if len(pools) > 1 else {}
    keys = {"train__steps": 5, "checkpoint__every": 2, "recovery__deadline_s": 4.0, **placed, **keys}
    return with_keys(data, runtime__kind="ray", placement__pools=dict(pools), **keys)


def ended(run: Path) -> dict[str, torch.Tensor]:
    """All weights and optimizer states of the last checkpoint."""
    newest = checkpoint.latest(run / "checkpoints")
    folders = [path for path in sorted(newest.iterdir()) if path.is_dir()]
    return {f"{folder.name}/{name}": tensor for folder in folders for name, tensor in saved_tensors(folder).items()}


def measured(run: Path) -> list[dict[str, Any]]:
    """The records without what depends on the machine."""
    return [{k: v for k, v in r.items() if not is_measured(k)} for r in read_records(run / "metrics.jsonl")]


def check_same(run: Path, clean: Path) -> None:
    """Weights, optimizer states and records are those of the run that lost nobody."""
    expected, found = ended(clean), ended(run)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert measured(run) == measured(clean)
    assert len(measured(run)) == 6, "the evaluation before and five steps"


def recoveries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "recoveries.jsonl").read_text().splitlines()]


def pair(hybridflow: Train, folder: Path, config: dict[str, Any], *faults: Fault) -> tuple[Path, Path, Outcome]:
    """The same run with and without faults: their directories, and what the first printed. One process computes what the
    local runtime does."""
    for name in ("clean", "struck"):
        (folder / name).mkdir()
    alone = config["placement"]["pools"] == ONE
    whole = with_keys(config, runtime=None, placement=None, recovery=None) if alone else config
    assert hybridflow("train", written(folder / "clean", whole)).code == 0
    with striking(*faults) as struck:
        told = hybridflow("train", written(folder / "struck", config))
    assert told.code == 0, told.err
    assert struck == list(faults)
    return folder / "struck" / "run", folder / "clean" / "run", told


def test_a_worker_that_is_killed_in_an_update_costs_nothing_but_time(hybridflow: Train, tmp_path: Path) -> None:
    fault = Fault("critic.update", 3, [("main", 0)])
    run, clean, told = pair(hybridflow, tmp_path, on_ray(CARTPOLE, ONE), fault)
    check_same(run, clean)
    (event,) = recoveries(run)
    assert event["lost"].startswith("worker 0 of pool 'main' died")
    assert event["step"] <= event["after"] == 2
    assert "worker 0 of pool 'main' died" in told.out
    assert "back after step" in told.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "pools", "faults"),
    [
        (CARTPOLE, TWO, [Fault("actor.save", 2, [("main", 0)]), Fault("critic.update", 4, [("main", 0), ("main", 1)])]),
        (REVERSE, APART, [Fault("publish", 2, [("learning", 1)])]),
        (REVERSE, APART, [Fault("sampler.rollout", 3, [("sampling", 0)])]),
        (REVERSE, APART, [Fault("sampler.rollout", 7, [("sampling", 0)])]),
        (REVERSE, TWO, [Fault("actor.update", 2, [("main", 1)], signal.SIGSTOP)]),
        (REVERSE, TWO, [Fault("actor.update", 2, [("main", 1)]), Fault("mend", 1, [("main", 0)])]),
    ],
    ids=["saving, and a whole pool", "publish", "sampler of its own", "last evaluation", "stopped", "again after it"],
)
def test_runs_end_as_if_nobody_had_been_lost(
    data: dict[str, Any], pools: dict[str, int], faults: list[Fault], hybridflow: Train, tmp_path: Path
) -> None:
    run, clean, _ = pair(hybridflow, tmp_path, on_ray(data, pools), *faults)
    check_same(run, clean)
    assert len(recoveries(run)) == sum(fault.what != "mend" for fault in faults), "a loss meanwhile is part of it"


@pytest.mark.slow
def test_a_step_that_always_kills_its_workers_ends_the_run(hybridflow: Train, tmp_path: Path) -> None:
    faults = [Fault("actor.update", number, [("main", 1)]) for number in range(2, 9)]
    with striking(*faults) as struck:
        told = hybridflow("train", written(tmp_path, on_ray(REVERSE, TWO, recovery__max_restarts=2)))
    assert told.code == 1
    assert "it is the loss number 3 without a new step getting done (recovery.max_restarts)" in told.err
    assert len(struck) == 3
