"""What evaluations score by: the reward, functions of their own, and what training looks at beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys

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
