"""FSDP (Zhao et al. 2023; torch's ``fully_shard``): data-parallel ranks share weights, gradients and optimizer out.

Of every parameter that a rank of a mesh holds (its slice, the layers of its stage), each rank of the line keeps a run of
rows. A layer's weights are gathered when it runs, forward and backward, and dropped behind it:

    shards          fp32 rows: the masters that AdamW moves
    forward         all-gather of a layer, in the weights' own dtype ──> run ──> drop
    backward        all-gather again ──> gradients of the whole layer ──> reduce-scatter, in fp32 ──> added to the shard's
    norm, AdamW     own rows

Gradients are reduced in every microbatch. Adding them up first would save a third of what is sent, but takes whole fp32
gradients on every rank: who has that memory is better served by ZeRO-1, which sends nothing else in between. Where
a line is but some of the ranks with the same parameters (hybrid sharding), shards of gradients are summed over the other
lines once a minibatch; torch would do so in every microbatch.

A forward is a meeting of all ranks of the line, so all of them run the same number: see ``run_microbatches``. Between
steps a network has its shards alone; ``reading`` gathers all of it, for a sampler in the same processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.models.decoder import Decoder, sum_tied
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import run_of, whole
from hybridflow.parallel.tensor import gradient_norm, sum_shared
from hybridflow.workers.optimizer import Optimizer, OptimizerConfig
from hybridflow.workers.parts import Cut, Lines

if TYPE_CHECKING:  # elsewhere where it is used: every process of every run would take half a second longer to start
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FsdpNetwork", "FsdpOptimizer", "fsdp_bytes", "gathered_bytes", "runs"]


def runs(shape: Sequence[int], ranks: int) -> list[range]:
    """Which numbers of a parameter each rank holds, row by row: the same number of rows, but for the last ranks."""
    rows, width = -(-shape[0] // ranks), prod(shape[1:])
    return [range(min(i * rows, shape[0]) * width, min((i + 1) * rows, shape[0]) * width) for i in range(ranks)]


def fsdp_bytes(module: nn.Module, ranks: int) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) that the first of the ranks holds of ``module``; no other holds more. Trained
    weights are fp32 whatever they are gathered in, frozen ones have their own dtype."""
    parameters = list(module.parameters())
    sizes = [len(runs(parameter.shape, ranks)[0]) for parameter in parameters]
    trained = sum(size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad)
    pairs = zip(sizes, parameters, strict=True)
    frozen = sum(size * x.element_size() for size, x in pairs if not x.requires_grad)
    return 4 * trained + frozen, 4 * trained, 8 * trained


def gathered_bytes(network: nn.Module, ranks: int) -> tuple[int, int]:
    """What is whole at a time: (beside the activations, at the end of a backward pass).

    Beside them the weights of the root and of two layers, one of which has come before it is needed, and in fp32 what a
    layer's gradients are reduced from and what comes of the other ranks; at the end the same of the root.
    """
    decoder = cast(Decoder, network.decoder)
    size, layers = decoder.anchor.element_size(), [sum(x.numel() for x in layer.parameters()) for layer in decoder.layers]
    root = sum(parameter.numel() for parameter in network.parameters()) - sum(layers)
    layer = max(layers)
    return size * (root + 2 * layer) + 8 * layer, 8 * root + 8 * root // ranks


class FsdpNetwork:
    """``network``, a policy, critic or reward model on a decoder, from now on sharded over ``lines.shard``.

    Its forward is ``network.outputs``. What it trains has to be known before, and stays so.
    """

    def __init__(self, network: nn.Module, lines: Lines) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.network, self.line = network, lines.shard
        decoder = cast(Decoder, network.decoder)
        self.dtype = decoder.gathered = decoder.anchor.dtype
        device = decoder.anchor.device
        assert lines.shard.group is not None, "a line of one has nothing to share out"
        mesh = DeviceMesh.from_group(lines.shard.group, device.type)
        gathered = None if self.dtype == torch.float32 else self.dtype
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
        self.modules: list[FSDPModule] = []
        for module in (*decoder.layers, network):  # one by one, so that there is never more than one layer of fp32 copies
            _to_masters(module)
            self.modules.append(cast("FSDPModule", fully_shard(module, mesh=mesh, mp_policy=policy)))
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if device.type == "cpu":
                module.set_custom_all_gather(_AllGather(self.line))  # type: ignore[arg-type]  # its class is private
                module.set_custom_reduce_scatter(_ReduceScatter(self.line))  # type: ignore[arg-type]
        self._run_sharded()

    def _run_sharded(self) -> None:
        """Make ``outputs`` a forward. Without gradients nothing comes after it, so the root is then dropped at once."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(self.network, "outputs")
        network: Any = self.network
        run = network.outputs

        def outputs(*args: Any) -> Any:
            found = run(*args)
            if not torch.is_grad_enabled():
                self.drop()
            return found

        network.outputs = outputs

    def drop(self) -> None:
        """Drop what forwards leave for a backward pass, in case that none has come."""
        self.modules[-1].reshard()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whole parameters, in their own dtype, as long as it lasts. All ranks of the line enter it together."""
        for module in self.modules:
            module.unshard()
        try:
            yield
        finally:
            for module in self.modules:
                module.reshard()

    def tensors(self) -> Iterator[Tensor]:
        """What this rank holds between steps."""
        for parameter in self.network.parameters():
            yield local(parameter)

    @torch.no_grad()
    def full(self, named: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The shards of parameters, or what belongs to them, joined; in the weights' own dtype by default. All ranks call
        this with the same names."""
        return {name: self._joined(name, local(x).to(dtype or self.dtype)) for name, x in named.items()}

    def _joined(self, name: str, piece: Tensor) -> Tensor:
        shape = self.network.get_parameter(name).shape
        return self.line.all_gather(piece.reshape(-1), [len(run) for run in runs(shape, self.line.size)]).view(shape)

    def run_of(self, name: str) -> range:
        """Which numbers of a parameter this rank holds."""
        return runs(self.network.get_parameter(name).shape, self.line.size)[self.line.index]

    def own(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard of what belongs to a parameter."""
        run = self.run_of(name)
        return full.reshape(-1)[run.start : run.stop].view(-1, *full.shape[1:])

    def load(self, name: str, full: Tensor) -> None:
        """Replace a parameter."""
        local(self.network.get_parameter(name)).copy_(self.own(name, full))


def local(x: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, in place."""
    from torch.distributed.tensor import DTensor

    return cast(DTensor, x.detach()).to_local() if isinstance(x, DTensor) else x


def _to_masters(module: nn.Module) -> None:
    """fp32 weights, but for those that are sharded already or frozen."""
    from torch.distributed.tensor import DTensor

    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


class _Buffers:
    def __init__(self, line: Line) -> None:
        self.line = line

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    """Through our line: gloo's own gathers into a second copy of everything."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self.line.all_gather(input_tensor, [len(input_tensor)] * self.line.size, out=output_tensor)


class _ReduceScatter(_Buffers):
    """Through our line: gloo's own is an all-reduce of everything."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        assert op == dist.ReduceOp.SUM
        output_tensor.copy_(self.line.reduce_scatter(input_tensor, [len(output_tensor)] * self.line.size))


class FsdpOptimizer(Optimizer):
    """An ``Optimizer`` of a sharded network. All ranks of its line, and of ``lines.replicate``, call its methods together.

    ``masters`` are the shards, in place; a rank's may be empty.
    """

    sharded = True

    def __init__(
        self, network: FsdpNetwork, config: OptimizerConfig, total_steps: int, cut: Cut | None, lines: Lines
    ) -> None:
        self.network, self.lines = network, lines
        super().__init__(network.network, config, total_steps, cut)
        shards = {n: whole(p.shape) for n, p in self.parameters.items()} if cut is None else cut.shards
        self._pieces = {name: run_of(shards[name], network.run_of(name)) for name in self.parameters}

    def _make_masters(self) -> dict[str, Tensor]:
        return {name: local(parameter) for name, parameter in self.parameters.items()}

    def zero_grad(self) -> None:
        super().zero_grad()
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce_gradients(self, over_ranks: Any) -> None:
        """Give the masters the gradients of the whole minibatch, which backward passes have summed over the line."""
        for name, parameter in self.parameters.items():
            self.masters[name].grad = None if parameter.grad is None else local(parameter.grad)
        replicate = self.lines.replicate
        super().reduce_gradients(replicate.all_reduce if replicate.size > 1 else None)
        self.network.drop()

    def _gradients(self) -> dict[str, Tensor]:
        """As rows of numbers; of masters that this rank has none of, too."""
        return {name: gradient.view(-1) for name, gradient in super()._gradients().items()}

    def sum_parts(self) -> None:
        if self.cut is not None:
            gradients, lines = self._gradients(), self.lines
            sum_shared(lines.tp, gradients, self._pieces, over=lines.shard)
            # Both stages of a tied matrix have it sharded alike.
            sum_tied(self.cut.decoder, {n.removeprefix("decoder."): g for n, g in gradients.items()}, lines.pp)

    def clip(self) -> float:
        gradients, lines = self._gradients(), self.lines
        norm = float(gradient_norm(gradients, self._pieces, (lines.shard, lines.tp, lines.pp)))
        self._scale_down(gradients, norm)
        return norm

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """As an ``Optimizer`` does, but joined, one tensor after another, and each parameter on one rank alone."""
        kept = {name: dict(self.adamw.state.get(master, {})) for name, master in self.masters.items()}
        if self.network.dtype != torch.float32:
            kept = {name: {**states, "master": self.masters[name]} for name, states in kept.items()}
        for number, (name, states) in enumerate(kept.items()):
            here = number % self.lines.dp_cp.size == self.lines.dp_cp.index
            for key, state in states.items():
                full = self.network.full({name: state}, torch.float32)[name] if key != "step" else state
                if here:
                    yield key, name, full

    def _kept(self, name: str, tensor: Tensor | None) -> Tensor:
        return self.network.own(name, super()._kept(name, tensor)).clone()
