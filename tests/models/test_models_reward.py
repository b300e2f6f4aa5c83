"""Reward models: Hugging Face folders in and out, scores as transformers gives them."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ModelError
from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.policy import TextReward, fresh_score
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import is_reward_model, load_decoder, load_reward, save_decoder

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROWS = Ragged.from_rows([[5, 9, 2], [7, 8, 9, 10, 11, 2], [3, 60], [4]], np.int64)


def classifier(family: str, num_labels: int = 1) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(family, **SIZES, num_labels=num_labels)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def theirs(model: transformers.PreTrainedModel) -> torch.Tensor:
    padded = torch.tensor(ROWS.padded(0))
    with torch.no_grad():
        return model(input_ids=padded, attention_mask=(padded != 0).long()).logits[:, 0]


def ours(model: TextReward) -> torch.Tensor:
    with torch.no_grad():
        return model.outputs(Batch({"tokens": ROWS}))["scores"]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_scores_equal_transformers_in_both_directions(family: str, tmp_path: Path) -> None:
    source = classifier(family)
    source.save_pretrained(tmp_path / "theirs")
    assert is_reward_model(tmp_path / "theirs")
    decoder, score = load_reward(tmp_path / "theirs")
    assert score is not None
    model = TextReward(decoder, score)
    assert float(theirs(source).std()) > 0.1
    torch.testing.assert_close(ours(model), theirs(source), rtol=0, atol=1e-5)
    save_decoder(model.decoder, tmp_path / "ours", copy_from=tmp_path / "theirs", score=model.score, pad_token_id=0)
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert back.config.num_labels == 1 and type(back) is type(source)
    torch.testing.assert_close(ours(model), theirs(back), rtol=0, atol=1e-5)
    again, head = load_reward(tmp_path / "ours")
    assert head is not None and torch.equal(ours(TextReward(again, head)), ours(model))


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_gives_the_body_and_no_head(tied: bool, tmp_path: Path) -> None:
    decoder = Decoder(DecoderSpec("llama", 61, 32, 48, 2, 4, 2, 8, 64, tied=tied))
    init_weights(decoder, torch.Generator().manual_seed(0))
    save_decoder(decoder, tmp_path / "lm")
    assert not is_reward_model(tmp_path / "lm")
    body, score = load_reward(tmp_path / "lm")
    assert score is None and body.lm_head is None
    assert torch.equal(body.layers[1].qkv.weight, decoder.layers[1].qkv.weight)


def test_a_fresh_head_is_drawn_from_the_seed() -> None:
    decoder = Decoder(DecoderSpec("llama", 61, 64, 48, 1, 4, 2, 16, 64))
    one, same, other = (fresh_score(decoder, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert one.shape == (1, 64) and float(one.std()) == pytest.approx(65**-0.5, rel=0.3)


def test_classifiers_of_several_labels_and_reward_models_as_policies_are_refused(tmp_path: Path) -> None:
    classifier("llama", 3).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match=r"score.weight is \[3, 32\]; a reward model has one label"):
        load_reward(tmp_path / "three")
    classifier("llama").save_pretrained(tmp_path / "one")
    with pytest.raises(ModelError, match=r"score.weight"):
        load_decoder(tmp_path / "one")
