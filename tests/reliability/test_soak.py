"""A run takes no more of the machine as it goes on: see benchmarks/soak.py, of which this is a short one."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

STEPS, EVERY, MARGIN_MB = 200, 10, 12.0
SPARE = {"handles": 2, "threads": 2, "objects": 0}
"""gRPC's pool, below Ray, has one or two threads more now and then; what leaks does so with each step or checkpoint"""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["local", "ray"])
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_nothing_grows(bench: ModuleType, tmp_path: Path, kind: str) -> None:
    uses = bench.soak(kind, STEPS, EVERY, tmp_path)
    workers = [use for use in uses if "Process" in use.name or use.name == "driver"]
    assert len(workers) == (1 if kind == "local" else 3), [use.name for use in uses]
    for use in workers:
        for what, spare in SPARE.items():
            if values := getattr(use, what):
                first, second = bench.halves(values)
                assert max(second) <= max(first) + spare * (kind == "ray"), f"{what} of {use.name} grow: {values}"
        first, second = (statistics.median(half) for half in bench.halves(use.rss_mb))
        assert second - first < MARGIN_MB, f"memory of {use.name} grows: {use.rss_mb}"
