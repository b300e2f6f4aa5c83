"""``hybridflow verify-resume`` proves that a run resumes exactly, and finds what doesn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CARTPOLE, REVERSE, with_keys, written
from test_recovery_runs import TWO, on_ray
from test_runs import ENVIRONMENTS, run

from hybridflow.commands import verify_resume
from hybridflow.commands.verify_resume import compare
from hybridflow.telemetry.records import is_measured


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(config: Any, resume: str | None, until: int) -> None:
        assert verify_resume.train(config, resume, until) == 0

    monkeypatch.setattr(verify_resume, "_in_a_process_of_its_own", train)


@pytest.mark.slow
def test_real_processes_prove_it(hybridflow: Any, tmp_path: Path) -> None:
    outcome = hybridflow("verify-resume", written(tmp_path, REVERSE))
    assert outcome.code == 0 and "exact: steps 1 to 2, and 3 to 4 in another process are 4 steps" in outcome.out
    assert "tensors of actor" in outcome.out and "state of the loop" in outcome.out
    assert not (tmp_path / "run").exists(), "the configuration's own folder is left alone"


@pytest.mark.parametrize("name", ["ppo-cartpole", "dqn-switches", "agents", "impala-workers"])
def test_environments_replays_several_agents_and_schedules(
    name: str, hybridflow: Any, tmp_path: Path, in_this_process: None
) -> None:
    outcome = hybridflow("verify-resume", written(tmp_path, ENVIRONMENTS[name]), "--at", 3, "--steps", 8)
    assert outcome.code == 0 and "bit for bit" in outcome.out and "nothing was learned" not in outcome.out
    assert ("tensors of replay" in outcome.out) == (name == "dqn-switches")


IN_PARTS = {"actor__mesh": {"pp": 2}, "actor__generation_mesh": {"tp": 2}}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", ["replay", "layouts"])
def test_worker_processes(name: str, hybridflow: Any, tmp_path: Path, in_this_process: None) -> None:
    """A replay whose rows two of them share; a policy that changes its layout for rollouts, of which times are measured."""
    replay = on_ray(with_keys(ENVIRONMENTS["dqn-switches"], replay__shards=2), TWO)
    data = replay if name == "replay" else on_ray(REVERSE, TWO, **IN_PARTS)
    outcome = hybridflow("verify-resume", written(tmp_path, data), "--at", 3, "--steps", 5)
    assert outcome.code == 0, outcome.out
    assert "bit for bit" in outcome.out
    assert "nothing was learned" not in outcome.out
    assert ("tensors of replay" in outcome.out) == (name == "replay")


def test_what_is_not_exact_is_told(
    hybridflow: Any, tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that forgets what it waits for."""

    def forget(schedule: Any, state: Any) -> None:
        schedule.version = state["version"] + 1

    monkeypatch.setattr("hybridflow.rollout.schedule._Learning.load_state_dict", forget)
    outcome = hybridflow("verify-resume", written(tmp_path, CARTPOLE))
    assert outcome.code == 1 and "first in metrics, step 3: policy_version" in outcome.out
    assert "state of the loop" in outcome.out and "no: schedule.version" in outcome.out


def test_nothing_is_proven_by_a_buffer_that_warms_up(hybridflow: Any, tmp_path: Path, in_this_process: None) -> None:
    path = written(tmp_path, with_keys(ENVIRONMENTS["dqn-cartpole"], replay__warmup=90))
    assert "nothing was learned in so few steps" in hybridflow("verify-resume", path).out


def test_a_wrong_break_or_a_run_that_fails_is_told(
    hybridflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, CARTPOLE)
    assert "expected 0 < at < steps" in hybridflow("verify-resume", path, "--at", 4).err

    class Failing:
        exitcode = 3

        def __init__(self, **_: Any) -> None: ...
        def start(self) -> None: ...
        def join(self) -> None: ...

    monkeypatch.setattr(verify_resume.multiprocessing, "get_context", lambda _: type("", (), {"Process": Failing}))
    outcome = hybridflow("verify-resume", path)
    assert outcome.code == 1 and "the run until step 4 ended with exit code 3" in outcome.err


def test_one_bit_of_a_weight_of_the_optimizer_or_of_a_metric_is_found(tmp_path: Path) -> None:
    runs = [run(with_keys(REVERSE, checkpoint={"every": 2}), tmp_path / name) for name in ("one", "other")]
    assert [part.differs for part in compare(*runs)] == [""] * len(compare(*runs))
    metrics = runs[1] / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace('"policy_version": 2', '"policy_version": 2.0'))
    assert [part.differs for part in compare(*runs) if part.differs] == ["step 2: policy_version"]
    metrics.write_text(text)
    path = runs[1] / "checkpoints" / "step-00000002" / "actor" / "0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (part,) = [part for part in compare(*runs) if part.differs]
    assert part.what == "tensors of actor" and part.differs.endswith("(0.safetensors)") and part.num_parts > 20


def test_what_is_measured_is_not_compared() -> None:
    measured = ("time/step_s", "sampler/transition_s", "tokens_per_s", "memory/rss_gb", "moved/a-b", "driver/bytes")
    assert [name for name in (*measured, "loss/policy", "reward/mean", "step") if is_measured(name)] == [*measured]


def test_bits_are_compared_not_values() -> None:
    same = verify_resume._same
    assert same(float("nan"), float("nan")) and not same(0.0, -0.0) and not same(1, 1.0) and not same(True, 1)
    nan = np.array([np.nan, 1.0])
    assert same(nan, nan.copy()) and not same(nan, nan.astype(np.float32)) and not same(nan, nan[None])
    assert not same(np.array([0.0]), np.array([-0.0]))
    words = np.array(["a", None], object)
    assert same(words, words.copy()) and not same(words, words[::-1])
