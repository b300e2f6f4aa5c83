"""Damaged experience: datasets of recorded episodes, and replay buffers in checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import with_keys
from hypothesis import given
from hypothesis import strategies as st
from mutations import damaged, examples, little_memory, survives, values  # noqa: F401
from test_runs import ENVIRONMENTS

from hybridflow import checkpoint
from hybridflow.build import Run, build
from hybridflow.config import validate
from hybridflow.core.errors import CheckpointError, DataError
from hybridflow.core.files import written
from hybridflow.data.envs import EnvironmentConfig, spaces_of
from hybridflow.data.recorded import open_recorded, record
from hybridflow.launch import train

pytestmark = pytest.mark.usefixtures("little_memory")

REPLAYING = with_keys(ENVIRONMENTS["dqn-switches"], replay__warmup=8)


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Path]]:
    """A run with a replay buffer, and its checkpoint."""
    folder = tmp_path_factory.mktemp("replaying") / "run"
    keys = {"train__steps": 1, "checkpoint__every": 1}
    config = validate(with_keys(REPLAYING, run_dir=str(folder), **keys), "test")
    assert train(config) == 0
    run = build(config)
    yield run, checkpoint.latest(folder / "checkpoints")
    run.runtime.stop()


def list_again(path: Path, name: str) -> None:
    """Let the manifest say that the file is as it was written."""
    manifest = path / "manifest.json"
    listed = json.loads(manifest.read_text())
    listed["files"][name] = written(path, name)._asdict()
    listed["files"][name]["bytes"] = listed["files"][name].pop("num_bytes")
    manifest.write_text(json.dumps(listed))


def test_no_file_of_a_checkpoint_is_believed_for_its_hash(replaying: tuple[Run, Path]) -> None:
    run, path = replaying
    for name in json.loads((path / "manifest.json").read_text())["files"]:
        good, manifest = (path / name).read_bytes(), (path / "manifest.json").read_text()
        try:
            for content in (b"", b"{}}", (2).to_bytes(8, "little") + b"{}"):  # the last one is of no tensors
                (path / name).write_bytes(content)
                list_again(path, name)
                with pytest.raises(CheckpointError, match="there is no other checkpoint"):
                    run.load(checkpoint.load(path))
        finally:
            (path / name).write_bytes(good)
            (path / "manifest.json").write_text(manifest)
    run.load(checkpoint.load(path))


@given(data=st.data())
@examples(60)
def test_replays_of_checkpoints(replaying: tuple[Run, Path], data: st.DataObject) -> None:
    """Whether or not the manifest knows of the damage."""
    run, path = replaying
    name = data.draw(st.sampled_from(sorted(json.loads((path / "manifest.json").read_text())["files"])))
    good, manifest = (path / name).read_bytes(), (path / "manifest.json").read_text()
    try:
        (path / name).write_bytes(data.draw(damaged(good)))
        if data.draw(st.booleans()):
            list_again(path, name)
        survives(lambda: run.load(checkpoint.load(path)))
    finally:
        (path / name).write_bytes(good)
        (path / "manifest.json").write_text(manifest)
    run.load(checkpoint.load(path))


PLAYED = EnvironmentConfig(id="CartPole-v1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "cartpole-v0"
    record(PLAYED, lambda seen: np.zeros(len(seen), np.int64), folder, 30, 0.5, {})
    return folder


def episodes(folder: Path) -> list[Any]:
    return list(open_recorded(str(folder), PLAYED.id, spaces_of(PLAYED)).batches())


@pytest.mark.parametrize("name", ["main_data.hdf5", "metadata.json"])
@given(data=st.data())
@examples(40)
def test_recorded_datasets(dataset: Path, name: str, data: st.DataObject) -> None:
    path = dataset / "data" / name
    good = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(good)))
        survives(lambda: episodes(dataset))
    finally:
        path.write_bytes(good)


@given(data=st.data())
@examples(30)
def test_metadata_of_recorded_datasets(dataset: Path, data: st.DataObject) -> None:
    path = dataset / "data" / "metadata.json"
    good = path.read_text()
    content = json.loads(good)
    for _ in range(data.draw(st.integers(1, 2))):
        content[data.draw(st.sampled_from(sorted(content)))] = data.draw(values)
    try:
        path.write_text(json.dumps(content))
        survives(lambda: episodes(dataset))
    finally:
        path.write_text(good)


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("observations", lambda x: x[:-1], r"observations that are float32 \[\d+, 4\], expected float32 \[\d+, 4\]"),
        ("observations", lambda x: np.where(x == x[0], np.nan, x), "observations that are NaN or infinite"),
        ("actions", lambda x: x + 2, r"actions that are none of Discrete\(2\)"),
        ("actions", lambda x: x - 1, r"actions that are none of Discrete\(2\)"),
        ("actions", lambda x: x + 0.5, r"actions that are float64 \[\d+\], expected int64 \[\d+\]"),
        ("rewards", lambda x: np.where(x > 0, np.inf, x), "rewards that are NaN or infinite"),
        ("rewards", lambda x: x[:, None], r"rewards that are float64 \[\d+, 1\], expected float32 \[\d+\]"),
        ("rewards", lambda x: x[:-1], "observations that are"),
        ("terminations", lambda x: x[:0], r"terminations that are bool \[0\]"),
        ("terminations", None, "can't be read \\(KeyError"),
    ],
)
def test_episodes_that_can_t_be_of_the_environment(
    dataset: Path, name: str, changed: Callable[[Any], Any] | None, told: str, tmp_path: Path
) -> None:
    shutil.copytree(dataset, tmp_path / "changed-v0")
    with h5py.File(tmp_path / "changed-v0" / "data" / "main_data.hdf5", "a") as file:
        episode = file["episode_1"]
        values = episode[name][()]
        del episode[name]
        if changed is not None:
            episode[name] = changed(values)
    with pytest.raises(DataError, match=told) as caught:
        episodes(tmp_path / "changed-v0")
    assert "\n" not in str(caught.value)
    assert "changed-v0" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"total_steps": 10**9}, "it is said to have 9999"),
        ({"total_steps": 20}, "has more steps than all are said to have"),
        ({"total_episodes": 10**12, "total_steps": 10**13}, "1000000000000 episodes of 10000000000000 steps"),
        ({"observation_space": None}, "observation_space is None, expected str"),
        ({"data_format": "pickle"}, "can't be read"),
    ],
)
def test_what_a_dataset_says_of_itself_is_not_believed(
    dataset: Path, changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    shutil.copytree(dataset, tmp_path / "changed-v0")
    path = tmp_path / "changed-v0" / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(DataError, match=told):
        episodes(tmp_path / "changed-v0")


def test_arrays_that_a_dataset_has_no_room_for_take_no_memory(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "changed-v0")
    with h5py.File(tmp_path / "changed-v0" / "data" / "main_data.hdf5", "a") as file:
        file["episode_0"]["rewards"].resize((10**9,))
    with pytest.raises(DataError, match=r"episode_0/rewards of shape \[1000000000\] can't be in so small a file"):
        episodes(tmp_path / "changed-v0")


def test_a_dataset_that_names_a_program_runs_none(dataset: Path, tmp_path: Path) -> None:
    """Minari makes the environment of a dataset whose spaces are missing."""
    shutil.copytree(dataset, tmp_path / "changed-v0")
    path = tmp_path / "changed-v0" / "data" / "metadata.json"
    content = json.loads(path.read_text())
    made = json.loads(content["env_spec"]) | {"entry_point": "os:mkdir", "kwargs": {"path": str(tmp_path / "made")}}
    del content["action_space"]
    path.write_text(json.dumps(content | {"env_spec": json.dumps(made)}))
    with pytest.raises(DataError, match="action_space is None, expected str"):
        episodes(tmp_path / "changed-v0")
    assert not (tmp_path / "made").exists()
