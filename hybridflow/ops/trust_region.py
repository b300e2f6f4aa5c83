"""Steps within a trust region, which move the policy by themselves instead of handing a gradient to an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.core.roles import Loss, columns

__all__ = ["conjugate_gradient", "trust_region_step"]

Total = Callable[[Tensor], Tensor]


def conjugate_gradient(product: Total, target: Tensor, iterations: int, tolerance: float = 1e-10) -> Tensor:
    """x with A x = ``target`` [P] for a positive definite A, of which ``product`` gives A v (Hestenes and Stiefel 1952)."""
    x, residual = torch.zeros_like(target), target.clone()
    direction, squared = residual.clone(), residual @ residual
    for _ in range(iterations):
        if float(squared) <= tolerance * float(target @ target):
            break
        image = product(direction)
        step = squared / (direction @ image)
        x, residual = x + step * direction, residual - step * image
        before, squared = squared, residual @ residual
        direction = residual + squared / before * direction
    return x


@columns(reads=("observations", "actions", "log_probs", "advantages"), on="step")
def trust_region_step(
    networks: Mapping[str, Any],
    columns: Mapping[str, Tensor],
    total: Total,
    *,
    max_kl: float,
    damping: float = 0.1,
    iterations: int = 10,
    backtracks: int = 10,
) -> Loss:
    """The natural gradient step of TRPO (Schulman et al. 2015, 6 and appendix C) on the network "policy".

        x = F⁻¹ g by conjugate gradients,   step = √(2 δ / xᵀ F x) x, halved until the surrogate rises and KL <= δ

    g is the gradient of the mean of ρ A, F the Hessian of the mean KL(π_old || π) plus ``damping``, δ is ``max_kl``. If no
    step does, the policy stays. ``total`` sums a tensor over all that have a part of the steps. Metrics: ``policy_kl``
    and ``entropy`` after it, ``step_scale`` (1 for the whole step, 0 for none).
    """
    policy = networks["policy"]
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    count = total(torch.tensor(float(len(columns["advantages"])), device=columns["advantages"].device))

    def mean(values: Tensor) -> Tensor:
        return total(values.sum()) / count

    def gains(distribution: Any) -> Tensor:
        ratio = (distribution.log_prob(columns["actions"]) - columns["log_probs"]).exp()
        weighted: Tensor = ratio * columns["advantages"]
        return weighted

    with policy.twice_differentiable():
        now = policy.distribution(columns["observations"])
        old, before = now.detached(), gains(now)
        gradient = total(_flat(torch.autograd.grad(before.sum(), parameters, retain_graph=True))) / count
        of_kl = _flat(torch.autograd.grad(old.kl(now).sum(), parameters, create_graph=True))

        def fisher(vector: Tensor) -> Tensor:
            image = _flat(torch.autograd.grad(of_kl @ vector, parameters, retain_graph=True))
            return total(image) / count + damping * vector

        direction = conjugate_gradient(fisher, gradient, iterations)
        curvature = float(direction @ fisher(direction))
    start, sizes = _flat(tuple(parameters)).detach(), [parameter.numel() for parameter in parameters]
    step = (2 * max_kl / curvature) ** 0.5 * direction if curvature > 0 else torch.zeros_like(start)
    with torch.no_grad():
        for scale in (*(0.5**number for number in range(backtracks)), 0.0):
            for parameter, values in zip(parameters, torch.split(start + scale * step, sizes), strict=True):
                parameter.copy_(values.view_as(parameter))
            after = policy.distribution(columns["observations"])
            kl, reached = old.kl(after), gains(after)
            if scale == 0 or (float(mean(kl)) <= max_kl and float(mean(reached)) > float(mean(before.detach()))):
                break
        drift = old.log_prob(columns["actions"]) - columns["log_probs"]
        metrics = {"policy_kl": kl, "entropy": after.entropy(), "step_scale": torch.full_like(kl, scale)}
    return Loss(-reached, metrics, drift=drift)


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])
