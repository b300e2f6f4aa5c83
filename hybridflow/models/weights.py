"""Hugging Face model folders in and out.

    config.json  <──read_spec── hf_config──>  DecoderSpec
    *.safetensors  <──hf_state── load_hf_state──>  Decoder

One table of names serves both directions. Ours fuses q, k, v and gate, up; theirs are row slices of ours, so both
directions go through views and neither holds a second copy of the model. A decoder that holds a ``Part`` takes its slices
of the tensors as they stream by.
"""

import errno
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.core.errors import ContractError, ModelError, ResourceError
from hybridflow.core.files import appearing, hidden_name, inside
from hybridflow.core.tensor_file import Kind, kind_of, write_tensors
from hybridflow.models.decoder import Decoder, Part, part_shards
from hybridflow.models.layers import allocated
from hybridflow.models.layout import decoder_pieces, decoder_shards
from hybridflow.models.spec import DecoderSpec, Family, RopeScaling
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import Piece, Shard

__all__ = [
    "check_sizes",
    "decoder_sizes",
    "disk_space",
    "empty_decoder",
    "hf_config",
    "hf_state",
    "is_reward_model",
    "load_decoder",
    "load_hf_state",
    "load_reward",
    "parse_spec",
    "read_json",
    "read_spec",
    "save_decoder",
]

SCORE = "score.weight"
"""The head of a reward model."""

_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Our name of a matrix -> Hugging Face's."""

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_ASSUMED: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
"""What transformers assumes of a key that config.json leaves out."""

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)


# ---------------------------------------------------------------------------------------------------------- config.json


Size = Annotated[int, Field(gt=0, le=2**31)]


class _Rope(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rope_type: Literal["default", "linear", "llama3"]
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat = 1.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_position_embeddings: Size = 8192
    partial_rotary_factor: Literal[1] | None = None

    def scaling(self) -> RopeScaling | None:
        match self.rope_type:
            case "default":
                return None
            case "linear":
                return RopeScaling("linear", self.factor)
            case "llama3":
                low, high, original = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
                return RopeScaling("llama3", self.factor, low, high, original)


class _HfConfig(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model_type: Family
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None
    head_dim: Size | None = None
    max_position_embeddings: Size
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    rope: _Rope
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    partial_rotary_factor: Literal[1] | None = None
    quantization_config: None = None

    def spec(self) -> DecoderSpec:
        window = self.sliding_window if self.model_type == "mistral" or self.use_sliding_window else None
        biased = self.attention_bias and self.model_type in ("llama", "qwen3")
        return DecoderSpec(
            family=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            # Up to the window, sliding attention and full attention are the same.
            max_positions=min(self.max_position_embeddings, window or self.max_position_embeddings),
            rope_theta=self.rope.rope_theta or self.rope_theta,
            rope_scaling=self.rope.scaling(),
            norm_eps=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            qkv_bias=biased or self.model_type == "qwen2",
            output_bias=biased,
            mlp_bias=self.mlp_bias and self.model_type == "llama",
            qk_norm=self.model_type == "qwen3",
        )


def read_spec(folder: Path) -> DecoderSpec:
    """Sizes from ``config.json``, as transformers 4 or 5 writes it.

    Sliding windows are read as a limit of the context: ``max_positions`` is at most the window.
    Raises ModelError: no such folder, not a model that the decoder can run, a key missing or wrong.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give a Hugging Face model folder or one of 'hybridflow models'")
    return parse_spec(read_json(folder / "config.json"), folder / "config.json")


def is_reward_model(folder: Path) -> bool:
    """Whether config.json says that the folder holds a sequence classifier, not a language model."""
    named = read_json(folder / "config.json").get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForSequenceClassification") for name in named[:1])


def parse_spec(config: Mapping[str, Any], where: Path | str) -> DecoderSpec:
    """The spec of a config.json's content; ModelError as of ``read_spec``."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{where}: its rope parameters are {given!r}, expected an object; copy the file again")
    rope = dict(given)
    rope["rope_type"] = rope.pop("rope_type", rope.pop("type", "default"))
    assumed = _ASSUMED.get(str(config.get("model_type")), {})
    try:
        spec = _HfConfig.model_validate({**assumed, **config, "rope": rope}).spec()
    except ValidationError as error:
        raise ModelError(f"{where}: {_first_problem(error)}; use a model that the decoder supports") from error
    needed = {"linear": ["factor"], "llama3": ["factor", "original_max_position_embeddings"]}.get(rope["rope_type"], [])
    if missing := [key for key in needed if key not in rope]:
        raise ModelError(f"{where}: rope of type {rope['rope_type']} needs {', '.join(missing)}; add it")
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        sizes = f"{spec.num_heads} heads of size {spec.head_dim} on {spec.num_kv_heads} key-value heads"
        raise ModelError(f"{where}: {sizes}; heads must be a multiple of key-value heads and their size even")
    return spec


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{key} is missing"
    found = problem["input"] if isinstance(problem["input"], str | int | float) else type(problem["input"]).__name__
    return f"{key} is {found!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def hf_config(spec: DecoderSpec) -> dict[str, Any]:
    """Content of the ``config.json`` that ``read_spec`` reads back as ``spec``; the form that transformers 4 and 5 read.

    Raises ModelError when the family has no key for what the spec asks.
    """
    scaling = spec.rope_scaling
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": scaling.kind, "factor": scaling.factor},
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.output_bias,
        "mlp_bias": spec.mlp_bias,
    }
    if scaling is not None and scaling.kind == "llama3":
        config["rope_scaling"] |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    if (back := parse_spec(config, f"a {spec.family} config")) != spec:
        wrong = [key for key, value in vars(spec).items() if getattr(back, key) != value]
        told = ", ".join(f"{key} = {getattr(spec, key)}" for key in wrong)
        raise ModelError(f"a Hugging Face folder can't hold a {spec.family} with {told}; use another family")
    return config


def _merged_config(decoder: Decoder, copy_from: Path | None) -> dict[str, Any]:
    """Ours over the keys of ``copy_from``; all of theirs when it describes the same sizes."""
    ours = hf_config(decoder.spec)
    config: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **ours}
    if copy_from is not None and (copy_from / "config.json").is_file():
        theirs = read_json(copy_from / "config.json")
        if theirs.get("model_type") == decoder.spec.family:
            same = parse_spec(theirs, copy_from / "config.json") == decoder.spec
            stale = {"rope_parameters", "layer_types", "max_window_layers"}
            config = theirs if same else {**{k: v for k, v in theirs.items() if k not in stale}, **ours}
    config.pop("dtype", None)
    architecture, dtype = ours["architectures"], str(decoder.embed.weight.dtype).removeprefix("torch.")
    return {**config, "architectures": architecture, "torch_dtype": dtype}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. ModelError: there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: missing; a Hugging Face model folder holds one, copy the whole folder") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, expected an object; copy the file again")
    return content


# -------------------------------------------------------------------------------------------------------------- tensors


def _pieces(spec: DecoderSpec, shards: Mapping[str, Shard]) -> dict[str, list[Piece]]:
    """What is held of each tensor, by Hugging Face's name."""
    found: dict[str, list[Piece]] = {}
    for piece in decoder_pieces(spec, shards):
        found.setdefault(_hf_name(piece.name), []).append(piece)
    return found


def _hf_name(name: str) -> str:
    """Of a tensor: "layers.0.q.weight" -> "model.layers.0.self_attn.q_proj.weight"."""
    path, matrix, kind = ("." + name).rsplit(".", 2)
    return f"model{path}.{_NAMES[matrix]}.{kind}" if path else f"{_NAMES[matrix]}.{kind}"


def hf_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of every weight; detached views, so that writing to them writes to the decoder.

    Of a decoder that holds a part, what is here.
    """
    own = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    for name, pieces in _pieces(decoder.spec, decoder.shards).items():
        yield from ((name, piece.of(own[piece.parameter])) for piece in pieces)


@torch.no_grad()
def load_hf_state(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]], where: Path | str = "the tensors") -> None:
    """Copy (Hugging Face name, full tensor) pairs, in any order, into the decoder, which keeps what it is a part of.

    ``where`` names their origin in errors. Raises ModelError: a tensor is missing, unknown or of the wrong shape.
    """
    own = dict(decoder.named_parameters())
    targets = _pieces(decoder.spec, decoder.shards)
    elsewhere = _pieces(decoder.spec, decoder_shards(decoder.spec)).keys() - targets.keys()
    for name, tensor in tensors:
        pieces = targets.pop(name, [])
        if not pieces:
            if not (name in elsewhere or _redundant(name, decoder.spec)):
                raise ModelError(
                    f"{where}: {name} is no weight of this {decoder.spec.family}; does config.json belong to it?"
                )
        elif tuple(tensor.shape) != pieces[0].shape:
            sizes = f"is {list(tensor.shape)}, config.json says {list(pieces[0].shape)}"
            raise ModelError(f"{where}: {name} {sizes}; copy both files from one model")
        for piece in pieces:
            piece.of(own[piece.parameter]).copy_(tensor.narrow(piece.dim, piece.cut.start, len(piece.cut)))
    if targets:
        some = ", ".join(sorted(targets)[:3])
        raise ModelError(f"{where}: {len(targets)} tensors are missing ({some}); copy the weights again")


def _redundant(name: str, spec: DecoderSpec) -> bool:
    """What some folders store beside the weights: rotary tables, and the head when it is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")


def decoder_sizes(spec: DecoderSpec, dtype: torch.dtype, part: Part | None = None) -> Decoder:
    """A decoder, or a part of it, on the device "meta": every parameter's shape and type, no memory."""
    with torch.device("meta"):
        return Decoder(spec, part).to(dtype)


def empty_decoder(spec: DecoderSpec, dtype: torch.dtype, part: Part | None = None) -> Decoder:
    """A decoder, or a part of it, on the CPU whose weights aren't set yet."""
    return allocated(decoder_sizes(spec, dtype, part))


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32, part: Part | None = None) -> Decoder:
    """The model of a Hugging Face folder (safetensors, single or sharded), or a part, its weights cast to ``dtype``.

    Files are memory-mapped and read tensor by tensor: the peak is the decoder itself, and one tensor if it is a part.
    Raises ModelError: see ``read_spec`` and ``load_hf_state``; weights missing or damaged.
    """
    spec, files = read_spec(folder), _weight_files(folder)
    check_sizes(spec, dict(_shapes(files)), folder)
    decoder = empty_decoder(spec, dtype, part)
    load_hf_state(decoder, _stored(files), folder)
    return decoder


def load_reward(
    folder: Path, dtype: torch.dtype = torch.float32, part: Part | None = None
) -> tuple[Decoder, Tensor | None]:
    """The decoder, or a part of it, without language head, and the score head [1, D], None for a language model.

    Raises ModelError as ``load_decoder`` does, and for a classifier with several labels.
    """
    spec, files = replace(read_spec(folder), tied=True), _weight_files(folder)
    check_sizes(spec, dict(_shapes(files)), folder)
    decoder = empty_decoder(spec, dtype, part)
    heads: dict[str, Tensor] = {}

    def body() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _stored(files):
            if name == SCORE:
                heads[name] = tensor
            else:
                yield name, tensor

    load_hf_state(decoder, body(), folder)
    score = heads.get(SCORE)
    if score is not None and score.shape != (1, decoder.spec.hidden_size):
        raise ModelError(f"{folder}: {SCORE} is {list(score.shape)}; a reward model has one label, so one row")
    return decoder, score


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{folder}: no model.safetensors (.index.json) in it; the weights must be stored as safetensors")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{index}: no weight_map in it; copy the file again")
    for name in shards.values():
        if not inside(name):
            raise ModelError(
                f"{index}: its weight_map names {name!r}, expected files of this folder; copy the folder again"
            )
    return [folder / shard for shard in sorted(set(shards.values()))]


def _stored(paths: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        with _opened(path) as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a dict


def _shapes(paths: list[Path]) -> Iterator[tuple[str, list[int]]]:
    for path in paths:
        with _opened(path) as file:
            yield from ((name, file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - not a dict


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """ModelError: a file of weights is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise ModelError(f"{path}: missing, the index names it; copy the whole folder") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: damaged or truncated ({error}); copy or download it again") from error


def check_sizes(spec: DecoderSpec, shapes: Mapping[str, Sequence[int]], where: Path | str) -> None:
    """ModelError if stored tensors, by Hugging Face's names, have other sizes: before memory is taken for what a
    configuration says. Only the first layer is looked at; ``load_hf_state`` checks all."""
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    if spec.num_layers > len(layers):
        found = f"the weights have {len(layers)} layers, config.json says {spec.num_layers}"
        raise ModelError(f"{where}: {found}; copy both files from one model")
    one = replace(spec, num_layers=1)
    for name, (piece, *_) in _pieces(one, decoder_shards(one)).items():
        if name == "lm_head.weight" and name not in shapes:
            continue  # of the embedding's size; ``load_hf_state`` knows what is there instead
        if name not in shapes:
            raise ModelError(f"{where}: 1 tensors are missing ({name}); copy the weights again")
        if tuple(shapes[name]) != piece.shape:
            sizes = f"is {list(shapes[name])}, config.json says {list(piece.shape)}"
            raise ModelError(f"{where}: {name} {sizes}; copy both files from one model")


# --------------------------------------------------------------------------------------------------------------- saving


def save_decoder(
    decoder: Decoder,
    folder: Path,
    *,
    copy_from: Path | None = None,
    shard_bytes: int = 5 * 2**30,
    score: Tensor | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Write a Hugging Face folder that transformers, vLLM and ``load_decoder`` read, in the dtype of the weights.

    With ``score`` [1, D] it is a reward model (...ForSequenceClassification with one label); transformers then needs
    ``pad_token_id`` to find the last token of padded rows.

    Of a decoder that holds a part, all ranks of its tp and pp lines call this: every stage writes its own files, and no
    rank has more than one tensor whole at a time. ``score`` is that of the last stage.

    ``copy_from``: the folder that the model came from; tokenizer, chat template, generation settings and the other keys of
    config.json are taken over. Files have up to ``shard_bytes``; of several there is an index. The folder appears complete
    or not at all. Raises ModelError: ``folder`` is there already or can't be written; ResourceError: the disk is full;
    ContractError: the decoder holds only a part of the model, and not with the others.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(f"{folder}: exists already; choose another folder or remove it")
    part, files = decoder.part, _files(decoder, score, shard_bytes)
    size = sum(math.prod(shard.shape) for shard in decoder_shards(decoder.spec).values()) * decoder.anchor.itemsize
    if part.pp.index or part.tp.index:
        with _explained(folder.parent, size):
            _write_files(folder.with_name(hidden_name(folder)), decoder, files, size)
        return
    with disk_space(folder.parent, size), appearing(folder) as partial:
        classifier = _write_files(partial, decoder, files, size)
        config = _merged_config(decoder, copy_from) | (_classifier(decoder.spec, pad_token_id) if classifier else {})
        _write_json(partial / "config.json", config)
        for name in _COMPANIONS:
            if copy_from is not None and (copy_from / name).is_file():
                shutil.copyfile(copy_from / name, partial / name)


def _classifier(spec: DecoderSpec, pad_token_id: int | None) -> dict[str, Any]:
    architecture = _ARCHITECTURES[spec.family].replace("CausalLM", "SequenceClassification")
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [architecture], **labels, "pad_token_id": pad_token_id}


Row = list[Piece]
"""What the ranks of a tensor-parallel line hold of one tensor."""


def _files(decoder: Decoder, score: Tensor | None, shard_bytes: int) -> list[dict[str, tuple[Kind, Row | Tensor]]]:
    """The tensors that this stage writes, by file."""
    spec, part, dtype = decoder.spec, decoder.part, decoder.anchor.dtype
    places = (replace(part, tp=Line(part.tp.size, index)) for index in range(part.tp.size))
    tables = [_pieces(spec, part_shards(spec, place)) for place in places]
    found: dict[str, tuple[Kind, Row | Tensor]] = {}
    if score is not None:
        found[SCORE] = kind_of(score), score
    for name in tables[0]:
        row = [piece for table in tables for piece in table[name]]
        if any(piece.owned for piece in row):
            found[name] = Kind(dtype, row[0].shape), row
    files: list[dict[str, tuple[Kind, Row | Tensor]]] = [{}]
    room = shard_bytes
    for name, entry in sorted(found.items(), key=lambda item: -item[1][0].dtype.itemsize):
        if entry[0].num_bytes > room and files[-1]:
            files.append({})
            room = shard_bytes
        files[-1][name] = entry
        room -= entry[0].num_bytes
    return files


def _write_files(folder: Path, decoder: Decoder, files: list[dict[str, tuple[Kind, Row | Tensor]]], size: int) -> bool:
    """Write what this stage holds to a folder that the first one has made, or help its first rank to do so; whether a stage
    has a head of scores. The first stage waits for the others, and adds the index. ``size``: of all weights of the decoder.
    """
    part = decoder.part
    told = [entry for file in files for entry in file.items()]
    score = sum(kind.num_bytes for name, (kind, _) in told if name == SCORE)
    stages = _of_stages(decoder, [len(files), score, sum(kind.num_bytes for _, (kind, _) in told)])
    counts, scores, sizes = zip(*stages, strict=True)
    if sum(sizes) - sum(scores) != size:
        raise ContractError(f"{folder}: the decoder holds {part} of the model; let its learner export it")
    total = sum(counts)
    names = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    names = names if total > 1 else ["model.safetensors"]
    own = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    for name, file in zip(names[sum(counts[: part.pp.index]) :], files, strict=False):
        tensors = (what if isinstance(what, Tensor) else _joined(part.tp, what, own) for _, what in file.values())
        if part.tp.index == 0:
            write_tensors(folder / name, {tensor: kind for tensor, (kind, _) in file.items()}, tensors)
        else:
            deque(tensors, maxlen=0)
    if part.tp.index == 0:
        _of_stages(decoder, [0])
        if part.pp.index == 0 and total > 1:
            _write_index(folder, names, sum(sizes))
    return any(scores)


def _of_stages(decoder: Decoder, numbers: list[int]) -> list[list[int]]:
    """What each stage says of itself, when all of them have."""
    pp, told = decoder.part.pp, torch.tensor([numbers], dtype=torch.int64, device=decoder.anchor.device)
    found: list[list[int]] = pp.all_gather(told, [1] * pp.size).tolist()
    return found


def _joined(tp: Line, row: Row, own: Mapping[str, Tensor]) -> Tensor:
    """The whole tensor, of what the ranks of a line own of it one behind the other."""
    piece = row[tp.index]
    x, dim = piece.of(own[piece.parameter]), piece.dim
    if piece.local_shape == piece.shape:
        return x
    mine = x if piece.owned else x.narrow(dim, 0, 0)
    sizes = [len(held.cut) if held.owned else 0 for held in row]
    return tp.all_gather(mine.transpose(0, dim).contiguous(), sizes).transpose(0, dim)


def _write_index(folder: Path, names: list[str], size: int) -> None:
    weight_map: dict[str, str] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def disk_space(folder: Path, num_bytes: int) -> Iterator[None]:
    """Make ``folder``, and turn a disk too small for ``num_bytes``, or any error of writing, into one line."""
    with _explained(folder, num_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield


@contextmanager
def _explained(folder: Path, num_bytes: int) -> Iterator[None]:
    """An error of writing as one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _disk_full(error):
            needed = f"{math.ceil(num_bytes / 2**20)} MiB are needed"
            raise ResourceError(f"{folder}: the disk is full, {needed}; free space or choose another folder") from error
        raise ModelError(f"{folder}: can't be written ({error}); choose another folder") from error


def _disk_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"os error {errno.ENOSPC}" in str(error)  # safetensors tells the number in its text alone
