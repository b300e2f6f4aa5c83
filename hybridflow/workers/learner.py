"""The learner: trains networks with any declared loss.

``update`` sees the whole batch and deals its own minibatches:

    units (rows, steps for nets on single observations, or groups for losses that compare the rows of a group),
    permuted by (seed, update, epoch)
      └─ minibatch: one optimizer step, ONE normaliser counted before it is split
           └─ microbatches by token budget: forward, loss terms / normaliser, backward; gradients add up

so neither the loss nor the gradient depends on how a minibatch is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.controller.protocols import THREE_D, VIEW
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import NonFiniteError
from hybridflow.core.fields import FIELDS
from hybridflow.core.roles import Fn, Loss, WorkerContext, control, remote
from hybridflow.core.seeding import generator
from hybridflow.ops.kl import LOG_RATIO_LIMIT
from hybridflow.workers.microbatch import plan_microbatches
from hybridflow.workers.optimizer import Optimizer, OptimizerConfig

__all__ = ["Learner", "Networks", "UpdatePlan", "action_columns"]


@dataclass(frozen=True)
class Networks:
    """Networks to build by name. ``main`` is trained; ``inputs`` are the columns that it reads. ``model``: whose weights
    they start from, for people to read."""

    build: Callable[[], Mapping[str, nn.Module]]
    main: str
    inputs: tuple[str, ...]
    model: str = "a new network"


@dataclass(frozen=True)
class UpdatePlan:
    """How ``update`` splits a batch: ``epochs`` passes of ``minibatches`` optimizer steps, ``token_budget`` a forward."""

    minibatches: int = 1
    epochs: int = 1
    token_budget: int = 4096


def _inputs(args: Mapping[str, Any]) -> tuple[str, ...]:
    return (*args["networks"].inputs, "response_mask")


def _value_inputs(args: Mapping[str, Any]) -> tuple[str, ...]:
    final = ("final_observations",) if "observations" in args["networks"].inputs else ()
    return (*_inputs(args), *final)


class Learner:
    """Owns networks and the optimizer of the main one. ``version`` counts updates."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        networks: Networks,
        optimizer: OptimizerConfig,
        plan: UpdatePlan,
        total_steps: int,
        seed: int,
    ) -> None:
        self.context, self.plan, self.seed, self.version = context, plan, seed, 0
        self.networks = dict(networks.build())
        self.model: Any = self.networks[networks.main]
        self.optimizer = Optimizer(self.model, optimizer, total_steps)

    @remote(VIEW, reads=lambda args: ("sample_id", *_inputs(args)), kind="train")
    def update(self, batch: Batch, loss: Fn, /) -> Batch:
        """One update: ``epochs x minibatches`` optimizer steps on ``loss``. Rows without an action step have no part."""
        units = _Units(batch, "group" if loss.per == "group" else self.model.unit)
        written = {name: np.zeros(units.num_steps, np.float32) for name in loss.writes}
        for epoch in range(self.plan.epochs):
            order = generator(self.seed, "minibatch", self.version, epoch).permutation(len(units))
            for number, index in enumerate(np.array_split(order, self.plan.minibatches)):
                drift = self._minibatch(units.rows(index), loss, written)
                if epoch == number == 0 and drift:
                    self._observe_drift(torch.cat(drift).double())
        self.version += 1
        return units.time_columns(written)

    def _minibatch(self, units: _Units, loss: Fn, written: Mapping[str, np.ndarray]) -> list[Tensor]:
        """One optimizer step; the drift of its parts."""
        if len(units) == 0:
            self.context.metrics.add("updates_skipped", 1)
            return []
        normaliser = {"step": units.num_actions, "row": len(units.batch), "group": len(units)}[loss.per]
        self.optimizer.zero_grad()
        drift: list[Tensor] = []
        for index in plan_microbatches(units.lengths, self.plan.token_budget):
            micro = units.rows(index)
            result = self._loss(micro.batch, loss)
            total = result.terms.sum() / normaliser
            self._check_finite(float(total.detach()), f"loss {loss.name}", micro.batch)
            total.backward()  # type: ignore[no-untyped-call]
            self._observe(result, loss)
            drift += [] if result.drift is None else [result.drift]
            for name, values in written.items():
                values[micro.places] = result.columns[name].float().cpu().numpy()
        self._step(units.batch, loss)
        return drift

    def _loss(self, batch: Batch, loss: Fn) -> Loss:
        columns = action_columns(batch, next(self.model.parameters()).device)
        outputs = self.networks if loss.on == "networks" else self.model.outputs(batch)
        result: Loss = loss(outputs, columns)
        return result

    def _observe(self, result: Loss, loss: Fn) -> None:
        metrics = {"loss": result.terms.detach(), **result.metrics}
        for name, values in metrics.items():
            self.context.metrics.add(name, float(values.sum()), values.numel())

    def _observe_drift(self, drift: Tensor) -> None:
        """How far the learner is from the policy that sampled, before an update changes it: [N] differences of
        log-probabilities, and the share of samples that are left when each weighs π_learner / π_sampled."""
        weights, metrics = drift.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), self.context.metrics
        metrics.add("mismatch", float(drift.abs().sum()), len(drift))
        metrics.maximum("mismatch_max", float(drift.abs().max()))
        metrics.add("effective_samples", float(weights.sum() ** 2 / (weights**2).sum()), len(drift))

    def _step(self, batch: Batch, loss: Fn) -> None:
        norm = self.optimizer.clip()
        self._check_finite(norm, f"gradient norm of {loss.name}", batch)
        self.context.metrics.add("grad_norm", norm)
        self.context.metrics.add("learning_rate", self.optimizer.learning_rate)
        self.optimizer.step()

    def _check_finite(self, value: float, what: str, batch: Batch) -> None:
        if not math.isfinite(value):
            samples = ", ".join(map(str, batch["sample_id"][:8]))
            raise NonFiniteError(f"{what} is {value} in update {self.version}, samples {samples}; the step was not applied")

    @remote(THREE_D, reads=_value_inputs, writes=("values", "bootstrap_values"))
    def compute_values(self, batch: Batch, /) -> Batch:
        """Value before every action step, and after the last one."""
        values = forward(self.model, batch, ("values",), self.plan.token_budget)["values"]
        with torch.no_grad():
            bootstrap = self.model.bootstrap(batch).float().cpu().numpy()
        return Batch({"values": values, "bootstrap_values": bootstrap})

    @remote(THREE_D, reads=_inputs, writes=("learner_log_probs",))
    def compute_log_probs(self, batch: Batch, /) -> Batch:
        """Log-probability of every action step under the current policy, whoever chose it."""
        log_probs = forward(self.model, batch, ("log_probs",), self.plan.token_budget)["log_probs"]
        return Batch({"learner_log_probs": log_probs})

    @remote(THREE_D, reads=_inputs, writes=("scores",))
    def compute_scores(self, batch: Batch, /) -> Batch:
        """What the reward model that is trained gives to every row."""
        return Batch({"scores": score_rows(self.model, batch, self.plan.token_budget)})

    @control
    def blend(self, source: str, target: str, weight: float) -> None:
        """Move network ``target`` towards ``source``: target += weight (source - target)."""
        with torch.no_grad():
            pairs = zip(self.networks[target].parameters(), self.networks[source].parameters(), strict=True)
            for old, new in pairs:
                old.lerp_(new, weight)

    @control
    def num_parameters(self) -> tuple[int, int]:
        """(all, trained) of the main network."""
        sizes = [(p.numel(), p.numel() * p.requires_grad) for p in self.model.parameters()]
        return sum(size for size, _ in sizes), sum(trained for _, trained in sizes)

    @control
    def export(self, save: Callable[[Any], None]) -> None:
        """Call ``save`` with the main network."""
        save(self.model)

    @control
    def state_dict(self) -> dict[str, Any]:
        networks = {name: network.state_dict() for name, network in self.networks.items()}
        return {"version": self.version, "networks": networks, "optimizer": self.optimizer.state_dict()}

    @control
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def forward(model: Any, batch: Batch, names: tuple[str, ...], token_budget: int) -> dict[str, Ragged]:
    """Outputs of a model without gradients, as time columns with zeros outside the action steps."""
    units = _Units(batch, "row")
    out = {name: np.zeros(units.num_steps, np.float32) for name in names}
    with torch.no_grad():
        for index in plan_microbatches(units.batch.lengths, token_budget):
            micro = units.rows(index)
            outputs = model.outputs(micro.batch)
            for name in names:
                out[name][micro.places] = outputs[name].float().cpu().numpy()
    return {name: batch.ragged("response_mask").like(values) for name, values in out.items()}


def score_rows(model: Any, batch: Batch, token_budget: int) -> np.ndarray:
    """``scores`` [B] of a reward model, without gradients."""
    scores = np.zeros(len(batch), np.float32)
    with torch.no_grad():
        for index in plan_microbatches(batch.lengths, token_budget):
            scores[index] = model.outputs(batch.rows(index))["scores"].cpu().numpy()
    return scores


def action_columns(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """What a loss sees: time columns packed over the action steps [N], row fields [R], and ``row_index`` [N]."""
    mask = batch.ragged("response_mask")
    columns = {"row_index": torch.tensor(mask.row_index[mask.values], device=device)}
    for name, column in batch.columns.items():
        if FIELDS[name].axis == "time" and isinstance(column, Ragged):
            columns[name] = torch.tensor(column.values[mask.values], device=device)
        elif FIELDS[name].axis == "row" and not isinstance(column, Ragged) and column.dtype.kind in "biuf":
            columns[name] = torch.tensor(column, device=device)
    return columns


class _Units:
    """A batch as the units that minibatches are made of, each with the places of its action steps in the whole batch.

    Rows without an action step are in no unit, nor is a group that has such a row. The rows of a group stay in order.
    """

    def __init__(self, batch: Batch, unit: Literal["row", "step", "group"]) -> None:
        mask = batch.ragged("response_mask")
        self.num_steps, self.axis = len(mask.values), mask
        places = Ragged(np.flatnonzero(mask.values), np.bincount(mask.row_index[mask.values], minlength=len(batch)))
        if unit == "step":
            self.batch, self._places = batch.steps(), Ragged(places.values, np.ones(len(places.values), np.int64))
            self._sizes = self._places.lengths
        else:
            kept, self._sizes = _groups(batch, places.lengths > 0) if unit == "group" else _rows(places.lengths > 0)
            self.batch, self._places = batch.rows(kept), places.rows(kept)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def lengths(self) -> np.ndarray:
        """[U] what each unit weighs in a microbatch: its rows times the longest of them."""
        starts = np.cumsum(self._sizes) - self._sizes
        longest = np.maximum.reduceat(self.batch.lengths, starts) if len(self) else self._sizes
        weights: np.ndarray = self._sizes * longest
        return weights

    @property
    def num_actions(self) -> int:
        return len(self._places.values)

    @property
    def places(self) -> np.ndarray:
        """[N] where the action steps stand on the packed time axis of the whole batch."""
        return self._places.values

    def rows(self, index: np.ndarray) -> _Units:
        """The units at ``index``."""
        new = object.__new__(_Units)
        new.num_steps, new.axis, new._sizes = self.num_steps, self.axis, self._sizes[index]
        rows = Ragged(np.arange(len(self.batch)), self._sizes).rows(index).values
        new.batch, new._places = self.batch.rows(rows), self._places.rows(rows)
        return new

    def time_columns(self, written: Mapping[str, np.ndarray]) -> Batch:
        return Batch({name: self.axis.like(values) for name, values in written.items()}, len(self.axis))


def _rows(has_steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, rows of each unit): every row by itself."""
    kept = np.flatnonzero(has_steps)
    return kept, np.ones(len(kept), np.int64)


def _groups(batch: Batch, has_steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, rows of each unit): rows of equal ``group_id`` side by side."""
    _, group, sizes = np.unique(batch["group_id"], return_inverse=True, return_counts=True)
    whole = np.bincount(group, weights=has_steps, minlength=len(sizes)) == sizes
    rows = np.argsort(group, kind="stable")
    return rows[whole[group[rows]]], sizes[whole].astype(np.int64)
