"""``hybridflow chaos`` on real runs: they go on from every fault, and end as those without."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REVERSE, Outcome, with_keys, written

from hybridflow.chaos import trial
from hybridflow.chaos.kinds import KINDS
from hybridflow.commands.chaos import Request, planned
from hybridflow.config import load_config

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("chaos_cases", ROOT / "benchmarks" / "chaos.py")
assert SPEC is not None and SPEC.loader is not None
MATRIX = importlib.util.module_from_spec(SPEC)
sys.modules["chaos_cases"] = MATRIX
SPEC.loader.exec_module(MATRIX)

SOONER = "three nodes, environments"
"""a case that ``make test-all`` has, too"""
LOCAL = with_keys(REVERSE, train__steps=12, checkpoint__every=1, reward={"retries": 1, "workers": 1}, evaluation__limit=4)


def chaos(hybridflow: Callable[..., Outcome], folder: Path, config: dict[str, Any], *options: str) -> tuple[int, Any]:
    out = hybridflow("chaos", written(folder, config), "--json", *options)
    assert out.out, out.err
    return out.code, json.loads(out.out)


@pytest.mark.timeout(400)
def test_a_run_goes_on_from_faults_in_one_process(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    kinds = ["pause-driver", "kill-reward", "kill-driver-saving"]
    code, told = chaos(hybridflow, tmp_path, LOCAL, "--kinds", ",".join(kinds), "--seed", "2")
    assert code == 0, told
    assert {fault["kind"] for fault in told["faults"]} == set(kinds)
    by_kind = {fault["kind"]: fault for fault in told["faults"]}
    assert by_kind["pause-driver"]["detect_s"] is None
    assert by_kind["pause-driver"]["recover_s"] >= 3
    assert 0 <= by_kind["kill-driver-saving"]["detect_s"] < by_kind["kill-driver-saving"]["recover_s"]
    assert told["differences"] == told["left"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_does_not_end_as_the_one_without_faults_is_told(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LEFT_S", 3.0)
    (tmp_path / "leaving.py").write_text(
        "import subprocess\n"
        "started = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "def score(response): return float(len(response))\n"
    )
    # Without a retry, the call that its process dies at is a failed row.
    reward = {"functions": [f"{tmp_path / 'leaving.py'}:score"], "retries": 0, "workers": 1}
    code, told = chaos(hybridflow, tmp_path, with_keys(LOCAL, reward=reward), "--kinds", "kill-reward")
    assert code == 1
    assert told["differences"]
    assert any("sleep 60" in process for process in told["left"])
    assert [fault["problem"] for fault in told["faults"]] == [""], "it went on, with a row less"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SOONER else pytest.mark.long) for name in MATRIX.CASES]
)
def test_runs_go_on_from_every_fault_and_end_as_without(name: str, tmp_path: Path) -> None:
    code, told = MATRIX.run(name, tmp_path)
    case = MATRIX.CASES[name]
    assert [fault["problem"] for fault in told["faults"]] == [""] * case.faults
    assert told["left"] == []
    assert not told["differences"], "bit for bit, or None: asynchronous runs are not compared"
    assert (told["differences"] is None) == ("asynchronous" in name)
    assert told["balance"]["problems"] == []
    assert code == 0


def test_the_matrix_has_sixty_faults_of_every_kind_on_all_runtimes(tmp_path: Path) -> None:
    for name, case in MATRIX.CASES.items():
        request = Request(MATRIX.written(name, tmp_path), (), 1, case.faults, case.kinds, case.nodes, None)
        assert planned(request, load_config(request.config, [])) == list(case.kinds)
    assert sum(case.faults for case in MATRIX.CASES.values()) >= 60
    assert {kind for case in MATRIX.CASES.values() for kind in case.kinds} == KINDS.keys()
    assert all(case.faults >= len(case.kinds) for case in MATRIX.CASES.values()), "each kind at least once"
    assert {case.nodes for case in MATRIX.CASES.values()} == {0, 3}
