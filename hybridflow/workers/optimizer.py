"""AdamW on fp32 master weights, with warm-up, decay, clipping and freezing."""

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridflow.core.config import Config
from hybridflow.core.errors import ConfigError
from hybridflow.models.decoder import sum_tied
from hybridflow.parallel.tensor import gradient_norm, sum_shared
from hybridflow.workers.parts import Cut

__all__ = ["MOMENTS", "Optimizer", "OptimizerConfig", "freeze", "learning_rate_scale", "sum_in_fp32", "training_bytes"]


MOMENTS = ("exp_avg", "exp_avg_sq")
SMALL = 2**20
"""numbers up to which a copy of all gradients takes less time than a norm of each"""


class OptimizerConfig(Config):
    """How weights move."""

    lr: float = Field(1e-5, gt=0)
    """peak learning rate"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up, down to zero at the last optimizer step"""
    warmup_steps: int = Field(0, ge=0)
    """optimizer steps over which the learning rate rises from zero"""
    weight_decay: float = Field(0.0, ge=0)
    """decoupled decay of matrices; norms and biases are never decayed"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """decay of AdamW's mean of gradients"""
    beta2: float = Field(0.999, ge=0, lt=1)
    """decay of AdamW's mean of squared gradients"""
    eps: float = Field(1e-8, gt=0)
    """added to the root of that mean"""
    max_grad_norm: float = Field(1.0, gt=0)
    """gradients are scaled down to this global norm"""
    freeze: tuple[str, ...] = ()
    """patterns of parameter names that are not trained, such as "embed*" or "layers.[0-9].*" """


def learning_rate_scale(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Factor on ``lr`` at optimizer step ``step`` (from 0) of ``total_steps``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if config.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) by torch's fused kernel, over groups of (parameters,
    weight decay). ``state`` and steps are those of ``torch.optim.AdamW``, whose bookkeeping takes longer than small
    networks do."""

    def __init__(self, groups: Sequence[tuple[list[Tensor], float]], config: OptimizerConfig) -> None:
        self.config = config
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": params,
                "weight_decay": decay,
                "lr": config.lr,
                "steps": _zeros(len(params), like=params),
                "states": [],
            }
            for params, decay in groups
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        # Counted together, in one operation, as long as all parameters move.
        self._steps = {p: group["steps"][i] for group in self.param_groups for i, p in enumerate(group["params"])}

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        config = self.config
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved:
                continue
            means, squares, steps = self._states(group, moved)
            torch._foreach_add_([group["steps"]] if len(moved) == len(group["params"]) else steps, 1)
            torch._fused_adamw_(
                moved,
                [parameter.grad for parameter in moved],
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=group["weight_decay"],
                eps=config.eps,
                amsgrad=False,
                maximize=False,
            )

    def _states(self, group: dict[str, Any], moved: list[Tensor]) -> list[list[Tensor]]:
        """Moments and step of each parameter, begun if it moves for the first time."""
        every = len(moved) == len(group["params"])
        if every and group["states"]:
            return cast(list[list[Tensor]], group["states"])
        states = [self.state.get(parameter) or self.begin(parameter) for parameter in moved]
        found = [[state[key] for state in states] for key in (*MOMENTS, "step")]
        group["states"] = found if every else []
        return found

    def forget(self) -> None:
        """Drop the state of every parameter."""
        self.state.clear()
        for group in self.param_groups:
            group["states"] = []

    def begin(self, parameter: Tensor, step: float = 0.0, **moments: Tensor) -> dict[str, Tensor]:
        """The state of a parameter from now on: after so many steps, with these moments, of zeros where none is given."""
        zeros = {key: torch.zeros_like(parameter) for key in MOMENTS if key not in moments}
        self.state[parameter] = {"step": self._steps[parameter].fill_(step), **zeros, **moments}
        return self.state[parameter]


class Optimizer:
    """Steps the trained parameters of ``module``.

    Weights that are not fp32 get an fp32 master copy: gradients of all microbatches add up there, AdamW moves it, and the
    weight is its rounding. fp32 weights are their own masters. ``cut``: what the module's parameters are parts of.
    ``sharded``: whether each rank of a data-parallel line keeps but a share. ``clipped_apart``: parts of a whole module, by
    the start of their parameters' names, each of which is clipped by itself.
    """

    sharded = False
    clipped_apart: tuple[str, ...] = ("",)

    def __init__(self, module: nn.Module, config: OptimizerConfig, total_steps: int, cut: Cut | None = None) -> None:
        self.config, self.total_steps, self.steps, self.cut = config, total_steps, 0, cut
        freeze(module, config.freeze, whole=cut is None)
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = self._make_masters()
        self._rounds = any(parameter.dtype != torch.float32 for parameter in self.parameters.values())
        decayed = [master for name, master in self.masters.items() if self.parameters[name].dim() >= 2]
        others = [master for name, master in self.masters.items() if self.parameters[name].dim() < 2]
        groups = [(decayed, config.weight_decay), (others, 0.0)] if config.weight_decay else [([*decayed, *others], 0.0)]
        self.adamw = AdamW(groups, config)
        self._transposed = [master for master in self.masters.values() if not master.is_contiguous()]

    def _make_masters(self) -> dict[str, Tensor]:
        masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            masters[name] = parameter
            if parameter.dtype != torch.float32:
                masters[name] = parameter.detach().float()
                sum_in_fp32(parameter, masters[name])
        return masters

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def reduce_gradients(self, over_ranks: Callable[[Tensor], Tensor] | None) -> None:
        """Make the gradients those of the whole minibatch. ``over_ranks`` sums a tensor over the ranks that hold the same
        parameters, None where there is one. Nothing may be trained here, on a stage of a pipeline."""
        if over_ranks is not None and self.masters:
            self.sum_gradients(over_ranks)
        self.sum_parts()

    def sum_gradients(self, over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace every gradient by its sum ``over_ranks``, which is called once, with all of them in a flat fp32 tensor.

        A rank that has none for a parameter adds zeros. Where no rank has one, there is none afterwards, so that the
        parameter stays untouched as it does in one process.
        """
        masters = list(self.masters.values())
        here = torch.tensor([float(master.grad is not None) for master in masters], device=masters[0].device)
        flat = torch.cat([here, *(_flat_gradient(master) for master in masters)])
        self.zero_grad()
        there, *parts = torch.split(over_ranks(flat), [len(masters), *(master.numel() for master in masters)])
        for master, part, count in zip(masters, parts, there.tolist(), strict=True):
            master.grad = part.view_as(master) if count else None

    def take_gradients(self, module: nn.Module, flat: Tensor) -> None:
        """Replace every gradient by its part of ``flat``, which has those of all parameters of the whole ``module``."""
        named = dict(module.named_parameters())
        parts = torch.split(flat, [parameter.numel() for parameter in named.values()])
        for name, part in zip(named, parts, strict=True):
            if name in self.masters:
                self.masters[name].grad = part.view_as(self.masters[name])

    def sum_parts(self) -> None:
        """Sum the gradients of what several ranks hold of one model: of norms and shared heads, and of a tied embedding."""
        if self.cut is not None:
            gradients, lines = self._gradients(), self.cut.lines
            sum_shared(lines.tp, gradients, self.cut.shards)
            in_decoder = {name.removeprefix("decoder."): gradient for name, gradient in gradients.items()}
            sum_tied(self.cut.decoder, in_decoder, lines.pp)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.config.lr * learning_rate_scale(self.config, self.steps, self.total_steps)

    def clip(self) -> float:
        """Scale the gradients down to ``max_grad_norm``; returns their norm before."""
        gradients = self._gradients()
        if self.cut is not None:
            lines = self.cut.lines
            norm = float(gradient_norm(gradients, self.cut.shards, (lines.tp, lines.pp)))
            self._scale_down(gradients, norm)
            return norm
        norms = []
        for start in self.clipped_apart:
            part = {name: gradient for name, gradient in gradients.items() if name.startswith(start)}
            norms.append(float(_total_norm(list(part.values()))))
            self._scale_down(part, norms[-1])
        return math.hypot(*norms)

    def _scale_down(self, gradients: Mapping[str, Tensor], norm: float) -> None:
        if gradients and norm > self.config.max_grad_norm:
            torch._foreach_mul_(list(gradients.values()), self.config.max_grad_norm / (norm + 1e-6))

    def step(self) -> None:
        """Apply the gradients."""
        rate = self.learning_rate
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self._align()
        self.adamw.step()
        self.steps += 1
        self._round()

    def _align(self) -> None:
        """Let gradients lie as their masters do, of which some are stored transposed: the fused AdamW goes through memory
        and looks at no strides."""
        for master in self._transposed:
            if master.grad is not None:
                master.grad = _lying_like(master, master.grad)

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self._copies().items() if self._rounds else ():
            self.parameters[name].copy_(master)

    def _copies(self) -> dict[str, Tensor]:
        """The masters that are not the weights themselves."""
        return {name: m for name, m in self.masters.items() if self.parameters[name].dtype != torch.float32}

    def tensors(self) -> Iterator[Tensor]:
        """AdamW's moments, and the masters that are not the weights themselves."""
        yield from self._copies().values()
        for master in self.masters.values():
            yield from self.adamw.state.get(master, {}).values()

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """(key, parameter, tensor) of all that is kept: AdamW's "step" [] and moments, and the "master" of a weight that
        isn't fp32, each for this rank's slice of the parameter."""
        copies = self._copies()
        for name, master in self.masters.items():
            kept = {**self.adamw.state.get(master, {}), **({"master": master} if name in copies else {})}
            yield from ((key, name, tensor) for key, tensor in kept.items())

    @torch.no_grad()
    def load(self, steps: int, read: Callable[[str, str], Tensor | None]) -> None:
        """Go on after ``steps`` steps from ``states``, of whatever mesh; the weights must have been loaded before.

        ``read(key, parameter)``: this rank's slice, None if nothing was kept; "weight" is the weight as it was saved.
        """
        self.steps = steps
        self.adamw.forget()
        for name, master in self.masters.items():
            if (step := read("step", name)) is not None:
                moments = {key: _lying_like(master, self._kept(name, read(key, name))) for key in MOMENTS}
                self.adamw.begin(master, float(step), **moments)
            saved = read("master", name)
            if saved is not None or name in self._copies():
                master.copy_(self._kept(name, read("weight", name) if saved is None else saved))
        self._round()

    def _kept(self, name: str, tensor: Tensor | None) -> Tensor:
        """What this rank keeps of a slice, on its device."""
        assert tensor is not None, "what is kept of a parameter is kept together"
        return tensor.to(self.masters[name].device, torch.float32)


def _zeros(number: int, like: Sequence[Tensor]) -> Tensor:
    """[number] fp32 on the device of those tensors."""
    return torch.zeros(number, device=like[0].device if like else None)


def _total_norm(tensors: list[Tensor]) -> Tensor:
    """Of all numbers of all tensors."""
    if not tensors:
        return torch.zeros(())
    small = sum(tensor.numel() for tensor in tensors) <= SMALL
    parts = torch.cat([x.flatten() for x in tensors]) if small else torch.stack(list(torch._foreach_norm(tensors)))
    norm: Tensor = torch.linalg.vector_norm(parts)
    return norm


def _lying_like(master: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, its numbers in the order in memory that those of the master have."""
    return tensor if tensor.stride() == master.stride() else torch.empty_like(master).copy_(tensor)


def training_bytes(module: nn.Module) -> tuple[int, int]:
    """(gradients, optimizer): what training the trained parameters of ``module`` takes besides its weights. Gradients and
    both moments of AdamW are fp32, and so are the masters of weights that aren't."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    size = sum(parameter.numel() for parameter in trained)
    masters = sum(parameter.numel() for parameter in trained if parameter.dtype != torch.float32)
    return 4 * size, 4 * (2 * size + masters)


def freeze(module: nn.Module, patterns: tuple[str, ...], whole: bool = True) -> None:
    """Stop training every parameter whose name matches a pattern; a pattern that matches none of a ``whole`` model is a
    ConfigError."""
    names = [name for name, _ in module.named_parameters()]
    short = {name: name.removeprefix("decoder.") for name in names}
    for pattern in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(short[name], pattern)]
        if not matched and whole:
            example = ", ".join(list(short.values())[:6])
            raise ConfigError([f"optimizer.freeze: {pattern!r} matches no parameter; names look like {example}, ..."])
        for name in matched:
            module.get_parameter(name).requires_grad_(False)
    if whole and not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(["optimizer.freeze: the patterns freeze every parameter; nothing would be trained"])


def _flat_gradient(master: Tensor) -> Tensor:
    return torch.zeros_like(master).flatten() if master.grad is None else master.grad.flatten()


def sum_in_fp32(parameter: nn.Parameter, holder: Any) -> None:
    """Whenever autograd has a gradient of ``parameter``, add it to ``holder.grad``, in fp32, and drop it."""

    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        holder.grad = parameter.grad.float() if holder.grad is None else holder.grad.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
