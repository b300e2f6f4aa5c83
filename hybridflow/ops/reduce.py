"""Reductions of tensors under a mask.

What stands in masked positions never matters, NaN and infinities included, neither for the value nor for the gradient of
``values``: positions are chosen with ``where``, never multiplied by zero.
"""

import torch
from torch import Tensor

__all__ = ["masked_mean", "masked_sum", "masked_whiten"]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` where ``mask`` (bool, same shape) is True; a scalar, 0 where nothing is."""
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor, normaliser: Tensor | float | None = None) -> Tensor:
    """``masked_sum`` over ``normaliser``, by default the number of True positions; 0 where nothing is.

    Give the normaliser of the whole minibatch when ``values`` is a part of it: the means of the parts then add up.
    """
    if normaliser is None:
        normaliser = mask.sum().clip(min=1)
    return masked_sum(values, mask) / normaliser


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / (population std + 1e-8) where ``mask`` is True, 0 elsewhere.

    Equal values, and a single one, become 0 without a gradient.
    """
    chosen = values[mask]
    if chosen.numel() == 0 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    std, mean = torch.std_mean(chosen, correction=0)
    return torch.zeros_like(values).masked_scatter(mask, (chosen - mean) / (std + 1e-8))
