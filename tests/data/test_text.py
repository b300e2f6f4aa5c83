import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from hybridflow.core.errors import DataError, ModelError
from hybridflow.data.text import Template, Tokenizer, last_user_text

CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}\n"
    "    {%- if message.content is not string %}{{ raise_exception('only text, please') }}{% endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' }}\n"
    "    {%- generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}"
)
HARD = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
    "{{ {'role': m.role, 'text': m.content, 'é<': 1} | tojson }}{{ {'a': 1} | tojson(indent=2) }}\n"
    "{% endfor %}\n{{ eos_token }}"
)
CHATS = [
    [{"role": "user", "content": "3 + 4 <b>é</b>?"}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": "a\nb"}, {"role": "assistant", "content": " c "}],
    [{"role": "user", "content": "x"}, {"role": "skip", "content": "y"}, {"role": "user", "content": "z"}],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder: byte-level tokens, begin and end tokens, a chat template."""
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    backend.add_special_tokens(special)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "chat_template": CHATML}
    config |= {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "model_max_length": 512}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2], "temperature": 0.6}))
    return tmp_path


def test_load_reads_the_facts_of_the_folder(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_ids == (2, 3)  # the tokenizer's own first; config.json is overruled
    assert tokenizer.pad_token_id == 2  # none is named: the end token
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("hé") == tokenizer.encode("hé", special=True)[1:]
    assert tokenizer.encode("hé", special=True)[0] == 0
    ids = [0, *tokenizer.encode("hé"), 2]
    assert tokenizer.decode(ids) == "hé"
    assert tokenizer.decode(ids, skip_special=False) == "<|bos|>hé<|im_end|>"
    assert pickle.loads(pickle.dumps(tokenizer)).encode("abc") == tokenizer.encode("abc")


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [CHATML, HARD])
@pytest.mark.parametrize("prompted", [True, False])
def test_chat_rendering_equals_transformers(folder, chat, template, prompted):
    transformers = pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    text = ours.render_chat(chat, prompted)
    assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompted)
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_saved_folder_loads_here_and_in_transformers(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(folder)
    ours.save(tmp_path / "out")
    again = Tokenizer.load(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (again.eos_token_ids, again.pad_token_id, again.chat_template) == ((2, 3), 2, CHATML)
    assert again.config == ours.config
    assert theirs.eos_token_id == 2 and theirs("hé<|im_end|>")["input_ids"] == [0, *ours.encode("hé"), 2]
    assert theirs.apply_chat_template(CHATS[0], tokenize=False) == ours.render_chat(CHATS[0], False)


def test_save_keeps_what_generation_config_says_otherwise(folder):
    Tokenizer.load(folder).save(folder)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "eos_token_id": [2, 3],
        "temperature": 0.6,
        "pad_token_id": 2,
    }


def test_character_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.characters("0123456789+= \n")
    text = "1 2+3\n=="
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode([*ids, *tokenizer.eos_token_ids, tokenizer.pad_token_id]) == text
    assert tokenizer.vocab_size == 3 + 14
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode(text) == ids
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)
    with pytest.raises(DataError, match=r"'12x-': no token for \['-', 'x'\]"):
        tokenizer.encode("12x-")


def test_folders_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ModelError, match=r"eos_token = '<end>', but tokenizer\.json has no such token"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.load(folder)
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="no end token is known"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.load(folder)


def test_templates_named_in_a_list(folder):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": named}))
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "D"


def test_chat_templates_that_fail(folder):
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(DataError, match=r"refused the messages.*only text, please"):
        tokenizer.render_chat([{"role": "user", "content": 3}])
    (folder / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(ModelError, match="chat template, line 2"):
        Tokenizer.load(folder).render_chat(CHATS[0])
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(DataError, match="unsafe"):
        Tokenizer.load(folder).render_chat(CHATS[0])


def test_templates(folder):
    tokenizer = Tokenizer.load(folder)
    assert Template().render(tokenizer, "{x} hi") == "{x} hi"
    assert Template("Q: {prompt} {A}:").render(tokenizer, "{x}") == "Q: {x} {A}:"
    system, user = "<|im_start|>system\nS<|im_end|>\n", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert Template("chat", "S").render(tokenizer, "hi") == system + user
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    assert Template("chat", "S").render(tokenizer, own) == system.replace("S", "mine") + user
    [plain], [chat] = Template().encode(tokenizer, ["hi"]), Template("chat").encode(tokenizer, ["hi"])
    assert plain[0] == 0 and chat[0] == 1  # the begin token; the chat template writes what it wants itself


def test_templates_that_cannot_be_used():
    tokenizer = Tokenizer.characters("ab")
    with pytest.raises(DataError, match='expected "plain", "chat" or a text that contains'):
        Template("chatml")
    with pytest.raises(DataError, match="a system message needs"):
        Template("plain", "S")
    with pytest.raises(DataError, match="a list of messages needs"):
        Template().render(tokenizer, CHATS[0])
    with pytest.raises(ModelError, match='the tokenizer has no chat template: use template = "plain"'):
        Template("chat").encode(tokenizer, ["a"])


def test_last_user_text():
    assert last_user_text("hi") == "hi"
    assert last_user_text(CHATS[1]) == "a\nb"
    assert last_user_text([{"role": "system", "content": "S"}]) == "S"
