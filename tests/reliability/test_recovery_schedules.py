"""Runs on Ray whose rollouts begin early, and that lose workers: what was under way is not lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REVERSE, Outcome, with_keys, written
from worker_faults import Fault, striking

from hybridflow.commands.ledger import balance
from hybridflow.telemetry.records import read_records

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "fault",
    [
        Fault("sampler.rollout", 30, [("draw", 1)]),
        Fault("actor.update", 3, [("train", 0)]),
        Fault("publish", 3, [("train", 0)]),
    ],
    ids=["sampler", "learner", "publish"],
)
def test_samplers_that_are_never_done_go_on_after_a_loss(
    fault: Fault, hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    config = with_keys(
        REVERSE,
        runtime={"kind": "ray"},
        placement={"pools": {"train": 1, "draw": 2}, "roles": {"actor": "train", "reward": "train", "sampler": "draw"}},
        schedule={"kind": "async", "max_staleness": 2},
        train__steps=6,
        checkpoint__every=2,
        recovery__deadline_s=4.0,
    )
    with striking(fault) as struck:
        told = hybridflow("train", written(tmp_path, config))
    assert told.code == 0, told.err
    assert struck == [fault]
    run = tmp_path / "run"
    steps = [record["step"] for record in read_records(run / "metrics.jsonl")]
    assert steps == list(range(7))
    groups = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert sorted({sample["step"] for sample in groups}) == list(range(1, 7))
    accounts = balance(run / "ledger.sqlite")
    per_step = config["train"]["prompts_per_step"] * config["train"]["group_size"]
    assert not accounts.problems and accounts.counts["trained"] == 6 * per_step
