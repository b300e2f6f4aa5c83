"""How a model runs on a rank of a mesh: whole, or as the part that the rank holds: slices of weights, layers of a pipeline.

    whole model    microbatch ──outputs──> use ──> backward
    pipeline       microbatch ──stage 0──> activations ──> ... ──last stage──> outputs ──> use;  gradients go the way back

What is the same for all of them stands in the learner and the scorers: which microbatches there are, and ``use``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.roles import WorkerContext
from hybridflow.models.decoder import Decoder, part_shards
from hybridflow.models.policy import network_shards
from hybridflow.parallel.context import num_own
from hybridflow.parallel.mesh import ALONE, Line
from hybridflow.parallel.pipeline import Wire, run_pipeline
from hybridflow.parallel.pipeline_plan import forward_only, interleaved
from hybridflow.parallel.shard import Shard

__all__ = ["WHOLE", "Cut", "Lines", "run_microbatches"]

Use = Callable[[int, Any, Any], Any]
"""(number of the microbatch, what the model saw of it, the outputs) -> what is wanted of it; in training, its loss"""


@dataclass(frozen=True)
class Lines:
    """The lines of a rank's mesh, each of one where there is no mesh. ``chunks``: stages on each rank of ``pp``."""

    dp: Line = ALONE
    tp: Line = ALONE
    pp: Line = ALONE
    cp: Line = ALONE
    dp_cp: Line = ALONE
    shard: Line = ALONE
    replicate: Line = ALONE
    chunks: int = 1

    @staticmethod
    def of(context: WorkerContext) -> Lines:
        lines = context.lines
        if lines is None:
            return WHOLE
        axes = (lines.dp, lines.tp, lines.pp, lines.cp, lines.dp_cp, lines.shard, lines.replicate)
        return Lines(*axes, chunks=context.mesh.chunks)

    @property
    def whole(self) -> bool:
        """Whether every rank holds whole models."""
        return self.tp.size == self.pp.size == 1


WHOLE = Lines()


def run_microbatches(
    model: Any,
    batches: Iterable[Any],
    use: Use,
    pp: Line,
    *,
    train: bool,
    read: Callable[[Any], Any] | None = None,
    blanks: int = 0,
) -> dict[int, Any]:
    """``use`` the outputs of every microbatch: its results by number, on the last pipeline stage.

    With ``train`` the results are losses, and gradients add up in the parameters. ``read`` replaces ``model.outputs``,
    where models are whole. Every rank of a pipeline calls this with the same batches. ``blanks``: run so many microbatches
    more, which are without influence, because other ranks wait for this one's forwards.
    """
    if blanks:
        batches, use = chain(batches, repeat(BLANK, blanks)), partial(_use, use)
    if pp.size > 1:
        return _run_pipeline(model, list(batches), use, pp, train)
    results = {}
    with torch.set_grad_enabled(train):
        for number, batch in enumerate(batches):
            result = use(number, batch, (read or model.outputs)(batch))
            if train:
                result.backward()
            else:
                results[number] = result
    return results


BLANK = Batch({"tokens": Ragged.from_rows([[0, 0]]), "response_mask": Ragged.from_rows([[False, True]])})
"""One row that any model on tokens can read."""


def _use(use: Use, number: int, batch: Batch, outputs: Mapping[str, Tensor]) -> Any:
    return use(number, batch, outputs) if batch is not BLANK else sum(x.sum() * 0.0 for x in outputs.values())


def _run_pipeline(model: Any, batches: list[Batch], use: Use, pp: Line, train: bool) -> dict[int, Any]:
    decoder: Decoder = model.decoder
    chunks = decoder.part.num_chunks

    def stage(chunk: int, number: int, received: Tensor | None) -> Any:
        batch = batches[number]
        outputs = model.outputs(batch, received, chunk)
        return use(number, batch, outputs) if decoder.part.ends(chunk) else outputs

    def shape_of(number: int) -> tuple[int, ...]:
        tokens = num_own(batches[number].lengths, decoder.part.cp)
        return decoder.num_states(tokens), decoder.spec.hidden_size

    plan = (interleaved if train else forward_only)(pp.size, chunks, len(batches))
    wire = Wire(pp.group, pp.index, pp.size, shape_of, decoder.dtype, decoder.anchor.device, pp.traffic)
    return run_pipeline(plan, [partial(stage, chunk) for chunk in range(chunks)], wire)


class Cut:
    """What this rank holds of a network's parameters: makes full tensors of slices."""

    def __init__(self, network: nn.Module, lines: Lines) -> None:
        self.lines, self.shards = lines, network_shards(network)
        self.decoder: Decoder = network.decoder  # type: ignore[assignment]
        self._tables = [self._at(index) for index in range(lines.tp.size)]

    def _at(self, index: int) -> dict[str, Shard]:
        """The shards of another rank of the tensor-parallel line."""
        part = replace(self.decoder.part, tp=Line(self.lines.tp.size, index))
        decoder = {f"decoder.{name}": shard for name, shard in part_shards(self.decoder.spec, part).items()}
        others = {name: replace(s, owned=(index == 0,)) for name, s in self.shards.items() if name not in decoder}
        return {**decoder, **others}

    @torch.no_grad()
    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors of slices by the parameter's name, without those that another pipeline stage owns. Every rank of the
        tensor-parallel line calls this with the same names."""
        owned = {name: any(any(table[name].owned) for table in self._tables) for name in tensors}
        return {
            name: self._joined(tensor, [t[name] for t in self._tables]) for name, tensor in tensors.items() if owned[name]
        }

    def _joined(self, x: Tensor, shards: list[Shard]) -> Tensor:
        own, dim = shards[self.lines.tp.index], shards[0].dim
        if own.whole:
            return x
        pieces = [x.narrow(dim, place.start, len(place)) for _, place, mine in own.places if mine]
        mine = torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)
        cuts = [[cut for cut, _, mine in shard.places if mine] for shard in shards]
        gathered = self.lines.tp.all_gather(mine.transpose(0, dim).contiguous(), [sum(map(len, c)) for c in cuts])
        out, start = x.new_empty(shards[0].shape), 0
        for cut in (cut for rank in cuts for cut in rank):
            out.narrow(dim, cut.start, len(cut)).copy_(gathered[start : start + len(cut)].transpose(0, dim))
            start += len(cut)
        return out
