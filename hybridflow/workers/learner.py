"""The learner: trains networks with any declared loss.

``update`` sees the whole batch and deals its own minibatches:

    units (rows, steps for nets on single observations, or groups for losses that compare the rows of a group),
    permuted by (seed, update, epoch)
      └─ minibatch: one optimizer step, ONE normaliser counted before it is split
           └─ data-parallel blocks: each pulls the values of its own units alone
                └─ microbatches by token budget: forward, loss terms / normaliser, backward; gradients add up
           gradients add up over the blocks, in one flat sum; every rank takes the same step, or its share of it (zero.py)
           ... and so for every loss, if there are several; nothing but what a loss trains has gradients meanwhile

so neither the loss nor the gradient depends on how a minibatch is split. Every rank deals alike without a word to the
others. They meet in every minibatch's sum of gradients, to which a block without units adds zeros, after the first one in
the sums behind ``effective_samples``, and at the end in those of the columns that a loss writes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, VIEW, deal
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError, NonFiniteError, UserError
from hybridflow.core.files import Written, check_file
from hybridflow.core.roles import Fn, Loss, MemoryPart, WorkerContext, control, remote
from hybridflow.core.seeding import generator, torch_generator
from hybridflow.models.decoder import Decoder
from hybridflow.ops.kl import LOG_RATIO_LIMIT
from hybridflow.parallel.mesh import ALONE, Line
from hybridflow.parallel.tensor import owned_pieces
from hybridflow.reshard.execute import HybridWeights, Transition
from hybridflow.reshard.memory import Arena
from hybridflow.workers.checkpoint import PieceReader, PieceWriter, check_seen, kept, restore
from hybridflow.workers.forward import forward, score_rows
from hybridflow.workers.fsdp import FsdpNetwork, FsdpOptimizer
from hybridflow.workers.microbatch import plan_microbatches
from hybridflow.workers.networks import Networks, all_tensors, as_array, tensors
from hybridflow.workers.offload import Shelf, Shelved
from hybridflow.workers.optimizer import Optimizer, OptimizerConfig, freeze
from hybridflow.workers.parts import Cut, Lines, run_microbatches
from hybridflow.workers.publish import Published, buckets, checksum, probe_texts
from hybridflow.workers.units import Columns, Pulled, PulledSteps, Units, action_columns
from hybridflow.workers.zero import ShardedOptimizer, ShardMode

__all__ = ["Learner", "Trained", "UpdatePlan"]


@dataclass(frozen=True)
class UpdatePlan:
    """How ``update`` splits a batch: ``epochs`` passes of ``minibatches`` optimizer steps, ``token_budget`` a forward.

    ``drawn``: minibatches are so many rows each, one after another as a replay buffer drew them; None: they are dealt.
    """

    minibatches: int = 1
    epochs: int = 1
    token_budget: int = 4096
    drawn: int | None = None


class Trained(NamedTuple):
    """How a network besides the main one is trained."""

    optimizer: OptimizerConfig
    total_steps: int


def _inputs(args: Mapping[str, Any]) -> tuple[str, ...]:
    return (*args["networks"].inputs, "response_mask")


def _value_inputs(args: Mapping[str, Any]) -> tuple[str, ...]:
    final = (f"final_{name}" for name in args["networks"].inputs if name in ("observations", "states"))
    return (*_inputs(args), *final)


class Learner(Shelved):
    """Owns networks, and an optimizer of the main one and of each of the ``others``. ``version`` counts updates. ``shard``:
    "zero1" shares the optimizers out over the ranks that hold the same parameters, "fsdp" weights and gradients, too.
    UserError if networks can't be."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        networks: Networks,
        optimizer: OptimizerConfig,
        plan: UpdatePlan,
        total_steps: int,
        seed: int,
        shard: ShardMode = "none",
        others: Mapping[str, Trained] | None = None,
    ) -> None:
        self.context, self.plan, self.seed, self.version = context, plan, seed, 0
        self.lines, self._inputs, self._stepped = Lines.of(context), networks.inputs, False
        self.networks, self.normalised = networks.at(self.lines), networks.normalised
        self.main, self.model = networks.main, cast(Any, self.networks[networks.main])
        self.cut = None if self.lines.whole else Cut(self.model, self.lines)
        self.fsdp: FsdpNetwork | None = None
        # Before an optimizer, which keeps views of weights.
        self.hybrid = None if shard == "fsdp" else self._hybrid_weights()
        if shard == "fsdp" and self.lines.shard.size > 1:
            if networks.part is None:
                raise UserError(f'mesh: shard = "fsdp" shards decoders, not {networks.model}; use "zero1" or "none"')
            freeze(self.model, optimizer.freeze, whole=self.cut is None)
            self.fsdp = FsdpNetwork(self.model, self.lines)
            self.optimizer: Optimizer = FsdpOptimizer(self.fsdp, optimizer, total_steps, self.cut, self.lines)
        else:
            self.optimizer = self._optimizer(self.main, Trained(optimizer, total_steps), shard)
        rest = {name: self._optimizer(name, trained, shard) for name, trained in (others or {}).items()}
        self.optimizers = {self.main: self.optimizer, **rest}
        for name, network in self.networks.items():
            network.requires_grad_(False) if name not in self.optimizers else None
        self._observed: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._writer = PieceWriter()
        weights = Shelf(lambda: all_tensors(*self.networks.values()) if self.fsdp is None else self.fsdp.tensors())
        memory = None if self.hybrid is None else self.hybrid.memory
        arena = memory if isinstance(memory, Arena) else None
        self.shelves: dict[MemoryPart, Shelf | Arena] = {
            "weights": arena or weights,
            "optimizer": Shelf(lambda: chain.from_iterable(one.tensors() for one in self.optimizers.values())),
        }

    def _optimizer(self, name: str, trained: Trained, shard: ShardMode) -> Optimizer:
        if shard == "zero1" and self.lines.shard.size > 1:
            return ShardedOptimizer(self.networks[name], *trained, self.cut, self.lines)
        return Optimizer(self.networks[name], *trained, self.cut)

    def _hybrid_weights(self) -> HybridWeights | None:
        """Of a decoder that trains cut over the processes in which its sampler draws responses."""
        lines = self.context.lines
        if self.cut is None or lines is None or lines.mesh.generation_tp is None:
            return None
        return HybridWeights(self.model.decoder, lines)

    def offload(self, keep: Collection[MemoryPart] = ()) -> int:
        """See ``Offloadable``. Gradients, which every minibatch begins anew, are dropped."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        return super().offload(keep)

    @property
    def sampled(self) -> Decoder:
        """What a sampler in the same processes draws responses with, while it is ``reading``."""
        decoder: Decoder = self.model.decoder if self.hybrid is None else self.hybrid.generation_decoder
        return decoder

    @property
    def sampled_pp(self) -> Line:
        """The pipeline that ``sampled`` is a stage of."""
        return self.lines.pp if self.hybrid is None else self.hybrid.generation_pp

    @contextmanager
    def reading(self) -> Iterator[Transition | None]:
        """As long as it lasts, what is ``sampled`` has its weights; what it took to bring them there, if it took anything.
        All ranks enter it together."""
        if self.hybrid is not None:
            self.hybrid.generation()
            try:
                yield self.hybrid.transition
            finally:
                self.hybrid.training()
            return
        with self._gathered():
            yield None

    def _gathered(self) -> AbstractContextManager[None]:
        """As long as it lasts, parameters are whole, but for their cuts."""
        return nullcontext() if self.fsdp is None else self.fsdp.reading()

    @remote(VIEW, reads=lambda args: ("sample_id", *_inputs(args)), kind="train")
    def update(self, batch: Batch, loss: Fn, /, *others: Fn) -> Batch:
        """One update: ``epochs x minibatches`` optimizer steps on each of the losses, in their order. Rows without an
        action step have no part."""
        losses = (loss, *others)
        dealt_by = batch.select(name for name in ("sample_id", "response_mask", "group_id") if name in batch)
        if (loaded := dealt_by.load()) is not dealt_by:
            batch = batch.with_columns(**loaded.columns)
        units = Units.of(batch, "group" if any(loss.per == "group" for loss in losses) else self.model.unit)
        plan = replace(self.plan, minibatches=1, epochs=1) if any(loss.on == "step" for loss in losses) else self.plan
        epochs = [self._deal(self._cut(units, epoch, plan), units) for epoch in range(plan.epochs)]
        alone = self.context.mesh.dp == 1
        parts = [part for minibatches in epochs for _, part, _ in minibatches]
        own = np.arange(len(units)) if alone else np.unique(np.concatenate(parts))
        pulled = units.load(batch, own, self._device)
        mask, samples = batch.ragged("response_mask"), batch["sample_id"]
        for epoch, minibatches in enumerate(epochs):
            written = {name: np.zeros(len(mask.values), np.float32) for loss in losses for name in loss.writes}
            shuffled, start = pulled, 0
            if plan.drawn is None and not (alone and len(minibatches) == 1):
                shuffled = pulled.take(np.searchsorted(own, np.concatenate([part for _, part, _ in minibatches])))
            for number, (index, part, forwards) in enumerate(minibatches):
                mine = shuffled if len(part) == len(shuffled.units) else shuffled.part(start, start + len(part))
                start += len(part)
                whole = mine.units if part is index else units.take(index)
                drift = self._minibatch(whole, mine, forwards, losses, written, samples)
                if epoch == number == 0 and (drift or self.context.mesh.dp > 1):
                    self._observe_drift(drift)
            self._add_up()
        if self.normalised:
            seen = shuffled.seen(self.model)
            self.model.observe(action_columns(seen, self._device) if isinstance(seen, Batch) else seen, self._total)
        self.version += 1
        return Batch({name: mask.like(self._summed(values)) for name, values in written.items()}, len(mask))

    @remote(ONE_TO_ALL, reads=("sample_id", "gradients", "policy_version"), kind="train")
    def apply(self, batch: Batch, /) -> Batch:
        """An optimizer step on the ``gradients`` [P] of each row, for all parameters of the main network. Others have made
        them, with its weights as they were ``staleness`` steps ago."""
        samples, versions = batch["sample_id"], batch.ragged("policy_version")
        for row, gradients in enumerate(batch["gradients"]):
            self.optimizer.take_gradients(self.model, torch.tensor(gradients, device=self._device))
            self._step("a rollout's gradients", {self.main: self.optimizer}, samples[row : row + 1])
            self.context.metrics.add("staleness", self.version - int(versions[row][0]))
            self.version += 1
        return Batch({}, len(batch))

    def _cut(self, units: Units, epoch: int, plan: UpdatePlan) -> list[np.ndarray]:
        """The units of every minibatch."""
        order = np.arange(len(units))
        if plan.drawn is not None:
            rows = units.rows.values
            return np.split(order, np.searchsorted(rows, range(plan.drawn, int(rows.max(initial=0)) + 1, plan.drawn)))
        if plan.minibatches > 1:
            order = generator(self.seed, "minibatch", self.version, epoch).permutation(order)
        return np.array_split(order, plan.minibatches)

    def _deal(self, minibatches: Sequence[np.ndarray], units: Units) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """(all units, those of this rank's block, how many forwards it takes part in at least) of every minibatch."""
        dp, block = self.context.mesh.dp, self.context.block
        if dp == 1:
            return [(index, index, 0) for index in minibatches]
        dealt = [[index[part] for part in deal(units.weights[index], dp)] for index in minibatches]
        forwards = [0 if self.fsdp is None else self._most_forwards(units, parts) for parts in dealt]
        return [(index, parts[block], most) for index, parts, most in zip(minibatches, dealt, forwards, strict=True)]

    def _most_forwards(self, units: Units, parts: Sequence[np.ndarray]) -> int:
        """Microbatches of the block that has most."""
        return max(len([*plan_microbatches(units.weights[part], self.plan.token_budget)]) for part in parts)

    def _minibatch(
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
        kept = [micro.seen(self.model) for micro in micros] if len(losses) > 1 else None
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
                batches = kept or (micro.seen(self.model) for micro in micros)
                drift += self._gradients(loss, whole, micros, batches, max(0, forwards - len(micros)), written, samples)
            self._step(loss.name, trained, samples[whole.rows.values])
        return drift

    def _own_step(
        self, loss: Fn, part: Pulled | PulledSteps, written: Mapping[str, np.ndarray], samples: np.ndarray
    ) -> list[Tensor]:
        """A step that the function takes by itself, on everything at once."""
        result: Loss = loss(self.networks, part.seen(self.model), self._total)
        self._check_finite(float(result.terms.sum()), f"loss {loss.name}", samples[part.units.rows.values])
        self._observe(loss, result)
        self._stepped = True
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
            self._check_finite(float(total.detach()), f"loss {loss.name}", samples[units.rows.values])
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

    def _total(self, values: Tensor) -> Tensor:
        """A sum over the ranks that hold the same parameters."""
        return values.detach() if self._over_copies is None else self._over_copies(values.detach().clone())

    def _summed(self, values: np.ndarray) -> np.ndarray:
        """``values``, summed over the data-parallel blocks."""
        return self.context.sum(torch.from_numpy(values).to(self._device)).cpu().numpy()

    @cached_property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def _observe(self, loss: Fn, result: Loss) -> None:
        prefix = "" if not loss.trains or self.main in loss.trains else f"{loss.trains[0]}_"
        metrics = {f"{prefix}loss": result.terms.detach(), **result.metrics}
        for name, values in metrics.items():
            self._observed[name].append(values)

    def _add_up(self) -> None:
        """Report what was observed since the last time: values are added up together, which costs less, and waits for a GPU
        once."""
        for name, parts in self._observed.items():
            values = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
            self.context.metrics.add(name, float(values.sum(dtype=torch.float64)), values.numel())
        self._observed.clear()

    def _observe_drift(self, parts: list[Tensor]) -> None:
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

    def _step(self, what: str, trained: Mapping[str, Optimizer], samples: np.ndarray) -> None:
        norms = {name: optimizer.clip() for name, optimizer in trained.items()}
        for norm in norms.values():
            self._check_finite(norm, f"gradient norm of {what}", samples)
        for name, optimizer in trained.items():
            prefix = "" if name == self.main else f"{name}_"
            rate = optimizer.learning_rate
            self._stepped |= not prefix and norms[name] > 0 and rate > 0
            self.context.metrics.add(f"{prefix}grad_norm", norms[name])
            self.context.metrics.add(f"{prefix}learning_rate", rate)
            optimizer.step()

    def _check_finite(self, value: float, what: str, samples: np.ndarray) -> None:
        if not math.isfinite(value):
            shown = ", ".join(map(str, samples[:8]))
            raise NonFiniteError(f"{what} is {value} in update {self.version}, samples {shown}; the step was not applied")

    @remote(THREE_D, reads=_value_inputs, writes=("values", "bootstrap_values"))
    def compute_values(self, batch: Batch, /) -> Batch:
        """Value before every action step, and after the last one."""
        values = forward(self.model, batch, ("values",), self.plan.token_budget, self.lines.pp, self._together)["values"]
        with torch.no_grad():
            bootstrap = self.model.bootstrap(batch).float().cpu().numpy()
        return Batch({"values": values, "bootstrap_values": bootstrap})

    @remote(THREE_D, reads=_inputs, writes=("learner_log_probs",))
    def compute_log_probs(self, batch: Batch, /) -> Batch:
        """Log-probability of every action step under the current policy, whoever chose it."""
        budget, pp = self.plan.token_budget, self.lines.pp
        log_probs = forward(self.model, batch, ("log_probs",), budget, pp, self._together)["log_probs"]
        return Batch({"learner_log_probs": log_probs})

    @remote(THREE_D, reads=_inputs, writes=("scores",))
    def compute_scores(self, batch: Batch, /) -> Batch:
        """What the reward model that is trained gives to every row."""
        budget, pp = self.plan.token_budget, self.lines.pp
        return Batch({"scores": score_rows(self.model, batch, budget, pp, self._together)})

    @property
    def _together(self) -> Line:
        """The ranks whose forwards wait for each other."""
        return ALONE if self.fsdp is None else self.lines.dp_cp

    @cached_property
    def _weights(self) -> dict[str, list[Tensor]]:
        return {name: [*network.parameters()] for name, network in self.networks.items()}

    @control
    def num_parameters(self) -> tuple[int, int]:
        """(all, trained) of the main network, whole."""
        sizes = torch.zeros(2, dtype=torch.int64, device=self._device)
        for name, parameter in self.model.named_parameters():
            sizes_only = torch.empty(parameter.shape, device="meta")
            pieces = [sizes_only] if self.cut is None else owned_pieces(sizes_only, self.cut.shards[name])
            size = sum(piece.numel() for piece in pieces)
            sizes += sizes.new_tensor([size, size * parameter.requires_grad])
        for line in (self.lines.tp, self.lines.pp):
            line.all_reduce(sizes)
        total, trained = sizes.tolist()
        return total, trained

    @control
    def policy_version(self) -> int:
        """How many updates the networks have had."""
        return self.version

    @control
    def export(self, save: Callable[[Any], None]) -> int:
        """Call ``save`` with the main network on rank 0; of a cut one, with what each rank of the first copy holds, and
        they write it together. Returns its version. Whoever calls this waits until it is done: ``save`` may read what the
        caller then removes."""
        with self._gathered():
            if self.context.rank == 0 if self.lines.whole else self.lines.dp_cp.index == 0:
                save(self.model)
        return self.version

    @control
    def num_buckets(self) -> int:
        """How many calls of ``weights`` make a whole model."""
        return self._num_buckets

    @cached_property
    def _num_buckets(self) -> int:
        """As many as the stage with most of it needs."""
        return self.lines.pp.most(len(self._buckets))

    @cached_property
    def _buckets(self) -> list[list[str]]:
        shards = {} if self.cut is None else {f"{self.main}/{name}": shard for name, shard in self.cut.shards.items()}
        named = tensors(self.networks, self.main)
        shapes = {name: shards[name].shape if name in shards else x.shape for name, x in named.items()}
        return buckets({name: prod(shapes[name]) * x.element_size() for name, x in named.items()})

    @control
    def weights(self, bucket: int) -> Published:
        """A bucket of what samplers read, for ``Replica.load``: the main network's parameters and buffers by
        "<network>/<name>", tied ones once; of a pipeline, those of this stage. On a CPU the arrays of a whole model are the
        weights themselves, which the next update changes. All ranks call it; those of the first copy have the weights."""
        named = tensors(self.networks, self.main)
        own = {name: named[name] for name in (self._buckets[bucket] if bucket < len(self._buckets) else ())}
        first, arrays = self.lines.dp_cp.index == 0, dict[str, np.ndarray]()
        if first or self.fsdp is not None:
            full = self._full(own)
            arrays = {name: as_array(tensor) for name, tensor in full.items()} if first else {}
        stepped, probe = self._stepped, None
        if bucket == self._num_buckets - 1:
            self._stepped, probe = False, self._probe()
        return Published(arrays, checksum(arrays.values()), self.version, stepped, probe)

    def _probe(self) -> np.ndarray | None:
        """Log-probabilities of fixed texts, on the last stage; None for other models than policies on tokens."""
        if self._inputs != ("tokens",) or self.main != "policy":
            return None
        texts = probe_texts(self.model.decoder.spec.vocab_size)
        budget = int(texts.lengths.sum())
        found = forward(self.model, texts, ("log_probs",), budget, self.lines.pp, self._together)["log_probs"]
        return found.values if self.model.decoder.part.last else None

    def _full(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by "<network>/<name>", full instead of shards and slices."""
        if self.cut is None and self.fsdp is None:
            return dict(named)
        full = self._joined({name.partition("/")[2]: tensor for name, tensor in named.items()})
        return {f"{self.main}/{name}": tensor for name, tensor in full.items()}

    def _joined(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors of this rank's shards of slices of the main network."""
        slices = own if self.fsdp is None else self.fsdp.full(own)
        return slices if self.cut is None else self.cut.full(slices)

    @control
    def save(self, folder: Path) -> dict[str, Any]:
        """Begin to write this rank's part of weights and optimizer to ``folder``; how far they are. All is copied before
        this returns, so updates can go on. See ``saved``."""
        pieces = kept(self.networks, self.optimizers, self.lines, self.fsdp)
        self._writer.start(folder / f"{self.context.rank}.safetensors", pieces)
        return {"version": self.version, "optimizer_steps": {name: one.steps for name, one in self.optimizers.items()}}

    @control(ONE_TO_ALL)
    def saved(self, wait: bool) -> list[list[Written] | None]:
        """Of every rank the files that it has written, None if it isn't done. An error of writing is raised here."""
        return [self._writer.done(wait)]

    @control
    def sees(self, file: Path) -> None:
        """CheckpointError if a file of the driver isn't there for this rank."""
        check_seen(file, self.context.rank)

    @control
    def load(self, folder: Path, state: Mapping[str, Any], files: Sequence[Written]) -> None:
        """Go on from ``save``, on whatever mesh. ``files``: those in ``folder``, whose content the ranks check together.
        CheckpointError: one is missing, damaged, or of another model."""
        for file in files[self.context.rank :: self.context.mesh.size]:
            check_file(folder.parent, file)
        self.version = state["version"]
        with PieceReader(folder) as reader:
            restore(reader, self.networks, self.optimizers, state["optimizer_steps"], self.fsdp)
