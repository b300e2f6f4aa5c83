"""``hybridflow plan`` as its users see it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys, written

Program = Callable[..., Outcome]


def roles_of(hybridflow: Program, *arguments: object) -> dict[str, dict[str, Any]]:
    code, out, err = hybridflow("plan", *arguments, "--explain-memory", "--json")
    assert (code, err) == (0, "")
    told: dict[str, Any] = json.loads(out)
    return {role["role"]: role for role in told["roles"]}


def test_it_tells_bytes_of_every_role_without_loading_a_model(
    hybridflow: Program, tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "sizes"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    data = with_keys(REVERSE, algorithm="ppo", kl__coef=0.1, actor={"model": str(folder)}, generation__max_new_tokens=40)
    path = written(tmp_path, data)
    code, out, err = hybridflow("plan", path, "--explain-memory")
    assert (code, err) == (0, "")
    assert "(checkpointed)" in out and "KV cache" in out and "FLOPs a step" in out and "driver: at most" in out
    roles = roles_of(hybridflow, path)
    assert roles.keys() == {"actor", "critic", "reference", "sampler"}
    parts = {name: role["footprint"] for name, role in roles.items()}
    graph = {role["name"]: role for role in json.loads(hybridflow("graph", path, "--json").out)["roles"]}
    for name in ("actor", "critic"):
        held = [parts[name][part] for part in ("weights", "gradients", "optimizer")]
        assert held == [graph[name][f"{part}_bytes"] for part in ("weight", "gradient", "optimizer")]
        assert parts[name]["activations"] > parts[name]["checkpointed"] > 0 and roles[name]["flops"] > 0
    assert parts["sampler"]["cache"] > 0 and parts["sampler"]["repacked"] > 0 and parts["reference"]["forward"] > 0
    recomputed = roles_of(hybridflow, path, "--actor.activation_checkpointing", "true")
    assert recomputed["actor"]["peak_bytes"] < roles["actor"]["peak_bytes"]
    assert recomputed["actor"]["flops"] > roles["actor"]["flops"]


def test_meshes_share_what_a_process_needs(hybridflow: Program, tmp_path: Path) -> None:
    ray = {"kind": "ray"}
    path = written(tmp_path, with_keys(REVERSE, runtime=ray, placement={"pools": {"main": 4}}))
    alone = roles_of(hybridflow, path)["actor"]["footprint"]
    cut = roles_of(hybridflow, path, "--actor.mesh.tp", 2, "--train.token_budget", 16)["actor"]["footprint"]
    staged = roles_of(hybridflow, path, "--actor.mesh.pp", 2, "--train.token_budget", 16)["actor"]["footprint"]
    whole = roles_of(hybridflow, path, "--train.token_budget", 16)["actor"]["footprint"]
    shared = roles_of(hybridflow, path, "--actor.mesh.cp", 2, "--train.token_budget", 16)["actor"]["footprint"]
    assert cut["weights"] < 0.6 * alone["weights"] and cut["activations"] < 0.8 * whole["activations"]
    assert shared["weights"] == alone["weights"] and shared["activations"] < 0.6 * whole["activations"]
    assert staged["communication"] > 0 and alone["communication"] >= alone["gradients"]


def test_a_run_is_compared_with_what_it_took(hybridflow: Program, tmp_path: Path) -> None:
    path = written(tmp_path, REVERSE)
    assert hybridflow("train", path).code == 0
    out = hybridflow("plan", tmp_path / "run", "--explain-memory").out
    assert "measured: " in out
    told = json.loads(hybridflow("plan", tmp_path / "run", "--explain-memory", "--json").out)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert told["measured_bytes"] == round(1e9 * max(record.get("memory/grown_gb", 0) for record in records))
    assert hybridflow("report", tmp_path / "run").code == 0
    assert "predicted 0.0" in (tmp_path / "run/report.html").read_text()


def test_networks_of_environments_are_not_counted_and_it_says_so(hybridflow: Program, tmp_path: Path) -> None:
    out = hybridflow("plan", written(tmp_path, CARTPOLE), "--explain-memory").out
    assert "Of networks for environments" in out


@pytest.mark.parametrize("missing", ["--json", ""])
def test_what_it_shall_do_has_to_be_said(hybridflow: Program, tmp_path: Path, missing: str) -> None:
    code, _, err = hybridflow("plan", written(tmp_path, REVERSE), *([missing] if missing else []))
    assert code == 2 and "--explain-memory" in err
