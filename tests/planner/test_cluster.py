"""Clusters by name and from files; every mistake is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.core.errors import ConfigError
from hybridflow.planner.cluster import PRESETS, conflicts, parse_cluster
from hybridflow.planner.hardware import Fingerprint, Probe, fingerprint, save_probe


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(tmp_path))
    return tmp_path


def probe(machine: Fingerprint) -> Probe:
    flops = {"float32": {1: 50e9, machine.cores: 90e9}, "bfloat16": {1: 100e9, machine.cores: 190e9}}
    bandwidth = {1: 12e9, machine.cores: 20e9}
    return Probe(machine, flops, bandwidth, 24e9, 24e9, 2e9, 50e-6, {1: 3e-6, machine.cores: 5e-6})


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_cluster(text)
    (line,) = error.value.problems
    return line


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


def test_the_testbed_of_the_paper() -> None:
    cluster = parse_cluster("a100-80g:16x8")
    ((number, machine),) = cluster.machines
    assert (number, machine.devices, cluster.devices) == (16, 8, 128)
    assert machine.link == 600e9 / 2
    assert machine.network == 200e9 / 8
    assert machine.device.flops["bfloat16"] == 312e12
    assert machine.device.price == 0


def test_several_kinds_of_machines_and_prices() -> None:
    cluster = parse_cluster("a100-80g:2x8@1.5 + h100:1x4")
    assert [(number, one.device.name, one.devices, one.device.price) for number, one in cluster.machines] == [
        (2, "a100-80g", 8, 1.5),
        (1, "h100", 4, 0.0),
    ]
    assert cluster.devices == 20


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_consistent(name: str) -> None:
    assert list(conflicts(PRESETS[name])) == []
    assert parse_cluster(f"{name}:1x1").devices == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a10-80g:1x8", "did you mean a100-80g?"),
        ("trainium:1x8", "there are a100-80g, h100, h200, l40s, cpu, here"),
        ("a100-80g", "expected KIND:MACHINESxDEVICES"),
        ("", "expected KIND:MACHINESxDEVICES"),
        ("a100-80g:0x8", "whole numbers from 1 on"),
        ("a100-80g:2x0", "whole numbers from 1 on"),
        ("a100-80g:2x1.5", "whole numbers from 1 on"),
        ("a100-80g:-1x8", "whole numbers from 1 on"),
        ("a100-80g:16", "whole numbers from 1 on"),
        ("a100-80g:1x8@-1", "is no price"),
        ("a100-80g:1x8@much", "is no price"),
        ("here:1x2", "run: hybridflow probe"),
        ("missing.toml", "no such file"),
    ],
)
def test_mistakes(text: str, told: str) -> None:
    assert told in problem(text)


def test_every_mistake_of_a_text_is_told() -> None:
    with pytest.raises(ConfigError) as error:
        parse_cluster("a10:1x8+h100:0x8")
    assert len(error.value.problems) == 2


def test_here_divides_the_machine_by_its_workers(home: Path) -> None:
    machine = replace(fingerprint(), cores=4, gpus=())
    measured = probe(machine)
    assert measured.share(4).flops["float32"] == 50e9
    assert measured.share(1).flops["float32"] == 90e9
    assert 50e9 < measured.share(2).flops["float32"] < 90e9
    assert measured.share(8).flops["float32"] == 25e9
    assert measured.share(1).bandwidth == 20e9
    assert measured.share(4).bandwidth == 6e9  # side by side they read more than the threads of one
    assert [measured.share(workers).launch_s for workers in (4, 1)] == [3e-6, 5e-6]
    save_probe(probe(fingerprint()))
    ((number, one),) = parse_cluster("here:1x2").machines
    assert (number, one.devices, one.link, one.device.memory_bytes) == (1, 2, 2e9, 12e9)
    assert "write here:1x2" in problem("here:2x2")


def test_a_probe_of_other_parts_does_not_count(home: Path) -> None:
    save_probe(probe(replace(fingerprint(), torch="1.0")))
    assert "has not been measured" in problem("here:1x1")


def test_a_probe_that_measured_less_does_not_count(home: Path) -> None:
    path = save_probe(probe(fingerprint()))
    kept = json.loads(path.read_text())
    del kept["launch_s"]
    path.write_text(json.dumps(kept))
    assert "run: hybridflow probe" in problem("here:1x1")


OWN = """
[devices.mine]
flops = { bfloat16 = 1e14, float32 = 2e13 }
memory_gb = 40
bandwidth_gb_s = 1000
price = 0.5

[devices.large]
like = "h100"
memory_gb = 96

[[machines]]
device = "mine"
number = 3
devices = 4
link_gb_s = 50
network_gb_s = 100
link_latency_us = 5
network_latency_us = 20

[[machines]]
device = "large"
devices = 8
network_gb_s = 200

[[machines]]
device = "l40s"
devices = 1
network_gb_s = 12.5
"""


def test_a_file_has_devices_and_machines_of_its_own(home: Path) -> None:
    cluster = parse_cluster(write(home, OWN))
    (number, mine), (_, large), (_, plain) = cluster.machines
    assert (number, mine.devices, mine.link, mine.network, mine.network_latency_s) == (
        3,
        4,
        50e9,
        100e9,
        pytest.approx(20e-6),
    )
    assert (mine.device.name, mine.device.memory_bytes, mine.device.price) == ("mine", 40e9, 0.5)
    assert (large.device.name, large.device.memory_bytes, large.device.bandwidth) == ("large", 96e9, 3.35e12)
    assert (large.link, large.network) == (450e9, 200e9)
    assert (plain.device, plain.network) == (PRESETS["l40s"].device, 12.5e9)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "network_gb_s = 100",
            "network_gb_s = 900",
            "network of 900 GB/s is faster than its 4 devices can deliver, 200 GB/s",
        ),
        ("link_gb_s = 50", "link_gb_s = 2000", "link of 2000 GB/s is faster than the memory"),
        ("link_gb_s = 50", "link_gb_s = 0", "link_gb_s = 0: input should be greater than 0"),
        ("link_gb_s = 50", "link_gb_s = -5", "input should be greater than 0"),
        ("link_gb_s = 50\n", "", "machines of mine: without link_gb_s"),
        ("link_latency_us = 5", "link_latency_us = 50", "swap the latencies"),
        ("number = 3", "number = 0", "input should be greater than or equal to 1"),
        ("number = 3", "number = 2.5", "input should be a valid integer"),
        ("memory_gb = 40\n", "", "without memory_gb"),
        ('like = "h100"', 'like = "h10"', "did you mean h100?"),
        ('device = "l40s"', 'device = "larg"', "did you mean large?"),
        ("bfloat16 = 1e14", "int4 = 1e14", 'expected "bfloat16" and "float32"'),
        ("devices = 8", "device_count = 8", "device_count"),
    ],
)
def test_mistakes_of_a_file(home: Path, old: str, new: str, told: str) -> None:
    path = write(home, OWN.replace(old, new))
    with pytest.raises(ConfigError) as error:
        parse_cluster(path)
    assert all(line.startswith(path) and "\n" not in line for line in error.value.problems)
    assert any(told in line for line in error.value.problems)
