"""An env worker that learns by itself: it turns what it rolled out into gradients, and the learner takes the steps.

    rollout ──> values ──estimate──> advantages, returns ──losses──> gradients [P], one row

All of it happens in one call, with the networks that it acts with, so nothing but gradients leaves the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.controller.protocols import DP
from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.errors import NonFiniteError
from hybridflow.core.roles import Fn, Loss, remote
from hybridflow.workers.env_sampler import EnvSampler
from hybridflow.workers.units import action_columns

__all__ = ["GradientSampler"]

READS = ("sample_id", "policy_version", "observations", "actions", "response_mask", "final_observations")


class GradientSampler(EnvSampler):
    """Its source's network is an ``ActorCritic``, or whatever has its outputs."""

    @remote(
        DP,
        reads=lambda args: (*READS, *(("memory",) if args.get("memory_size") else ())),
        writes=("sample_id", "policy_version", "gradients"),
        makes=("values", "bootstrap_values", "advantages", "returns"),
        rows="one",
        kind="train",
    )
    def gradients(self, batch: Batch, estimate: Fn, /, *losses: Fn) -> Batch:
        """``gradients`` [1, P] of the sum of the ``losses``, each a mean over the steps, for all parameters one behind the
        other. The row has the first ``sample_id`` of the rollout. NonFiniteError if a loss isn't finite."""
        network = self._network
        columns = action_columns(batch, network.device)
        with torch.enable_grad(), _differentiable(network) as parameters:
            outputs = network.outputs(batch if network.unit == "row" else columns)
            steps = batch.with_columns(**_valued(network, batch, outputs["values"]))
            estimated = batch.select(("response_mask",)).with_columns(**estimate(steps))
            columns |= action_columns(estimated, network.device)
            total = sum((self._mean(loss, outputs, columns, batch["sample_id"]) for loss in losses), torch.zeros(()))
            parts = torch.autograd.grad(total, parameters)
        gradients = torch.cat([part.flatten() for part in parts]).cpu().numpy()[None]
        versions = Ragged(batch.ragged("policy_version").values[:1], np.ones(1, np.int64))
        return Batch({"sample_id": batch["sample_id"][:1], "policy_version": versions, "gradients": gradients})

    def _mean(self, loss: Fn, outputs: Any, columns: Any, samples: Array) -> Tensor:
        """Of the terms, which are reported with the loss's metrics."""
        result: Loss = loss(outputs, columns)
        total = result.terms.sum()
        if not math.isfinite(value := float(total.detach())):
            shown = ", ".join(map(str, samples[:8]))
            raise NonFiniteError(f"loss {loss.name} is {value}, samples {shown}; no gradients were made of it")
        self.context.metrics.add(loss.name, value, len(result.terms))
        for name, values in result.metrics.items():
            self.context.metrics.add(name, float(values.sum()), values.numel())
        return total / len(result.terms)


def _valued(network: Any, batch: Batch, values: Tensor) -> dict[str, Any]:
    """Columns of the value before every step and after the last one."""
    with torch.no_grad():
        bootstrap = network.bootstrap(batch).float().cpu().numpy()
    column = batch.ragged("response_mask").like(values.detach().float().cpu().numpy())
    return {"values": column, "bootstrap_values": bootstrap}


@contextmanager
def _differentiable(network: nn.Module) -> Iterator[list[Tensor]]:
    """All parameters; as long as it lasts, they have gradients."""
    parameters: list[Tensor] = list(network.parameters())
    before = [parameter.requires_grad for parameter in parameters]
    network.requires_grad_(True)
    try:
        yield parameters
    finally:
        for parameter, wanted in zip(parameters, before, strict=True):
            parameter.requires_grad_(wanted)
