"""A trained policy by itself, outside of a run: what plays, serves, exports and measures it starts from here.

policy = Policy.load(Path("runs/cartpole"))
action = policy.act(observation)                   # for environment.step; or of a batch of observations all actions
action, memory = policy.step(observation, memory)  # the same, of a policy that remembers its episode
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.build_networks import WEIGHTS, actor_networks, main_network
from hybridflow.config import RunConfig, load_run
from hybridflow.core.batch import Array
from hybridflow.core.errors import DataError, ModelError
from hybridflow.data.agents import Agents, SharedSlot, agents_of
from hybridflow.data.envs import EVALUATION, EnvironmentConfig, Slot, entry_types, spaces_of
from hybridflow.models.exported import read_policy
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["Acting", "Moment", "Policy"]


class Acting(nn.Module):
    """forward(observations [B, ...]) -> [B, ...] the likeliest actions, as the environment takes them: numbered from its
    own start, or clipped to its bounds, in its own type. The same as ``data.envs`` makes of a policy's actions.

    A network with a memory is also given that [B, M], zeros when an episode begins, and returns it as it is afterwards.
    """

    start: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, network: Any, action_space: Any) -> None:
        super().__init__()
        self.network = network
        self.numbered = type(action_space).__name__ in ("Discrete", "MultiDiscrete")
        if self.numbered:
            self.register_buffer("start", torch.tensor(action_space.start))
        else:
            self.register_buffer("low", torch.tensor(action_space.low))
            self.register_buffer("high", torch.tensor(action_space.high))
        self.dtype = torch.from_numpy(np.zeros(0, action_space.dtype)).dtype

    def forward(self, observations: Tensor, memory: Tensor | None = None) -> Any:
        if memory is None:
            return self._native(self.network.distribution(observations).mode)
        distribution, after = self.network.step(observations, memory)
        return self._native(distribution.mode), after

    def _native(self, mode: Tensor) -> Tensor:
        if self.numbered:
            return (mode + self.start).to(self.dtype)
        return torch.minimum(torch.maximum(mode, self.low), self.high).to(self.dtype)


class Moment(NamedTuple):
    """An episode being played: its ``environment``, the ``observation`` that it shows, and how it went until now."""

    environment: Any
    observation: Array
    episode_return: float
    num_steps: int
    ended: bool


@dataclass(frozen=True)
class Policy:
    """``network``, after ``version`` updates, acts in ``environment``, which has ``spaces`` of observations and actions;
    ``config`` is its run's."""

    network: Any
    environment: EnvironmentConfig
    spaces: tuple[Any, Any]
    config: RunConfig
    version: int

    @classmethod
    def load(cls, run: Path, overrides: Sequence[str] = ()) -> Policy:
        """What the run in directory ``run`` has exported, for the environment of its evaluations, with ``overrides`` of its
        configuration, as on the command line. CheckpointError: there is no run; ModelError: it has exported nothing yet, or
        was no run in an environment."""
        config = load_run(run, ["--device", "cpu", *overrides])
        if config.environment is None:
            raise ModelError(f"{run}: a run on [data]; expected one in an [environment], whose policy acts")
        environment = config.environment.with_options(config.evaluation.options).unrecorded
        spaces = spaces_of(environment)
        network = actor_networks(spaces, config)[main_network(config)].eval().requires_grad_(False)
        weights, version = read_policy(RunDirectory(run).model / WEIGHTS)
        network.load_state_dict(weights)  # once more: a training may have replaced the file
        return cls(network, environment, spaces, config, version)

    @cached_property
    def agents(self) -> Agents | None:
        """Who acts, if there are several."""
        return agents_of(self.environment) if self.environment.shared else None

    def rows(self, observation: Any) -> Array:
        """[B, ...] in the space's type: an observation as the only row, those of several agents as a row each."""
        array = np.asarray(observation, self.spaces[0].dtype)
        return array if self.environment.shared else array[None]

    @cached_property
    def acting(self) -> Acting:
        """What ``act`` runs."""
        return Acting(self.network, self.spaces[1]).eval()

    def act(self, observations: Any) -> Array:
        """The likeliest action at one observation, or at each of a batch [B, ...], as ``environment.step`` takes it.

        DataError if shape or type don't fit the space of observations, or if the policy has a memory: see ``step``.
        """
        if self.memory_size:
            raise DataError("this policy remembers: call step(observation, memory), with None for the memory at first")
        batch, one = self._batch(np.asarray(observations))
        with torch.inference_mode():
            actions: Array = self.acting(torch.from_numpy(batch)).numpy()
        return actions[0] if one else actions

    @property
    def memory_size(self) -> int:
        """M, the numbers that the policy remembers of an episode; 0 if it has no memory."""
        return int(self.network.memory_size)

    def step(self, observations: Any, memory: Array | None = None) -> tuple[Array, Array]:
        """``act`` of any policy, also of those with a memory: the actions, and the memory [M] or [B, M] afterwards, for the
        next step. Episodes begin with None."""
        batch, one = self._batch(np.asarray(observations))
        given = np.zeros((len(batch), self.memory_size), np.float32) if memory is None else memory
        with torch.inference_mode():
            found = self.acting(torch.from_numpy(batch), torch.from_numpy(given.reshape(len(batch), self.memory_size)))
        actions, after = (part.numpy() for part in found)
        return (actions[0], after[0]) if one else (actions, after)

    def _batch(self, observations: Array) -> tuple[Array, bool]:
        """[B, ...] of the space's type, and whether it was a single one."""
        space, shape = self.spaces[0], self.spaces[0].shape or ()
        one = observations.shape == shape
        if not one and observations.shape[1:] != shape:
            expected = f"{shape}, or {('B', *shape)} for several".replace("'", "")
            raise DataError(f"observations of shape {observations.shape}: expected {expected}")
        if observations.dtype != space.dtype and not np.can_cast(observations.dtype, space.dtype, "same_kind"):
            raise DataError(f"observations of type {observations.dtype}: expected {space.dtype}, as in {space}")
        batch = observations.astype(space.dtype, copy=False)
        batch = batch[None] if one else batch
        if self.agents is not None and self.agents.numbered:
            _check_named(batch, self.agents.names)
        return batch, one

    def episode(self, number: int, options: Mapping[str, Any] | None = None) -> Iterator[Moment]:
        """Play episode ``number`` of the run's evaluations, with further ``options`` of the environment: its moments, from
        the first observation to the last. Of several agents observations are [A, ...], and returns are those of all."""
        config = self.environment.with_options(options or {})
        if config.shared:
            yield from self._shared_episode(SharedSlot(config, self.config.seed, number, agents_of(config), EVALUATION))
            return
        slot = Slot(config, self.config.seed, number, EVALUATION)
        moment, memory = Moment(slot.environment, slot.observation, 0.0, 0, False), None
        try:
            yield moment
            while not moment.ended:
                action, memory = self.step(moment.observation, memory)
                observation, reward, terminated, truncated, _ = slot.environment.step(action)
                total, ended = moment.episode_return + float(reward), bool(terminated or truncated)
                moment = Moment(slot.environment, np.array(observation), total, moment.num_steps + 1, ended)
                yield moment
        finally:
            slot.close()

    @torch.no_grad()
    def _shared_episode(self, slot: SharedSlot) -> Iterator[Moment]:
        """Those who are there act, by actions that are numbered from 0."""
        memory = torch.zeros(len(slot.present), self.memory_size)
        actions = np.zeros((len(slot.present), *(self.spaces[1].shape or ())), entry_types(self.spaces)["actions"].base)
        try:
            yield Moment(slot.environment, slot.observation, 0.0, 0, False)
            while (there := slot.present).any():
                distribution, memory[there] = self.network.step(torch.from_numpy(slot.observation[there]), memory[there])
                actions[there] = distribution.mode.numpy()
                slot.step(actions)
                ended = not slot.present.any()
                yield Moment(slot.environment, slot.observation, float(slot.returns.sum()), slot.num_steps, ended)
        finally:
            slot.close()


def _check_named(batch: Array, names: Sequence[str]) -> None:
    """DataError if a row doesn't end with the one-hot number of an agent."""
    who = batch[:, -len(names) :]
    wrong = np.flatnonzero(((who == 1).sum(1) != 1) | ((who != 0).sum(1) != 1))
    if len(wrong):
        expected = f"expected that its last {len(names)} numbers are the one-hot number of one of {', '.join(names)}"
        raise DataError(f"observation {wrong[0]} names no agent: {expected}")
