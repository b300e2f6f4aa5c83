"""Slots that are stepped together: what a sampler sees of its environments.

    slots.open([0, 1, 2, 3], saved)      # made when first asked for, where they stood if they were saved
    slots.observations                   # [S, ...]
    ended = slots.step(live, actions)    # slots.observations and slots.rewards change

An episode that ends is followed by the slot's next one at once: ``observations`` then hold how that begins, and what
followed the last step is in what ``step`` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridflow.core.batch import Array
from hybridflow.data.envs import EnvironmentConfig, Replayable, Slot, entry_types

__all__ = ["Ended", "Episode", "Slots"]


class Episode(NamedTuple):
    """A whole episode of an environment. Of several agents, the return is the sum of theirs, which are ``by_agent``."""

    episode_return: float
    episode_length: int
    by_agent: Mapping[str, float] = {}


class Ended(NamedTuple):
    """The end of an agent's episode at ``place``; ``observation`` is what followed its last step, ``state`` likewise.
    ``episode``: of its environment if that ended, too."""

    place: int
    observation: Array
    terminated: bool
    truncated: bool
    episode: Episode | None
    state: Array | None = None


class Slots:
    """Slots of this process. S are open: place i of an array is slot number ``ids[i]``.

    ``observations`` [S, ...]: what policies see next. ``rewards`` [S]: of the last step. ``num_steps`` [S]: before it.
    ``present``: see ``SharedSlots``, which has ``num_agents`` places for each slot; None: all of them, always.
    """

    num_agents = 1
    present: Any = None
    states: Array = np.zeros((0, 0), np.float32)

    def __init__(
        self, config: EnvironmentConfig, seed: int, spaces: tuple[Any, Any], purpose: str = "env", restart: bool = True
    ) -> None:
        self.config, self.seed, self.purpose, self.restart = config, seed, purpose, restart
        self._type = entry_types(spaces)["observations"]
        self._slots: dict[int, Replayable] = {}
        self._open: list[Slot] = []

    def open(self, ids: Sequence[int], saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Turn to these slots. CheckpointError if an environment can't be brought back to where it was ``saved``."""
        self._open = self._opened(ids, saved)
        self.observations, self.rewards = np.zeros(len(ids), self._type), np.zeros(len(ids), np.float32)
        for index, slot in enumerate(self._open):
            self.observations[index] = slot.observation
        self.num_steps = np.array([slot.num_steps for slot in self._open], np.int64)

    def _opened(self, ids: Sequence[int], saved: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        for index in ids:
            if index not in self._slots:
                slot = self._make(index)
                if index in saved:
                    slot.load_state_dict(saved[index])
                self._slots[index] = slot
        return [self._slots[index] for index in ids]

    def _make(self, index: int) -> Replayable:
        return Slot(self.config, self.seed, index, self.purpose)

    def step(self, live: Sequence[int], actions: Array) -> list[Ended]:
        """Step the slots at the indices ``live`` with ``actions`` [len(live), ...]; the episodes that ended."""
        ended, slots, observations, rewards = list[Ended](), self._open, self.observations, self.rewards
        for index, action in zip(live, actions, strict=True):
            slot = slots[index]
            observation, rewards[index], terminated, truncated = slot.step(action)
            if terminated or truncated:
                episode = Episode(slot.episode_return, len(slot.actions))
                ended.append(Ended(index, observation, terminated, truncated, episode))
                if self.restart:
                    slot.begin(slot.episode + 1)
                    observation = slot.observation
            observations[index] = observation
        return ended

    def state_dicts(self) -> dict[int, dict[str, Any]]:
        """The state of every slot that was ever open, by its number."""
        return {index: slot.state_dict() for index, slot in self._slots.items()}

    def release(self, ids: Sequence[int]) -> None:
        """Close the environments of these slots, as far as they were ever open; ``open`` comes next."""
        for index in ids:
            if index in self._slots:
                self._slots.pop(index).close()

    def close(self) -> None:
        """Close the environments."""
        self.release(list(self._slots))
