"""Sizes of models against published counts, and against decoders that are built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hybridflow.core.errors import ModelError
from hybridflow.models.policy import TextCritic, TextPolicy, TextReward
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import decoder_sizes, hf_config
from hybridflow.planner.sizes import MODELS, Head, ModelSize, find_model
from hybridflow.workers.optimizer import freeze

PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-34b": 33_743_970_304,
    "llama-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
}
ACTIVE = {"mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9}


def test_models_have_the_parameters_that_their_files_have() -> None:
    assert {name: size.parameters() for name, size in MODELS.items()} == PUBLISHED
    for name, active in ACTIVE.items():
        assert MODELS[name].active_parameters() == pytest.approx(active, rel=0.02)
    dense = [size for size in MODELS.values() if size.experts == 1]
    assert len(dense) == len(MODELS) - 3 and all(size.active_parameters() == size.parameters() for size in dense)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "llama", "tied": False},
        {"family": "llama", "output_bias": True, "qkv_bias": True, "mlp_bias": True},
        {"family": "qwen2", "qkv_bias": True},
        {"family": "qwen3", "qk_norm": True, "tied": False, "head_dim": 16},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_model_of_a_run_is_counted(changes: dict[str, Any]) -> None:
    spec = replace(DecoderSpec("llama", 50, 32, 48, 3, 4, 2, 8, 128), **changes)
    size, body = ModelSize("it", spec), replace(spec, tied=True)  # of critics and reward models, as they are built
    models: dict[Head, torch.nn.Module] = {
        "policy": TextPolicy(decoder_sizes(spec, torch.float32)),
        "value": TextCritic(decoder_sizes(body, torch.float32)),
        "score": TextReward(decoder_sizes(body, torch.float32), torch.empty(1, 32, device="meta")),
    }
    for head, model in models.items():
        assert size.parameters(head) == sum(parameter.numel() for parameter in model.parameters())
        assert size.trained_parameters(head) == size.parameters(head)
        freeze(model, ("embed*", "layers.[01].*"))
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert size.trained_parameters(head, frozen=2, trains_head=not spec.tied) == trained


MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
QWEN3 = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 8}


@pytest.mark.parametrize(("family", "keys"), [("mixtral", MIXTRAL), ("qwen3_moe", QWEN3)])
def test_models_with_experts_are_read_from_their_config(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    shared = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shared |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **shared, **keys)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    size = find_model(str(tmp_path))
    assert (size.experts, size.active_experts) == ((4, 2) if family == "mixtral" else (6, 3))
    assert size.parameters() == sum(parameter.numel() for parameter in built.parameters())


def test_names_folders_and_files_name_models(tmp_path: Path, no_cache: None) -> None:
    assert find_model("meta-llama/Llama-3.1-8B") is MODELS["llama-3.1-8b"]
    assert find_model("smollm2-135m") is MODELS["smollm2-135m"]
    spec = MODELS["qwen3-0.6b"].spec
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec)))
    assert find_model(str(tmp_path)) == ModelSize(str(tmp_path), spec)
    assert find_model(str(tmp_path / "config.json")).spec == spec


def told(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_names_no_model_is_told_with_the_nearest(tmp_path: Path, no_cache: None) -> None:
    assert "did you mean qwen2.5-7b? The names are llama-7b, " in told("qwen2.5-7")
    assert "json; the names are llama-7b, " in told("zzz") and "did you mean" not in told("zzz")
    assert told(str(tmp_path)) == f"{tmp_path}: a folder without config.json; give a Hugging Face model folder"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is null; expected a number of experts"),
        ({"mlp_only_layers": [0]}, "some layers have no experts"),
        ({"num_experts_per_tok": 9}, "9 experts of 6 can't work on a token"),
    ],
)
def test_configs_that_are_not_understood_are_told(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    config = {**hf_config(MODELS["qwen3-0.6b"].spec), "model_type": "qwen3_moe", **QWEN3, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert said in told(str(tmp_path))
