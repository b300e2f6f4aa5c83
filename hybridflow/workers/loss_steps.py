"""Optimizer steps on losses: what an update of the learner is made of.

    minibatch ── for every loss: gradients of its microbatches, summed over ranks ── clip ── step of what it trains

Nothing but what a loss trains has gradients meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError, NonFiniteError, UserError
from hybridflow.core.roles import Fn, Loss, WorkerContext
from hybridflow.core.seeding import generator, torch_generator
from hybridflow.ops.kl import LOG_RATIO_LIMIT
from hybridflow.workers.fsdp import FsdpNetwork
from hybridflow.workers.optimizer import Optimizer
from hybridflow.workers.parts import Lines, run_microbatches
from hybridflow.workers.units import Columns, Pulled, PulledSteps, Units, action_columns

__all__ = ["LossSteps", "UpdatePlan"]


@dataclass(frozen=True)
class UpdatePlan:
    """How ``update`` splits a batch: ``epochs`` passes of ``minibatches`` optimizer steps, ``token_budget`` a forward.

    ``drawn``: minibatches are so many rows each, one after another as a replay buffer drew them; None: they are dealt.
    ``max_skips``: so many optimizer steps in a row whose loss or gradient isn't finite are left out; one more, or any if it
    is 0, is a NonFiniteError.
    """

    minibatches: int = 1
    epochs: int = 1
    token_budget: int = 4096
    drawn: int | None = None
    max_skips: int = 0

    def cut(self, units: Units, seed: int, version: int, epoch: int) -> list[np.ndarray]:
        """The units of every minibatch of an epoch."""
        order = np.arange(len(units))
        if self.drawn is not None:
            rows = units.rows.values
            return np.split(order, np.searchsorted(rows, range(self.drawn, int(rows.max(initial=0)) + 1, self.drawn)))
        if self.minibatches > 1:
            order = generator(seed, "minibatch", version, epoch).permutation(order)
        return np.array_split(order, self.minibatches)


class LossSteps:
    """Takes the steps of a learner, whose ``networks`` have these ``optimizers``; a loss that names none trains ``main``.

    ``version``: how many updates the networks have had. ``stepped``: whether the main one has moved since this was last set
    to False.
    """

    def __init__(
        self,
        context: WorkerContext,
        networks: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        main: str,
        lines: Lines,
        fsdp: FsdpNetwork | None,
        seed: int,
        plan: UpdatePlan,
    ) -> None:
        self.context, self.networks, self.optimizers, self.main = context, networks, optimizers, main
        self.lines, self.fsdp, self.seed, self.plan = lines, fsdp, seed, plan
        self.version, self.stepped, self._skipped = 0, False, 0
        self._model: Any = networks[main]
        self._observed: defaultdict[str, list[Tensor]] = defaultdict(list)

    def minibatch(
        self,
        whole: Units,
        part: Pulled | PulledSteps,
        forwards: int,
        losses: Sequence[Fn],
        written: Mapping[str, np.ndarray],
        samples: np.ndarray,
    ) -> list[Tensor]:
        """One optimizer step on each loss, for which this rank sees the ``part`` of the ``whole``, in as many ``forwards``
        at least; the drift of its microbatches."""
        if len(whole) == 0:
            self.context.metrics.add("updates_skipped", 1)
            return []
        micros = part.microbatches(self.plan.token_budget)
        kept = [micro.seen(self._model) for micro in micros] if len(losses) > 1 else None
        drift: list[Tensor] = []
        number = 1 + next(iter(self._trained_by(losses[0]).values())).steps
        for loss in losses:
            if number % loss.every:
                continue
            if loss.on == "weights":
                with torch.no_grad():
                    loss(self._weights)
                continue
            trained = self._trained_by(loss)
            if loss.on == "step":
                drift += self._own_step(loss, part, written, samples)
                continue
            with self._alone(trained):
                batches = kept or (micro.seen(self._model) for micro in micros)
                drift += self._gradients(loss, whole, micros, batches, max(0, forwards - len(micros)), written, samples)
            self.step(loss.name, trained, samples, whole)
        return drift

    def _own_step(
        self, loss: Fn, part: Pulled | PulledSteps, written: Mapping[str, np.ndarray], samples: np.ndarray
    ) -> list[Tensor]:
        """A step that the function takes by itself, on everything at once."""
        result: Loss = loss(self.networks, part.seen(self._model), self.total)
        self._check_finite(float(result.terms.sum()), f"loss {loss.name}", samples, part.units)
        self._observe(loss, result)
        self.stepped = True
        for name in loss.writes:
            written[name][part.units.places.values] = result.columns[name].float().cpu().numpy()
        return [] if result.drift is None else [result.drift]

    def _trained_by(self, loss: Fn) -> dict[str, Optimizer]:
        names = loss.trains or (self.main,)
        if unknown := [name for name in names if name not in self.optimizers]:
            raise ContractError(f"loss {loss.name} trains {unknown[0]!r}; this learner trains {', '.join(self.optimizers)}")
        return {name: self.optimizers[name] for name in names}

    @contextmanager
    def _alone(self, trained: Collection[str]) -> Iterator[None]:
        """As long as it lasts, no other network that is trained has gradients: losses may read it, and pay nothing."""
        others = [p for name, one in self.optimizers.items() if name not in trained for p in one.parameters.values()]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def _gradients(
        self,
        loss: Fn,
        whole: Units,
        micros: Sequence[Pulled | PulledSteps],
        batches: Iterable[Batch | Columns],
        blanks: int,
        written: Mapping[str, np.ndarray],
        samples: np.ndarray,
    ) -> list[Tensor]:
        """Gradients of a loss for what it trains, of the whole minibatch on every rank; the drift of the ``micros``."""
        normaliser = {"step": whole.num_actions, "row": whole.num_rows, "group": len(whole)}[loss.per]
        trained, drift = self._trained_by(loss), list[Tensor]()
        for optimizer in trained.values():
            optimizer.zero_grad()

        def terms(number: int, seen: Batch | Columns, outputs: Any) -> Tensor:
            self.context.breathe()
            columns = action_columns(seen, self._device) if isinstance(seen, Batch) else seen
            units = micros[number].units
            places = units.places.values
            if loss.noise:
                columns = columns | {"noise": self._noise(loss, whole, places, columns["actions"])}
            result: Loss = loss(outputs, columns)
            total = result.terms.sum() / normaliser
            found = total.item()
            if self.plan.max_skips and not math.isfinite(found):
                return total * math.nan  # so that no rank's gradient is finite, and all of them skip the step
            self._check_finite(found, f"loss {loss.name}", samples, units)
            self._observe(loss, result)
            drift.extend([] if result.drift is None else [result.drift])
            for name in loss.writes:
                written[name][places] = result.columns[name].float().cpu().numpy()
            return total

        if loss.on == "networks" and self.fsdp is not None:
            raise UserError(f'mesh: shard = "fsdp" and the loss {loss.name}, which reads networks, exclude each other')
        read = (lambda _: self.networks) if loss.on == "networks" else None
        model = self.networks[next(iter(trained))]
        run_microbatches(model, batches, terms, self.lines.pp, train=True, read=read, blanks=blanks)
        for optimizer in trained.values():
            optimizer.reduce_gradients(self._over_copies)
        return drift

    def _noise(self, loss: Fn, whole: Units, places: np.ndarray, actions: Tensor) -> Tensor:
        """Standard normal numbers like ``actions``, for the steps at these ``places`` of the minibatch ``whole``."""
        steps = self._trained_by(loss)[(loss.trains or (self.main,))[0]].steps
        random = torch_generator(self.seed, f"noise/{loss.name}", steps)
        drawn = torch.randn((whole.num_actions, *actions.shape[1:]), generator=random)
        if len(places) < whole.num_actions:
            order = np.argsort(whole.places.values)
            drawn = drawn[torch.from_numpy(order[np.searchsorted(whole.places.values, places, sorter=order)])]
        return drawn.to(actions.device)

    @property
    def _over_copies(self) -> Callable[[Tensor], Tensor] | None:
        """Sums a tensor over the ranks that hold the same parameters; None where there is one."""
        if self.lines.cp.size > 1:
            return self.lines.dp_cp.all_reduce
        return self.context.sum if self.context.mesh.dp > 1 else None

    def total(self, values: Tensor) -> Tensor:
        """A sum over the ranks that hold the same parameters."""
        return values.detach() if self._over_copies is None else self._over_copies(values.detach().clone())

    def summed(self, values: np.ndarray) -> np.ndarray:
        """``values``, summed over the data-parallel blocks."""
        return self.context.sum(torch.from_numpy(values).to(self._device)).cpu().numpy()

    def _observe(self, loss: Fn, result: Loss) -> None:
        prefix = "" if not loss.trains or self.main in loss.trains else f"{loss.trains[0]}_"
        metrics = {f"{prefix}loss": result.terms.detach(), **result.metrics}
        for name, values in metrics.items():
            self._observed[name].append(values)

    def add_up(self) -> None:
        """Report what was observed since the last time: values are added up together, which costs less, and waits for a GPU
        once."""
        for name, parts in self._observed.items():
            values = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
            self.context.metrics.add(name, float(values.sum(dtype=torch.float64)), values.numel())
        self._observed.clear()

    def observe_drift(self, parts: list[Tensor]) -> None:
        """How far the learner is from the policy that sampled, before an update changes it: [N] differences of
        log-probabilities, and the share of samples that are left when each weighs π_learner / π_sampled."""
        drift = torch.cat([torch.zeros(0, device=self._device), *parts]).double()
        weights, metrics = drift.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), self.context.metrics
        if len(drift):
            metrics.add("mismatch", float(drift.abs().sum()), len(drift))
            metrics.maximum("mismatch_max", float(drift.abs().max()))
        # No mean over samples, so it is made of sums over all blocks; also blocks that saw no sample have to take part.
        sums = torch.stack([weights.sum(), (weights**2).sum(), torch.ones_like(weights).sum()])
        total, squares, count = self.context.sum(sums).tolist()
        if count and self.context.block == 0:
            metrics.add("effective_samples", total**2 / squares, count)

    def step(self, what: str, trained: Mapping[str, Optimizer], samples: np.ndarray, units: Units | None = None) -> None:
        """Apply the gradients of ``what``; NonFiniteError, with nothing applied, if one of their norms isn't finite
        and may not be skipped."""
        norms = {name: optimizer.clip() for name, optimizer in trained.items()}
        if self._skips(norms.values()):
            return
        for norm in norms.values():
            self._check_finite(norm, f"gradient norm of {what}", samples, units)
        for name, optimizer in trained.items():
            prefix = "" if name == self.main else f"{name}_"
            rate = optimizer.learning_rate
            self.stepped |= not prefix and norms[name] > 0 and rate > 0
            self.context.metrics.add(f"{prefix}grad_norm", norms[name])
            self.context.metrics.add(f"{prefix}learning_rate", rate)
            optimizer.step()

    def _skips(self, norms: Iterable[float]) -> bool:
        """Whether the step is left out. Norms are of all ranks' gradients, so all of them decide alike."""
        if not self.plan.max_skips:
            return False
        finite = all(map(math.isfinite, norms))
        self.context.metrics.add("steps_skipped", not finite)
        self._skipped = 0 if finite else self._skipped + 1
        return 0 < self._skipped <= self.plan.max_skips

    def _check_finite(self, value: float, what: str, samples: np.ndarray, units: Units | None) -> None:
        """``samples``: the ids of all rows, of which ``units`` has some; None: it has all."""
        if not math.isfinite(value):
            shown = ", ".join(map(str, (samples if units is None else samples[units.rows.values])[:8]))
            skipped = f", after {self.plan.max_skips} skipped ones" if self._skipped > 1 else ""
            found = f"{what} is {value} in update {self.version}{skipped}, samples {shown}"
            raise NonFiniteError(f"{found}; the step was not applied")

    @cached_property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    @cached_property
    def _weights(self) -> dict[str, list[Tensor]]:
        return {name: [*network.parameters()] for name, network in self.networks.items()}
