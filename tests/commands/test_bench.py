"""The bench command on a tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Outcome

from hybridflow.commands.bench import _COLUMNS, RANDOM, Workload, _least_seconds, random_spec
from hybridflow.models.decoder import Decoder

SHORT = ("--prompts", 3, "--group", 2, "--prompt-tokens", 5, "--new-tokens", 4, "--threads", 1)


@pytest.mark.parametrize(
    ("dtype", "precision", "error"),
    [("float32", "full", 1e-5), ("bfloat16", "full", 3e-2), ("float32", "bfloat16", 3e-2), ("float32", "int8", 0.1)],
)
def test_bench_measures_the_engine(
    hybridflow: Callable[..., Outcome], tiny_model: Path, dtype: str, precision: str, error: float
) -> None:
    outcome = hybridflow("bench", "rollout", tiny_model, *SHORT, "--dtype", dtype, "--precision", precision, "--json")
    assert outcome.code == 0, outcome
    (row,) = json.loads(outcome.out)
    split = row.pop("time_split")
    assert (row.pop("model"), row.pop("dtype"), row.pop("threads")) == (str(tiny_model), dtype, 1)
    assert row.pop("precision") == precision and row["log_prob_error"] < error
    assert all(math.isfinite(value) and value > 0 for value in row.values())
    assert row["share_of_limit"] == pytest.approx(row["tokens_per_cpu_second"] / row["limit_tokens_per_cpu_second"])
    assert 0 < row["share_of_limit"] < 1.5
    assert set(split) == {"linear", "attention", "sampling", "rest"}
    assert all(0 < share < 1 for share in split.values())
    assert sum(split.values()) == pytest.approx(1)


def test_bench_shows_a_table(hybridflow: Callable[..., Outcome], tiny_model: Path) -> None:
    outcome = hybridflow("bench", "rollout", tiny_model, *SHORT)
    assert outcome.code == 0, outcome
    columns = ["model", "size", "tok/s", "tok/CPU-s", "limit", "share", "linear", "attend", "sample", "rest"]
    header, row, machine = outcome.out.splitlines()
    assert header.split() == columns and len(row.split()) == len(columns)
    assert machine.startswith("tiny: float32, precision: full, log-probs ")


def test_help_explains_every_column(hybridflow: Callable[..., Outcome]) -> None:
    text = hybridflow("bench", "--help").out
    assert all(f"\n  {column} " in text for column in _COLUMNS)


def test_the_limit_by_hand() -> None:
    """3 rows go in waves of 2 and 1; prompts take no head but for their last states."""
    spec = random_spec("5M")
    with torch.device("meta"):
        decoder = Decoder(spec)
    layers = spec.num_layers * 256 * (256 + 2 * 128 + 256 + 3 * 704)
    head = 256 * 8192
    workload = Workload(prompts=3, group=1, prompt_tokens=10, new_tokens=5)
    computing = _least_seconds(decoder, workload, slots=2, peak=1.0, bandwidth=math.inf, dtype=torch.float32)
    assert computing == 2 * (3 * 10 * layers + 3 * head) + 4 * 2 * 3 * (layers + head)
    reading = _least_seconds(decoder, workload, slots=2, peak=math.inf, bandwidth=1.0, dtype=torch.float32)
    assert reading == 4 * 2 * 4 * (layers + head)


def test_random_models_have_the_sizes_of_their_names() -> None:
    for name in RANDOM:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in Decoder(random_spec(name)).parameters())
        assert size == pytest.approx(float(name[:-1]) * 1e6, rel=0.15)


@pytest.mark.parametrize("arguments", [("--prompts", 0), ("--new-tokens", 0), ("--threads", 0)])
def test_bench_tells_a_mistake_in_one_line(
    hybridflow: Callable[..., Outcome], tiny_model: Path, arguments: tuple[str, int]
) -> None:
    outcome = hybridflow("bench", "rollout", tiny_model, *arguments)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert f"{arguments[0]} is 0; expected at least 1" in outcome.err
