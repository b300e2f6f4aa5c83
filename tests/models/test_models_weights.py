"""Folders that transformers writes, read by us, and the other way round."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybridflow.core.errors import ModelError, ResourceError
from hybridflow.models import weights
from hybridflow.models.decoder import CausalAttention, Decoder, init_weights
from hybridflow.models.spec import DecoderSpec, RopeScaling
from hybridflow.models.weights import (
    hf_config,
    hf_state,
    load_decoder,
    load_hf_state,
    read_spec,
    save_decoder,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}),
    "mistral-head-dim": ("mistral", {"head_dim": 12, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-multi-head": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 16, "rope_theta": 1e6}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}


def hugging_face_model(family: str, changes: dict) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or a mix-up of them goes unseen
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small lose more to threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=VARIANTS)
def stored(request, tmp_path_factory):
    """(model of transformers, its folder)"""
    folder = tmp_path_factory.mktemp("hf") / request.param
    model = hugging_face_model(*VARIANTS[request.param])
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "llama"
    hugging_face_model("llama", {}).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(llama, tmp_path):
    """A llama folder to damage."""
    return shutil.copytree(llama, tmp_path / "copy")


def ragged(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in lengths]


def our_logits(decoder: Decoder, rows: list[torch.Tensor]) -> torch.Tensor:
    attention = CausalAttention(torch.tensor([len(row) for row in rows]))
    with torch.no_grad():
        return decoder(torch.cat(rows), attention.positions, attention) @ decoder.head_weight.T


def their_logits(model: transformers.PreTrainedModel, rows: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in rows])


def test_logits_equal_those_of_transformers_on_ragged_batches(stored):
    model, folder = stored
    rows = ragged(9, 1, 17, 40)
    decoder = load_decoder(folder)
    torch.testing.assert_close(our_logits(decoder, rows), their_logits(model, rows), atol=1e-5, rtol=1e-5)


def test_transformers_loads_what_we_save(stored, tmp_path):
    model, folder = stored
    save_decoder(load_decoder(folder), tmp_path / "ours")
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(told.values())
    rows = ragged(5, 23)
    assert torch.equal(their_logits(loaded, rows), their_logits(model, rows))
    assert loaded.config.eos_token_id is None


@pytest.mark.parametrize("shard_bytes", [2**30, 10_000], ids=["single", "sharded"])
def test_a_round_trip_is_bit_equal(stored, tmp_path, shard_bytes):
    model, folder = stored
    decoder = load_decoder(folder)
    save_decoder(decoder, tmp_path / "ours", copy_from=folder, shard_bytes=shard_bytes)
    again = load_decoder(tmp_path / "ours")
    assert again.spec == decoder.spec
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    index = tmp_path / "ours" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1) == (shard_bytes == 10_000)
    names = set().union(*(load_file(file) for file in files))
    assert names == {name for name, _ in hf_state(decoder)}
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == names
        assert all(sum(t.nbytes for t in load_file(file).values()) <= shard_bytes for file in files)
        sharded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert torch.equal(their_logits(sharded, ragged(7)), their_logits(model, ragged(7)))


def test_weights_keep_the_dtype_that_is_asked_for(llama, tmp_path):
    decoder = load_decoder(llama, torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    save_decoder(decoder, tmp_path / "half", copy_from=llama)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "dtype" not in config
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}


def test_hf_state_is_views_and_load_hf_state_its_inverse(llama):
    decoder = load_decoder(llama)
    state = dict(hf_state(decoder))
    fused = decoder.layers[1].qkv.weight
    assert state["model.layers.1.self_attn.k_proj.weight"].data_ptr() == fused[32].data_ptr()
    other = Decoder(decoder.spec)
    load_hf_state(other, hf_state(decoder))
    assert torch.equal(other.layers[1].qkv.weight, fused)
    assert other.layers[0].gate_up.weight.requires_grad


def test_the_folder_it_came_from_gives_tokenizer_and_unknown_keys(copy, tmp_path):
    companions = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
    for name in companions:
        (copy / name).write_text(f'"{name}"')
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "sliding_window": 5, "curator": "someone"}))
    decoder = load_decoder(copy)
    save_decoder(decoder, tmp_path / "same", copy_from=copy)
    kept = json.loads((tmp_path / "same" / "config.json").read_text())
    assert {name: (tmp_path / "same" / name).read_text() for name in companions} == {n: f'"{n}"' for n in companions}
    assert (tmp_path / "same" / "generation_config.json").exists()
    assert (kept["curator"], kept["eos_token_id"], kept["max_position_embeddings"]) == ("someone", 2, 64)

    longer = Decoder(dataclasses.replace(decoder.spec, max_positions=128, rope_theta=77.0))
    save_decoder(longer, tmp_path / "changed", copy_from=copy)
    assert read_spec(tmp_path / "changed") == longer.spec
    assert json.loads((tmp_path / "changed" / "config.json").read_text())["curator"] == "someone"


def write_config(folder: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **changes}))
    return folder


def test_old_and_new_forms_of_rope_mean_the_same(tmp_path):
    old = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    first = read_spec(write_config(tmp_path / "a", rope_scaling=old, rope_theta=5000.0))
    assert first == read_spec(write_config(tmp_path / "b", rope_parameters=LLAMA3))
    assert (first.rope_theta, first.rope_scaling) == (5000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 16))
    linear = read_spec(write_config(tmp_path / "c", rope_scaling={"type": "linear", "factor": 4.0}))
    assert (linear.rope_theta, linear.rope_scaling) == (10_000.0, RopeScaling("linear", 4.0))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "mistral", "sliding_window": None}, 64),
        ({"model_type": "mistral", "max_position_embeddings": 9000}, 4096),  # transformers assumes a window
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, 16),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16}, 64),
    ],
)
def test_a_sliding_window_limits_the_context(tmp_path, changes, expected):
    assert read_spec(write_config(tmp_path / "m", **changes)).max_positions == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2': input should be 'llama', 'mistral', 'qwen2' or 'qwen3'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn': input should be 'default', 'linear' or 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "rope of type linear needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope.full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': input should be 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "heads must be a multiple of key-value heads"),
        ({"head_dim": 7}, "size even"),
    ],
)
def test_an_unsupported_config_is_told_in_one_line(tmp_path, changes, told):
    with pytest.raises(ModelError) as error:
        read_spec(write_config(tmp_path / "m", **changes))
    assert told in str(error.value) and "config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_that_is_needed_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 5}))
    with pytest.raises(ModelError, match="hidden_size is missing"):
        read_spec(tmp_path)


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def add_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, folder / "model.safetensors")


def reshape_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(60, 32)}, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def scramble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def lose_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: holds a list"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (drop_tensor, r"1 tensors are missing \(model.layers.1.self_attn.k_proj.weight\)"),
        (add_tensor, "model.layers.0.self_attn.q_proj.bias is no weight of this llama"),
        (reshape_tensor, r"lm_head.weight is \[60, 32\], config.json says \[61, 32\]"),
        (truncate, "model.safetensors: damaged or truncated"),
        (scramble, "model.safetensors: damaged or truncated"),
        (lose_shard, "model-00001-of-00002.safetensors: missing"),
        (empty_index, "no weight_map"),
    ],
)
def test_a_damaged_folder_is_told_in_one_line(copy, damage, told):
    damage(copy)
    with pytest.raises(ModelError, match=told) as error:
        load_decoder(copy)
    assert str(copy) in str(error.value) and "\n" not in str(error.value)


def test_stored_copies_of_a_tied_head_and_of_rotary_tables_are_passed_over(tmp_path):
    hugging_face_model("llama", {"tie_word_embeddings": True}).save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    extra = {"lm_head.weight": torch.ones(61, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **extra}, file)
    assert torch.equal(load_decoder(tmp_path / "m").head_weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("place", ["full folder", "file"])
def test_saving_never_replaces_what_is_there(llama, tmp_path, place):
    target = tmp_path / "target"
    if place == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists already"):
        save_decoder(load_decoder(llama), target)


def failing(error: Exception):
    def save(*args, **kwargs):
        raise error

    return save


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError, "MiB are needed"),
        (weights.SafetensorError("I/O error: No space left on device (os error 28)"), ResourceError, "MiB are needed"),
        (PermissionError(errno.EACCES, "Permission denied"), ModelError, "can't be written"),
    ],
)
def test_a_save_that_fails_leaves_nothing(llama, tmp_path, monkeypatch, error, kind, told):
    monkeypatch.setattr(weights, "write_tensors", failing(error))
    with pytest.raises(kind, match=told):
        save_decoder(load_decoder(llama), tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_disk_too_small_is_told_before_anything_is_written(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ResourceError, match=r"the disk is full, 1 MiB are needed; free space"):
        save_decoder(load_decoder(llama), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_write_files", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save_decoder(load_decoder(llama), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_spec_that_no_hugging_face_config_can_say_is_refused():
    spec = DecoderSpec("mistral", 8, 8, 8, 1, 2, 1, 4, 16, qkv_bias=True)
    with pytest.raises(ModelError, match="mistral with qkv_bias = True"):
        hf_config(spec)


specs = st.builds(
    DecoderSpec,
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    vocab_size=st.integers(1, 50),
    hidden_size=st.integers(1, 5).map(lambda n: 8 * n),
    intermediate_size=st.integers(1, 50),
    num_layers=st.integers(1, 3),
    num_heads=st.sampled_from([2, 4, 8]),
    num_kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([2, 4, 6]),
    max_positions=st.integers(1, 10_000),
    rope_theta=st.floats(1.0, 1e7),
    rope_scaling=st.none()
    | st.builds(RopeScaling, kind=st.just("linear"), factor=st.floats(1.0, 32.0))
    | st.builds(
        RopeScaling, kind=st.just("llama3"), factor=st.floats(1.0, 32.0), original_max_positions=st.integers(1, 9999)
    ),
    tied=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(spec=specs)
def test_every_spec_survives_its_config_and_its_weights(spec):
    biased = spec.family == "qwen2"
    spec = dataclasses.replace(spec, qkv_bias=biased, qk_norm=spec.family == "qwen3")
    assert weights.parse_spec(json.loads(json.dumps(hf_config(spec))), "here") == spec
    decoder, other = Decoder(spec), Decoder(spec)
    init_weights(decoder, torch.Generator().manual_seed(1))
    load_hf_state(other, hf_state(decoder))
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), other.parameters(), strict=True))
