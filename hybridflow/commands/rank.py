"""The rank command: preferences from the model's own samples, the better and the worse of them told by a real scorer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.build import make_parts
from hybridflow.build_text import TextParts
from hybridflow.config import load_config, load_run
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.errors import DataError, UserError
from hybridflow.core.files import write_whole

__all__ = ["best_and_worst", "rank"]


def rank(source: Path, overrides: Sequence[str], out: Path, count: int | None) -> None:
    """Write the best and the worst of ``train.group_size`` responses to each of ``count`` prompts (all, if not given).

    ``source``: a configuration, or a run directory for the model that it exported. Prompts whose responses were all scored
    alike, or of which fewer than two have a score, give no pair; how many these are is told.
    """
    if out.exists():
        raise DataError(f"{out}: exists already; choose another file or remove it")
    if count is not None and count < 1:
        raise UserError(f"--count {count}: expected 1 or more")
    config = load_run(source, overrides) if source.is_dir() else load_config(source, overrides)
    if config.train.group_size < 2:
        raise UserError(f"{source}: train.group_size = {config.train.group_size}: ranking compares 2 responses or more")
    runtime = LocalRuntime()
    try:
        parts = make_parts(config, runtime)
        if not isinstance(parts, TextParts):
            raise UserError(f"{source}: ranking samples responses to prompts, so it needs data.task or data.prompts")
        total = len(parts.prompts) if count is None else count
        pairs = [pair for batch in _sampled(parts, total) for pair in _pairs(parts, batch)]
    finally:
        runtime.stop()
    skipped = f"{total - len(pairs)} prompts skipped: all of their responses were scored alike"
    if not pairs:
        raise DataError(f"{source}: {skipped}; raise generation.temperature or train.group_size")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs).encode())
    print(f"{out}: {len(pairs)} pairs" + (f", {skipped}" if len(pairs) < total else ""))


def _sampled(parts: TextParts, total: int) -> Iterator[Batch]:
    """Scored responses to ``total`` prompts, as the rollouts of a training run would be."""
    num_prompts, group_size = parts.config.train.prompts_per_step, parts.config.train.group_size
    reward = parts.reward  # before the actor: a wrong reward should not wait for a model to load
    for start in range(0, total, num_prompts):
        batch = parts.prompts.batch(start // num_prompts, num_prompts, group_size)
        batch = batch.rows(range(min(num_prompts, total - start) * group_size))
        yield reward.score(parts.actor.rollout(batch))


def _pairs(parts: TextParts, batch: Batch) -> Iterator[dict[str, Any]]:
    """Pairs as rows of a file that ``data.pairs`` reads."""
    for best, worst in best_and_worst(batch):
        record = parts.prompts.records[int(parts.prompts.rows(batch["group_id"][[best]])[0])]
        high, low = (float(f"{batch['scores'][row]:.6g}") for row in (best, worst))  # float32 has no more digits
        yield {
            "prompt": record.prompt,
            "chosen": batch["response"][best],
            "rejected": batch["response"][worst],
            "margin": float(f"{high - low:.6g}"),
            "chosen_score": high,
            "rejected_score": low,
        }


def best_and_worst(batch: Batch) -> Iterator[tuple[int, int]]:
    """(row of the highest score, row of the lowest) of every group in which scores differ; the first row of equal ones.

    Rows without a score, and empty responses, which no file of pairs may hold, don't count.
    """
    usable = ~batch["score_failed"] & np.array([bool(response) for response in batch["response"]], bool)
    for group in dict.fromkeys(batch["group_id"].tolist()):
        rows = np.flatnonzero((batch["group_id"] == group) & usable)
        scores = batch["scores"][rows]
        if len(rows) and scores.min() < scores.max():
            yield int(rows[scores.argmax()]), int(rows[scores.argmin()])
