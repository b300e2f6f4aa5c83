"""One policy for agents whose spaces differ: a network for each group of agents with equal spaces.

observation [B, W + A]: what the agent sees, filled up with zeros | one-hot number of the agent
agents 0, 2 ── first 3 numbers ──> network 0 ──> 2 actions ─┐
agent 1     ── first 11 numbers ─> network 1 ──> 5 actions ─┴─> a Categorical over 5, where what others can't do is
                                                                impossible
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.models.nets import Categorical, CategoricalPolicy

__all__ = ["GroupedPolicy"]


class GroupedPolicy(nn.Module):
    """``networks``, each for the agents that ``groups`` numbers and for the first so many numbers (``widths``) of what they
    observe; with ``agent_id`` it is shown the agent's number, too. ``num_actions``: the most that any of them has."""

    inputs: tuple[str, ...] = ("observations", "actions")
    unit: Literal["row", "step"] = "step"
    memory_size = 0

    def __init__(
        self,
        networks: Sequence[CategoricalPolicy],
        groups: Sequence[Sequence[int]],
        widths: Sequence[int],
        num_actions: int,
        agent_id: bool,
    ) -> None:
        super().__init__()
        self.networks, self.widths, self.num_actions, self.agent_id = nn.ModuleList(networks), widths, num_actions, agent_id
        self.num_agents = sum(map(len, groups))
        self._groups = [list(group) for group in groups]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _parts(self, observations: Tensor) -> Iterator[tuple[CategoricalPolicy, Tensor, Tensor]]:
        """Of every group its network, the rows [R] of its agents, and what they show to it."""
        who = observations[:, -self.num_agents :]
        for network, group, width in zip(self.networks, self._groups, self.widths, strict=True):
            rows = who[:, group].any(-1).nonzero()[:, 0]
            yield network, rows, self._shown(observations[rows], width)  # type: ignore[misc]

    def distribution(self, observations: Tensor) -> Categorical:
        """Of the action at each observation [B, W + A]."""
        if torch.compiler.is_exporting():
            return self._everywhere(observations)
        log_probabilities = torch.full((len(observations), self.num_actions), -math.inf, device=observations.device)
        for network, rows, shown in self._parts(observations):
            own = network.distribution(shown).log_probabilities
            log_probabilities[rows, : own.shape[1]] = own
        return Categorical(log_probabilities)

    def _everywhere(self, observations: Tensor) -> Categorical:
        """The same by every network on every row: what a graph for any rows can do."""
        who = observations[:, -self.num_agents :]
        log_probabilities = observations.new_full((observations.shape[0], self.num_actions), -math.inf)
        for network, group, width in zip(self.networks, self._groups, self.widths, strict=True):
            shown = self._shown(observations, width)
            own: Tensor = network.distribution(shown).log_probabilities  # type: ignore[operator]
            padded = F.pad(own, (0, self.num_actions - own.shape[1]), value=-math.inf)
            log_probabilities = torch.where((who[:, group] > 0).any(-1, keepdim=True), padded, log_probabilities)
        return Categorical(log_probabilities)

    def _shown(self, observations: Tensor, width: int) -> Tensor:
        """Of observations what a network sees."""
        parts = (observations[:, :width], observations[:, -self.num_agents :])
        return torch.cat(parts, -1) if self.agent_id else parts[0]

    def step(self, observations: Tensor, memory: Tensor) -> tuple[Categorical, Tensor]:
        """As that of other networks, without a memory."""
        return self.distribution(observations), memory

    def outputs(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``log_probs`` and ``entropy``, [N] over the action steps."""
        distribution = self.distribution(columns["observations"])
        return {"log_probs": distribution.log_prob(columns["actions"]), "entropy": distribution.entropy()}

    def observe(self, columns: Mapping[str, Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """As that of other networks."""
        for network, _, shown in self._parts(columns["observations"]):
            network.observe({"observations": shown}, total)

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        """As long as it lasts, gradients have gradients."""
        with ExitStack() as stack:
            for network in self.networks:
                stack.enter_context(network.twice_differentiable())  # type: ignore[operator]
            yield
