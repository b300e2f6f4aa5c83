"""What tests share: a tiny model on disk, small configurations, the program run in this process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from hybridflow.cli import main
from hybridflow.config import validate
from hybridflow.core.config import apply_overrides, to_toml
from hybridflow.core.files import Written
from hybridflow.data.text import Tokenizer
from hybridflow.models import sources
from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import read_spec, save_decoder
from hybridflow.workers.checkpoint import PieceReader


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests measure of a busy machine must not stay; models are the user's."""
    models, home = sources.cache_home() / "models", tmp_path_factory.mktemp("home")
    models.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models)
    os.environ["HYBRIDFLOW_HOME"] = str(home)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def hybridflow(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the program: ``hybridflow("train", config, "--seed", 3)``."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random decoder over digits and a few letters."""
    tokenizer = Tokenizer.characters("0123456789+= >?:.abcdefghijklmnopqrstuvwxyzWA")
    decoder = Decoder(DecoderSpec("llama", tokenizer.vocab_size, 32, 64, 2, 4, 2, 8, 128))
    init_weights(decoder, torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("models")
    tokenizer.save(folder / "tokenizer")
    save_decoder(decoder, folder / "tiny", copy_from=folder / "tokenizer")
    return folder / "tiny"


REVERSE: dict[str, Any] = {
    "algorithm": "grpo",
    "threads": 1,
    "actor": {"fresh": {"hidden_size": 32}, "optimizer": {"lr": 1e-3}},
    "data": {"task": "reverse", "options": {"length": 3}},
    "generation": {"max_new_tokens": 4},
    "train": {"steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatches": 2},
    "evaluation": {"limit": 10},
}
CARTPOLE: dict[str, Any] = {
    "algorithm": "ppo",
    "threads": 1,
    "ppo": {"gamma": 0.99},
    "actor": {"optimizer": {"lr": 1e-3}},
    "critic": {"optimizer": {"lr": 1e-3}},
    "environment": {"id": "CartPole-v1", "num_envs": 4, "steps_per_rollout": 32},
    "train": {"steps": 2, "minibatches": 2, "epochs": 2},
    "evaluation": {"limit": 2},
}

PENDULUM: dict[str, Any] = {
    "algorithm": "sac",
    "threads": 1,
    "actor": {"net": {"hidden": [8]}, "optimizer": {"lr": 1e-3}},
    "critic": {"net": {"hidden": [8, 8]}, "optimizer": {"lr": 1e-3}},
    "environment": {"id": "Pendulum-v1", "num_envs": 2, "steps_per_rollout": 5},
    "train": {"steps": 2, "updates_per_step": 3},
    "replay": {"capacity": 100, "batch_size": 8, "warmup": 20},
    "evaluation": {"limit": 2},
}


def with_keys(data: dict[str, Any], /, **keys: Any) -> dict[str, Any]:
    """The data with dotted keys set: ``train__steps=3``; None removes."""
    out = apply_overrides(data, [])
    for name, value in keys.items():
        *path, last = name.split("__")
        section = out
        for part in path:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return out


def written(folder: Path, data: dict[str, Any]) -> Path:
    """The file of a run, with what is set alone."""
    path = folder / "run.toml"
    config = validate({**data, "run_dir": str(folder / "run")}, "test")
    path.write_text(to_toml(config, set(type(config).model_fields) - config.model_fields_set))
    return path


@pytest.fixture(scope="session")
def cartpole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a short run that has exported a policy with normalised observations."""
    folder = tmp_path_factory.mktemp("cartpole")
    path = written(folder, with_keys(CARTPOLE, actor__net__normalise=True))
    assert main(["train", str(path)]) == 0
    return folder / "run"


class Saved(NamedTuple):
    """What a learner has saved: the folder with its tensors, and what the driver keeps."""

    folder: Path
    state: dict[str, Any]
    files: list[Written]

    def tensors(self) -> dict[str, torch.Tensor]:
        return saved_tensors(self.folder)


def save(learner: Any, folder: Path) -> Saved:
    """As runtimes do, in one process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    state = learner.save(folder)
    (files,) = learner.saved(True)
    return Saved(folder, state, files)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, whole, by name."""
    with PieceReader(folder) as reader:
        return {name: reader.full(name) for name in reader.names()}


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty model cache."""
    monkeypatch.setitem(os.environ, "HYBRIDFLOW_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M in the user's own cache, fetched if it isn't there: tests of the demo run on the real model."""
    return sources.add("smollm2-135m")


@pytest.fixture(scope="session")
def wordy_model(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random decoder over the real model's tokens, so that its samples hold words that scorers know."""
    decoder = Decoder(DecoderSpec("llama", read_spec(real_model).vocab_size, 16, 32, 1, 2, 2, 8, 128))
    init_weights(decoder, torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("models") / "wordy"
    save_decoder(decoder, folder, copy_from=real_model)
    return folder


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of 8 slots on this machine, started once; runtimes join it. Its workers can import ``ray_workers``."""
    import ray  # here: other environments run some of the tests, too

    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_IGNORE_UNHANDLED_ERRORS="1")
    workers = str(Path(__file__).parent / "controller")
    with warnings.catch_warnings(), mock.patch.dict(os.environ, PYTHONPATH=workers):
        warnings.simplefilter("ignore")
        ray.init("local", num_cpus=8, object_store_memory=400_000_000, _node_ip_address="127.0.0.1", **quiet)
    yield
    ray.shutdown()
