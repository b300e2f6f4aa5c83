"""The decoder as the rollout engine runs it: the learner's own parameters, its matrices repacked where that is faster.

On a CPU every product with a dense matrix first reorders it into the blocks that oneDNN multiplies, whatever the number of
rows. Over a rollout it pays to do that once: 2.4 times the speed at 4 rows, 1.5 at 16, 1.1 at 64. Elsewhere, and for
rollouts of a few tokens, the parameters are read in place.

The engine may also run at a lower ``Precision`` than the learner's. Then responses are drawn from the rounded model, and
their log-probabilities are those of that model; how far they are from the learner's is what off-policy corrections see.

The copy lives as long as the rollout, as the key-value cache does, so no update can leave it behind.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.core.errors import UserError
from hybridflow.models.decoder import Decoder, FusedLinear, Linear, RMSNorm, SummedLinear
from hybridflow.ops.linear import can_pack, linear, pack
from hybridflow.parallel.mesh import Line

__all__ = ["MIN_STEPS", "Precision", "RolloutWeights", "rollout_dtype"]

Precision = Literal["full", "bfloat16", "int8"]
"""``full``: the learner's dtype. ``bfloat16``: all but the sampling. ``int8``: products of the layers take 8-bit matrices,
one scale an output, and 8-bit activations, one scale a token; CPUs only. A log-probability of SmolLM2-135M then is off by
0.06 or 0.25 on average; both are 2 to 3 times as fast as float32 on an AMD Zen 5, and bfloat16 is the faster one there."""

_TINY = torch.finfo(torch.float32).tiny
_TYPICAL_ROWS = 64
MIN_STEPS = 32  # packing costs what it saves in about 16 decode steps


def rollout_dtype(precision: Precision, dtype: torch.dtype) -> torch.dtype:
    """Of activations, keys and values, when the learner has ``dtype``."""
    return torch.bfloat16 if precision == "bfloat16" else dtype


class RolloutWeights:
    """``decoder`` to run, and ``logits``; ``refresh`` when the parameters have changed."""

    def __init__(self, decoder: Decoder, steps: int, precision: Precision) -> None:
        """steps: most decode steps that are to come. UserError if int8 is asked for on another device than a CPU."""
        weight = decoder.anchor
        if precision == "int8" and weight.device.type != "cpu":
            raise UserError(f'Engine: precision "int8" runs on CPUs only, but the model is on {weight.device}')
        self._source, self._int8 = decoder, precision == "int8"
        self._dtype = rollout_dtype(precision, weight.dtype)
        self._packs = steps >= MIN_STEPS and can_pack(weight)
        self.refresh()

    def refresh(self) -> None:
        """Take the parameters as they are now."""
        # A decoder that gathers its weights would drop them again behind each layer.
        changed = self._packs or self._int8 or self._dtype != self._source.anchor.dtype
        in_place = not changed and self._source.gathered is None
        if self._source.part.last:
            head = self._source.head_weight.detach().to(self._dtype)
            self._head = pack(head) if self._packs else head
        self.decoder = self._source if in_place else self._copy()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, D] -> [B, V], fp32; on the last pipeline stage, of the tokens that are here."""
        return linear(hidden, self._head).float()

    def _copy(self) -> Decoder:
        """A decoder without head: other linear layers, and the other parameters, shared where their type stays.

        Linear layers and norms become plain functions: calling a module takes longer than a small product.
        """
        with torch.device("meta"):
            new = Decoder(self._source.spec, replace(self._source.part, sequence_parallel=False))
        new.lm_head = None
        for name, module in self._source.named_modules():
            if name == "lm_head":
                continue
            if isinstance(module, (Linear, RMSNorm)):
                parent, _, last = name.rpartition(".")
                delattr(new.get_submodule(parent), last)
                setattr(new.get_submodule(parent), last, self._function(module))
            else:
                for kind, parameter in module.named_parameters(recurse=False):
                    new.get_submodule(name).register_parameter(kind, nn.Parameter(self._cast(parameter), False))
        return new

    def _function(self, module: Linear | RMSNorm) -> Callable[[Tensor], Tensor]:
        if isinstance(module, RMSNorm):
            weight = self._cast(module.weight)
            return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=module.eps)
        weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
        if isinstance(module, FusedLinear):
            weight, bias = module.ordered(weight), None if bias is None else module.ordered(bias)
        if isinstance(module, SummedLinear):
            return _Summed(self._product(weight, None), None if bias is None else self._cast(bias), module.region.line)
        return self._product(weight, bias)

    def _product(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        if self._int8:
            return _Int8Linear(weight, bias)
        weight, bias = self._cast(weight), None if bias is None else self._cast(bias)
        return partial(linear, weight=pack(weight) if self._packs else weight, bias=bias)

    def _cast(self, parameter: Tensor) -> Tensor:
        return parameter.detach().to(self._dtype)


class _Summed:
    """A product whose inputs are cut over a line of ranks; with a bias, once."""

    def __init__(self, product: Callable[[Tensor], Tensor], bias: Tensor | None, line: Line) -> None:
        self.product, self.bias, self.line = product, bias, line

    def __call__(self, x: Tensor) -> Tensor:
        out = self.line.all_reduce(self.product(x))
        return out if self.bias is None else out.add_(self.bias)


class _Int8Linear:
    """x W^T with W rounded to [-127, 127] times a scale of each output, x to [1, 255] - 128 times one of each token: so a
    token's result doesn't depend on the others. Where the inputs are cut over ranks, the scales are each rank's own."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.float()
        self.scales = (weight.abs().amax(1) / 127).clamp(min=_TINY)
        rounded = (weight / self.scales[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, [_TYPICAL_ROWS, weight.shape[1]])
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        scales = x.abs().amax(1, keepdim=True).float() / 127 + _TINY
        rounded = (x / scales + 128).round().to(torch.uint8)  # oneDNN is fast with unsigned activations only
        out = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return (out.mul_(scales) if self.bias is None else torch.addcmul(self.bias, out, scales)).to(x.dtype)
