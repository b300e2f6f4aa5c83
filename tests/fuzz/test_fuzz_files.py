"""Whatever is in a file, it is read or refused by an error of ours: soon, and without memory for what a header claims."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, with_keys
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import damaged, examples, little_memory, survives, values  # noqa: F401

from hybridflow import checkpoint
from hybridflow.cli import main
from hybridflow.config import load_config, validate
from hybridflow.core.errors import HybridFlowError, ModelError
from hybridflow.data.pairs import read_pairs
from hybridflow.data.prompts import read_records
from hybridflow.data.text import Tokenizer
from hybridflow.launch import train
from hybridflow.models.exported import read_policy
from hybridflow.models.gguf import convert_gguf
from hybridflow.models.weights import is_reward_model, load_decoder, load_reward

ROOT = Path(__file__).parents[2]
CONFIGS = [path.read_bytes() for path in sorted((ROOT / "examples").rglob("*.toml"))]
PROMPTS = b'{"prompt": "2+3=", "answer": "5"}\n{"prompt": [{"role": "user", "content": "4+\\u0034="}], "n": 1.5e3}\n'
PAIRS = b'{"prompt": "51>", "chosen": "15", "rejected": "55", "margin": 2.0}\n'
CSV = b'prompt,answer\n"2+3=",5\n"a ""b""",6\n'


pytestmark = pytest.mark.usefixtures("little_memory")


@given(st.sampled_from(CONFIGS).flatmap(damaged))
@example(b"a = " + b"[" * 100_000)
@example(b"a = " + b"1" * 5000)
@example(b"\xff")
@examples(30)
def test_configurations(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.toml").write_bytes(data)
    survives(lambda: load_config(tmp_path / "run.toml"))


@given(st.data())
@examples(30)
def test_values_of_configurations(data: st.DataObject) -> None:
    """Keys that exist, with what doesn't belong there."""
    given = with_keys(data.draw(st.sampled_from([REVERSE, CARTPOLE])), run_dir="x")
    section = data.draw(st.sampled_from(sorted(name for name, value in given.items() if isinstance(value, dict))))
    key = data.draw(st.sampled_from(sorted(given[section])) | st.text(max_size=5))
    given[section] = given[section] | {key: data.draw(values)}
    survives(lambda: validate(given, "test"))


@given(
    st.sampled_from([(PROMPTS, ".jsonl"), (PAIRS, ".jsonl"), (CSV, ".csv")]).flatmap(
        lambda f: st.tuples(damaged(f[0]), st.just(f[1]))
    )
)
@example((b'{"prompt": ' + b"[" * 100_000, ".jsonl"))
@example((b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", ".jsonl"))
@example((b'{"prompt": "\\ud800"}', ".jsonl"))
@example((b'prompt\n"' + b"a" * 200_000 + b'"', ".csv"))
@examples(60)
def test_prompts(tmp_path: Path, found: tuple[bytes, str]) -> None:
    path = tmp_path / f"data{found[1]}"
    path.write_bytes(found[0])
    survives(lambda: [str(record.prompt).encode() for record in read_records(path)])
    survives(lambda: read_pairs(path))


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    shutil.copytree(tiny_model, folder)
    return folder


def read_model(folder: Path) -> None:
    survives(lambda: load_decoder(folder))
    survives(lambda: is_reward_model(folder) and load_reward(folder))
    survives(lambda: Tokenizer.load(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@given(st.data())
@examples(12)
def test_models(model: Path, name: str, data: st.DataObject) -> None:
    good = (model / name).read_bytes()
    try:
        (model / name).write_bytes(data.draw(damaged(good)))
        read_model(model)
    finally:
        (model / name).write_bytes(good)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@given(st.data())
@examples(25)
def test_values_of_models(model: Path, name: str, data: st.DataObject) -> None:
    path = model / name
    good = path.read_bytes() if path.is_file() else b"{}"
    content = json.loads(good)
    for _ in range(data.draw(st.integers(1, 2))):
        keys = [*content, "rope_scaling", "rope_parameters", "eos_token", "eos_token_id", "pad_token", "chat_template"]
        content[data.draw(st.sampled_from(sorted(keys)))] = data.draw(values)
    try:
        path.write_text(json.dumps(content))
        read_model(model)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("size", [10**5, 10**9, 2**62])
def test_sizes_that_the_weights_do_not_have_take_no_memory(model: Path, key: str, size: int) -> None:
    good = (model / "config.json").read_text()
    try:
        (model / "config.json").write_text(json.dumps(json.loads(good) | {key: size}))
        with pytest.raises(HybridFlowError):
            load_decoder(model)
    finally:
        (model / "config.json").write_text(good)


@given(data=damaged(b"\0" * 8 + b"{}"))
@example((2**60).to_bytes(8, "little") + b"{}")
@example((60).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [1152921504606846976], "data_offsets": [0, 4]}}')
@examples(30)
def test_policies(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "policy.safetensors").write_bytes(data)
    survives(lambda: read_policy(tmp_path / "policy.safetensors"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from test_models_gguf import write_gguf

    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path


@given(data=st.data())
@examples(25)
def test_gguf(tmp_path: Path, gguf: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path / "hf", ignore_errors=True)
    (tmp_path / "m.gguf").write_bytes(data.draw(damaged(gguf.read_bytes())))
    survives(lambda: convert_gguf(tmp_path / "m.gguf", tmp_path / "hf"))


@pytest.mark.parametrize(("length", "told"), [(2**40, "a list of 1099511627776 values"), (2**20, "it ends at byte")])
def test_a_list_that_a_gguf_has_no_room_for_takes_no_memory(tmp_path: Path, gguf: Path, length: int, told: str) -> None:
    name = b"tokenizer.ggml.token_type"
    data = bytearray(gguf.read_bytes())
    at = data.index(name) + len(name) + 8  # behind the types of a list and of its values
    assert int.from_bytes(data[at : at + 8], "little") == 264
    data[at : at + 8] = length.to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=told):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    data = with_keys(CARTPOLE, run_dir=str(folder), train__steps=1, checkpoint__every=1)
    assert train(validate(data, "test")) == 0
    return checkpoint.latest(folder / "checkpoints")


def load_all(path: Path) -> None:
    survives(lambda: checkpoint.load(path, content=True))
    survives(lambda: checkpoint.intact(path.parent))


@given(data=st.data())
@examples(40)
def test_checkpoints(saved: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(file for file in saved.rglob("*") if file.is_file())))
    good = path.read_bytes()
    try:
        if data.draw(st.booleans()):
            path.write_bytes(data.draw(damaged(good)))
        else:
            path.unlink()
        load_all(saved)
    finally:
        path.write_bytes(good)


@given(data=st.data())
@examples(40)
def test_manifests(saved: Path, data: st.DataObject) -> None:
    good = (saved / "manifest.json").read_text()
    content: dict[str, Any] = json.loads(good)
    target: Any = content
    for _ in range(data.draw(st.integers(0, 2))):
        inner = [value for value in target.values() if isinstance(value, dict)]
        target = data.draw(st.sampled_from(inner)) if inner else target
    target[data.draw(st.sampled_from([*target, "../../x"]))] = data.draw(values)
    try:
        (saved / "manifest.json").write_text(json.dumps(content))
        load_all(saved)
    finally:
        (saved / "manifest.json").write_text(good)


def test_what_is_damaged_is_one_line_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_bytes(b"a = " + b"[" * 100_000)
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
