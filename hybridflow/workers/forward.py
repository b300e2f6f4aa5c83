"""What models give for the rows of a batch: without gradients for verbs, and what losses see of the columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hybridflow.core.batch import Batch, Ragged
from hybridflow.parallel.mesh import ALONE, Line
from hybridflow.workers.microbatch import plan_microbatches
from hybridflow.workers.parts import run_microbatches
from hybridflow.workers.units import Units

__all__ = ["forward", "score_rows"]


def forward(
    model: Any, batch: Batch, names: tuple[str, ...], token_budget: int, pp: Line = ALONE, together: Line = ALONE
) -> dict[str, Ragged]:
    """Outputs of a model without gradients, as time columns with zeros outside the action steps; of a pipeline ``pp``, on
    its last stage. Ranks whose forwards wait for each other run them ``together``."""
    batch = batch.select((*model.inputs, "response_mask"))
    units, mask = Units.of(batch, model.unit), batch.ragged("response_mask")
    out = {name: np.zeros(len(mask.values), np.float32) for name in names}
    micros = units.load(batch, np.arange(len(units)), next(model.parameters()).device).microbatches(token_budget)

    def keep(number: int, _: Any, outputs: Mapping[str, Tensor]) -> None:
        for name in names:
            out[name][micros[number].units.places.values] = outputs[name].float().cpu().numpy()

    blanks = together.most(len(micros)) - len(micros)
    seen = (micro.seen(model) for micro in micros)
    run_microbatches(model, seen, keep, pp, train=False, blanks=blanks)
    return {name: mask.like(values) for name, values in out.items()}


def score_rows(model: Any, batch: Batch, token_budget: int, pp: Line = ALONE, together: Line = ALONE) -> np.ndarray:
    """``scores`` [B] of a reward model, without gradients; of a pipeline ``pp``, on its last stage. See ``forward``."""
    scores, micros = np.zeros(len(batch), np.float32), list(plan_microbatches(batch.lengths, token_budget))

    def keep(number: int, _: Batch, outputs: Mapping[str, Tensor]) -> None:
        scores[micros[number]] = outputs["scores"].cpu().numpy()

    blanks = together.most(len(micros)) - len(micros)
    run_microbatches(model, (batch.rows(index) for index in micros), keep, pp, train=False, blanks=blanks)
    return scores
