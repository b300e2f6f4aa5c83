"""The planner, with the constants it has, against the bars of the HybridFlow paper: what docs/planner.md says of it."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path

import pytest

from hybridflow.planner.cost import Efficiency

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "planner.py"


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_published_bars_are_retold(real_model: Path) -> None:
    bench = runpy.run_path(str(BENCHMARK))
    bars, planner = bench["bars"](), bench["Planner"](Efficiency())
    assert len(bars) == 27
    mappings = bench["picked"](bars, planner.results(bench["searched"](bars)))
    predicted = {bar: planner.tokens_per_second(bar, mappings) for bar in bars}
    found = bench["scores"](predicted)
    assert found.median <= 0.06 and found.worst <= 0.25
    assert found.right / found.pairs >= 0.85
    assert found.regret_mean <= 0.015 and found.regret_worst <= 0.08
    moves = [abs(planner.transition(one) / one.seconds - 1) for one in bench["transitions"]()]
    assert statistics.median(moves) <= 0.12 and max(moves) <= 0.25
    # a fifth more of each speed is felt
    faster = bench["Planner"](Efficiency(compute=Efficiency().compute * 1.2))
    assert all(faster.tokens_per_second(bar, mappings) > 1.01 * predicted[bar] for bar in bars)
