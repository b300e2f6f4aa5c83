"""The probe measures what it says, keeps it, and clusters called "here" read it."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import hybridflow.commands.probe as command
from hybridflow.cli import main
from hybridflow.planner import probe
from hybridflow.planner.cluster import parse_cluster
from hybridflow.planner.hardware import fingerprint, load_probe


def test_seconds_are_those_of_one_call() -> None:
    found = probe._seconds(lambda: time.sleep(0.01), torch.device("cpu"))
    assert 0.01 <= found < 0.1


def test_what_threads_dont_gain_is_left_of_a_layer() -> None:
    """Two threads multiply 1.5 times as fast; a layer of 0.7 ms, 0.1 ms of which is no product, should take 0.4 ms."""
    found = {(torch.float32, 1): 1e11, (torch.float32, 2): 1.5e11, "tiny": 1e-4, ("rows", 1): 7e-4, ("rows", 2): 6.5e-4}
    assert probe._launch_s(found, 1) == pytest.approx(1e-4)
    assert probe._launch_s(found, 2) == pytest.approx(2.5e-4)
    assert probe._launch_s(found | {("rows", 2): 3e-4}, 2) == 1e-4


def test_a_probe_is_kept_and_divides_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "ENOUGH_S", 0.002)
    monkeypatch.setattr(command, "measure", partial(probe.measure, rounds=1))
    start = time.perf_counter()
    assert main(["probe", "--json"]) == 0
    assert time.perf_counter() - start < 60
    told, kept, machine = json.loads(capsys.readouterr().out), load_probe(), fingerprint()
    assert kept.machine == machine
    assert Path(told["file"]).parent == machine.folder
    assert [*kept.flops] == ["float32", "bfloat16"]
    assert all([*rates] == [*kept.bandwidth] for rates in kept.flops.values())
    assert 1e9 < kept.flops["float32"][1] < 1e16
    assert 1e8 < kept.bandwidth[1] < 1e13
    assert 1e6 < kept.link < kept.bandwidth[1]
    assert 1e-7 < kept.link_latency_s < 1e-1
    assert [*kept.launch_s] == [*kept.bandwidth] and kept.launch_s[1] == min(kept.launch_s.values()) > 1e-7
    assert kept.shared_bandwidth >= max(kept.bandwidth.values())
    ((_, one),) = parse_cluster("here:1x2").machines
    assert one.device.memory_bytes == kept.memory_bytes / 2
