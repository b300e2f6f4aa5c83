"""A run takes no more of the machine as it goes on: see benchmarks/soak.py, of which this is a short one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS, MARGIN_MB = 200, 12.0
SPARE = {"handles": 2, "threads": 2, "objects": 0}
"""gRPC's pool, below Ray, has one or two threads more now and then; what leaks does so with each step or checkpoint"""


@pytest.mark.parametrize("kind", ["local", "ray"])
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_nothing_grows(kind: str) -> None:
    """In a program of its own: what other tests have left behind in this one comes and goes."""
    program = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    told = subprocess.run([sys.executable, program, kind, str(STEPS)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    uses = [json.loads(line) for line in told.stdout.splitlines()]
    workers = [use for use in uses if "Process" in use["process"] or use["process"] == "driver"]
    assert len(workers) == (1 if kind == "local" else 3), uses
    for use in workers:
        for what, spare in SPARE.items():
            first, second = use.get(what, (0, 0))
            assert second <= first + spare * (kind == "ray"), f"{what} grow: {use}"
        first, second = use["rss_mb"]
        assert second - first < MARGIN_MB, f"memory grows: {use}"
