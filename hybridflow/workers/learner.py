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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
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
from hybridflow.core.errors import UserError
from hybridflow.core.files import Written, check_file
from hybridflow.core.roles import Fn, MemoryPart, WorkerContext, control, remote
from hybridflow.models.decoder import Decoder
from hybridflow.parallel.mesh import ALONE, Line
from hybridflow.parallel.tensor import owned_pieces
from hybridflow.reshard.execute import HybridWeights, Transition
from hybridflow.reshard.memory import Arena
from hybridflow.workers.checkpoint import PieceReader, PieceWriter, check_seen, kept, restore
from hybridflow.workers.forward import forward, score_rows
from hybridflow.workers.fsdp import FsdpNetwork, FsdpOptimizer
from hybridflow.workers.loss_steps import LossSteps, UpdatePlan
from hybridflow.workers.microbatch import plan_microbatches
from hybridflow.workers.networks import Networks, all_tensors, as_array, tensors
from hybridflow.workers.offload import Shelf, Shelved
from hybridflow.workers.optimizer import Optimizer, OptimizerConfig, freeze
from hybridflow.workers.parts import Cut, Lines
from hybridflow.workers.publish import Published, buckets, checksum, probe_texts
from hybridflow.workers.units import Units, action_columns
from hybridflow.workers.zero import ShardedOptimizer, ShardMode

__all__ = ["Learner", "Trained", "UpdatePlan"]


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
    """Owns networks, and an optimizer of the main one and of each of the ``others``.

    ``shard``: "zero1" shares the optimizers out over the ranks that hold the same parameters, "fsdp" weights and gradients,
    too. UserError if networks can't be."""

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
        self.context, self.plan, self.seed = context, plan, seed
        self.lines, self._inputs = Lines.of(context), networks.inputs
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
            self.optimizer.clipped_apart = networks.clipped_apart
        rest = {name: self._optimizer(name, trained, shard) for name, trained in (others or {}).items()}
        self.optimizers = {self.main: self.optimizer, **rest}
        for name, network in self.networks.items():
            network.requires_grad_(False) if name not in self.optimizers else None
        mine = (self.networks, self.optimizers, self.main, self.lines, self.fsdp)
        self.loss_steps = LossSteps(context, *mine, seed, plan)
        self._writer = PieceWriter()
        weights = Shelf(lambda: all_tensors(*self.networks.values()) if self.fsdp is None else self.fsdp.tensors())
        memory = None if self.hybrid is None else self.hybrid.memory
        arena = memory if isinstance(memory, Arena) else None
        self.shelves: dict[MemoryPart, Shelf | Arena] = {
            "weights": arena or weights,
            "optimizer": Shelf(lambda: chain.from_iterable(one.tensors() for one in self.optimizers.values())),
        }

    @property
    def version(self) -> int:
        """How many updates the networks have had."""
        return self.loss_steps.version

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
        epochs = [self._deal(plan.cut(units, self.seed, self.version, epoch), units) for epoch in range(plan.epochs)]
        alone = self.context.mesh.dp == 1
        parts = [part for minibatches in epochs for _, part, _ in minibatches]
        own = np.arange(len(units)) if alone else np.unique(np.concatenate(parts))
        pulled = units.load(batch, own, self._device)
        mask, samples = batch.ragged("response_mask"), batch["sample_id"]
        for epoch, minibatches in enumerate(epochs):
            written = {name: np.zeros(len(mask.values), np.float32) for loss in losses for name in loss.writes}
            shuffled = pulled
            if plan.drawn is None and not (alone and len(minibatches) == 1):
                shuffled = pulled.take(np.searchsorted(own, np.concatenate([part for _, part, _ in minibatches])))
            shares = shuffled.split([len(part) for _, part, _ in minibatches]) if len(minibatches) > 1 else [shuffled]
            for number, ((index, part, forwards), mine) in enumerate(zip(minibatches, shares, strict=True)):
                whole = mine.units if part is index else units.take(index)
                drift = self.loss_steps.minibatch(whole, mine, forwards, losses, written, samples)
                if epoch == number == 0 and (drift or self.context.mesh.dp > 1):
                    self.loss_steps.observe_drift(drift)
            self.loss_steps.add_up()
        if self.normalised:
            seen = shuffled.seen(self.model)
            self.model.observe(
                action_columns(seen, self._device) if isinstance(seen, Batch) else seen, self.loss_steps.total
            )
        self.loss_steps.version += 1
        return Batch({name: mask.like(self.loss_steps.summed(values)) for name, values in written.items()}, len(mask))

    @remote(ONE_TO_ALL, reads=("sample_id", "gradients", "policy_version"), kind="train")
    def apply(self, batch: Batch, /) -> Batch:
        """An optimizer step on the ``gradients`` [P] of each row, for all parameters of the main network. Others have made
        them, with its weights as they were ``staleness`` steps ago."""
        samples, versions = batch["sample_id"], batch.ragged("policy_version")
        for row, gradients in enumerate(batch["gradients"]):
            self.optimizer.take_gradients(self.model, torch.tensor(gradients, device=self._device))
            self.loss_steps.step("a rollout's gradients", {self.main: self.optimizer}, samples[row : row + 1])
            self.context.metrics.add("staleness", self.version - int(versions[row][0]))
            self.loss_steps.version += 1
        return Batch({}, len(batch))

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

    @cached_property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

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
        stepped, probe = self.loss_steps.stepped, None
        if bucket == self._num_buckets - 1:
            self.loss_steps.stepped, probe = False, self._probe()
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
        own = {name.partition("/")[2]: tensor for name, tensor in named.items()}
        slices = own if self.fsdp is None else self.fsdp.full(own)
        full = slices if self.cut is None else self.cut.full(slices)
        return {f"{self.main}/{name}": tensor for name, tensor in full.items()}

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
        self._writer.forget()
        for file in files[self.context.rank :: self.context.mesh.size]:
            check_file(folder.parent, file)
        self.loss_steps.version, self.loss_steps.stepped = state["version"], False
        with PieceReader(folder) as reader:
            restore(reader, self.networks, self.optimizers, state["optimizer_steps"], self.fsdp)
