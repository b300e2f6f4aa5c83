"""GGUF files of the Llama and Qwen2 families, as Hugging Face folders.

A GGUF holds everything in one file: sizes and tokenizer as metadata, weights quantised or not. The sizes become
``config.json``, the weights are dequantised to bfloat16, the byte-level BPE vocabulary and its merges become
``tokenizer.json``.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, TokenType, dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from hybridflow.core.errors import ModelError
from hybridflow.models.spec import DecoderSpec, RopeScaling
from hybridflow.models.weights import check_sizes, empty_decoder, hf_config, load_hf_state, save_decoder

__all__ = ["Progress", "convert_gguf", "silent"]

Progress = Callable[[str, int, int], None]
"""(stage, done, total): called as the work goes on; ``total`` counts what the stage counts (bytes, tensors)."""

MOST_VALUES = 2**20
"""of a list in the metadata, each of which the reader makes objects for; vocabularies have a quarter of a million tokens"""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def silent(stage: str, done: int, total: int) -> None:
    """The progress of nobody."""


def convert_gguf(path: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the model and tokenizer of the GGUF file ``path`` as the Hugging Face folder ``folder``, weights in bfloat16.

    The folder appears complete or not at all. Raises ModelError: not a GGUF, damaged, or of a kind not supported here.
    """
    reader, meta = _open(path)
    spec = _spec(meta, reader, path)
    stored = {_hf_name(tensor.name, path): tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    check_sizes(spec, stored, path)
    decoder = empty_decoder(spec, torch.bfloat16)
    load_hf_state(decoder, _tensors(reader, spec, path, progress), path)
    with tempfile.TemporaryDirectory() as side:
        try:
            _write_companions(Path(side), meta, spec, path)
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises nothing narrower
            raise ModelError(f"{path}: its tokenizer can't be read: {error}; download it again") from error
        save_decoder(decoder, folder, copy_from=Path(side))


class _Meta(dict[str, Any]):
    """Metadata of a file; what it lacks is told as an error of the file."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.path = path

    def size(self, key: str) -> int:
        """A whole number from 1 to 2^31."""
        value = self[key]
        if not isinstance(value, int) or not 0 < value <= 2**31:
            raise ModelError(f"{self.path}: {key} is {value!r}, expected a size; download it again")
        return value

    def decimal(self, key: str) -> float:
        """The number that was meant: metadata is float32, which turns 1e-5 into 9.999999747378752e-06."""
        value = self[key]
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(f"{self.path}: {key} is {value!r}, expected a number above 0; download it again")
        return float(str(np.float32(value)))

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"{self.path}: no {key} in its metadata; the file is incomplete, convert or download it again")


class _Reader(GGUFReader):  # type: ignore[misc]
    """Refuses what the file is too short for; by itself, the reader goes on behind its end, as long as there is memory."""

    def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}")
        return super()._get(offset, dtype, count, **order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY and (length := self._get(orig_offs + 4, np.uint64)[0]) > MOST_VALUES:
            raise ValueError(f"a list of {length} values")
        return super()._get_field_parts(orig_offs, raw_type)


def _open(path: Path) -> tuple[GGUFReader, _Meta]:
    try:
        reader = _Reader(path)
        return reader, _Meta(path, {key: field.contents() for key, field in reader.fields.items()})
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file; give the path of a .gguf file") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{path}: not a GGUF file, or a truncated one ({error}); download it again") from error


def _spec(meta: _Meta, reader: GGUFReader, path: Path) -> DecoderSpec:
    family = meta["general.architecture"]
    if family not in ("llama", "qwen2"):
        raise ModelError(f"{path}: architecture {family!r}; supported are llama and qwen2")
    names = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in names:
        raise ModelError(f"{path}: no token_embd.weight in it; download it again")
    heads, head_size = meta.size(f"{family}.attention.head_count"), f"{family}.attention.key_length"
    kv_heads, rope_base = f"{family}.attention.head_count_kv", f"{family}.rope.freq_base"
    return DecoderSpec(
        family=family,
        vocab_size=int(names["token_embd.weight"].shape[-1]),
        hidden_size=meta.size(f"{family}.embedding_length"),
        intermediate_size=meta.size(f"{family}.feed_forward_length"),
        num_layers=meta.size(f"{family}.block_count"),
        num_heads=heads,
        num_kv_heads=meta.size(kv_heads) if kv_heads in meta else heads,
        head_dim=meta.size(head_size) if head_size in meta else meta.size(f"{family}.embedding_length") // heads,
        max_positions=meta.size(f"{family}.context_length"),
        rope_theta=meta.decimal(rope_base) if rope_base in meta else 10_000.0,
        rope_scaling=_scaling(meta, family, path),
        norm_eps=meta.decimal(f"{family}.attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
    )


def _scaling(meta: _Meta, family: str, path: Path) -> RopeScaling | None:
    kind = meta.get(f"{family}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{path}: rope scaling {kind!r}; supported are none and linear")
    return RopeScaling("linear", meta.decimal(f"{family}.rope.scaling.factor")) if kind == "linear" else None


def _tensors(reader: GGUFReader, spec: DecoderSpec, path: Path, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, fp32 tensor) of every weight."""
    for done, tensor in enumerate(reader.tensors):
        progress("convert", done, len(reader.tensors))
        try:
            with np.errstate(all="ignore"):  # of numbers that are told below
                values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except ValueError as error:
            raise ModelError(f"{path}: {tensor.name} is damaged ({error}); download it again") from error
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(
                f"{path}: {tensor.name} is quantised as {kind}, which can't be read; use another file"
            ) from error
        if not np.isfinite(values).all():
            raise ModelError(f"{path}: {tensor.name} has numbers that are NaN or infinite; download it again")
        weight = torch.from_numpy(values)
        if spec.family == "llama" and ".attn_q." in tensor.name:
            weight = _halves(weight, spec.num_heads)
        if spec.family == "llama" and ".attn_k." in tensor.name:
            weight = _halves(weight, spec.num_kv_heads)
        yield _hf_name(tensor.name, path), weight
    progress("convert", len(reader.tensors), len(reader.tensors))


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k, from GGUF's rotary pairs (0, 1), (2, 3) ... to Hugging Face's (0, E/2), (1, E/2 + 1) ..."""
    if len(weight) % (2 * heads):
        return weight  # of another shape than the file says, which is told where it is put into the model
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str, path: Path) -> str:
    match name.split("."):
        case ["blk", layer, module, kind] if module in _LAYER:
            return f"model.layers.{layer}.{_LAYER[module]}.{kind}"
        case [module, kind] if module in _TOP:
            return f"{_TOP[module]}.{kind}"
    raise ModelError(f"{path}: {name} is no weight of a plain llama or qwen2; this variant isn't supported")


def _write_companions(folder: Path, meta: _Meta, spec: DecoderSpec, path: Path) -> None:
    """config.json with the ids of the special tokens, tokenizer.json and the settings beside them."""
    special = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    ids = {f"{name}_id": special[name] for name in ("bos_token", "eos_token", "pad_token")}
    tokens = meta["tokenizer.ggml.tokens"]
    _tokenizer(meta, path).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_positions,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token] for name, token in special.items() if token is not None},
    }
    if (template := meta.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    given = {key: token for key, token in ids.items() if token is not None}
    contents = {
        "config.json": hf_config(spec) | ids,
        "tokenizer_config.json": settings,
        "generation_config.json": given,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _tokenizer(meta: _Meta, path: Path) -> Tokenizer:
    kind, pre = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in ("gpt-2", "smollm", "qwen2"):
        supported = "byte-level BPE ('gpt2') split as gpt-2, smollm or qwen2"
        raise ModelError(f"{path}: tokenizer {kind!r} split as {pre!r}; supported is {supported}")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if meta.get("tokenizer.ggml.add_bos_token", False):
        bos = meta["tokenizer.ggml.bos_token_id"]
        special = [(tokens[bos], bos)]
        tokenizer.post_processor = processors.TemplateProcessing(f"{tokens[bos]} $A", special_tokens=special)
    kinds = [TokenType(kind) for kind in meta["tokenizer.ggml.token_type"]]
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = kind == TokenType.CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def _splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before BPE, in the way that GGUF calls ``pre``."""
    if pre == "qwen2":
        words = pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]) if pre == "smollm" else plain
