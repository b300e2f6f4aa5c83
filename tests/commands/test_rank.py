"""Pairs from samples: what rank writes is what the scorer said, and the rest of the product reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys

from hybridflow.commands.rank import best_and_worst
from hybridflow.config import resolved, validate
from hybridflow.core.batch import Batch, objects
from hybridflow.data.pairs import read_pairs
from hybridflow.data.task_rewards import positions

Program = Callable[..., Outcome]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    def write(data: dict[str, Any] = REVERSE, **keys: Any) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(resolved(validate(with_keys(data, **{"run_dir": str(tmp_path / "run"), **keys}), "test")))
        return path

    return write


def test_pairs_are_best_and_worst_of_each_prompt_s_samples(config: Any, hybridflow: Program, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pairs.jsonl"
    outcome = hybridflow("rank", config(), "--out", out, "--count", 10)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert outcome.code == 0 and f"{len(rows)} pairs" in outcome.out and 5 <= len(rows) <= 10
    if len(rows) < 10:
        assert f"{10 - len(rows)} prompts skipped: all of their responses were scored alike" in outcome.out
    for row in rows:
        answer = row["prompt"][:3][::-1]
        high, low = (float(positions(row[side], answer)["score"]) for side in ("chosen", "rejected"))
        assert row["chosen_score"] == pytest.approx(high, abs=1e-5) and row["rejected_score"] == pytest.approx(
            low, abs=1e-5
        )
        assert row["margin"] == pytest.approx(high - low, abs=1e-5) and row["margin"] > 0
    assert [record.margin for record in read_pairs(out)] == [row["margin"] for row in rows]


def test_ranking_is_a_function_of_the_seed_and_reads_overrides(config: Any, hybridflow: Program, tmp_path: Path) -> None:
    path = config()
    for name, keys in (("a", ()), ("b", ()), ("c", ("--seed", "7"))):
        assert hybridflow("rank", path, "--out", tmp_path / name, "--count", 5, *keys).code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def scored(scores: list[float], failed: list[bool], groups: list[int], texts: list[str]) -> Batch:
    columns = {"scores": np.array(scores, np.float32), "score_failed": np.array(failed), "group_id": np.array(groups)}
    return Batch({**columns, "response": objects(texts)})


def test_best_and_worst_by_hand() -> None:
    batch = scored(
        [1, 3, 2, 3, 5, 5, 9, 0, 1, 0],
        [False, False, False, False, False, False, True, False, False, False],
        [4, 4, 4, 4, 2, 2, 7, 7, 7, 7],
        ["a", "b", "c", "d", "e", "f", "g", "h", "i", ""],
    )
    assert list(best_and_worst(batch)) == [(1, 0), (8, 7)]
    alone = scored([1, 2], [False, True], [0, 0], ["a", "b"])
    assert list(best_and_worst(alone)) == []


def test_mistakes(config: Any, hybridflow: Program, tmp_path: Path) -> None:
    def line(*arguments: object) -> str:
        outcome = hybridflow("rank", *arguments)
        assert outcome.code == 2 and len(outcome.err.splitlines()) == 1, outcome
        return outcome.err

    path, out = config(), tmp_path / "pairs.jsonl"
    assert "--count 0: expected 1 or more" in line(path, "--out", out, "--count", 0)
    (tmp_path / "constant.py").write_text("def f(response): return 1.0\n")
    functions = json.dumps([f"{tmp_path / 'constant.py'}:f"])
    none = line(path, "--out", out, "--count", 3, "--reward.functions", functions)
    assert "3 prompts skipped: all of their responses were scored alike; raise generation.temperature" in none
    assert not out.exists()
    out.write_text("x")
    assert "pairs.jsonl: exists already" in line(path, "--out", out)
    sft = config(algorithm="sft", train__group_size=None)
    assert "train.group_size = 1: ranking compares 2 responses or more" in line(sft, "--out", tmp_path / "p")
    games = config(CARTPOLE, train__group_size=2)
    assert "ranking samples responses to prompts" in line(games, "--out", tmp_path / "p")
