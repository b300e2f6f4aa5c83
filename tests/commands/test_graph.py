"""``hybridflow graph`` as its users see it."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys, written

ROOT = Path(__file__).parents[2]
Program = Callable[..., Outcome]


@pytest.fixture
def ppo(tmp_path: Path, tiny_model: Path) -> Path:
    """PPO with a KL on a model folder that has no weights."""
    folder = tmp_path / "sizes"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    actor = {"model": str(folder), "dtype": "bfloat16", "optimizer": {"freeze": ["embed*"]}}
    return written(tmp_path, with_keys(REVERSE, algorithm="ppo", kl__coef=0.1, actor=actor, train__group_size=2))


@pytest.mark.parametrize(
    ("schedule", "told"),
    [("one_step_off", "begins one step before"), ("async", "begins 2 steps before"), ("sync", "")],
)
def test_rollouts_that_begin_early_are_told(hybridflow: Program, tmp_path: Path, schedule: str, told: str) -> None:
    stale = {"max_staleness": 2} if schedule == "async" else {}
    code, out, err = hybridflow("graph", written(tmp_path, with_keys(REVERSE, schedule={"kind": schedule, **stale})))
    assert (code, err) == (0, "")
    assert told in out and ("A rollout begins" in out) == bool(told)


def test_it_says_who_runs_where_and_what_passes_without_loading_a_model(hybridflow: Program, ppo: Path) -> None:
    code, out, err = hybridflow("graph", ppo, "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.startswith("ppo: a step is 4 prompts, 2 responses to each. Prompts have ")
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    reference = rf"reference +ModelScorer +cpu +[\d,]+ +frozen +bfloat16 +[\d.]+ kB +{ppo.parent}/sizes"
    assert re.fullmatch(reference, rows["reference"])
    assert re.search(r"cpu +[\d,]+ +[\d,]+ +bfloat16 +[\d.]+ kB +[\d.]+ kB +[\d.]+ kB ", rows["actor"])
    assert "the actor's, in place" in rows["sampler"] and "own processes" in rows["reward"]
    assert re.search(r"estimator\.compute  compute, 8 rows, \d+ tokens\n      reads score_failed, scores", out)
    assert "      reads prompt, sample_id, expected_length from 0 data.prompts, " in out
    assert "      runs drop_failed > score_rewards > kl_penalty > gae > whiten\n" in out
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
    assert "replay.sample  compute, 512 rows, 128 steps\n" in out and "runs dqn_loss, follow, minibatches: 4" in out
    told = json.loads(hybridflow("graph", tmp_path / "run.toml", "--json").out)
    observed = next(edge for edge in told["edges"] if edge["column"] == "observations")
    assert (observed["dtype"], observed["bytes"]) == ("float32[4]", 128 * 4 * 4)
    prioritised = with_keys(dqn, replay={"priority": 0.6})
    out = hybridflow("graph", written(tmp_path, prioritised)).out
    assert "replay.sample  compute, 128 rows, 128 steps, 4 times\n" in out


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


POOLS = ["--runtime.kind", "ray", "--placement.pools.train", "2", "--placement.pools.rest", "[1, 1]"]
for _role, _pool in {"actor": "train", "critic": "rest", "reference": "rest", "reward": "rest"}.items():
    POOLS += [f"--placement.roles.{_role}", _pool]


def test_pools_are_told_with_what_they_hold_and_who_runs_when(hybridflow: Program, ppo: Path) -> None:
    code, out, err = hybridflow("graph", ppo, *POOLS)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["sampler"][:4] == ["sampler", "TextSampler", "train", "dp"]
    assert rows["estimator"] == ["estimator", "EstimatorWorker", "train", "1", "cpu"] and "together" not in rows
    assert re.search(r"\nrest +1 \+ 1 +[\d.]+ kB .* reward, reference, critic\n", out)
    order = [re.split(r" {2,}", line) for line in out.split("\nstage ")[1].split("\n\n")[0].splitlines()[1:]]
    assert order == [
        ["1", "sampler.rollout"],
        ["2", "reward.score"],
        ["3", "reference.score"],
        ["4", "critic.compute_values"],
        ["5", "estimator.compute"],
        ["6", "actor.update", "critic.update"],
    ]
    assert "actor.update  train, 8 rows, 64 tokens, VIEW\n" in out
    assert re.search(r"      reads tokens, log_probs from 1 sampler.rollout, \d+ B\n", out)
    assert re.search(r"      reads score_failed, scores from 2 reward.score on rest, \d+ B\n", out)
    apart = hybridflow("graph", ppo, *POOLS, "--placement.pools.own", "1", "--placement.roles.critic", "own").out
    stages = [re.split(r" {2,}", line) for line in apart.split("\nstage ")[1].split("\n\n")[0].splitlines()[1:]]
    assert stages[1] == ["2", "reward.score", "critic.compute_values"]
    local = hybridflow("graph", ppo).out
    assert " pool " not in local and "VIEW" not in local and len(local) < len(out)


def test_a_sampler_away_from_its_learner_has_a_copy_that_is_sent(hybridflow: Program, ppo: Path) -> None:
    arguments = (ppo, *POOLS, "--placement.roles.sampler", "rest")
    assert re.search(r"\ntrain +rest +weights +[\d.]+ kB\n", hybridflow("graph", *arguments).out)
    told = json.loads(hybridflow("graph", *arguments, "--json").out)
    roles, pools = ({part["name"]: part for part in told[name]} for name in ("roles", "pools"))
    assert (roles["sampler"]["copy_of"], roles["sampler"]["weight_bytes"]) == ("actor", roles["actor"]["weight_bytes"])
    held = sum(roles[name]["weight_bytes"] for name in ("reference", "critic", "sampler"))
    assert pools["rest"]["weight_bytes"] == held and pools["rest"]["nodes"] == [1, 1]
    assert told["calls"][1]["protocol"] == "THREE_D_ALL_MICRO_DP" and told["stages"][0] == [1]
    [weights] = [transfer for transfer in told["transfers"] if transfer["what"] == "weights"]
    assert weights == {"source": "train", "target": "rest", "what": "weights", "bytes": roles["actor"]["weight_bytes"]}


def test_a_cut_model_is_told_by_what_its_fullest_rank_holds(hybridflow: Program, ppo: Path) -> None:
    cut = (ppo, *POOLS, "--actor.mesh.tp", "2", "--critic.mesh.pp", "2", "--generation.engine", "vllm")
    whole, parts = (
        {role["name"]: role for role in json.loads(hybridflow("graph", *arguments, "--json").out)["roles"]}
        for arguments in ((ppo, *POOLS), cut)
    )
    assert (parts["actor"]["mesh"], parts["critic"]["mesh"], parts["reference"]["mesh"]) == ("tp 2", "pp 2", "dp 2")
    for name in ("actor", "critic"):
        one, held = whole[name], parts[name]
        assert (held["parameters"], held["trained"]) == (one["parameters"], one["trained"])
        for size in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            assert 0.5 <= held[size] / one[size] < 0.75, (name, size)
    assert parts["reference"]["weight_bytes"] == whole["reference"]["weight_bytes"]
    assert (parts["sampler"]["copy_of"], parts["sampler"]["weight_bytes"]) == ("actor", whole["actor"]["weight_bytes"])
    text = hybridflow("graph", *cut).out
    assert re.search(r"\nactor +Learner +train +tp 2 +cpu ", text) and "a copy of the actor's" in text
    code, _, err = hybridflow("graph", ppo, *POOLS, "--placement.pools.rest", "8", "--critic.mesh.tp", "8")
    assert (
        code == 2
        and err.startswith("error: critic.mesh: tp = 8, but the model has 4 attention heads")
        and err.count("\n") == 1
    )


def test_ranks_that_cut_sequences_hold_whole_models(hybridflow: Program, ppo: Path) -> None:
    cut = (ppo, *POOLS, "--actor.mesh.cp", "2", "--actor.mesh.shard", "zero1")
    whole, parts = (
        {role["name"]: role for role in json.loads(hybridflow("graph", *arguments, "--json").out)["roles"]}
        for arguments in ((ppo, *POOLS), cut)
    )
    assert (parts["actor"]["mesh"], parts["sampler"]["mesh"]) == ("cp 2", "dp 2")
    assert parts["actor"]["weight_bytes"] == whole["actor"]["weight_bytes"] and parts["sampler"]["copy_of"] == ""
    assert 0.5 <= parts["actor"]["optimizer_bytes"] / whole["actor"]["optimizer_bytes"] < 0.55


@pytest.mark.parametrize("shard", ["zero1", "fsdp"])
def test_a_rank_of_a_group_holds_its_part_of_what_the_group_shares_out(hybridflow: Program, ppo: Path, shard: str) -> None:
    four = (ppo, *POOLS, "--placement.pools.train", "4", "--actor.mesh.shard", shard)
    shares = []
    for ranks in (4, 2):
        found = hybridflow("graph", *four, "--actor.mesh.shard_ranks", str(ranks), "--json")
        [actor] = [role for role in json.loads(found.out)["roles"] if role["name"] == "actor"]
        shares.append({part: actor[f"{part}_bytes"] for part in ("weight", "gradient", "optimizer")})
    times = {part: shares[1][part] / share for part, share in shares[0].items()}
    whole = 2 if shard == "fsdp" else 1
    assert times == pytest.approx({"weight": whole, "gradient": whole, "optimizer": 2}, rel=0.05)


def test_dot_and_page_show_the_pools(hybridflow: Program, ppo: Path, tmp_path: Path) -> None:
    out = hybridflow("graph", ppo, *POOLS, "--dot").out
    clusters = re.findall(r'\n  subgraph "cluster (\w+)" { label="\1: 2 workers";((?: n\d;)+) }', out)
    assert clusters == [("train", " n1; n5; n7;"), ("rest", " n2; n3; n4; n6;")]
    assert r'n6 [label="6 critic.update\nstage 6: train, ' in out and 'n0 [label="0 data.prompts\\nsource' in out
    assert hybridflow("graph", ppo, *POOLS, "--html", tmp_path / "graph.html").code == 0
    page = (tmp_path / "graph.html").read_text()
    assert page.count(">pool train, dp 2</text>") == 2 and page.count(">pool rest, dp 2</text>") == 2
    lanes = re.findall(r'font-size="14" fill="var\(--text\)">(\w+)<', page)
    assert lanes == ["data", "sampler", "estimator", "actor", "reward", "reference", "critic"]
    heights = re.findall(r'y="(\d+)" font-weight="600" fill="var\(--text\)">\d \w+<', page)
    assert len(heights) == 8 and heights[6] == heights[7], "the updates are side by side"
    assert len(set(heights)) == 7
    assert all(f"<h2>{title}</h2>" in page for title in ("Execution order", "Pools", "Transfers"))


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
