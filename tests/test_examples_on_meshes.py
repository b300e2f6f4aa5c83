"""Every example that trains a language model trains it on a mesh, too, when only mesh and runtime are set."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome
from test_runs import records

from hybridflow.commands.rank import rank
from hybridflow.config import load_config
from hybridflow.config_sections import section_of
from hybridflow.launch import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parent.parent / "examples"
OF_TEXT = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.toml") if "[data]" in path.read_text())
SMALL = ("--train.steps", "2", "--train.prompts_per_step", "10", "--evaluation.limit", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wordy_model: Path) -> Path:
    """The examples, on a tiny model instead of SmolLM2, and what the runs before them leave."""
    folder = tmp_path_factory.mktemp("meshes")
    shutil.copytree(EXAMPLES, folder / "examples")
    for path in (folder / "examples").rglob("*.toml"):
        text = re.sub(r"^freeze = .*\n", "", path.read_text(), flags=re.MULTILINE)
        path.write_text(text.replace("smollm2-135m", str(wordy_model)))
    with contextlib.chdir(folder):
        examples = Path("examples")
        train(load_config(examples / "sft_addition.toml", SMALL))
        train(load_config(examples / "reverse.toml", ("--run_dir", "runs/half", *SMALL)))
        rank(Path("runs/half"), (), Path("runs/pairs.jsonl"), 40)
        rank(examples / "rlhf" / "sample.toml", SMALL, Path("runs/rlhf/pairs.jsonl"), 40)
        train(load_config(examples / "rlhf" / "reward_model.toml", SMALL))
    return folder


def test_there_are_examples_of_text() -> None:
    assert len(OF_TEXT) > 10


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("path", OF_TEXT, ids=str)
def test_an_example_runs_cut_by_its_mesh_lines_alone(
    hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, folder: Path, path: Path
) -> None:
    monkeypatch.chdir(folder)
    config = load_config("examples" / path)
    run_dir = folder / "runs" / "cut" / path.with_suffix("")
    ray = ["--runtime.kind", "ray", "--runtime.timeout_s", 100, "--run_dir", run_dir]
    small = [name for name, size in (config.placement.pools or {"main": 1}).items() if size == 1]
    pools = [word for name in small for word in (f"--placement.pools.{name}", 2)]
    cut = [(f"--{name}.mesh.tp", 2) for name in dict.fromkeys(map(section_of, config.model_sections))]
    outcome = hybridflow("train", "examples" / path, *ray, *pools, *(word for words in cut for word in words), *SMALL)
    assert outcome.code == 0, outcome.err
    last = records(run_dir)[-1]
    assert last["step"] == 2 and math.isfinite(last["grad_norm"])
