"""GGUF files written here, converted, and read back by transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from tokenizers import Tokenizer, pre_tokenizers

from hybridflow.core.errors import ModelError
from hybridflow.models.decoder import CausalAttention
from hybridflow.models.gguf import convert_gguf
from hybridflow.models.spec import RopeScaling
from hybridflow.models.weights import load_decoder, read_spec

HEADS, KV_HEADS, SIZE, WIDE = 4, 2, 32, 64
KV_SIZE = SIZE // HEADS * KV_HEADS
SPECIAL = ["<|end|>", "<|start|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "hello", "Ġhe", "12"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ he", "1 2"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
NAMES = {
    "attn_q": ("self_attn.q_proj", (SIZE, SIZE)),
    "attn_k": ("self_attn.k_proj", (KV_SIZE, SIZE)),
    "attn_v": ("self_attn.v_proj", (KV_SIZE, SIZE)),
    "attn_output": ("self_attn.o_proj", (SIZE, SIZE)),
    "ffn_gate": ("mlp.gate_proj", (WIDE, SIZE)),
    "ffn_up": ("mlp.up_proj", (WIDE, SIZE)),
    "ffn_down": ("mlp.down_proj", (SIZE, WIDE)),
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Hugging Face's q or k in the order of GGUF: row j of a half goes to pair j."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                out[head * size + 2 * pair + half] = rows[head * size + half * size // 2 + pair]
    return out


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.bfloat16)


def write_gguf(
    path, family="llama", pre="smollm", tied=True, biased=False, changes=None, extra=None
) -> dict[str, torch.Tensor]:
    """A model of one layer, its embedding quantised; returns the weights under Hugging Face's names."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, family)
    metadata = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": SIZE,
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for key, value in metadata.items():
        writer.add_uint32(f"{family}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in (changes or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)

    packed = quantize(rng.normal(size=(len(TOKENS), SIZE)).astype(np.float32), GGMLQuantizationType.Q4_1)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    expected = {"model.embed_tokens.weight": bf16(dequantize(packed, GGMLQuantizationType.Q4_1))}

    def put(ours: str, theirs: str, shape: tuple[int, ...], heads: int = 0) -> None:
        values = rng.normal(size=shape).astype(np.float32)
        writer.add_tensor(ours, permuted(values, heads) if heads and family == "llama" else values)
        expected[theirs] = bf16(values)

    for ours, (theirs, shape) in NAMES.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(ours, 0)
        put(f"blk.0.{ours}.weight", f"model.layers.0.{theirs}.weight", shape, heads)
        if biased and ours in ("attn_q", "attn_k", "attn_v"):
            put(f"blk.0.{ours}.bias", f"model.layers.0.{theirs}.bias", shape[:1], heads)
    put("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", (SIZE,))
    put("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", (SIZE,))
    put("output_norm.weight", "model.norm.weight", (SIZE,))
    if not tied:
        put("output.weight", "lm_head.weight", (len(TOKENS), SIZE))
    if extra is not None:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize(
    ("family", "pre", "tied", "biased"),
    [("llama", "smollm", True, False), ("llama", "gpt-2", False, False), ("qwen2", "qwen2", False, True)],
)
def test_weights_become_those_of_transformers(tmp_path, family, pre, tied, biased):
    expected = write_gguf(tmp_path / "m.gguf", family, pre, tied, biased)
    told = []
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf", lambda *progress: told.append(progress))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    state = model.state_dict()
    assert model.dtype == torch.bfloat16
    assert set(state) == set(expected) | {"lm_head.weight"}
    assert all(torch.equal(state[name], weight) for name, weight in expected.items())
    assert told[0] == ("convert", 0, told[-1][2]) and told[-1] == ("convert", len(expected), len(expected))

    tokens = torch.tensor([5, 9, 200, 31, 5])
    attention = CausalAttention(torch.tensor([5]))
    decoder = load_decoder(tmp_path / "hf")
    with torch.no_grad():
        ours = decoder(tokens, attention.positions, attention) @ decoder.head_weight.T
        theirs = model.float()(tokens[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_sizes_are_those_of_the_metadata(tmp_path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    write_gguf(tmp_path / "m.gguf", changes=scaling)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    spec = read_spec(tmp_path / "hf")
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.max_positions) == (1, 2, 8, 128)
    assert (spec.norm_eps, spec.rope_theta) == (1e-5, 1e5)  # not 9.999999747378752e-06
    assert (spec.tied, spec.rope_scaling) == (True, RopeScaling("linear", 2.5))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["hello", "Ġhe", "1", "2", "<|end|>", "Ġ", "Ã", "©", "Ċ"]),
        ("gpt-2", ["hello", "Ġhe", "12", "<|end|>", "Ġ", "Ã", "©", "Ċ"]),
        ("qwen2", ["hello", "Ġhe", "1", "2", "<|end|>", "Ġ", "Ã", "©", "Ċ"]),
    ],
)
def test_the_tokenizer_cuts_and_joins_like_the_original(tmp_path, pre, pieces):
    family = "qwen2" if pre == "qwen2" else "llama"
    write_gguf(tmp_path / "m.gguf", family, pre, biased=pre == "qwen2")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    text = "hello he12<|end|> é\n"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == pieces
    assert encoded.ids == [TOKENS.index(piece) for piece in pieces]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.decode(encoded.ids) == "hello he12 é\n"


def test_special_tokens_and_chat_template_reach_transformers(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|start|>hello<|end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (0, None)
    assert generation == {"bos_token_id": 1, "eos_token_id": 0}


def test_a_beginning_token_is_put_in_front_when_the_file_says_so(tmp_path):
    original = GGUFWriter.add_chat_template
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            GGUFWriter, "add_chat_template", lambda self, text: (original(self, text), self.add_add_bos_token(True))
        )
        write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<|start|>", "hello"]
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"family": "gemma"}, "architecture 'gemma'; supported are llama and qwen2"),
        ({"pre": "deepseek-llm"}, "tokenizer 'gpt2' split as 'deepseek-llm'; supported is"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight is no weight of a plain llama"),
        ({"extra": "blk.0.ffn_gate_exps.weight"}, "ffn_gate_exps.weight is no weight of a plain llama"),
        ({"extra": "blk.0.attn_v.bias"}, "v_proj.bias is no weight of this llama"),
        ({"changes": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'; supported are none and linear"),
    ],
)
def test_an_unsupported_file_is_told_in_one_line(tmp_path, arguments, told):
    write_gguf(tmp_path / "m.gguf", **arguments)
    with pytest.raises(ModelError) as error:
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    assert told in str(error.value) and "m.gguf" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 4000, 0.6, 0.99])
def test_a_truncated_file_is_told_in_one_line(tmp_path, kept):
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ModelError, match=r"m\.gguf: not a GGUF file, or a truncated one"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")


def test_a_weight_that_is_not_finite_is_told_in_one_line(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[-4:] = np.float32(np.nan).tobytes()
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf: output_norm\.weight has numbers that are NaN or infinite"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_is_no_gguf_is_told_in_one_line(tmp_path):
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1, and then some more text")
    with pytest.raises(ModelError, match=r"m\.gguf: not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    with pytest.raises(ModelError, match=r"n\.gguf: no such file"):
        convert_gguf(tmp_path / "n.gguf", tmp_path / "hf")


def test_metadata_that_is_missing_is_named(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"no llama\.attention\.head_count in its metadata"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
