"""Runs whose processes share weights, gradients and optimizer out: they learn the same, and go on without sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, with_keys
from test_runs import run
from test_worker_groups import learned, on_ray

from hybridflow.build_trace import trace
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError

TWO = with_keys(on_ray(REVERSE, {"main": 2}), train__steps=3, checkpoint={"every": 3})
FSDP = with_keys(TWO, actor__mesh={"shard": "fsdp"}, placement__offload=["actor"])


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_grpo_on_two_workers_learns_the_same_with_everything_shared_out(tmp_path: Path) -> None:
    none, fsdp = (learned(run(data, tmp_path / name)) for name, data in (("none", TWO), ("fsdp", FSDP)))
    assert len(none) == len(fsdp) == 4
    for a, b in zip(none, fsdp, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=2e-5)
    run(with_keys(REVERSE, checkpoint={"every": 3}), tmp_path / "fsdp", resume="latest", train__steps=4)
    assert learned(tmp_path / "fsdp")[-1]["step"] == 4


def sizes(data: dict[str, Any]) -> tuple[dict[str, int], int]:
    """(bytes of the actor, what the actor's sampler reads)."""
    roles = {role.name: role for role in trace(validate(data | {"run_dir": "unused"}, "test")).roles}
    kinds = {kind: getattr(roles["actor"], f"{kind}_bytes") for kind in ("weight", "gradient", "optimizer")}
    return kinds, roles["sampler"].weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_call_graph_tells_what_a_process_holds(dtype: str) -> None:
    (whole, in_place), (part, gathered) = (sizes(with_keys(data, actor__dtype=dtype)) for data in (TWO, FSDP))
    number = whole["gradient"] // 4
    assert part["weight"] == part["gradient"] == part["optimizer"] // 2
    assert number * 2 <= part["weight"] < number * 2 * 1.05
    assert in_place == 0 and gathered == whole["weight"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_keys(FSDP, generation__engine="vllm"), r'actor\.mesh\.shard = "fsdp": vLLM reads whole weights'),
        (
            with_keys(CARTPOLE, critic__mesh={"shard": "fsdp"}),
            r'critic\.mesh\.shard = "fsdp" shards decoders, not networks',
        ),
    ],
)
def test_what_cannot_be_sharded_is_told(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(with_keys(data, run_dir="unused"), "test")
