"""What evaluations score by: the reward, functions of their own, and what training looks at beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys, written

from hybridflow.config import resolved, validate
from hybridflow.core.errors import ConfigError

Program = Callable[..., Outcome]
JUDGES = (
    "def length(response): return float(len(response))\ndef half(response): return 0.5\ndef two(response): return 2.0\n"
)


@pytest.fixture
def evaluated(tmp_path: Path, hybridflow: Program) -> Callable[..., Outcome]:
    """Evaluate a configuration in which ``{name}`` stands for a function of the file of judges."""
    (tmp_path / "judges.py").write_text(JUDGES)

    def run(*options: str, **keys: Any) -> Outcome:
        config = validate(with_keys(REVERSE, run_dir=str(tmp_path / "run"), **keys), "test")
        (tmp_path / "run.toml").write_text(resolved(config))
        return hybridflow("eval", tmp_path / "run.toml", *options)

    return run


def functions(tmp_path: Path, *names: str) -> dict[str, list[str]]:
    return {"functions": [f"{tmp_path / 'judges.py'}:{name}" for name in names]}


def test_its_own_functions_score_and_the_reward_stands_beside_them(evaluated: Any, tmp_path: Path) -> None:
    keys = {"reward": functions(tmp_path, "two"), "evaluation": {**functions(tmp_path, "length", "half"), "limit": 10}}
    record = json.loads(evaluated("--json", **keys).out)
    assert record["reward"] == 2.0 and record["count"] == 10 and "cost" not in record
    assert 0.5 < record["score"] <= 4.5 and record["low"] <= record["score"] <= record["high"]
    assert evaluated(**keys).out.rstrip().endswith("n 10, reward 2.000")
    alone = json.loads(evaluated("--json", reward=keys["reward"]).out)
    assert alone["score"] == 2.0 and "reward" not in alone


def test_a_cost_is_evaluated_beside_the_score(evaluated: Any, tmp_path: Path) -> None:
    keys = {"algorithm": "safe_rlhf", "train__group_size": None, "cost": functions(tmp_path, "half")}
    record = json.loads(evaluated("--json", **keys).out)
    assert record["cost"] == 0.5 and "reward" not in record


def test_a_method_without_reward_can_be_evaluated(evaluated: Any, tmp_path: Path) -> None:
    options = {"digits": 1}
    keys = {"algorithm": "sft", "train__group_size": None, "data": {"task": "addition", "options": options}}
    record = json.loads(evaluated("--json", **keys, evaluation=functions(tmp_path, "half")).out)
    assert record["score"] == 0.5 and record["reward"] == 0.0  # the task's own reward


def test_mistakes_are_told(evaluated: Any, tmp_path: Path) -> None:
    wrong = evaluated(evaluation=functions(tmp_path, "hlaf"))
    assert wrong.code == 2 and len(wrong.err.splitlines()) == 1 and "hlaf" in wrong.err
    pairs = {"algorithm": "dpo", "train__group_size": None, "data": {"pairs": "x.jsonl"}, "generation": None}
    for data in (with_keys(CARTPOLE), with_keys(REVERSE, **pairs)):
        with pytest.raises(ConfigError, match=r"evaluation\.functions: they score responses"):
            validate(with_keys(data, run_dir="x", evaluation=functions(tmp_path, "half")), "test")


def test_episodes_of_an_environment_are_evaluated(hybridflow: Program, tmp_path: Path) -> None:
    path = written(tmp_path, CARTPOLE)
    run = tmp_path / "run"
    untrained = hybridflow("eval", path, "--episodes", 4, "--json")
    assert json.loads(untrained.out)["count"] == 4 and not run.exists()
    assert hybridflow("train", path).code == 0
    first = hybridflow("eval", run, "--episodes", 6, "--json")
    record = json.loads(first.out)
    assert record["count"] == 6 and record["low"] < record["score"] == record["episode_length"] < record["high"]
    assert record["return_min"] <= record["score"] <= record["return_max"] and record["return_std"] > 0
    assert json.loads((run / "result.json").read_text())["evaluation"] == record
    assert hybridflow("eval", run, "--episodes", 6, "--json").out == first.out  # the same episodes
    assert hybridflow("eval", run, "--episodes", 6, "--json", "--seed", 2).out != first.out  # others
    line = hybridflow("eval", run, "--episodes", 6).out
    assert line.startswith(f"mean return {record['score']:.3f}, 95 % confidence [") and "return min" in line
    assert json.loads(hybridflow("eval", run, "--episodes", 1, "--json").out)["low"] is None
    assert json.loads(hybridflow("eval", run, "--json").out)["count"] == 2  # evaluation.limit


def test_evaluations_have_options_of_their_own(hybridflow: Program, tmp_path: Path) -> None:
    short = with_keys(CARTPOLE, evaluation={"limit": 3, "options": {"max_episode_steps": 7}})
    assert hybridflow("train", written(tmp_path, short)).code == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["eval/return_max"] == records[-1]["eval/episode_length"] == 7
    assert max(record.get("episode_return/mean", 0) for record in records) > 7
    other = with_keys(CARTPOLE, environment__id="FrozenLake-v1", evaluation={"options": {"map_name": "8x8"}})
    (tmp_path / "other").mkdir()
    told = hybridflow("train", written(tmp_path / "other", other))
    assert told.code == 2 and "evaluation.options: with them the spaces are (Discrete(64)" in told.err
    assert len(told.err.splitlines()) == 1


def test_what_has_no_episodes_or_no_model_says_so(hybridflow: Program, tmp_path: Path) -> None:
    path = written(tmp_path, REVERSE)
    assert "a run on [data] has no episodes" in hybridflow("eval", path, "--episodes", 3).err
    told = hybridflow("eval", path, "--evaluation.options", "{ x = 1 }").err
    assert "evaluation.options: they are for the [environment]" in told
    assert "input should be greater than 0" in hybridflow("eval", written(tmp_path, CARTPOLE), "--episodes", 0).err
    (tmp_path / "run").mkdir()
    assert "not a run directory" in hybridflow("eval", tmp_path / "run").err
    (tmp_path / "run" / "config.toml").touch()
    assert "no exported model; give a run that has finished" in hybridflow("eval", tmp_path / "run").err
