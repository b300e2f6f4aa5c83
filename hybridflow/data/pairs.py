"""Preferences: two responses to a prompt, the better one known.

records = read_pairs(Path("pairs.jsonl"))            # {"prompt": "51>", "chosen": "15", "rejected": "55"}
PairSource(records, tokenizer).batch(0, 8)           # 16 rows: chosen, rejected, chosen, rejected, ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.batch import Batch, Column, Ragged
from hybridflow.core.errors import DataError
from hybridflow.core.seeding import derive
from hybridflow.data.prompts import DataConfig, PromptRecord, prompt_of, read_rows, text_of
from hybridflow.data.text import Prompt, Tokenizer

__all__ = ["PairRecord", "PairSource", "load_pairs", "read_pairs"]

_HELD_OUT = 0.1  # share of the prompts


@dataclass(frozen=True)
class PairRecord:
    """A prompt, the better and the worse response, and how much better it is, if that is known."""

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None


class PairSource:
    """Pairs, encoded once, as batches. Prompts that are too long are treated as ``PromptSource`` says."""

    def __init__(self, records: Sequence[PairRecord], config: DataConfig, tokenizer: Tokenizer, seed: int = 0) -> None:
        self.prompts = config.source([PromptRecord(record.prompt, {"pair": record}) for record in records], tokenizer, seed)
        kept: list[PairRecord] = [record.fields["pair"] for record in self.prompts.records]
        end = tokenizer.eos_token_ids[0]
        texts = [text for record in kept for text in (record.chosen, record.rejected)]
        self._responses = Ragged.from_rows([[*ids, end] for ids in tokenizer.encode_many(texts)], np.int64)
        margins = [record.margin for record in kept]
        self._margins = None if None in margins else np.array(margins, np.float32)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def has_margins(self) -> bool:
        return self._margins is not None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with one of its responses."""
        rows = np.repeat(np.arange(len(self)), 2)
        return int((self.prompts.encoded(rows).lengths + self._responses.lengths).max())

    def batch(self, step: int, num_pairs: int) -> Batch:
        """The pairs of a step, two rows each: the preferred response, behind it the other one.

        ``tokens`` (prompt, response, end token), ``response_mask`` (True on the last two), ``preferred``, ``group_id`` (the
        pair), ``sample_id``, and ``margins`` if every record has one. They depend on the records, seed and step alone.
        """
        pairs = step * num_pairs + np.arange(num_pairs, dtype=np.int64)
        return self._batch(self.prompts.rows(pairs), pairs)

    def all(self, limit: int | None = None) -> Batch:
        """Every pair once, in the order of the records, or the first ``limit`` of them."""
        rows = np.arange(len(self) if limit is None else min(limit, len(self)), dtype=np.int64)
        return self._batch(rows, rows)

    def _batch(self, records: NDArray[np.int64], pairs: NDArray[np.int64]) -> Batch:
        sides = np.tile([0, 1], len(records))
        rows, ids = 2 * np.repeat(records, 2) + sides, np.repeat(pairs, 2)
        texts = list(zip(self.prompts.encoded(np.repeat(records, 2)), self._responses.rows(rows), strict=True))
        tokens = Ragged.from_rows([np.concatenate(text) for text in texts], np.int64)
        mask = np.concatenate([np.repeat([False, True], [len(prompt), len(response)]) for prompt, response in texts])
        columns: dict[str, Column] = {"sample_id": 2 * ids + sides, "group_id": ids, "preferred": sides == 0}
        if self._margins is not None:
            columns["margins"] = np.repeat(self._margins[records], 2)
        return Batch({**columns, "tokens": tokens, "response_mask": tokens.like(mask)})


def load_pairs(config: DataConfig) -> tuple[list[PairRecord], list[PairRecord]]:
    """(to learn from, held out). Without ``eval_pairs`` a tenth of the prompts is held out, with all of their pairs; which
    ones depends on their text alone. Of a single prompt none is."""
    assert config.pairs is not None, "validated"
    records = read_pairs(Path(config.pairs), config.prompt_field)
    if config.eval_pairs is not None:
        return records, read_pairs(Path(config.eval_pairs), config.prompt_field)
    prompts = {repr(record.prompt) for record in records}
    count = math.ceil(_HELD_OUT * len(prompts)) if len(prompts) > 1 else 0
    held_out = set(sorted(prompts, key=lambda prompt: derive(0, f"pairs/held_out/{prompt}"))[:count])
    sides: tuple[list[PairRecord], list[PairRecord]] = ([], [])
    for record in records:
        sides[repr(record.prompt) in held_out].append(record)
    return sides


def read_pairs(path: Path, prompt_field: str = "prompt") -> list[PairRecord]:
    """Read .jsonl, .csv or .parquet with the columns of the prompt, ``chosen``, ``rejected`` and maybe ``margin``.

    A response is a text, or a list of one assistant's message. DataError names the file, the row (for JSONL the line), what
    was found and what was expected.
    """
    records = [_record(row, where, prompt_field) for where, row in read_rows(path)]
    if not records:
        raise DataError(f"{path}: is empty, expected one pair a row")
    return records


def _record(row: Mapping[str, Any], where: str, prompt_field: str) -> PairRecord:
    prompt = prompt_of(row, where, prompt_field)
    chosen, rejected = (text_of({**row, **_spoken(row, name)}, where, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(
            f"{where}: chosen and rejected are the same text, {chosen[:60]!r}; nothing is preferred, remove the row"
        )
    return PairRecord(prompt, chosen, rejected, _margin(row.get("margin"), where))


def _spoken(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A response that is a list of one assistant's message stands for its content."""
    match row.get(name):
        case [{"role": "assistant", "content": content}]:
            return {name: content}
        case _:
            return {}


def _margin(value: Any, where: str) -> float | None:
    """A number, or none; CSV files hold it as text."""
    if value is None or value == "":
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin) or isinstance(value, bool):
        raise DataError(f"{where}: margin is {value!r}, expected a finite number")
    return margin
