"""Prompts: read from files, encoded once, dealt to steps.

    records = read_records(Path("train.jsonl"))                    # [PromptRecord("What is 3 + 4?", {"answer": "7"})]
    source = PromptSource(records, tokenizer, Template("chat"), max_prompt_tokens=512, seed=1)
    source.batch(step=0, num_prompts=8, group_size=4)              # Batch of 32 rows: prompt, prompt_text, fields, ids ...
    source.demonstrations(step=0, num_prompts=8)                   # Batch of 8 rows: tokens, response_mask, sample_id
    source.all()                                                   # every prompt once, for evaluation

The rows of a step are a pure function of (records, seed, step), so a resumed run needs no state to go on where it was. Only
how long their responses are expected to be comes of those before (``expected``), which no response depends on.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from hybridflow.core.batch import Batch, Column, Ragged, objects
from hybridflow.core.config import Config
from hybridflow.core.errors import DataError
from hybridflow.core.seeding import generator
from hybridflow.data.lengths import ExpectedLengths
from hybridflow.data.text import Prompt, Template, Tokenizer, last_user_text

__all__ = [
    "DataConfig",
    "OnLongPrompt",
    "PromptRecord",
    "PromptSource",
    "did_you_mean",
    "prompt_of",
    "read_records",
    "read_rows",
    "text_of",
]

OnLongPrompt = Literal["error", "skip", "truncate_left", "truncate_right"]

Rows = Iterator[tuple[str, Mapping[str, Any]]]  # (where the row is, the row)

_CHUNK = 4096  # texts encoded at once


class DataConfig(Config):
    """What a run learns from: a built-in task, a file of prompts or a file of preferences."""

    task: str | None = None
    """built-in task: addition, reverse, sort or reasoning_gym:NAME"""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """options of the task, such as digits = 2"""
    prompts: str | None = None
    """file of prompts: .jsonl, .csv or .parquet"""
    eval_prompts: str | None = None
    """file of held-out prompts for evaluation"""
    pairs: str | None = None
    """file of preferences, with the columns (prompt,) chosen, rejected and maybe margin; hybridflow rank makes one"""
    eval_pairs: str | None = None
    """file of held-out pairs; without it the pairs of a tenth of the prompts, always the same, are held out"""
    prompt_field: str = "prompt"
    """column of the prompt: text or a list of messages; all other columns reach the reward functions by name"""
    completion_field: str = "completion"
    """column of the demonstrated response, for supervised fine-tuning"""
    template: str = "plain"
    """"plain" (the prompt as it is), "chat" (through the model's chat template) or a text that contains {prompt}"""
    system: str | None = None
    """system message before every prompt; needs template = "chat\""""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """longest prompt; no limit if not given"""
    on_long_prompt: OnLongPrompt = "error"
    """what happens to a longer one: stop, leave it out, or cut tokens off its left or right end"""

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        if template not in ("plain", "chat") and "{prompt}" not in template:
            raise ValueError(f'{template!r} is none of "plain", "chat" or a text that contains {{prompt}}')
        return template

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("task", "prompts", "pairs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of task, prompts and pairs; found {' and '.join(given) or 'none'}")
        if self.task is None and self.options:
            raise ValueError(f"options belong to a task, but {given[0]} are given; remove {', '.join(self.options)}")
        for name in ("prompts", "pairs"):
            if name not in given and getattr(self, f"eval_{name}") is not None:
                raise ValueError(f"eval_{name} belongs to {name}, but there is {given[0]}; remove it")
        if self.system is not None and self.template != "chat":
            raise ValueError(f'system needs template = "chat", but the template is {self.template!r}')
        return self

    def source(self, records: Sequence[PromptRecord], tokenizer: Tokenizer, seed: int) -> PromptSource:
        """The records as these keys want them encoded."""
        template = Template(self.template, self.system)
        return PromptSource(records, tokenizer, template, self.max_prompt_tokens, self.on_long_prompt, seed)


@dataclass(frozen=True)
class PromptRecord:
    """A row of a data set: the prompt, its other fields by name, and for fine-tuning the demonstrated response."""

    prompt: Prompt
    fields: Mapping[str, Any] = field(default_factory=dict)
    completion: str | None = None


class PromptSource:
    """Records, encoded once, as batches.

    A prompt over ``max_prompt_tokens`` raises DataError, is skipped or is cut, as ``on_long_prompt`` says; ``num_skipped``
    and ``num_truncated`` count them. "truncate_left" removes the beginning and keeps the end. Epochs are permutations of
    the records that remain; a step may begin in one epoch and end in the next.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        tokenizer: Tokenizer,
        template: Template = Template(),  # noqa: B008  (frozen)
        max_prompt_tokens: int | None = None,
        on_long_prompt: OnLongPrompt = "error",
        seed: int = 0,
    ) -> None:
        if not records:
            raise DataError("the data set has no prompts")
        encoded: list[list[int]] = []
        for start in range(0, len(records), _CHUNK):
            encoded += template.encode(tokenizer, [record.prompt for record in records[start : start + _CHUNK]])
        kept, prompts, self.num_truncated = _limit(encoded, max_prompt_tokens, on_long_prompt)
        self.records = [records[i] for i in kept]
        self.num_skipped = len(records) - len(kept)
        if not kept:
            raise DataError(f"all {len(records)} prompts have more than {max_prompt_tokens} tokens; raise the limit")
        self._prompts = Ragged.from_rows(prompts, np.int64)
        self.expected = ExpectedLengths(self._prompts.lengths)
        self._texts = objects(last_user_text(record.prompt) for record in self.records)
        self._fields = objects(record.fields for record in self.records)
        self._tokenizer, self._seed = tokenizer, seed

    def __len__(self) -> int:
        return len(self.records)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self._prompts.lengths.max())

    def batch(self, step: int, num_prompts: int, group_size: int = 1) -> Batch:
        """The prompts of a step [num_prompts * group_size]: each ``group_size`` times side by side, under one group_id."""
        return self.draw(step * num_prompts, num_prompts, group_size)

    def draw(self, first: int, num_prompts: int, group_size: int = 1) -> Batch:
        """The same for ``num_prompts`` prompts of the endless sequence of epochs, from number ``first`` on."""
        groups = first + np.arange(num_prompts, dtype=np.int64)
        ids = first * group_size + np.arange(num_prompts * group_size, dtype=np.int64)
        return self._batch(self.rows(groups), groups).repeat(group_size).with_columns(sample_id=ids)

    def all(self, limit: int | None = None) -> Batch:
        """Every prompt once, in the order of the records, or the first ``limit`` of them."""
        rows = np.arange(len(self) if limit is None else min(limit, len(self)), dtype=np.int64)
        return self._batch(rows, rows)

    def demonstrations(self, step: int, num_prompts: int) -> Batch:
        """tokens (prompt, completion, end token), response_mask (True on the last two) and sample_id of a step.

        DataError if a record has no completion.
        """
        ids = step * num_prompts + np.arange(num_prompts, dtype=np.int64)
        rows = self.rows(ids)
        prompts, completions = self._prompts.rows(rows), self._completions.rows(rows)
        pairs = list(zip(prompts, completions, strict=True))
        tokens = Ragged.from_rows([np.concatenate(pair) for pair in pairs], np.int64)
        mask = np.concatenate([np.repeat([False, True], [len(prompt), len(completion)]) for prompt, completion in pairs])
        return Batch({"sample_id": ids, "tokens": tokens, "response_mask": tokens.like(mask)})

    @cached_property
    def _completions(self) -> Ragged:
        """The completions' tokens, each with the tokenizer's end token behind it."""
        texts = [record.completion for record in self.records if record.completion is not None]
        if len(texts) < len(self):
            missing = next(i for i, record in enumerate(self.records) if record.completion is None)
            raise DataError(f"{_name(missing, self.records[missing])} has no completion; fine-tuning needs one for each")
        end = self._tokenizer.eos_token_ids[0]
        encoded: list[list[int]] = []
        for start in range(0, len(texts), _CHUNK):
            encoded += self._tokenizer.encode_many(texts[start : start + _CHUNK])
        return Ragged.from_rows([[*ids, end] for ids in encoded], np.int64)

    def encoded(self, records: NDArray[np.int64]) -> Ragged:
        """The tokens of these records' prompts."""
        return self._prompts.rows(records)

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The record at each position of the endless sequence of epochs."""
        epochs, places = np.divmod(positions, len(self))
        orders = {epoch: _order(self._seed, int(epoch), len(self)) for epoch in np.unique(epochs)}
        return np.array([orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)], np.int64)

    def _batch(self, rows: NDArray[np.int64], groups: NDArray[np.int64]) -> Batch:
        columns: dict[str, Column] = {"sample_id": groups, "group_id": groups, "prompt": self._prompts.rows(rows)}
        columns |= {"prompt_text": self._texts[rows], "fields": self._fields[rows]}
        return Batch(columns | {"expected_length": self.expected.of(rows)})


def read_records(path: Path, prompt_field: str = "prompt", completion_field: str | None = None) -> list[PromptRecord]:
    """Read .jsonl, .csv or .parquet; columns other than the prompt and the completion become ``fields``.

    DataError names the file, the row (for JSONL the line), what was found and what was expected.
    """
    records = [_record(row, where, prompt_field, completion_field) for where, row in read_rows(path)]
    if not records:
        raise DataError(f"{path}: is empty, expected one prompt a row")
    return records


def read_rows(path: Path) -> Rows:
    """The rows of a file, each with where it is, for errors. DataError if the file or a row can't be read."""
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected a file; {_supported()}")
    if path.suffix not in _READERS:
        raise DataError(f"{path}: can't read {path.suffix or 'a file without extension'}; {_supported()}")
    try:
        yield from _READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}; convert the file") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"


def _limit(
    encoded: Sequence[list[int]], limit: int | None, policy: OnLongPrompt
) -> tuple[Sequence[int], list[list[int]], int]:
    """(records to keep, their tokens, how many were cut)."""
    empty = next((i for i, ids in enumerate(encoded) if not ids), None)
    if empty is not None:
        raise DataError(f"record {empty + 1}: its prompt has no tokens; remove it")
    long = [i for i, ids in enumerate(encoded) if limit is not None and len(ids) > limit]
    if not long:
        return range(len(encoded)), list(encoded), 0
    if policy == "error":
        found = f"record {long[0] + 1}: its prompt has {len(encoded[long[0]])} tokens, max_prompt_tokens is {limit}"
        hint = 'raise it, or set on_long_prompt to "skip", "truncate_left" or "truncate_right"'
        raise DataError(f"{found} ({len(long)} of {len(encoded)} are longer); {hint}")
    if policy == "skip":
        kept = sorted(set(range(len(encoded))) - set(long))
        return kept, [encoded[i] for i in kept], 0
    part = slice(-limit, None) if policy == "truncate_left" and limit else slice(limit)
    return range(len(encoded)), [ids[part] if limit and len(ids) > limit else ids for ids in encoded], len(long)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return generator(seed, "data", epoch).permutation(count)


def _name(index: int, record: PromptRecord) -> str:
    text = last_user_text(record.prompt)
    return f"record {index + 1} ({text if len(text) <= 60 else text[:57] + '...'!r})"


def _record(row: Mapping[str, Any], where: str, prompt_field: str, completion_field: str | None) -> PromptRecord:
    prompt = prompt_of(row, where, prompt_field)
    completion = text_of(row, where, completion_field, "completion_field") if completion_field else None
    others = {name: value for name, value in row.items() if name not in (prompt_field, completion_field)}
    return PromptRecord(prompt, others, completion)


def prompt_of(row: Mapping[str, Any], where: str, prompt_field: str) -> Prompt:
    """The prompt in a row; DataError if there is none, or none that can be read."""
    _check_column(row, where, prompt_field, "prompt_field")
    prompt: Prompt = row[prompt_field]
    problem = _problem(prompt)
    if problem:
        raise DataError(f"{where}: {prompt_field} {problem}")
    return prompt


def text_of(row: Mapping[str, Any], where: str, name: str, key: str | None = None) -> str:
    """The text in column ``name``, which the configuration's ``key`` chooses; DataError if there is none."""
    _check_column(row, where, name, key)
    text = row[name]
    if not (isinstance(text, str) and text):
        raise DataError(f"{where}: {name} is {text!r}, expected a text that is not empty")
    return text


def _check_column(row: Mapping[str, Any], where: str, name: str, key: str | None) -> None:
    if name in row:
        return
    found = ", ".join(map(str, row)) or "none"
    near = difflib.get_close_matches(name, [str(column) for column in row], 1, 0.6)
    if key is None:
        hint = f"rename {near[0]!r}" if near else "add it"
    else:
        hint = f"did you mean {key} = {near[0]!r}?" if near else f"set {key} to one of them"
    raise DataError(f"{where}: no column {name!r}; found {found}; {hint}")


def _problem(prompt: Any) -> str | None:
    """What is wrong with a prompt."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "is empty, expected a text"
    if not isinstance(prompt, list):
        return f"is {prompt!r} ({type(prompt).__name__}), expected a text or a list of messages"
    if not prompt:
        return "is an empty list, expected messages"
    for i, message in enumerate(prompt, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"has {message!r} as message {i}, expected an object with the texts role and content"
    return None


def _read_jsonl(path: Path) -> Rows:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if "\\u" in line:
                    json.dumps(row, ensure_ascii=False).encode()
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}") from None
            except (ValueError, RecursionError) as error:  # half a surrogate pair, a number of 5000 digits
                raise DataError(f"{path}:{number}: can't be read: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f'{path}:{number}: is a {type(row).__name__}, expected an object, {{"prompt": "..."}}')
            yield f"{path}:{number}", row


def _read_csv(path: Path) -> Rows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            for number, values in enumerate(reader, 1):
                if values and len(values) != len(names):
                    raise DataError(f"{path}, row {number}: has {len(values)} columns, the header has {len(names)}")
                if values:
                    yield f"{path}, row {number}", dict(zip(names, values, strict=True))
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from None


def _read_parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(f'{path}: reading .parquet needs pyarrow; pip install "hybridflow[data]"') from None
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{path}, row {number}", row


_READERS = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}


def _supported() -> str:
    return f"supported are {', '.join(_READERS)}"
