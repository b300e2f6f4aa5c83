"""What one rollout in environments records, and the pieces of episodes that become of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.data.envs import entry_types
from hybridflow.models.nets import joined

__all__ = ["Ending", "RolloutSteps"]

Ints = NDArray[np.int64]


class Ending(NamedTuple):
    """How a piece ended, and in which state, where states are wanted."""

    observation: Array
    terminated: bool
    truncated: bool
    state: Array | None


class RolloutSteps:
    """What one rollout records: arrays [T, S, ...] of steps, and the ends of pieces by (place of the seat, step).

    ``taken`` [T, S]: the steps that were taken. ``since``: the step with which the piece of each seat began.
    ``like``: states [S, ...] such as are to be recorded, None for none.
    """

    def __init__(self, num_steps: Ints, spaces: tuple[Any, Any], like: Array | None) -> None:
        self.num_steps, self.width, self.types = num_steps, int(num_steps.max(initial=0)), entry_types(spaces)
        shape = (self.width, len(num_steps))
        self.observations = np.zeros(shape, self.types["observations"])
        self.actions = np.zeros(shape, self.types["actions"])
        self.rewards, self.log_probs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.with_states = like is not None
        self.states = np.zeros((*shape, *(() if like is None else like.shape[1:])), np.float32)
        self.taken = np.arange(self.width)[:, None] < num_steps
        self.at_random, self.begun = np.zeros(len(num_steps), bool), np.zeros((len(num_steps), 0), np.float32)
        self.ends: dict[tuple[int, int], Ending] = {}
        self._cuts, self.since = dict[tuple[int, int], Array](), [0] * len(num_steps)
        self._everyone = list(range(len(num_steps)))
        self._shortest, self._distributions = int(num_steps.min(initial=self.width)), list[Any]()

    def live(self, t: int, present: Array | None) -> tuple[list[int], slice | Ints]:
        """The seats that take a step ``t``, of those that are ``present`` (None: all): their places, and what picks them
        from an array [S, ...]."""
        if t < self._shortest and (present is None or present.all()):
            return self._everyone, slice(None)
        if present is not None:
            self.taken[t] &= present
        live = np.flatnonzero(self.taken[t])
        return live.tolist(), live

    def record(self, t: int, where: slice | Ints, observations: Array, actions: Array, distribution: Any) -> None:
        """What the slots at ``where`` saw and do in step ``t``."""
        self.observations[t, where], self.actions[t, where] = observations, actions
        self._distributions.append(distribution)

    def cut(self, place: int, t: int, slots: Any, memory: torch.Tensor) -> None:
        """End a piece after step ``t``; the next one begins with ``memory`` [M]."""
        state = slots.states[place].copy() if self.with_states else None
        self.ends[place, t] = Ending(slots.observations[place].copy(), False, False, state)
        self._cuts[place, t], self.since[place] = memory.cpu().numpy().copy(), t + 1

    def pieces(self, first_ids: Ints, following: Array, states: Array, version: int) -> Batch:
        """One row a piece, numbered from ``first_ids`` [S]; ``following``, ``states`` [S, ...]: what followed the last
        steps."""
        for place in np.flatnonzero(self.taken.any(0)).tolist():
            last = int(np.flatnonzero(self.taken[:, place])[-1])
            if (place, last) not in self.ends:  # the collection limit: the episode goes on
                state = states[place] if self.with_states else None
                self.ends[place, last] = Ending(following[place], False, False, state)
        ends = sorted(self.ends)
        owners = np.array([place for place, _ in ends], np.int64)
        self.num_pieces = np.bincount(owners, minlength=len(first_ids))
        before = np.cumsum(self.num_pieces) - self.num_pieces
        counted = np.cumsum(self.taken.T.reshape(-1))
        lengths = np.diff([counted[place * self.width + t] for place, t in ends], prepend=0).astype(np.int64)
        endings = [self.ends[end] for end in ends]
        final = np.zeros(len(ends), self.types["final_observations"])
        for number, ending in enumerate(endings):
            final[number] = ending.observation
        memory = np.zeros((len(ends), self.begun.shape[1]), np.float32)
        memory[before[self.num_pieces > 0]] = self.begun[self.num_pieces > 0]
        for number, end in enumerate(ends[:-1]):
            if end in self._cuts and ends[number + 1][0] == end[0]:
                memory[number + 1] = self._cuts[end]
        count = int(self.taken.sum())
        return Batch(
            {
                "sample_id": first_ids[owners] + np.arange(len(ends)) - before[owners],
                **{name: Ragged(values, lengths) for name, values in self._taken().items()},
                "response_mask": Ragged(np.ones(count, bool), lengths),
                "policy_version": Ragged(np.full(count, version, np.int64), lengths),
                "terminated": np.array([ending.terminated for ending in endings], bool),
                "truncated": np.array([ending.truncated for ending in endings], bool),
                "final_observations": final,
                **({"final_states": self._final_states(endings)} if self.with_states else {}),
                **({"memory": memory} if memory.shape[1] else {}),
            }
        )

    def _final_states(self, endings: Sequence[Ending]) -> Array:
        states = np.array([ending.state for ending in endings], np.float32)
        return states.reshape(len(endings), *self.states.shape[2:])

    def _taken(self) -> dict[str, Array]:
        """Time columns [N, ...] of the steps that were taken, by slot and time."""
        taken = self.taken
        if self._distributions:
            actions = torch.from_numpy(self.actions[taken])
            together = joined(self._distributions)
            self.log_probs[taken] = together.log_prob(actions.to(together.device)).float().cpu().numpy()
            if self.at_random.any():
                self.log_probs[:, self.at_random] = together.bounds.fill_log_prob
        names = ("observations", "actions", "rewards", "log_probs", *(("states",) if self.with_states else ()))
        columns = {name: getattr(self, name) for name in names}
        return {name: values.swapaxes(0, 1)[taken.T] for name, values in columns.items()}
