"""Examples that must learn, run whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

EXAMPLES = Path(__file__).parent.parent / "examples"


def last_evaluation(run: Path) -> dict[str, Any]:
    evaluations: list[dict[str, Any]] = json.loads((run / "result.json").read_text())["evaluations"]
    return evaluations[-1]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_reverse_from_scratch(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    assert hybridflow("train", EXAMPLES / "reverse.toml", "--run_dir", tmp_path / "run").code == 0
    assert last_evaluation(tmp_path / "run")["eval/score"] > 0.95
    again = hybridflow("eval", tmp_path / "run", "--json")
    assert json.loads(again.out)["score"] == last_evaluation(tmp_path / "run")["eval/score"]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_reverse_with_rollouts_that_begin_early(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    assert hybridflow("train", EXAMPLES / "async_reverse.toml", "--run_dir", tmp_path / "run").code == 0
    assert last_evaluation(tmp_path / "run")["eval/score"] > 0.9


@pytest.mark.parametrize(
    "name",
    [
        *("cartpole", "dqn_cartpole", "reinforce_cartpole", "trpo_cartpole", "a3c_cartpole"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("a2c_cartpole", "impala_cartpole")),
    ],
)
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_cartpole(hybridflow: Callable[..., Outcome], tmp_path: Path, name: str) -> None:
    """The environment counts as solved at 475 (Gymnasium); 20 episodes or more are evaluated."""
    assert hybridflow("train", EXAMPLES / f"{name}.toml", "--run_dir", tmp_path / "run").code == 0
    assert last_evaluation(tmp_path / "run")["eval/score"] >= 475
    again = hybridflow("eval", tmp_path / "run", "--json")
    assert json.loads(again.out)["score"] == last_evaluation(tmp_path / "run")["eval/score"]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_dqn_remembers_velocities(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five seeds the worst reached 198 with a memory; without one it stays at 40."""
    monkeypatch.chdir(EXAMPLES.parent)
    example = EXAMPLES / "dqn_memory.toml"
    assert hybridflow("train", example, "--run_dir", tmp_path / "run").code == 0
    single = ("--actor.net.kind", "mlp", "--replay.sequence", "1", "--replay.batch_size", "640", "--train.steps", "60")
    assert hybridflow("train", example, "--run_dir", tmp_path / "single", *single).code == 0
    remembering, single_steps = (last_evaluation(tmp_path / name)["eval/score"] for name in ("run", "single"))
    assert remembering > 150 > 2 * single_steps


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_agents_learn_to_speak_and_to_listen(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    """Agents at random get -78, and -63 who stand still (benchmarks/random_agents.py)."""
    other = ("--environment.id", "pettingzoo:mpe2.simple_speaker_listener_v4", "--train.steps", "30")
    example = EXAMPLES / "mappo_simple_spread.toml"
    assert hybridflow("train", example, "--run_dir", tmp_path / "run", *other).code == 0
    assert last_evaluation(tmp_path / "run")["eval/low"] > -50


@pytest.mark.slow
def test_the_long_run_begins(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    """SAC's million steps on HalfCheetah: none is learned from before the warm-up is over, all are after it."""
    short = ("--train.steps", "4", "--replay.warmup", "100", "--evaluation.limit", "1", "--run_dir", tmp_path / "run")
    assert hybridflow("train", EXAMPLES / "sac_halfcheetah.toml", *short).code == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step.get("replay/samples_per_insert") for step in steps[1:]] == [None, None, 512, 384]
    temperatures = [step["actor/temperature"] for step in steps[2:]]
    assert 1 > temperatures[0] > temperatures[1] > temperatures[2] > 0.9


@pytest.mark.parametrize(("name", "steps"), [("sac", 250), ("td3", 400), pytest.param("ddpg", 300, marks=pytest.mark.long)])
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_pendulum(hybridflow: Callable[..., Outcome], tmp_path: Path, name: str, steps: int) -> None:
    """Shortened: an episode that hangs down costs about 1200, and the whole example reaches -170."""
    example = EXAMPLES / f"{name}_pendulum.toml"
    assert hybridflow("train", example, "--run_dir", tmp_path / "run", "--train.steps", str(steps)).code == 0
    assert last_evaluation(tmp_path / "run")["eval/score"] > -300
