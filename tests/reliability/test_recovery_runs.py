"""Runs on Ray that lose workers, and end as if nothing had happened."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CARTPOLE, PENDULUM, REVERSE, Outcome, saved_tensors, with_keys, written
from safetensors.numpy import load_file
from test_runs import ENVIRONMENTS
from worker_faults import Fault, striking

from hybridflow import checkpoint
from hybridflow.commands.ledger import balance
from hybridflow.controller.shelf import located
from hybridflow.snapshots import Snapshots
from hybridflow.telemetry.records import is_measured, read_records

pytestmark = pytest.mark.usefixtures("ray_cluster")

ONE, TWO = {"main": 1}, {"main": 2}
APART = {"learning": 2, "sampling": 1}
ROWS = {"learning": 1, "sampling": 1, "rows": 2}
WORKERS = {"learning": 1, "sampling": 2}
OVERLAPPING = with_keys(ENVIRONMENTS["dqn-switches"], schedule__kind="one_step_off", replay__shards=2)
SAC = with_keys(PENDULUM, schedule__kind="one_step_off", replay__shards=2)
Train = Callable[..., Outcome]


def on_ray(data: dict[str, Any], pools: Mapping[str, int], **keys: Any) -> dict[str, Any]:
    """``data`` on these pools of the session's Ray; the second pool, if there is one, has the sampler, the third rows of a
    replay."""
    roles = {"actor": "learning", "sampler": "sampling"}
    roles |= {"critic": "learning"} if data["algorithm"] in ("ppo", "impala") and "data" not in data else {}
    roles |= {"reward": "learning"} if "data" in data else {}
    roles |= {"replay": "rows" if "rows" in pools else "learning"} if "replay" in data else {}
    placed = {"placement__roles": roles} if len(pools) > 1 else {}
    keys = {"train__steps": 5, "checkpoint__every": 2, "recovery__deadline_s": 4.0, **placed, **keys}
    return with_keys(data, runtime__kind="ray", placement__pools=dict(pools), **keys)


def ended(run: Path) -> dict[str, torch.Tensor]:
    """All weights and optimizer states of the last checkpoint."""
    newest = checkpoint.latest(run / "checkpoints")
    folders = [path for path in sorted(newest.iterdir()) if path.is_dir() and path.name != "replay"]
    return {f"{folder.name}/{name}": tensor for folder in folders for name, tensor in saved_tensors(folder).items()}


def measured(run: Path) -> list[dict[str, Any]]:
    """The records without what depends on the machine."""
    return [{k: v for k, v in r.items() if not is_measured(k)} for r in read_records(run / "metrics.jsonl")]


def replayed(run: Path) -> dict[str, list[Any]]:
    """What the last checkpoint has of a replay's rows, in the order of their numbers, whichever processes held them."""
    files = sorted((checkpoint.latest(run / "checkpoints") / "replay").glob("*.safetensors"))
    parts = [load_file(file) for file in files]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    order = np.argsort(arrays["numbers"].view(np.int64)[:, 0]) if arrays else []
    return {name: array[order].tolist() for name, array in arrays.items()}


def check_same(run: Path, clean: Path) -> None:
    """Weights, optimizer states, replayed rows, records and accounts are those of the run that lost nobody."""
    expected, found = ended(clean), ended(run)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert replayed(run) == replayed(clean)
    assert measured(run) == measured(clean)
    assert len(measured(run)) == 6, "the evaluation before and five steps"
    accounts = balance(run / "ledger.sqlite")
    assert (accounts.problems, accounts.counts) == ([], balance(clean / "ledger.sqlite").counts)


def recoveries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "recoveries.jsonl").read_text().splitlines()]


def pair(hybridflow: Train, folder: Path, config: dict[str, Any], *faults: Fault) -> tuple[Path, Path, Outcome]:
    """The same run with and without faults: their directories, and what the first printed. One process of each role
    computes what the local runtime does."""
    for name in ("clean", "struck"):
        (folder / name).mkdir()
    alone = all(size == 1 for pool, size in config["placement"]["pools"].items() if pool != "rows")
    whole = with_keys(config, runtime=None, placement=None, recovery=None) if alone else config
    whole = with_keys(whole, replay__shards=None) if alone and "replay" in config else whole
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
        (OVERLAPPING, ROWS, [Fault("sampler.rollout", 4, [("sampling", 0)]), Fault("replay.steps", 9, [("rows", 1)])]),
        pytest.param(
            SAC,
            ROWS,
            [Fault("actor.update", 2, [("learning", 0)]), Fault("sampler.rollout", 6, [("rows", 0)])],
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        "saving, and a whole pool",
        "publish",
        "sampler of its own",
        "last evaluation",
        "stopped",
        "again after it",
        "overlapping, its sampler and rows",
        "overlapping, its learner and rows",
    ],
)
def test_runs_end_as_if_nobody_had_been_lost(
    data: dict[str, Any], pools: dict[str, int], faults: list[Fault], hybridflow: Train, tmp_path: Path
) -> None:
    run, clean, _ = pair(hybridflow, tmp_path, on_ray(data, pools), *faults)
    check_same(run, clean)
    assert len(recoveries(run)) == sum(fault.what != "mend" for fault in faults), "a loss meanwhile is part of it"


@pytest.mark.slow
def test_what_could_not_be_completed_takes_no_memory(
    hybridflow: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor has been saved when the critic can't be."""
    left: list[list[str]] = []

    class Looking(Snapshots):
        def close(self) -> None:
            self.finish(wait=True)
            place = located(self._newest.path, self.runtime.nodes()[0]).parent  # type: ignore[union-attr]
            left.append(sorted(path.name for path in place.glob("snapshot-*")))
            super().close()

    monkeypatch.setattr("hybridflow.snapshots.Snapshots", Looking)
    monkeypatch.setattr("hybridflow.snapshots.SHARE", 1e9)  # one after each step
    with striking(Fault("actor.save", 2, [("main", 0)])) as struck:
        config = on_ray(CARTPOLE, ONE, train__steps=3, checkpoint__every=0)
        assert hybridflow("train", written(tmp_path, config)).code == 0
    assert len(struck) == 1
    assert [len(names) for names in left] == [1], left


@pytest.mark.slow
def test_a_step_that_always_kills_its_workers_ends_the_run(hybridflow: Train, tmp_path: Path) -> None:
    faults = [Fault("actor.update", number, [("main", 1)]) for number in range(2, 9)]
    with striking(*faults) as struck:
        told = hybridflow("train", written(tmp_path, on_ray(REVERSE, TWO, recovery__max_restarts=2)))
    assert told.code == 1
    assert "it is the loss number 3 without a new step getting done (recovery.max_restarts)" in told.err
    assert len(struck) == 3


WORKER, LEARNER = [("sampling", 1)], [("learning", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("impala-workers", [Fault("sampler.rollout", 6, WORKER), Fault("actor.update", 12, LEARNER)]),
        ("a3c-cartpole", [Fault("sampler.gradients", 6, WORKER)]),
        pytest.param(
            "dqn-workers",
            [Fault("sampler.rollout", 6, WORKER), Fault("actor.update", 12, LEARNER)],
            marks=pytest.mark.long,
        ),
    ],
)
def test_asynchronous_runs_go_on_and_no_step_of_an_environment_is_lost_or_made_twice(
    name: str, faults: list[Fault], hybridflow: Train, tmp_path: Path
) -> None:
    """What each worker finds on its turn is the machine's, so there is no run to compare with, but the accounts close."""
    data = with_keys(ENVIRONMENTS[name], environment__workers=2)
    with striking(*faults) as struck:
        told = hybridflow("train", written(tmp_path, on_ray(data, WORKERS, train__steps=12, checkpoint__every=4)))
    assert told.code == 0, told.err
    assert struck == faults
    run = tmp_path / "run"
    lost = [event["lost"].partition(" died")[0] for event in recoveries(run)]
    assert lost == ["worker 1 of pool 'sampling'", "worker 0 of pool 'learning'"][: len(faults)]
    assert [record["step"] for record in measured(run)] == [*range(13)]
    assert {record["worker"] for record in measured(run)[1:]} == {0, 1}
    assert balance(run / "ledger.sqlite").problems == []
    state = checkpoint.load(checkpoint.latest(run / "checkpoints")).state
    environment, pending = data["environment"], len(state["trainer"]["schedule"]["pending"])
    assert pending == 1
    rollout = environment["num_envs"] // 2 * environment["steps_per_rollout"]
    assert sum(slot["state"]["num_steps"] for slot in state["sampler"]) == (12 + pending) * rollout
