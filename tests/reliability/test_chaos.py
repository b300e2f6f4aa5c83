"""The parts of ``hybridflow chaos``: its schedule, its small disk, what it refuses, and how it compares two runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys, written
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.chaos.disk import Disk, SmallDisk
from hybridflow.chaos.kinds import KINDS, Scene
from hybridflow.chaos.processes import Processes, kill_all, remaining
from hybridflow.chaos.schedule import SPARE_STEPS, schedule
from hybridflow.chaos.training import newest_step
from hybridflow.chaos.verdict import differences

SAVED = {"checkpoint__every": 1, "train__steps": 40}


@settings(max_examples=30, deadline=None)
@given(faults=st.integers(1, 40), spare=st.integers(0, 100), seed=st.integers(0, 2**31))
def test_a_schedule_has_every_kind_before_any_comes_again_and_follows_from_its_seed(
    faults: int, spare: int, seed: int
) -> None:
    kinds, steps = ["a", "b", "c"], faults + SPARE_STEPS + spare
    made = schedule(kinds, faults, steps, seed)
    assert made == schedule(kinds, faults, steps, seed)
    assert len(made) == faults
    for begin in range(0, faults, 3):
        dealt = [fault.kind for fault in made[begin : begin + 3]]
        assert len(set(dealt)) == len(dealt)
    numbers = [fault.step for fault in made]
    assert numbers == sorted(set(numbers)), "each has a step of its own"
    assert numbers[0] >= 1 and numbers[-1] <= steps - SPARE_STEPS
    assert all(0 <= fault.delay < 1 and 0 <= fault.draw < 1 for fault in made)


def test_schedules_differ_by_seed() -> None:
    assert schedule(["a", "b"], 6, 50, 1) != schedule(["a", "b"], 6, 50, 2)


@pytest.mark.parametrize(
    ("keys", "options", "told"),
    [
        (
            {},
            ["--kinds", "kill-driver,kill-drivre"],
            "--kinds kill-drivre: no such kind; did you mean kill-driver? There are ",
        ),
        ({}, ["--kinds", "kill-worker"], "kill-worker can't befall this run: it has no worker processes; set runtime.kind"),
        ({}, ["--kinds", "kill-node"], "kill-node can't befall this run: it has one node; give --nodes 2 or more"),
        (
            {},
            ["--kinds", "kill-environment"],
            "kill-environment can't befall this run: it has no processes of environments",
        ),
        ({}, ["--faults", "38"], "38 faults need a step each and 3 more; train.steps = 40; give --train.steps 41 or more"),
        ({}, ["--faults", "-1"], "--faults -1: expected 0, one of each kind, or more"),
        ({}, ["--nodes", "3"], '--nodes are for runtime.kind = "ray"'),
        ({"checkpoint__every": 0}, [], "checkpoint.every = 0, so a run that dies begins anew; give --checkpoint.every"),
        (
            {"checkpoint__keep": 1},
            ["--kinds", "flip-checkpoint"],
            "it keeps one checkpoint; set checkpoint.keep = 2 or more",
        ),
        ({"runtime": {"kind": "ray", "address": "auto"}}, [], "runtime.address: leave it out, chaos starts what it breaks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_t_be_done_is_refused_in_one_line(
    keys: dict[str, Any], options: list[str], told: str, hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    out = hybridflow("chaos", written(tmp_path, with_keys(REVERSE, **{**SAVED, **keys})), *options)
    assert out.code == 2
    assert out.err.startswith("error: chaos: ") and out.err.count("\n") == 1
    assert told in out.err
    assert not (tmp_path / "run-chaos").exists()


def test_rewards_of_environments_and_folders_that_exist_are_refused(
    hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    config = written(tmp_path, with_keys(CARTPOLE, **SAVED))
    out = hybridflow("chaos", config, "--kinds", "kill-reward")
    assert out.code == 2 and "it calls no reward functions in processes of their own" in out.err
    (tmp_path / "run-chaos").mkdir()
    out = hybridflow("chaos", config, "--kinds", "kill-driver")
    assert out.code == 2 and "run-chaos is there already" in out.err


def test_the_small_disk_is_full_at_will_and_leaves_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("small")
    with SmallDisk(folder, 1 << 20) as disk:

        def write(name: str) -> int:
            lines = (
                "import sys",
                f"try: open({str(folder / name)!r}, 'w').write('x' * 10000)",
                "except OSError as e: sys.exit(e.errno)",
            )
            return subprocess.run([*disk.enter, sys.executable, "-c", "\n".join(lines)], check=False).returncode

        assert write("before") == 0
        assert not any(folder.iterdir()), "nobody else sees it"
        assert disk.seen(folder / "before").read_text() == "x" * 10000
        disk.fill()
        assert write("full") == errno.ENOSPC
        disk.free()
        assert write("after") == 0
    assert {path.name for path in folder.iterdir()} == {"before", "full", "after"}


@pytest.mark.parametrize("kind", ["flip-checkpoint", "truncate-checkpoint", "delete-checkpoint-file", "delete-manifest"])
def test_the_newest_checkpoint_alone_is_damaged_and_its_driver_dies(kind: str, tmp_path: Path) -> None:
    for step in ("step-00000001", "step-00000002"):
        (tmp_path / step / "actor").mkdir(parents=True)
        for name in ("manifest.json", "actor/0.safetensors"):
            (tmp_path / step / name).write_bytes(b"0123456789")
    program = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', 'hybridflow.cli'])"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program])
    processes = Processes(supervisor.pid, None)
    try:
        while (driver := processes.driver) is None:
            assert supervisor.poll() is None
        scene = Scene(processes, tmp_path, Disk(tmp_path / "disk"), None, 0.5)
        assert KINDS[kind].when(scene)
        KINDS[kind].befall(scene)
        assert remaining([driver], 5) == []
    finally:
        kill_all(processes.own())
        supervisor.wait()
    read = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert read[Path("step-00000001/actor/0.safetensors")] == read[Path("step-00000001/manifest.json")] == b"0123456789"
    newest = {path.relative_to("step-00000002"): value for path, value in read.items() if path.parts[0] == "step-00000002"}
    expected = {
        "flip-checkpoint": {"manifest.json": b"0123456789", "actor/0.safetensors": b"0123446789"},
        "truncate-checkpoint": {"manifest.json": b"0123456789", "actor/0.safetensors": b"01234"},
        "delete-checkpoint-file": {"manifest.json": b"0123456789"},
        "delete-manifest": {"actor/0.safetensors": b"0123456789"},
    }
    assert newest == {Path(name): value for name, value in expected[kind].items()}


def test_processes_that_are_stopped_can_be_ended_and_others_are_told(tmp_path: Path) -> None:
    sleeping = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    stopped, other = (psutil.Process(process.pid) for process in sleeping)
    os.kill(stopped.pid, signal.SIGSTOP)
    kill_all([stopped])
    assert remaining([stopped, other], 0.1) == [other]
    kill_all([other])
    assert [process.wait() for process in sleeping] == [-signal.SIGKILL] * 2, "their codes are left to who started them"


def test_the_newest_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert newest_step(metrics) == 0
    metrics.write_text("")
    assert newest_step(metrics) == 0
    metrics.write_text('{"step": 7, "a": 1}\n{"step": 8, "a"')
    assert newest_step(metrics) == 7
    metrics.write_text('{"step": 7, "a": 1}\n{"step": 8, "a": 1}\n')
    assert newest_step(metrics) == 8
    metrics.write_text('{"step": 1}\n' + json.dumps({"step": 2, "a": "x" * 100_000}) + '\n{"step": 3}\n')
    assert newest_step(metrics) == 3


def ended(folder: Path, step: int = 3, digest: str = "aa", **metrics: float) -> Path:
    """A run directory with a checkpoint and three records."""
    saved = folder / "checkpoints" / f"step-{step:08d}"
    saved.mkdir(parents=True)
    files = {"actor/0.safetensors": {"sha256": digest, "bytes": 1}, "trainer.json": {"sha256": "bb", "bytes": 1}}
    (saved / "manifest.json").write_text(json.dumps({"step": step, "files": files}))
    records = [{"step": number, "loss/policy": 0.5, "time/step_s": number, **metrics} for number in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_runs_are_equal_by_the_last_checkpoint_and_all_metrics_but_those_of_time(tmp_path: Path) -> None:
    clean = ended(tmp_path / "clean", **{"memory/rss_gb": 1.0, "tokens_per_s": 3.0, "kl": 0.25})
    assert differences(clean, ended(tmp_path / "same", **{"memory/rss_gb": 2.0, "tokens_per_s": 4.0, "kl": 0.25})) == []
    other = {"weights": ended(tmp_path / "weights", digest="cc", kl=0.25), "kl": ended(tmp_path / "kl", kl=0.26)}
    assert differences(clean, other["weights"]) == ["step-00000003/actor/0.safetensors differs"]
    assert differences(clean, other["kl"]) == ["step 1: kl differ"]
    assert differences(clean, ended(tmp_path / "without")) == ["step 1: kl differ"]
    early = ended(tmp_path / "early", step=2, kl=0.25)
    assert differences(clean, early) == ["the last checkpoint is step-00000002, not step-00000003"]
    shutil.rmtree(early / "checkpoints")
    assert differences(clean, early) == ["the last checkpoint is missing, not step-00000003"]
    lines = (clean / "metrics.jsonl").read_text().splitlines()
    twice = ended(tmp_path / "twice", kl=0.25)
    (twice / "metrics.jsonl").write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert differences(clean, twice) == ["metrics of 4 steps, not 3"]
