"""A policy's file, replaced while others read it."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file

from hybridflow.core.errors import ModelError
from hybridflow.models.exported import read_policy, save_policy
from hybridflow.models.nets import NetConfig, make_policy

SPACES = spaces.Box(-8.0, 8.0, (3,), np.float32), spaces.Discrete(2)


def policy() -> torch.nn.Module:
    return make_policy(*SPACES, NetConfig(hidden=(64,), normalise=True), torch.Generator().manual_seed(0))


def test_weights_come_back_with_their_version(tmp_path: Path) -> None:
    made = policy()
    save_policy(made, 12, tmp_path / "policy.safetensors")
    weights, version = read_policy(tmp_path / "policy.safetensors")
    assert version == 12 and weights.keys() == made.state_dict().keys()
    assert any(name.endswith(".count") for name in weights)  # the normaliser, too
    assert all(torch.equal(weights[name], value) for name, value in made.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["policy.safetensors"]


def test_whoever_reads_has_one_version_whole(tmp_path: Path) -> None:
    made, path, over = policy(), tmp_path / "policy.safetensors", threading.Event()

    def write() -> None:
        for version in itertools.takewhile(lambda _: not over.is_set(), range(1, 10_000)):
            with torch.no_grad():
                for value in made.state_dict().values():
                    value.fill_(version)
            save_policy(made, version, path)

    save_policy(made, 0, path)
    writer = threading.Thread(target=write)
    writer.start()
    seen = {0}
    try:
        while len(seen) < 15 and writer.is_alive():
            weights, version = read_policy(path)
            assert version == 0 or {float(value.double().mean()) for value in weights.values()} == {version}
            assert version >= max(seen)
            seen.add(version)
    finally:
        over.set()
        writer.join()
    assert len(seen) == 15


def test_what_is_no_exported_policy_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    with pytest.raises(ModelError, match=r"policy.safetensors: can't be read: .*; expected an exported policy"):
        read_policy(path)
    path.write_bytes(b"what is this")
    with pytest.raises(ModelError, match="can't be read"):
        read_policy(path)
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match="doesn't say its policy_version"):
        read_policy(path)
