"""What docs/auction.md says."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_its_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "auction.md").read_text(), re.DOTALL)
    exec(program, {})
    assert f"# {capsys.readouterr().out}" == program[program.rindex("# ") :]


@pytest.mark.slow
def test_resources_follow_the_work_in_its_table() -> None:
    """On slots, in shorter phases: nearly as good as the best split of each phase, and better than any static one."""
    bench = runpy.run_path(str(ROOT / "benchmarks" / "auction.py"))
    rows = {row.policy: row for row in bench["rows_of"](bench["slots"](60), seeds=1)}
    assert rows["best static split"].time == 1.0 <= rows["even split"].time
    auction = rows["auction"]
    assert auction.time < 0.8 and min(auction.phases) > 0.9 and auction.switches < 5
    assert auction.utilisation["slots"] > 1.3 * rows["best static split"].utilisation["slots"]


@pytest.mark.slow
def test_curves_of_models_are_the_planner_s() -> None:
    """On 128 machines: every model has a number of machines on which it fits, and more of them are never much slower."""
    bench = runpy.run_path(str(ROOT / "benchmarks" / "auction.py"))
    work = bench["nodes"](1)
    assert sum(work.capacity.values()) == 128 and len(work.phases[0].bidders) == 10
    for phase in work.phases:
        for bidder in phase.bidders:
            seconds = [bidder.seconds[units] for units in bidder.levels]
            assert len(seconds) > 8 and all(later < 1.02 * earlier for earlier, later in itertools.pairwise(seconds))
