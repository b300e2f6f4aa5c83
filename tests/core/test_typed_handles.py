"""A type checker sees a wrong verb, a wrong number of arguments and a wrong part of an algorithm, before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hybridflow

PROGRAM = """
from hybridflow.core.batch import Batch
from hybridflow.core.roles import Critic, Fn, Role, Runtime
from hybridflow.workers.estimator import EstimatorWorker
from hybridflow.workers.learner import Learner


def program(runtime: Runtime, batch: Batch, loss: Fn) -> Critic:
    critic = runtime.role(Role("critic", Learner))
    batch = critic.compute_values(batch)
    critic.update(batch, loss)
    {line}
    return critic
"""


def checked(folder: Path, line: str) -> str:
    (folder / "program.py").write_text(PROGRAM.replace("{line}", line))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        "--config-file",
        "pyproject.toml",
        str(folder / "program.py"),
    ]
    root = Path(hybridflow.__file__).parent.parent
    out = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300, check=False).stdout
    return "".join(line for line in out.splitlines(True) if ": note:" not in line)


@pytest.mark.timeout(300)
def test_handles_are_typed(tmp_path: Path) -> None:
    assert checked(tmp_path, "pass") == ""
    wrong = {
        "critic.compute_value(batch)": '"Learner" has no attribute "compute_value"',
        "critic.update(batch)": 'Too few arguments for "update" of "Learner"',
        "name: str = critic.num_parameters()": "Incompatible types in assignment",
        'runtime.role(Role("e", EstimatorWorker)).compute_values(batch)': '"EstimatorWorker" has no attribute',
        "estimator: Critic = runtime.role(Role('e', EstimatorWorker))": "Incompatible types in assignment",
    }
    told = checked(tmp_path, "\n    ".join(wrong)).splitlines()
    assert len(told) == len(wrong)
    for line, message in zip(told, wrong.values(), strict=True):
        assert message in line
