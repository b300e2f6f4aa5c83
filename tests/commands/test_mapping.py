"""``hybridflow plan --cluster`` as its users see it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys, written

from hybridflow.config import load_config
from hybridflow.telemetry.records import append_record
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import read_timeline

Program = Callable[..., Outcome]
CLUSTER = ("--cluster", "a100-80g:1x8")
SEVEN = ("--model", "llama-7b", "--lengths", "256+256", "--train.prompts_per_step", "64")


@pytest.fixture
def ppo(tmp_path: Path) -> Path:
    return written(tmp_path, with_keys(REVERSE, algorithm="ppo", kl__coef=0.1, actor__dtype="bfloat16"))


def told(hybridflow: Program, *arguments: object) -> Any:
    code, out, err = hybridflow("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_tables_and_json_say_the_same(hybridflow: Program, ppo: Path) -> None:
    code, out, err = hybridflow("plan", ppo, *CLUSTER, *SEVEN)
    assert (code, err) == (0, "")
    plan = told(hybridflow, ppo, *CLUSTER, *SEVEN)
    assert out.startswith("ppo with llama-7b in bfloat16 on 1 x 8 a100-80g. A step is 256 rows of 256 + 256 tokens.\n")
    assert f"{plan['seconds']:.4g} s a step, {plan['tokens_per_second']:,.0f} tokens/s" in out
    assert plan["tokens"] == 256 * 512 and plan["tokens_per_second"] == pytest.approx(plan["tokens"] / plan["seconds"])
    assert {pool["name"] for pool in plan["pools"]} == {role["pool"] for role in plan["roles"].values()}
    for pool in plan["pools"]:
        row = next(line for line in out.splitlines() if line.startswith(pool["name"]) and "a100-80g" in line)
        assert f"{pool['devices']} a100-80g" in row and f"{pool['busy']:.0%}" in row
    for name in ("actor", "critic", "reference", "sampler"):
        assert any(line.split()[:3] == [name, plan["roles"][name]["pool"], "llama-7b"] for line in out.splitlines())


def test_lengths_are_those_of_a_run(hybridflow: Program, ppo: Path, tmp_path: Path) -> None:
    """In the mean; and what is played out draws them as they were recorded."""
    (tmp_path / "other").mkdir()
    run = RunDirectory.create(tmp_path / "other" / "run", "")
    lengths = {"prompt_length/mean": 20.0, "response_length/mean": 40.0, "response_length/std": 60.0}
    append_record(run.metrics, {"step": 1, **lengths, "response_length/max": 220.0})
    arguments = (*CLUSTER, "--model", "llama-7b", "--lengths")
    plan = told(hybridflow, ppo, *arguments, run.path)
    assert plan["tokens"] == 16 * (20 + 40) and plan == told(hybridflow, ppo, *arguments, run.path)
    for step in range(100):
        append_record(run.samples, {"step": step, "tokens": 220 if step % 10 == 0 else 20})
    timeline = tmp_path / "skewed.json"
    again = told(hybridflow, ppo, *arguments, run.path, "--timeline", timeline)
    assert again["tokens"] == 16 * (20 + 40)
    drawn = {round(e["dur"]) for e in read_timeline(timeline) if e["ph"] == "X" and e["name"].startswith("sampler.rollout")}
    assert len(drawn) <= 2, "with a response of 220 tokens among a step's, or without"
    code, _, err = hybridflow("plan", ppo, *arguments, tmp_path / "other")
    assert (code, err) == (2, f"error: {tmp_path / 'other'}: not a run directory, it has no config.toml\n")


def test_a_step_is_the_sum_of_its_stages_and_memory_suffices(hybridflow: Program, ppo: Path) -> None:
    plan = told(hybridflow, ppo, *CLUSTER, *SEVEN)
    stages: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for task in plan["tasks"]:
        stages[task["stage"]][task["pool"]] += task["seconds"]
        assert task["seconds"] == pytest.approx(sum(task["parts"].values()))
    assert plan["seconds"] == pytest.approx(sum(max(pools.values()) for pools in stages.values()))
    assert sum(pool["devices"] for pool in plan["pools"]) <= 8
    for pool in plan["pools"]:
        roles = [plan["roles"][name] for name in pool["roles"]]
        most = max(role["working_bytes"] for role in roles)
        assert sum(role["held_bytes"] for role in roles) + most <= pool["usable_bytes"] < 80e9
        assert all(role["pp"] * role["tp"] * role["dp"] <= pool["devices"] for role in roles)


def test_runners_up_are_told_with_why_they_lose(hybridflow: Program, ppo: Path) -> None:
    plan, out = told(hybridflow, ppo, *CLUSTER, *SEVEN), hybridflow("plan", ppo, *CLUSTER, *SEVEN).out
    fitting = [one for one in plan["runners_up"] if one["devices"]]
    assert len(plan["runners_up"]) == plan["placements"] - 1 and fitting
    assert [one["seconds"] for one in fitting] == sorted(one["seconds"] for one in fitting)
    assert fitting[0]["seconds"] >= plan["seconds"] and all(one["loses"] for one in plan["runners_up"])
    assert "Runners-up." in out and fitting[0]["loses"] in out


def test_other_systems_are_slower_or_say_why_not(hybridflow: Program, ppo: Path) -> None:
    plan, out = told(hybridflow, ppo, *CLUSTER, *SEVEN), hybridflow("plan", ppo, *CLUSTER, *SEVEN).out
    assert [*plan["systems"]] == ["DeepSpeed-Chat", "OpenRLHF", "NeMo-Aligner"]
    for name, system in plan["systems"].items():
        assert system["seconds"] > plan["seconds"]
        assert re.search(rf"\n{name} .* {system['seconds'] / plan['seconds']:.1f}\n", out + "\n")
    small = told(hybridflow, ppo, "--cluster", "a100-80g:1x2", "--model", "smollm2-135m")["systems"]
    assert small["OpenRLHF"]["why_not"] == "needs a device for each of its 4 pools"


def test_picture_and_timeline(hybridflow: Program, ppo: Path, tmp_path: Path) -> None:
    picture, timeline = tmp_path / "out" / "plan.html", tmp_path / "out" / "plan.json"
    for _ in range(2):  # a file that is there is replaced
        out = hybridflow("plan", ppo, *CLUSTER, *SEVEN, "--picture", picture, "--timeline", timeline).out
    assert f"picture: {picture}\n" in out and f"timeline: {timeline}" in out
    page = picture.read_text()
    assert "<svg" in page and "sampler.rollout, step 3" in page and "Runners-up" in page
    events = read_timeline(timeline)
    plan = told(hybridflow, ppo, *CLUSTER, *SEVEN)
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes[0] == "simulation" and {f"pool {pool['name']}" for pool in plan["pools"]} < set(processes)
    done = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in done} == {1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in done) == pytest.approx(3e6 * plan["seconds"], rel=1e-3)


@pytest.mark.parametrize("cluster", ["a100-80g:1x8", "l40s:2x4"])
def test_a_written_file_is_mapped_as_planned(hybridflow: Program, ppo: Path, tmp_path: Path, cluster: str) -> None:
    out, arguments = tmp_path / "planned.toml", ("--cluster", cluster, "--train.prompts_per_step", "64")
    plan = told(hybridflow, ppo, *arguments, "--write", out)
    said = hybridflow("plan", ppo, *arguments, "--write", out).out
    assert f"to run it: hybridflow train {out} --train.prompts_per_step 64\n" in said
    devices = sum(pool["devices"] for pool in plan["pools"])
    again = hybridflow("plan", out, *arguments).out
    assert f"The placement of planned.toml: {plan['seconds']:.4g} s a step on {devices} devices." in again
    graph = json.loads(hybridflow("graph", out, "--json").out)
    assert {pool["name"]: sum(pool["nodes"]) for pool in graph["pools"]} == {
        pool["name"]: pool["devices"] for pool in plan["pools"]
    }


def test_a_file_whose_placement_has_no_room_says_so(hybridflow: Program, tmp_path: Path) -> None:
    path = written(tmp_path, with_keys(REVERSE, runtime={"kind": "ray"}, placement={"pools": {"main": 4}}))
    out = hybridflow("plan", path, "--cluster", "a100-80g:1x2").out
    assert "The placement of run.toml can't be compared: placement.pools.main = 4: there is no room on 1x2 devices" in out


def test_schedule_lengths_and_prices_matter(hybridflow: Program, ppo: Path) -> None:
    longer = (*SEVEN, "--lengths", "256+512~128")
    short, long = told(hybridflow, ppo, *CLUSTER, *SEVEN), told(hybridflow, ppo, *CLUSTER, *longer)
    assert long["tokens"] == 1.5 * short["tokens"] and long["seconds"] > 1.5 * short["seconds"]
    stale = told(hybridflow, ppo, *CLUSTER, *SEVEN, "--schedule", "async")
    assert stale["seconds"] <= short["seconds"] and stale["placements"] > short["placements"]
    out = hybridflow("plan", ppo, "--cluster", "a100-80g:1x8@1.5", *SEVEN, "--objective", "price").out
    assert "for a million tokens" in out and "for a million tokens" not in hybridflow("plan", ppo, *CLUSTER, *SEVEN).out


def test_what_if_tells_a_table(hybridflow: Program, ppo: Path) -> None:
    code, out, err = hybridflow("plan", ppo, *CLUSTER, *SEVEN, "--what-if", "devices=1,4,8")
    assert (code, err) == (0, "")
    header, one, four, eight = (line.split() for line in out.splitlines()[3:7])
    assert header[:4] == ["devices", "seconds", "a", "step"] and one[:2] == ["1", "nothing"]
    assert four[0] == "4" and float(four[4]) == 1.0 and four[5] == "100%" and float(eight[4]) > 1.5
    assert " on 1 x 8 a100-80g. " in out and "Only devices changes.\n" in out
    assert "devices=1: no mapping fits" in out and "the smallest cluster that would do" in out
    rows = told(hybridflow, ppo, *CLUSTER, *SEVEN, "--what-if", "devices=1,4,8")
    assert "problem" in rows[0] and rows[2]["tokens_per_second"] / rows[1]["tokens_per_second"] == pytest.approx(
        float(eight[4]), abs=0.01
    )
    assert sum(pool["devices"] for pool in rows[2]["pools"]) <= 8


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("cluster", "l40s:1x8,h100:1x8"),
        ("model", "llama-13b,llama-7b"),
        ("lengths", "256+512,256+256"),
        ("schedule", "sync,async"),
        ("algorithm", "remax,grpo"),
    ],
)
def test_anything_can_be_varied(hybridflow: Program, tmp_path: Path, key: str, values: str) -> None:
    path = written(tmp_path, with_keys(REVERSE, kl__coef=0.1, actor__dtype="bfloat16"))
    slow, fast = told(hybridflow, path, *CLUSTER, *SEVEN, "--what-if", f"{key}={values}")
    assert [slow["value"], fast["value"]] == values.split(",") and slow["seconds"] > fast["seconds"]
    out = hybridflow("plan", path, *CLUSTER, *SEVEN, "--what-if", f"{key}={values}").out
    assert "speed-up" in out and "efficiency" not in out and "a million tokens" not in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--cluster", "a100:1x8"), "cluster 'a100:1x8': no machines 'a100'; did you mean"),
        (("--cluster", "a100-80g:0x8"), "'0x8' is no size; expected MACHINESxDEVICES"),
        (("--cluster", ":x"), "cluster ':x': ':x' is no machines; expected KIND:MACHINESxDEVICES"),
        ((*CLUSTER, "--lengths", "0+0"), "lengths '0+0': prompts without a token; expected 1+1 or more"),
        ((*CLUSTER, "--lengths", "1024+0"), "lengths '1024+0': responses without a token; expected 1+1 or more"),
        ((*CLUSTER, "--lengths", "1024"), "lengths '1024': expected PROMPT+RESPONSE in tokens"),
        ((*CLUSTER, "--model", "lama-7b"), "lama-7b: no model of that name, folder or config.json; did you mean llama-7b"),
        ((*CLUSTER, "--model", "llama-70b"), "no mapping fits into the memory of"),
        ((*CLUSTER, "--what-if", "gpus=1,2"), "--what-if gpus=1,2: expected devices, cluster, model, lengths, schedule"),
        ((*CLUSTER, "--what-if", "devices="), "--what-if devices=: expected KEY=VALUE,VALUE"),
        (
            (*CLUSTER, "--what-if", "devices=12"),
            "--what-if devices=12: expected 1 to 8, which a machine has, or a multiple",
        ),
        ((*CLUSTER, "--what-if", "devices=8,x"), "--what-if devices=x: expected 1 to 8"),
        ((*CLUSTER, "--what-if", "schedule=late"), "--what-if schedule=late: expected sync or async"),
        ((*CLUSTER, "--what-if", "devices=4", "--picture", "x.html"), "plan: --what-if prints a table of many mappings"),
        ((*CLUSTER, "--picture", "/proc/none/x.html"), "plan: can't write /proc/none/x.html"),
        ((*CLUSTER, "--timeline", "/proc/none/x.json"), "plan: can't write /proc/none/x.json"),
        ((*CLUSTER, "--picture", "/proc"), "plan: can't write /proc (it is a folder)"),
        ((*CLUSTER, "--write", "/proc/none/x.toml"), "plan: can't write /proc/none/x.toml"),
        ((*CLUSTER, "--write", "x.toml", "--model", "llama-7b"), "plan: --write puts a mapping into a file"),
        ((*CLUSTER, "--objective", "price"), "device a100-80g has no price"),
        (
            ("--explain-memory", "--model", "llama-7b"),
            "plan: --model says something about a device mapping; give --cluster",
        ),
    ],
)
def test_nonsense_is_told_in_one_line(hybridflow: Program, ppo: Path, arguments: tuple[str, ...], error: str) -> None:
    code, out, err = hybridflow("plan", ppo, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and error in err


def test_a_plan_for_rollouts_beside_learning_is_written_with_its_schedule(
    hybridflow: Program, ppo: Path, tmp_path: Path
) -> None:
    path = tmp_path / "planned.toml"
    assert hybridflow("plan", ppo, *CLUSTER, "--schedule", "async", "--write", path).code == 0
    config = load_config(path)
    assert config.schedule.kind == "one_step_off"
    assert [role for role, pool in config.placed.roles.items() if pool == config.placed.roles["sampler"]] == ["sampler"]


def test_too_small_a_cluster_says_which_would_do(hybridflow: Program, ppo: Path) -> None:
    err = hybridflow("plan", ppo, *CLUSTER, "--model", "llama-70b").err
    machines = err.partition("the smallest cluster that would do: ")[2].split()[0]
    assert hybridflow("plan", ppo, "--cluster", f"a100-80g:{machines}x8", "--model", "llama-70b").code == 0
    fewer = f"a100-80g:{int(machines) - 1}x8"
    assert hybridflow("plan", ppo, "--cluster", fewer, "--model", "llama-70b").code == 2


@pytest.mark.parametrize("devices", [1, 3, 5])
def test_odd_numbers_of_devices(hybridflow: Program, ppo: Path, devices: int) -> None:
    plan = told(hybridflow, ppo, "--cluster", f"a100-80g:1x{devices}")
    assert sum(pool["devices"] for pool in plan["pools"]) <= devices


def test_a_run_is_planned_as_its_file(hybridflow: Program, tmp_path: Path) -> None:
    path = written(tmp_path, REVERSE)
    assert hybridflow("train", path, "--train.steps", "1").code == 0
    assert told(hybridflow, tmp_path / "run", *CLUSTER) == told(hybridflow, path, *CLUSTER)


def test_help_explains_all_that_time_is_made_of(hybridflow: Program, ppo: Path) -> None:
    plan, text = told(hybridflow, ppo, *CLUSTER, *SEVEN), hybridflow("plan", "--help").out
    legend = text.partition("are made of:\n")[2]
    assert all(f" {part} " in legend for task in plan["tasks"] for part in task["parts"])


def test_one_thing_is_asked_at_a_time(hybridflow: Program, ppo: Path) -> None:
    assert "--explain-memory --cluster" in hybridflow("plan", ppo, "--json").err
    code, _, err = hybridflow("plan", ppo, "--explain-memory", *CLUSTER)
    assert code == 2 and "not allowed with argument --explain-memory" in err


def test_environments_have_no_mapping(hybridflow: Program, tmp_path: Path) -> None:
    code, _, err = hybridflow("plan", written(tmp_path, CARTPOLE), *CLUSTER)
    assert code == 2 and "CartPole-v1: a planner knows language models only" in err
