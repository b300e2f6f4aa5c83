"""The policy of a run, served while and after it is trained."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CARTPOLE, PENDULUM, REVERSE, Outcome, with_keys, written
from gymnasium.spaces import Box

from hybridflow.core.errors import ModelError
from hybridflow.models.exported import read_policy, save_policy
from hybridflow.models.nets import NetConfig, make_policy
from hybridflow.policy import Policy
from hybridflow.serving.client import PolicyClient
from hybridflow.serving.server import Limits, PolicyServer

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FILE = "model/policy.safetensors"


@pytest.fixture
def run(hybridflow: Callable[..., Outcome], tmp_path: Path) -> Path:
    assert hybridflow("train", written(tmp_path, CARTPOLE)).code == 0
    return tmp_path / "run"


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own, and the line that it tells."""
    words = [sys.executable, "-m", "hybridflow.cli", "serve", *map(str, arguments), "--port", "0", "--budget-ms", "30000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(words, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_a_server_follows_its_run_and_ends_when_it_is_told_to(run: Path) -> None:
    policy, seen = Policy.load(run), np.array([0.01, 0.2, -0.03, 0.4], np.float32)
    with serving(run, "--follow", "--host", "0.0.0.0") as (process, told):
        found = re.fullmatch(r"serving \S+, version 2, at (http://\S+); Ctrl-C stops\n", told)
        assert found
        with PolicyClient(found[1].replace("0.0.0.0", "127.0.0.1"), timeout_s=30) as client:
            assert client.act(seen) == (policy.act(seen), 2)
            for version in range(3, 6):
                save_policy(policy.network, version, run / FILE)
                deadline = time.monotonic() + 20
                while client.act(seen)[1] != version:
                    assert time.monotonic() < deadline
            (run / FILE).write_bytes(b"what")
            time.sleep(0.5)
            assert client.act(seen)[1] == 5
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and re.fullmatch(r"stopped after \d+ answers, at version 5\n", out)
    warnings = err.splitlines()
    assert warnings[0] == "warning: --host 0.0.0.0 lets other machines ask; there is no authentication and no encryption"
    assert len(warnings) == 2 and re.fullmatch(r"warning: .*can't be read: .*; version 5 goes on", warnings[1])


def test_a_run_exports_its_policy_while_it_goes_on(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    keys = {"train__steps": 8, "train__minibatches": 1, "checkpoint__export_every": 2}
    config, versions, over = written(tmp_path, with_keys(CARTPOLE, **keys)), list[int](), threading.Event()

    def look() -> None:
        while not over.is_set():
            try:
                found = read_policy(tmp_path / "run" / FILE).version
            except ModelError as error:
                assert not versions and "No such file" in str(error)
                continue
            versions.extend([found] if not versions or found != versions[-1] else [])

    looking = threading.Thread(target=look)
    looking.start()
    outcome = hybridflow("train", config)
    over.set()
    looking.join()
    assert outcome.code == 0
    assert versions == sorted(versions) and set(versions) <= {0, 2, 4, 6, 8} and versions[-1] == 8
    timeline = (tmp_path / "run" / "timeline.json").read_text()
    assert timeline.count('"policy.export"') == 5  # before the first step, and after every second one
    assert Policy.load(tmp_path / "run").act(np.zeros(4, np.float32)) in (0, 1)


def test_the_version_counts_updates_also_after_a_run_goes_on(hybridflow: Callable[..., Outcome], run: Path) -> None:
    assert read_policy(run / FILE).version == 2
    longer = run.parent / "longer"
    train = ["train", run.parent / "run.toml", "--run_dir", longer, "--checkpoint.every", "2"]
    assert hybridflow(*train).code == hybridflow(*train, "--resume", "--train.steps", "4").code == 0
    metrics = [json.loads(line) for line in (longer / "metrics.jsonl").read_text().splitlines()]
    assert read_policy(longer / FILE).version == metrics[-1]["policy_version"] == 4


def test_mistakes_are_told_in_a_line(hybridflow: Callable[..., Outcome], run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").write_text((run / "config.toml").read_text())
    for words, message in (
        ((tmp_path / "none",), "none: no such run directory"),
        ((tmp_path,), "not a run directory, it has no config.toml"),
        ((other,), "no exported model"),
        ((run, "--budget-ms", 0), "serve: --budget-ms 0: expected more than 0"),
        ((run, "--max-batch", -1), "serve: --max-batch -1: expected more than 0"),
        ((run, "--port", 99999), "give another --host or --port"),
    ):
        outcome = hybridflow("serve", *words)
        assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1, outcome


def test_language_models_are_not_exported_while_they_are_trained(
    hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = hybridflow("train", written(tmp_path, REVERSE), "--checkpoint.export_every", 1)
    assert outcome.code == 2 and "checkpoint.export_every: only policies in an [environment]" in outcome.err


def test_the_control_loop_of_the_examples(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, example = tmp_path / "run", runpy.run_path(str(EXAMPLES / "pendulum_control.py"))
    assert hybridflow("train", written(tmp_path, PENDULUM), "--train.steps", 20).code == 0
    policy = Policy.load(run)
    with PolicyServer(policy.acting, policy.spaces, limits=Limits(30.0), version=17) as server:
        monkeypatch.setattr(sys, "argv", ["loop", server.url, "--rate", "0.5", "--episodes", "2", "--steps", "1"])
        example["main"]()
        first, second, mean, took = capsys.readouterr().out.splitlines()
        assert server.metrics()["requests"]["answered"] == 2
    told = [re.fullmatch(r"episode \d: return (-\d+), policy version 17", line) for line in (first, second)]
    returns = [float(found[1]) for found in told if found]
    assert -34 < min(returns) <= max(returns) <= 0 and len(returns) == 2
    assert re.fullmatch(r"mean return -\d+; 2 ticks, 0 without an action", mean)
    assert re.fullmatch(r"actions took [\d.]+ ms \(p50\), [\d.]+ ms \(p99\)", took)


def test_the_control_loop_holds_its_action_where_none_comes() -> None:
    example = runpy.run_path(str(EXAMPLES / "pendulum_control.py"))
    spaces = Box(-8, 8, (3,), np.float32), Box(-2, 2, (1,), np.float32)

    class Slow(torch.nn.Module):
        network, seconds = make_policy(*spaces, NetConfig(hidden=()), torch.Generator()), 0.0

        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            time.sleep(Slow.seconds)
            return torch.full((len(observations), 1), 1.5)

    with PolicyServer(Slow(), spaces, limits=Limits(30.0)) as server, PolicyClient(server.url, timeout_s=0.2) as client:
        loop, held = example["Loop"](client, 0.01), np.array([-0.5], np.float32)
        Slow.seconds = 0.5
        assert loop.action(np.zeros(3), held) is held
        assert (loop.missed, loop.versions, loop.latencies_s) == (1, set(), [])
