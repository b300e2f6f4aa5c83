"""Models by name or config.json, as far as a planner needs them: sizes of a decoder and of its experts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from hybridflow.core.errors import ModelError
from hybridflow.models.spec import DecoderSpec, Family

__all__ = ["MODELS", "Head", "ModelSize", "find_model"]

Head = Literal["policy", "value", "score"]
"""log-probabilities and entropies; a value a token, a score a row"""


@dataclass(frozen=True)
class ModelSize:
    """A decoder, or one whose MLPs are ``experts``, of which ``active_experts`` work on each token: then
    ``intermediate_size`` of ``spec`` is that of one expert. Dense models have one expert, which is active."""

    name: str
    spec: DecoderSpec
    experts: int = 1
    active_experts: int = 1

    def parameters(self, head: Head = "policy") -> int:
        """Of the whole model. A tied matrix of the vocabulary counts once."""
        spec = self.spec
        return self.vocabulary + spec.num_layers * self.layer + spec.hidden_size + self.head(head)

    def active_parameters(self, head: Head = "policy") -> int:
        """Those that work on a token."""
        return self.parameters(head) - self.spec.num_layers * (self.layer - self.active_layer)

    def trained_parameters(self, head: Head = "policy", frozen: int = 0, trains_head: bool = True) -> int:
        """Those above the first ``frozen`` layers; ``trains_head``: with the matrix of the vocabulary at the end."""
        spec, language = self.spec, head == "policy"
        trained = (spec.num_layers - frozen) * self.layer + spec.hidden_size
        if frozen == 0 and (trains_head or not (language and spec.tied)):
            trained += self.vocabulary
        return trained + (self.head(head) if trains_head or not language else 0)

    @property
    def vocabulary(self) -> int:
        """Of the matrix of embeddings."""
        return self.spec.vocab_size * self.spec.hidden_size

    def head(self, head: Head) -> int:
        """What there is besides the decoder: the untied matrix of the vocabulary, or what makes a value or a score."""
        if head == "policy":
            return 0 if self.spec.tied else self.vocabulary
        return self.spec.hidden_size + (1 if head == "value" else 0)

    @property
    def layer(self) -> int:
        """Parameters of a layer, all its experts and what chooses among them included."""
        return self._around_experts + self.experts * self.expert

    @property
    def active_layer(self) -> int:
        """Parameters of a layer that work on a token."""
        return self._around_experts + self.active_experts * self.expert

    @property
    def expert(self) -> int:
        """Of one MLP."""
        s = self.spec
        return 3 * s.hidden_size * s.intermediate_size + (2 * s.intermediate_size + s.hidden_size) * s.mlp_bias

    @property
    def _around_experts(self) -> int:
        s = self.spec
        queries, qkv = s.num_heads * s.head_dim, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        biases = qkv * s.qkv_bias + s.hidden_size * s.output_bias
        norms = 2 * s.hidden_size + 2 * s.head_dim * s.qk_norm
        router = s.hidden_size * self.experts if self.experts > 1 else 0
        return s.hidden_size * (qkv + queries) + biases + norms + router


_TABLE = """
llama-7b         llama    32000  4096  11008  32  32  32  128    4096
llama-13b        llama    32000  5120  13824  40  40  40  128    4096
llama-34b        llama    32000  8192  22016  48  64   8  128    4096
llama-70b        llama    32000  8192  28672  80  64   8  128    4096
llama-3.1-8b     llama   128256  4096  14336  32  32   8  128  131072
llama-3.1-70b    llama   128256  8192  28672  80  64   8  128  131072
llama-3.2-1b     llama   128256  2048   8192  16  32   8   64  131072  tied
llama-3.2-3b     llama   128256  3072   8192  28  24   8  128  131072  tied
qwen2.5-0.5b     qwen2   151936   896   4864  24  14   2   64   32768  tied
qwen2.5-1.5b     qwen2   151936  1536   8960  28  12   2  128  131072  tied
qwen2.5-3b       qwen2   151936  2048  11008  36  16   2  128   32768  tied
qwen2.5-7b       qwen2   152064  3584  18944  28  28   4  128  131072
qwen2.5-14b      qwen2   152064  5120  13824  48  40   8  128  131072
qwen2.5-32b      qwen2   152064  5120  27648  64  40   8  128  131072
qwen2.5-72b      qwen2   152064  8192  29568  80  64   8  128  131072
qwen3-0.6b       qwen3   151936  1024   3072  28  16   8  128   40960  tied
qwen3-1.7b       qwen3   151936  2048   6144  28  16   8  128   40960  tied
qwen3-4b         qwen3   151936  2560   9728  36  32   8  128   40960  tied
qwen3-8b         qwen3   151936  4096  12288  36  32   8  128   40960
qwen3-14b        qwen3   151936  5120  17408  40  40   8  128   40960
qwen3-32b        qwen3   151936  5120  25600  64  64   8  128   40960
qwen3-30b-a3b    qwen3   151936  2048    768  48  32   4  128   40960  8/128
qwen3-235b-a22b  qwen3   151936  4096   1536  94  64   4  128   40960  8/128
mistral-7b       mistral  32000  4096  14336  32  32   8  128   32768
mixtral-8x7b     mistral  32000  4096  14336  32  32   8  128   32768  2/8
smollm2-135m     llama    49152   576   1536  30   9   3   64    8192  tied
"""
"""Family, vocabulary, hidden and intermediate size, layers, heads, key-value heads, size of a head, positions; and whether
the vocabulary's matrices are tied, or how many experts of how many work. The first four are those of the paper."""


def _row(name: str, family: str, *cells: str) -> ModelSize:
    vocabulary, hidden, intermediate, layers, heads, kv_heads, head, positions = map(int, cells[:8])
    sizes = (vocabulary, hidden, intermediate, layers, heads, kv_heads, head, positions)
    tied, biased, normed = "tied" in cells, family == "qwen2", family == "qwen3"
    spec = DecoderSpec(cast(Family, family), *sizes, tied=tied, qkv_bias=biased, qk_norm=normed)
    active, experts = next((map(int, cell.split("/")) for cell in cells if "/" in cell), (1, 1))
    return ModelSize(name, spec, experts, active)


MODELS = {line.split()[0]: _row(*line.split()) for line in _TABLE.strip().splitlines()}
"""Sizes of their public config.json, by name."""

EXPERT_FAMILIES = {"mixtral": "mistral", "qwen3_moe": "qwen3"}
"""model_type of models with experts, and of what they are but for those"""


def find_model(name: str) -> ModelSize:
    """A name of ``MODELS``, in any case and with or without who made it, or one of ``hybridflow models``; a Hugging Face
    folder, of which config.json is enough; or that file. ModelError: it's none of them, or no decoder that is known."""
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _read(file, name)
    short = name.lower().rsplit("/", 1)[-1]
    if short in MODELS:
        return MODELS[short]
    from hybridflow.models.sources import installed  # here: names alone need no torch

    if name in installed():
        return _read(installed()[name] / "config.json", name)
    if path.is_dir():
        raise ModelError(f"{name}: a folder without config.json; give a Hugging Face model folder")
    near = difflib.get_close_matches(short, {**MODELS, **installed()}, 1, 0.5)
    hint = f"; did you mean {near[0]}? The" if near else "; the"
    raise ModelError(f"{name}: no model of that name, folder or config.json{hint} names are {', '.join(MODELS)}")


def _read(file: Path, name: str) -> ModelSize:
    """The size that a config.json tells."""
    from hybridflow.models.weights import parse_spec, read_json

    config = read_json(file)
    if "model_type" not in config or config["model_type"] not in EXPERT_FAMILIES:
        return ModelSize(name, parse_spec(config, file))
    experts = _count(config, file, "num_experts", "num_local_experts")
    active = _count(config, file, "num_experts_per_tok")
    if active > experts:
        raise ModelError(f"{file}: {active} experts of {experts} can't work on a token")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(f"{file}: some layers have no experts, which the planner can't tell from others")
    size = config.get("moe_intermediate_size", config.get("intermediate_size"))
    dense = {**config, "model_type": EXPERT_FAMILIES[config["model_type"]], "intermediate_size": size}
    return ModelSize(name, parse_spec(dense, file), experts, active)


def _count(config: Mapping[str, Any], file: Path, *keys: str) -> int:
    found = next((config[key] for key in keys if key in config), None)
    if type(found) is not int or found < 1:
        raise ModelError(f"{file}: {' or '.join(keys)} is {json.dumps(found)}; expected a number of experts")
    return found
