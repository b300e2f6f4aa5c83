"""Text to tokens and back: a tokenizer, its chat template, and how a prompt becomes the model's input.

    tokenizer = Tokenizer.load(Path("models/smollm2"))
    Template("chat", system="Be brief.").encode(tokenizer, ["What is 3 + 4?"])     # [[1, 9690, ...]]

Everything is read from a Hugging Face folder without transformers; ``Tokenizer.save`` writes one that transformers reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hybridflow.core.errors import DataError, ModelError

__all__ = ["Messages", "Prompt", "Template", "Tokenizer", "last_user_text"]

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the facts that a folder keeps beside it.

    ``config``: the data of tokenizer_config.json, without the chat template. ``eos_token_ids``: every token that ends a
    response; the first is the tokenizer's own, which ends demonstrations. ``pad_token_id``: the first end token where the
    folder names none (padding is masked everywhere, so its id never matters).
    """

    backend: tokenizers.Tokenizer
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    chat_template: str | None = None

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

        Only the first must be there. ModelError names a file that is missing or damaged, or says that no end token is
        known.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            hint = "load it once with transformers' AutoTokenizer and save_pretrained, which writes this file"
            raise ModelError(f"{folder}: no tokenizer.json; if the tokenizer is of an older kind, {hint}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path}: not a tokenizer: {error}; the file is damaged, fetch it again") from None
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        templates = config.pop("chat_template", None)
        jinja_file = folder / "chat_template.jinja"
        template = _read_text(jinja_file) if jinja_file.is_file() else _default_template(templates)
        others = [_read_json(folder / name) for name in ("generation_config.json", "config.json")]
        for name in _SPECIAL:
            _special_text(config, name, folder)
        eos = _eos_token_ids(backend, config, others, folder)
        pads = [_token_id(backend, config, "pad_token", folder), *(data.get("pad_token_id") for data in others)]
        return Tokenizer(backend, config, eos, next((pad for pad in pads if pad is not None), eos[0]), template)

    @staticmethod
    def characters(alphabet: str) -> Tokenizer:
        """One token for each character of ``alphabet``, for models trained from scratch; ``encode`` refuses others."""
        special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
        vocab = special | {character: i for i, character in enumerate(dict.fromkeys(alphabet), len(special))}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens(list(special))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        return Tokenizer(backend, config, eos_token_ids=(1,), pad_token_id=0)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text, such as a begin token. See ``encode_many``."""
        return self.encode_many([text], special)[0]

    def encode_many(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Token ids of every text, in parallel. DataError for a character that the tokenizer has no token for."""
        encoded = [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=special)]
        if self._unknown_id is not None:
            for text, ids in zip(texts, encoded, strict=True):
                if self._unknown_id in ids:
                    unknown = sorted({c for c in text if self._unknown_id in self.backend.encode(c).ids})
                    raise DataError(f"text {_short(text)}: no token for {unknown or text}; the tokenizer can't write it")
        return encoded

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; ``skip_special`` leaves out begin, end and padding tokens."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest id: what an embedding must hold at least."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def same(self, other: Tokenizer) -> bool:
        """Whether both give every id the same text, so that a model of one can read the tokens of the other."""
        mine, theirs = (tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (self, other))
        return mine == theirs and self.eos_token_ids[0] == other.eos_token_ids[0]

    @cached_property
    def _unknown_id(self) -> int | None:
        # Only what the model itself writes for the unknown: GPT-2's unk_token is its ordinary end token.
        model = self.backend.model
        unknown = model.unk_token if isinstance(model, (models.BPE, models.WordLevel, models.WordPiece)) else None
        return self.backend.token_to_id(unknown) if unknown else None

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The messages through the chat template, as transformers' ``apply_chat_template(tokenize=False)`` renders them.

        ModelError: there is no template, or it isn't valid. DataError: the template refuses these messages.
        """
        if self.chat_template is None:
            hint = 'use template = "plain" or a string with {prompt}, or give a model that was trained to chat'
            raise ModelError(f"the tokenizer has no chat template: {hint}")
        special = {name: _content(self.config[name]) for name in _SPECIAL if self.config.get(name)}
        try:
            template = _compile(self.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None
        plain = [dict(message) for message in messages]
        try:
            return template.render(messages=plain, add_generation_prompt=add_generation_prompt, **special)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refused the messages {_short(str(plain))}: {error}") from None

    def save(self, folder: Path) -> None:
        """Write the files that ``load`` and transformers' AutoTokenizer read; other keys of generation_config.json stay."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        generation = folder / "generation_config.json"
        eos = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
        ids = {"eos_token_id": eos, "pad_token_id": self.pad_token_id}
        _write_json(folder / "tokenizer_config.json", self.config)
        _write_json(generation, _read_json(generation) | ids)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


@dataclass(frozen=True)
class Template:
    """How a prompt becomes the model's input.

    ``kind``: "plain" (the prompt as it is), "chat" (a user message through the tokenizer's chat template) or a text that
    contains ``{prompt}``. ``system``: a system message before chats that have none of their own.
    """

    kind: str = "plain"
    system: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("plain", "chat") and "{prompt}" not in self.kind:
            expected = '"plain", "chat" or a text that contains {prompt}'
            raise DataError(f"template {self.kind!r} is none of the known: expected {expected}")
        if self.system is not None and self.kind != "chat":
            raise DataError(f'a system message needs template = "chat", but the template is {self.kind!r}')

    def render(self, tokenizer: Tokenizer, prompt: Prompt) -> str:
        """The text of the model's input. DataError if a list of messages meets a template for texts."""
        if self.kind == "chat":
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if self.system is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": self.system}, *messages]
            return tokenizer.render_chat(messages)
        if not isinstance(prompt, str):
            raise DataError(f'a prompt that is a list of messages needs template = "chat", but it is {self.kind!r}')
        return prompt if self.kind == "plain" else self.kind.replace("{prompt}", prompt)

    def encode(self, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of every prompt. A chat template writes its own begin token; otherwise the tokenizer adds it."""
        return tokenizer.encode_many([self.render(tokenizer, p) for p in prompts], special=self.kind != "chat")


def last_user_text(prompt: Prompt) -> str:
    """What the user wrote: the prompt, or the last user message (the last of all if there is none)."""
    if isinstance(prompt, str):
        return prompt
    users = [message for message in prompt if message["role"] == "user"]
    return str((users or prompt)[-1]["content"])


def _default_template(templates: Any) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones."""
    if isinstance(templates, list):
        named = [entry for entry in templates if isinstance(entry, Mapping) and entry.get("name") == "default"]
        return next((str(entry.get("template")) for entry in named), None)
    return None if templates is None else str(templates)


def _eos_token_ids(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], others: Sequence[Mapping[str, Any]], folder: Path
) -> tuple[int, ...]:
    own = _token_id(backend, config, "eos_token", folder)
    ids: list[int] = [] if own is None else [own]
    # As transformers' generate does, config.json only counts where generation_config.json says nothing.
    found = [data["eos_token_id"] for data in others if data.get("eos_token_id") is not None]
    if found:
        ids += found[0] if isinstance(found[0], list) else [found[0]]
    if not ids:
        raise ModelError(f'{folder}: no end token is known; add "eos_token": "..." to tokenizer_config.json')
    if not all(isinstance(number, int) for number in ids):
        raise ModelError(f"{folder}: its eos_token_id is {found[0]!r}, expected whole numbers; fetch the folder again")
    return tuple(dict.fromkeys(ids))


def _token_id(backend: tokenizers.Tokenizer, config: Mapping[str, Any], name: str, folder: Path) -> int | None:
    if not config.get(name):
        return None
    token = _special_text(config, name, folder)
    number = backend.token_to_id(token)
    if number is None:
        raise ModelError(f"{folder}: tokenizer_config.json says {name} = {token!r}, but tokenizer.json has no such token")
    return number


def _special_text(config: Mapping[str, Any], name: str, folder: Path) -> str:
    """The text of a special token, empty if there is none."""
    given = config.get(name) or ""
    text = given.get("content") if isinstance(given, Mapping) else given
    if not isinstance(text, str) or text != text.encode(errors="ignore").decode():  # halves of surrogate pairs
        raise ModelError(
            f"{folder}: tokenizer_config.json says {name} = {given!r}, expected a text; fetch the folder again"
        )
    return text


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text: {error}; the file is damaged, fetch it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}; the file is damaged, fetch it again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: holds a {type(data).__name__}, expected an object")
    return data


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(data), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant says, for training masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own type)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Templates come with models, so they are not trusted: a sandbox, with the names that Hugging Face templates use."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja's own filter, HTML is not escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
