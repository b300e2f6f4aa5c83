"""``hybridflow plan RUN --compare``: a real run beside its prediction, and what a timeline of several workers says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.build_compare import measured, observed, predicted
from hybridflow.cli import main
from hybridflow.core.errors import ConfigError
from hybridflow.core.metrics import Span
from hybridflow.planner.cluster import parse_cluster
from hybridflow.planner.cost import Efficiency
from hybridflow.planner.hardware import Probe, fingerprint, save_probe
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import Timeline

TASKS = ["sampler.rollout", "reward.score", "reference.score", "estimator.compute", "actor.update"]
CONFIG = """
algorithm = "grpo"
run_dir = "{run}"
threads = 1
[kl]
coef = 0.1
[actor.fresh]
hidden_size = 64
num_layers = 2
num_heads = 4
[data]
task = "reverse"
[generation]
max_new_tokens = 8
[train]
steps = {steps}
prompts_per_step = 8
group_size = 4
[evaluation]
limit = 1
"""
SPLIT = """
[runtime]
kind = "ray"
[placement.pools]
main = 1
own = 1
[placement.roles]
sampler = "own"
actor = "main"
reference = "main"
reward = "main"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of five steps."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text(CONFIG.format(run=folder / "run", steps=5))
    assert main(["train", str(folder / "run.toml")]) == 0
    return folder / "run"


@pytest.fixture
def probed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(home))
    machine = fingerprint()
    rates = {1: 1e11, machine.cores: 2e11}
    save_probe(
        Probe(
            machine,
            {"float32": rates, "bfloat16": rates},
            {1: 2e10, machine.cores: 3e10},
            3e10,
            24e9,
            1e9,
            1e-4,
            {1: 1e-4, machine.cores: 2e-4},
        )
    )


@pytest.mark.usefixtures("probed")
def test_every_task_of_a_run_is_predicted_and_a_fit_comes_near(
    run: Path, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert main(["plan", str(run), "--compare"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[3:9]] == [*TASKS, "step"]
    assert "where a fit would start" in text
    assert main(["plan", "--compare", str(run), "--calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 4
    assert [task["task"] for task in found["tasks"]] == TASKS
    assert all(task["measured_s"] > 0 and task["predicted_s"] > 0 for task in found["tasks"])
    assert sum(task["measured_s"] for task in found["tasks"]) <= 1.2 * found["measured_s"]
    assert found["predicted_s"] == pytest.approx(found["measured_s"], rel=0.3)
    assert not found["constants"]["network"]["determined"]
    assert main(["plan", str(run), "--compare"]) == 0
    text = capsys.readouterr().out
    assert f"as fitted to {run}" in text


@pytest.mark.usefixtures("probed")
def test_plans_for_this_machine_use_what_was_fitted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run), "--compare", "--calibrate", "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)["predicted_s"]
    assert main(["plan", str(run / "config.toml"), "--cluster", "here:1x1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned
    assert fitted > 0


def test_mistakes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(tmp_path))
    for arguments, told in (
        ([str(run), "--compare"], "run: hybridflow probe"),
        ([str(run / "config.toml"), "--explain-memory", "--calibrate"], "give a run directory and --compare too"),
        ([str(run / "config.toml"), "--cluster", "cpu:1x1", "--calibrate"], "give a run directory and --compare too"),
        ([str(run), "--compare", "--train.steps", "9"], "leave that out"),
        ([str(tmp_path), "--compare"], "not a run directory"),
    ):
        assert main(["plan", *arguments]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1


def record(directory: RunDirectory, step: int, seconds: float) -> None:
    with directory.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "time/step_s": seconds, "response_length/mean": 4.0 + step}) + "\n")


def span(name: str, kind: str, seconds: float, worker: str) -> Span:
    return Span(name, kind, 0.0, seconds, worker)


def test_a_task_takes_what_its_slowest_worker_does_and_pulls_but_not_what_it_waits(run: Path, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", (run / "config.toml").read_text())
    with Timeline(directory.timeline) as timeline:
        for step, seconds in enumerate((9.0, 1.0, 2.0, 4.0), 1):
            record(directory, step, 10 * seconds)
            spans = [span("actor.update", "train", share * seconds, f"main/{rank}") for rank, share in enumerate((1, 2))]
            spans += [span("actor.update", "queue", 100.0, "main/0"), span("actor.update", "transfer", 1.0, "main/1")]
            spans += [span("reward.score", "reward", 0.25, "main/0"), span("reward.score", "reward", 0.5, "main/0")]
            timeline.add(step, spans)
    found = measured(directory.path)
    assert (found.steps, found.step_s) == (3, 20.0)
    assert found.calls == pytest.approx({"actor.update": 5.0, "reward.score": 0.75})
    assert (found.prompt, found.response, found.deviation) == (None, 7.0, 0.0)


def test_weights_that_are_published_are_apart_from_the_task_that_waits(run: Path, tmp_path: Path) -> None:
    """Buckets overlap, so from the first to the last of them; both what is measured and what is predicted."""
    split = CONFIG.format(run=tmp_path / "run", steps=5) + SPLIT
    directory = RunDirectory.create(tmp_path / "run", split)
    with Timeline(directory.timeline) as timeline:
        for step in (1, 2, 3):
            record(directory, step, 8.0)
            spans = [Span("actor.weights", "transfer", 10.0 * step + start, 2.0, "main/0") for start in (0.0, 2.0)]
            spans += [Span("sampler.weights", "transfer", 10.0 * step + start, 1.0, "own/0") for start in (2.0, 4.0)]
            timeline.add(step, [*spans, Span("sampler.rollout", "generate", 10.0 * step + 5, 1.0, "own/0")])
    found = measured(directory.path)
    assert found.calls["sampler.weights"] == pytest.approx(5.0)
    seen = observed(found, parse_cluster("cpu:1x2"))
    assert seen.seconds == pytest.approx({"sampler.rollout": 1.0, "sampler.weights": 5.0})
    slow, fast = (predicted(seen, replace(Efficiency(), copy=copy)) for copy in (1e3, 1e12))
    assert [*slow.estimates][-1] == "sampler.weights" and "transition" not in slow.estimates["sampler.rollout"].parts
    change = slow.estimates["sampler.weights"].seconds - fast.estimates["sampler.weights"].seconds
    assert change > 10 and slow.step_s - fast.step_s == pytest.approx(change)
    assert slow.estimates["sampler.rollout"] == fast.estimates["sampler.rollout"]


def test_a_run_needs_steps_to_compare_with(run: Path, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", (run / "config.toml").read_text())
    Timeline(directory.timeline).close()
    for step in (1, 2):
        record(directory, step, 1.0)
    with pytest.raises(ConfigError, match="1 steps after the first; expected 2 or more"):
        measured(directory.path)
