"""``hybridflow profile``, what runs add to the base of a machine, and how plans read it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import CARTPOLE, PENDULUM, REVERSE, Outcome, with_keys, written

from hybridflow.build_profile import base_here, base_path, kept_roles
from hybridflow.cli import main
from hybridflow.commands import profile
from hybridflow.config import load_config, validate
from hybridflow.planner.hardware import Probe, fingerprint, save_probe
from hybridflow.planner.profile_base import Learned, ProfileBase
from hybridflow.rollout.reward_workers import default_workers

Program = Callable[..., Outcome]
TASKS = {"sampler.rollout", "reward.score", "estimator.compute", "actor.update"}


FEW = (profile.Size(0.25, 1), profile.Size(1, 0.5), profile.Size(1, 1))


class Known(NamedTuple):
    """A machine on which ``config`` was profiled, and what was printed."""

    home: Path
    config: Path
    told: str


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(tmp_path / "home"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "ENOUGH_S", 0.0)
    monkeypatch.setattr(profile, "SIZES", FEW)
    monkeypatch.setattr(profile, "_threads", lambda: [1])


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    folder, told = tmp_path_factory.mktemp("known"), io.StringIO()
    config = written(folder, with_keys(REVERSE, train__steps=4))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told):
        patch.setenv("HYBRIDFLOW_HOME", str(folder / "home"))
        patch.setattr(profile, "ENOUGH_S", 0.0)
        patch.setattr(profile, "SIZES", (*FEW, profile.Size(2, 1)))
        assert main(["profile", str(config)]) == 0
        machine = fingerprint()
        rates, cores = {1: 1e11, machine.cores: 2e11}, machine.cores
        flops, read, launch = {"float32": rates, "bfloat16": rates}, {1: 2e10, cores: 3e10}, {1: 1e-4, cores: 2e-4}
        save_probe(Probe(machine, flops, read, 3e10, 24e9, 1e9, 1e-4, launch))
    return Known(folder / "home", config, told.getvalue())


@pytest.fixture
def there(known: Known, monkeypatch: pytest.MonkeyPatch) -> Known:
    """This is that machine."""
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(known.home))
    return known


def profiled(hybridflow: Program, config: Path, *overrides: object) -> dict[str, dict[str, Any]]:
    code, out, err = hybridflow("profile", config, "--json", *overrides)
    assert (code, err) == (0, ""), err
    return {task["task"]: task for task in json.loads(out)["tasks"]}


def test_a_configuration_is_profiled_at_several_sizes_and_shown(hybridflow: Program, there: Known) -> None:
    assert there.told.startswith("rows x 0.25, lengths x 1, 1 thread: ") and "operations counted" in there.told
    assert not (there.config.parent / "run").exists()  # trained by the tests below
    shown = json.loads(hybridflow("profile", "show", "--json").out)
    tasks = {task["task"]: task for task in shown["tasks"]}
    assert {*tasks} == TASKS and shown["file"] == str(base_path())
    update, rollout = tasks["actor.update"], tasks["sampler.rollout"]
    assert tasks["reward.score"]["workers"] == [default_workers()] and update["workers"] == [1]
    assert update["rows"] == [4, 32] and update["threads"] == profile._threads()
    assert rollout["tokens"][0] < rollout["tokens"][1] and rollout["model"].startswith("llama 2x32 #")
    assert 4 < update["flops_per_token"] / (2 * 12 * 32**2) < 8 and tasks["reward.score"]["flops_per_token"] == 0
    assert all(0 < task["seconds"][0] <= task["seconds"][1] for task in tasks.values())
    assert all(task["left_out_error"] is not None for task in tasks.values())
    lines = hybridflow("profile", "show").out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [*tasks]
    found = base_here().predict("actor.update", rows=24, tokens=24 * 12)
    assert 0 < found.interval[0] < found.seconds < found.interval[1]


def test_how_pools_scale_is_shown(hybridflow: Program) -> None:
    learned = Learned("actor llama cpu", "threads", 0.625)
    ProfileBase.add(base_path(), asdict(fingerprint()), [], [learned])
    assert json.loads(hybridflow("profile", "show", "--json").out)["scalings"] == [learned._asdict()]
    line = "actor llama cpu: more threads divide 62% of its work, as the last auction learned"
    assert line in hybridflow("profile", "show").out.splitlines()


@pytest.mark.usefixtures("short")
def test_environments_and_replays_are_profiled(hybridflow: Program, tmp_path: Path) -> None:
    tasks = profiled(hybridflow, written(tmp_path, CARTPOLE))
    rollout = tasks["sampler.rollout"]
    assert rollout["rows"] == [1, 4] and rollout["tokens"] == [32, 128]
    assert rollout["model"].startswith("CartPole-v1 mlp 64-64 #") and {"actor.update", "critic.update"} <= {*tasks}
    replayed = profiled(hybridflow, written(tmp_path, PENDULUM))
    assert replayed["actor.update"]["samples"] > 4 and replayed["actor.update"]["kind"] == "train"


def test_runs_add_what_they_measure_and_share_it(hybridflow: Program, tmp_path: Path) -> None:
    config = written(tmp_path, with_keys(REVERSE, train__steps=4))
    assert hybridflow("train", config).code == 0
    first = base_here()
    assert {task[0] for task in first.tasks()} == TASKS
    assert {one.source for one in first.samples} == {str(tmp_path / "run")}
    more = ("--run_dir", tmp_path / "more", "--seed", 2, "--actor.optimizer.lr", 1e-4)
    assert hybridflow("train", config, *more).code == 0
    second = base_here()
    assert second.tasks() == first.tasks() and len(second.samples) > len(first.samples)
    assert hybridflow("train", config, "--run_dir", tmp_path / "other", "--train.epochs", 2).code == 0
    assert {task[0] for task in {*base_here().tasks()} - {*first.tasks()}} == {"actor.update"}


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ({"seed": 9, "train__prompts_per_step": 2, "generation__max_new_tokens": 9, "threads": 2}, set()),
        ({"actor__fresh__hidden_size": 64}, {"actor", "sampler"}),
        ({"actor__dtype": "bfloat16"}, {"actor", "sampler"}),
        ({"generation__precision": "int8"}, {"sampler"}),
        ({"actor__optimizer__freeze": ("embed*",)}, {"actor"}),
        ({"reward__functions": ("length",)}, {"reward"}),
        ({"train__group_size": 2}, {"sampler"}),
    ],
)
def test_what_a_role_is_decides_whose_samples_it_shares(keys: dict[str, Any], changed: set[str]) -> None:
    one, other = (
        kept_roles(validate({**data, "run_dir": "run"}, "test")) for data in (REVERSE, with_keys(REVERSE, **keys))
    )
    assert {role for role in one if one[role] != other[role]} - {"examiner"} == changed


def test_a_base_that_cannot_be_written_ends_no_run(hybridflow: Program, tmp_path: Path) -> None:
    base_path().parent.mkdir(parents=True)
    base_path().write_text("spoilt " * 1000)
    code, out, err = hybridflow("train", written(tmp_path, REVERSE))
    assert (code, err) == (0, "")
    assert out.count("task profiles of this run are not kept: ") == 1 and "step 2/2" in out
    assert base_path().read_text() == "spoilt " * 1000


def test_comparing_a_run_uses_what_others_measured(hybridflow: Program, there: Known, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert hybridflow("train", there.config, "--run_dir", run).code == 0
    assert {one.source for one in base_here().samples} == {"profile", str(run)}
    out = hybridflow("plan", run, "--compare").out
    assert "profiled: by what other runs measured of these tasks on this machine,\noff by " in out
    found = json.loads(hybridflow("plan", run, "--compare", "--json").out)
    assert all(task["profiled_s"] > 0 and task["spread"] >= 1 for task in found["tasks"])
    own = next(task for task in found["tasks"] if task["task"] == "reward.score")
    assert own["predicted_s"] == own["measured_s"] != own["profiled_s"]
    assert found["profiled_s"] == pytest.approx(sum(task["profiled_s"] for task in found["tasks"]), rel=0.01)
    others = base_here().without(str(run))
    guess = others.predict("reward.score", rows=16, tokens=0, workers=default_workers()).seconds
    assert own["profiled_s"] == pytest.approx(guess, rel=1e-6)
    base_path().unlink()
    alone = hybridflow("plan", run, "--compare")
    assert alone.code == 0 and f"to do so: hybridflow profile {run}/config.toml" in alone.out
    ProfileBase.add(base_path(), others.machine, others.samples)


def test_plans_for_this_machine_show_profiles_and_take_what_they_cannot_know(hybridflow: Program, there: Known) -> None:
    asked = ("plan", there.config, "--cluster", "here:1x1")
    with_profiles, out = json.loads(hybridflow(*asked, "--json").out), hybridflow(*asked).out
    others = base_here()
    base_path().unlink()
    without = json.loads(hybridflow(*asked, "--json").out)
    ProfileBase.add(base_path(), others.machine, others.samples)
    seconds = [{task["name"]: task["seconds"] for task in plan["tasks"]} for plan in (without, with_profiles)]
    assert seconds[0]["reward.score"] == 0 < seconds[1]["reward.score"]
    assert seconds[0]["actor.update"] == seconds[1]["actor.update"]
    assert "\nProfiled. " in out and "\nactor.update " in out.partition("\nProfiled. ")[2]
    assert "\nProfiled. " not in hybridflow("plan", there.config, "--cluster", "cpu:1x1").out


@pytest.mark.slow
@pytest.mark.usefixtures("short", "ray_cluster")
def test_workers_of_pools_are_profiled_after_one_process(
    hybridflow: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "SIZES", (profile.Size(1, 1),))
    config = written(tmp_path, with_keys(REVERSE, runtime__kind="ray", placement__pools={"main": 2}))
    code, out, err = hybridflow("profile", config)
    assert (code, err) == (0, "")
    told = re.search(r"^on its pools, rows x 1: ([\d.]+) s a step$", out, re.MULTILINE)
    assert told is not None and float(told[1]) > 0
    tasks = {task["task"]: task for task in json.loads(hybridflow("profile", "show", "--json").out)["tasks"]}
    assert {*tasks} == TASKS and tasks["actor.update"]["workers"] == tasks["sampler.rollout"]["workers"] == [1, 2]
    assert tasks["sampler.rollout"]["rows"] == tasks["actor.update"]["rows"] == [8, 16]


def test_mistakes_are_told_in_a_line(hybridflow: Program, tmp_path: Path) -> None:
    config = written(tmp_path, REVERSE)
    for arguments, told in (
        (("show",), "no task was profiled on this machine yet; run: hybridflow profile CONFIG.toml"),
        (("show", "--seed", 3), "profile show: --seed 3 says something about a run; give its TOML file"),
        ((tmp_path / "none.toml",), "no such file"),
        ((config, "--train.step", 3), "train.steps"),
        ((config, "--reward.functions", "nowhere.py:none"), "nowhere.py"),
    ):
        code, _, err = hybridflow("profile", *arguments)
        assert code == 2 and told in err and err.count("\n") == 1, err
    ProfileBase.add(base_path(), {**asdict(fingerprint()), "cores": 999}, [])
    code, _, err = hybridflow("profile", "show")
    assert code == 2 and "of another machine (cores 999, not " in err and err.count("\n") == 1


def test_sizes_that_are_impossible_or_the_same_are_left_out(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, with_keys(REVERSE, train__prompts_per_step=1, generation__max_new_tokens=1)), [])
    assert [*profile._scaled(config)] == ["rows x 0.25, lengths x 1", "rows x 2, lengths x 1"]
    split = with_keys(REVERSE, runtime__kind="ray", placement__pools={"main": 2})
    told = [*profile._scaled(load_config(written(tmp_path, split), []))]
    assert len(told) == 10 and [one for one in told if one.startswith("on its pools")] == told[6:]
