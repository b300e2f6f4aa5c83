"""Estimators of the KL divergence from samples, and the adaptive coefficient of the KL penalty."""

from collections.abc import Mapping
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "AdaptiveKL", "KLKind", "estimate_kl"]

KLKind = Literal["k1", "k2", "k3"]
X = TypeVar("X", Tensor, NDArray[np.float64])

LOG_RATIO_LIMIT = 20.0
"""Log-ratios of probabilities are clipped to this size before ``exp``: beyond it, a ratio only overflows."""


def estimate_kl(log_probs: X, other_log_probs: X, kind: KLKind) -> X:
    """KL(p || q) at each step, from actions sampled from p; tensors and arrays alike (Schulman 2020, "Approximating KL").

    With x = log q - log p:  k1 = -x, unbiased, may be negative · k2 = x² / 2, biased, low variance ·
    k3 = exp(x) - 1 - x, unbiased, never negative. In k3, x is clipped to ±20.
    As a loss (differentiated through log p) the expected gradient of k1 is zero, that of k2 is the gradient of KL(p || q),
    that of k3 the gradient of KL(q || p). In the reward k1 gives the gradient of KL(p || q), k3 that of KL(p || q) less
    KL(q || p).
    """
    x = other_log_probs - log_probs
    if kind == "k1":
        return -x
    if kind == "k2":
        return 0.5 * x * x
    x = x.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return _expm1(x) - x


def _expm1(x: X) -> X:
    if isinstance(x, Tensor):
        return torch.expm1(x)
    result: NDArray[np.float64] = np.expm1(x)
    return result


class AdaptiveKL:
    """Coefficient of the KL penalty, steered towards a target (Ziegler et al. 2019, "Fine-Tuning Language Models from
    Human Preferences", 2.2). Without a target it stays as it is.

        coef ← coef · (1 + clip(kl / target - 1, ±0.2) · num_samples / horizon)
    """

    def __init__(self, coef: float, target: float | None = None, horizon: float = 10_000) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, num_samples: int) -> None:
        """``kl``: measured over ``num_samples`` responses, in the unit of the target."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef = state["coef"]
