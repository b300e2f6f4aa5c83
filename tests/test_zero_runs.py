"""Runs whose processes share optimizer states out: they learn the same, and their checkpoints go on without sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import REVERSE, with_keys
from test_runs import run, state
from test_worker_groups import learned, on_ray

from hybridflow.build_trace import trace
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError

TWO = with_keys(on_ray(REVERSE, {"main": 2}), train__steps=3, checkpoint={"every": 3})
ZERO = with_keys(TWO, actor__mesh={"shard": "zero1"})


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_grpo_on_two_workers_learns_the_same_with_shared_out_states(tmp_path: Path) -> None:
    runs = [run(data, tmp_path / name) for name, data in (("none", TWO), ("zero1", ZERO))]
    none, zero = (learned(path) for path in runs)
    assert len(none) == len(zero) == 4
    for a, b in zip(none, zero, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=2e-6)
    kept = [state(path)["tensors"]["actor"] for path in runs]
    assert kept[0].keys() == kept[1].keys() and {name.partition("/")[0] for name in kept[0]} >= {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert all(tensor.shape == kept[1][name].shape for name, tensor in kept[0].items())
    alone = with_keys(REVERSE, checkpoint={"every": 3})
    run(alone, tmp_path / "zero1", resume="latest", train__steps=4)
    assert learned(tmp_path / "zero1")[-1]["step"] == 4


def optimizer_bytes(data: dict[str, Any]) -> int:
    (actor,) = (role for role in trace(validate(data | {"run_dir": "unused"}, "test")).roles if role.name == "actor")
    return actor.optimizer_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_call_graph_tells_what_a_process_holds(dtype: str) -> None:
    whole, part = (optimizer_bytes(with_keys(data, actor__dtype=dtype)) for data in (TWO, ZERO))
    assert abs(part - whole / 2) < 12 * 17
    cut = {"placement": {"pools": {"main": 4}}, "actor__mesh": {"tp": 2, "shard": "zero1"}}
    of_slices = with_keys(TWO, **cut | {"actor__mesh": {"tp": 2}})
    assert abs(optimizer_bytes(with_keys(TWO, **cut)) - optimizer_bytes(of_slices) / 2) < 12 * 17
    assert part / 3 < optimizer_bytes(with_keys(TWO, **cut)) < part / 1.5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actor__mesh", {"shard": "zero3"}, r"actor\.mesh\.shard = 'zero3'.*'none', 'zero1' or 'fsdp'"),
        ("reference__mesh", {"shard": "zero1"}, r"unknown key reference\.mesh\.shard; did you mean actor\.mesh\.shard"),
    ],
)
def test_what_cannot_be_shared_out_is_told(key: str, value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(with_keys(TWO, kl__coef=0.1, run_dir="unused", **{key: value}), "test")


def test_sharing_out_needs_no_other_key() -> None:
    for data in (ZERO, with_keys(REVERSE, actor__mesh={"shard": "zero1"})):
        assert validate(with_keys(data, run_dir="unused"), "test").actor.mesh.shard == "zero1"
