"""``hybridflow graph`` as its users see it."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys

from hybridflow.config import validate
from hybridflow.core.config import to_toml

ROOT = Path(__file__).parents[2]
Program = Callable[..., Outcome]


def written(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "run.toml"
    config = validate({**data, "run_dir": str(folder / "run")}, "test")
    path.write_text(to_toml(config, set(type(config).model_fields) - config.model_fields_set))
    return path


@pytest.fixture
def ppo(tmp_path: Path, tiny_model: Path) -> Path:
    """PPO with a KL on a model folder that has no weights."""
    folder = tmp_path / "sizes"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    actor = {"model": str(folder), "dtype": "bfloat16", "optimizer": {"freeze": ["embed*"]}}
    return written(tmp_path, with_keys(REVERSE, algorithm="ppo", kl__coef=0.1, actor=actor, train__group_size=2))


def test_it_says_who_runs_where_and_what_passes_without_loading_a_model(hybridflow: Program, ppo: Path) -> None:
    code, out, err = hybridflow("graph", ppo, "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.startswith("ppo: a step is 4 prompts, 2 responses to each. Prompts have ")
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    reference = rf"reference +ModelScorer +cpu +[\d,]+ +frozen +bfloat16 +[\d.]+ kB +{ppo.parent}/sizes"
    assert re.fullmatch(reference, rows["reference"])
    assert re.search(r"cpu +[\d,]+ +[\d,]+ +bfloat16 +[\d.]+ kB +[\d.]+ kB +[\d.]+ kB ", rows["actor"])
    assert "the actor's, in place" in rows["sampler"] and "own processes" in rows["reward"]
    assert re.search(r"estimator\.compute  compute, 8 rows, \d+ tokens\n      reads scores", out)
    assert "      reads prompt, sample_id from 0 data.prompts, " in out
    assert "      runs score_rewards > kl_penalty > gae > whiten\n" in out
    assert "      runs ppo_clip, minibatches: 2, epochs: 1\n" in out
    assert max(map(len, out.splitlines())) < 200


def test_json_has_all_of_it(hybridflow: Program, ppo: Path) -> None:
    told = json.loads(hybridflow("graph", ppo, "--json", "--train.prompts_per_step", 5).out)
    assert told["algorithm"] == "ppo" and told["calls"][0]["rows"] == 10
    actor = next(role for role in told["roles"] if role["name"] == "actor")
    assert actor["weight_bytes"] == 2 * actor["parameters"] and actor["trained"] < actor["parameters"]
    assert (actor["gradient_bytes"], actor["optimizer_bytes"]) == (4 * actor["trained"], 12 * actor["trained"])
    reads = [edge["column"] for edge in told["edges"] if told["calls"][edge["reader"]]["verb"] == "compute_values"]
    assert reads == ["tokens", "response_mask"]
    assert {edge["dtype"] for edge in told["edges"] if edge["bytes"] is None} == {"object"}


def test_environments_count_steps_and_replay_is_a_call(hybridflow: Program, tmp_path: Path) -> None:
    dqn = with_keys(CARTPOLE, algorithm="dqn", ppo=None, critic=None, train={"updates_per_step": 4})
    out = hybridflow("graph", written(tmp_path, dqn)).out
    assert "dqn in CartPole-v1: a step is 4 environments, 32 steps of each." in out
    assert "sampler.rollout  generate, 4 rows, 128 new steps\n" in out
    assert "replay.sample  compute, 128 rows, 128 steps, 4 times\n" in out
    told = json.loads(hybridflow("graph", tmp_path / "run.toml", "--json").out)
    observed = next(edge for edge in told["edges"] if edge["column"] == "observations")
    assert (observed["dtype"], observed["bytes"]) == ("float32[4]", 128 * 4 * 4)


def test_dot_is_a_graph_of_graphviz(hybridflow: Program, ppo: Path) -> None:
    first, *lines, last = hybridflow("graph", ppo, "--dot").out.splitlines()
    text, name = r'"(?:[^"\\\n]|\\.)*"', r"[a-z]\w*"
    attributes = rf"\[{name}=(?:{text}|{name})(?:, {name}=(?:{text}|{name}))*\]"
    assert re.fullmatch(rf"digraph {text} {{", first) and last == "}"
    assert all(re.fullmatch(rf"  {name}(?: -> {name})? {attributes};", line) for line in lines)
    nodes = {line.split()[0] for line in lines if "->" not in line}
    ends = {end for line in lines if "->" in line for end in re.findall(r"n\d+", line.split("[")[0])}
    assert ends == nodes - {"node"} and len(nodes) > 5


def test_the_page_stands_alone(hybridflow: Program, ppo: Path, tmp_path: Path) -> None:
    outcome = hybridflow("graph", ppo, "--html", tmp_path / "graph.html")
    assert outcome.out == f"{tmp_path / 'graph.html'}\n"
    page = (tmp_path / "graph.html").read_text()
    assert not re.search(r"(src|href)=.(?!data:)|https?://|<script>", page)
    boxes, calls = re.findall(r'<rect x="(\d+)" y="(\d+)" width="138"', page), re.findall(r">\d+ (\w+)</text>", page)
    assert calls.count("update") == 2 and len(boxes) == len(set(boxes)) == len(calls)


def test_mistakes_are_told_in_one_line(hybridflow: Program, ppo: Path, tmp_path: Path) -> None:
    for arguments, told in (
        ((tmp_path / "none.toml",), "no such file"),
        ((ppo, "--train.stesp", 3), "unknown key train.stesp; did you mean train.steps?"),
        ((ppo, "--actor.model", "smolm2-135m"), "smolm2-135m"),
        ((ppo, "--actor.optimizer.freeze", '["zz*"]'), "'zz*' matches no parameter"),
        ((ppo, "--html", ppo / "graph.html"), "run.toml/graph.html (File exists)"),
    ):
        code, out, err = hybridflow("graph", *arguments)
        assert (code, out) == (2, "") and err.startswith("error: ") and told in err and err.count("\n") == 1, err


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.toml")), ids=lambda path: path.stem)
def test_every_example_without_a_run_before_it_has_a_graph(
    hybridflow: Program, path: Path, monkeypatch: pytest.MonkeyPatch, real_model: Path
) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    if re.search(r'"runs/\w+', text.replace(tomllib.loads(text)["run_dir"], "")):
        return
    assert hybridflow("graph", path).code == 0
