"""A run over several machines that loses one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CARTPOLE, Outcome, with_keys, written
from test_recovery_runs import check_same, on_ray, recoveries

pytestmark = pytest.mark.slow


def clean(hybridflow: Callable[..., Outcome], folder: Path) -> Path:
    folder.mkdir()
    assert hybridflow("train", written(folder, on_ray(CARTPOLE, {"main": 2}))).code == 0
    return folder / "run"


@pytest.mark.usefixtures("ray_cluster")
def test_a_lost_machine_is_replaced_and_its_part_of_the_state_comes_from_another(
    hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    """What a process learned on the lost machine was on no disk: no checkpoint was written before the loss."""
    config = with_keys(on_ray(CARTPOLE, {"main": 2}, checkpoint__every=5), placement__pools={"main": (1, 1)})
    program = Path(__file__).with_name("three_nodes.py")
    (tmp_path / "struck").mkdir()
    command = [sys.executable, str(program), str(written(tmp_path / "struck", config))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(program.parent), *sys.path))}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["code"] == 0
    assert told["left"] == []
    assert len(set(told["before"])) == len(set(told["after"])) == 2
    assert told["before"][0] in told["after"], "the machine that was left keeps its place"
    assert told["before"][1] not in told["after"]
    run = tmp_path / "struck" / "run"
    (event,) = recoveries(run)
    assert "worker 1 of pool 'main'" in event["lost"]
    check_same(run, clean(hybridflow, tmp_path / "clean"))
