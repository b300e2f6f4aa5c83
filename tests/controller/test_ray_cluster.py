"""A cluster of two nodes, both on this machine: pools over nodes, and rows that cross between them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_workers import Maker, role

from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.batch import Batch

pytestmark = pytest.mark.slow

ROW_BYTES, ROWS = 250_000, 20


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """In a program of its own, since one process can't join two clusters."""
    program = Path(__file__).with_name("ray_two_nodes.py")
    environment = os.environ | {"PYTHONPATH": str(program.parent), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    out: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return out


def test_each_pool_has_a_process_on_each_node_and_they_sum_together(told: dict[str, Any]) -> None:
    assert told["nodes"] == [2, 2]
    assert told["sums over blocks"] == [3.0, 3.0]


def test_results_are_those_of_one_process(told: dict[str, Any]) -> None:
    runtime = LocalRuntime()
    a, b = runtime.role(role("a", Maker)), runtime.role(role("b", Maker))
    out = b.shout(b.double(a.make(Batch({"sample_id": np.arange(9)}))))
    b.update(out)
    values, texts, total = told["values"]
    assert values == [row.tolist() for row in out["values"]]
    assert texts == out["prompt_text"].tolist()
    assert total == runtime.drain().metrics.values()["b/total"]


def test_only_the_rows_that_are_read_cross_between_nodes(told: dict[str, Any]) -> None:
    made, after_readers, after_driver, _ = told["stored"]
    assert told["sums"] == [[0.0, 62_500.0 * (ROWS - 1)], [62_500.0 * (ROWS - 1), 0.0]]
    assert told["moved"] == 4 * ROW_BYTES
    assert told["in_driver"] == [62_500.0 * row for row in range(ROWS)]
    assert made == pytest.approx(ROWS * ROW_BYTES, rel=0.01)
    assert after_readers - made < ROW_BYTES, "no node has got a copy of the other one's half"
    assert after_driver - made < ROW_BYTES


def test_who_reads_everything_gets_one_copy_for_the_node(told: dict[str, Any]) -> None:
    assert told["whole"] == [62_500.0 * row for row in np.repeat(np.arange(ROWS), 2)]
    assert told["stored"][3] == pytest.approx(2 * ROWS * ROW_BYTES, rel=0.01)


def test_a_pool_over_more_nodes_than_there_are_is_refused(told: dict[str, Any]) -> None:
    assert told["refused"] == (
        "placement.pools: wide = [1, 1, 1] needs 3 machines with so many slots each; Ray has machines with 2 + 2 CPU slots"
    )
