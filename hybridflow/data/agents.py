"""Environments of several agents (PettingZoo's parallel ones): slots that step together.

An environment of A agents is one slot of a rollout's source, so its agents are always on the same worker. Agent k of
environment s has a *seat* of its own, number s * A + k, and plays its own pieces of episodes there. A seat is empty while
its agent isn't there: before it joins and after it has terminated or was truncated. When nobody is left, the environment's
next episode begins.

    places:  environment 0, agent 0 | environment 0, agent 1 | environment 1, agent 0 | ...
    present:        True            |         False          |         True           |

Agents whose spaces differ get observations of one width, filled up with zeros, and a one-hot agent id behind them, by which
networks tell them apart (Terry et al. 2020, Revisiting Parameter Sharing in Multi-Agent Deep Reinforcement Learning).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hybridflow.core.batch import Array
from hybridflow.core.errors import DataError
from hybridflow.core.seeding import derive
from hybridflow.data.envs import EnvironmentConfig, Replayable, native_action
from hybridflow.data.slots import Ended, Episode, Slots

__all__ = ["Agents", "SharedSlot", "SharedSlots", "agents_of", "make_parallel"]


@dataclass(frozen=True)
class Agents:
    """Who acts in an environment of several agents, by name, and the spaces of each.

    ``state_size``: numbers of the environment's ``state()``, None if it has none.
    """

    names: tuple[str, ...]
    observed: tuple[Any, ...]
    done: tuple[Any, ...]
    state_size: int | None
    agent_id: bool

    @cached_property
    def groups(self) -> list[list[int]]:
        """Agents of equal spaces."""
        groups: list[list[int]] = []
        for agent in range(len(self.names)):
            alike = (group for group in groups if self._spaces(group[0]) == self._spaces(agent))
            if (group := next(alike, None)) is None:
                groups.append([agent])
            else:
                group.append(agent)
        return groups

    def _spaces(self, agent: int) -> tuple[Any, Any]:
        return self.observed[agent], self.done[agent]

    @cached_property
    def numbered(self) -> bool:
        """Whether observations are vectors that end with a one-hot agent id."""
        return self.agent_id or len(self.groups) > 1

    @cached_property
    def width(self) -> int:
        """Numbers of the longest observation."""
        return max(int(math.prod(space.shape)) for space in self.observed)

    @cached_property
    def spaces(self) -> tuple[Any, Any]:
        """(observation space, action space) of every seat."""
        if not self.numbered:
            return self.observed[0], self.done[0]
        done = self.done[0] if len(self.groups) == 1 else _discrete(max(int(space.n) for space in self.done))
        return _box(self.width + len(self.names)), done

    def spaces_of(self, group: Sequence[int]) -> tuple[Any, Any]:
        """(observation space, action space) of a network for these agents alone."""
        seen = self.observed[group[0]].shape[0]
        return _box(seen + len(self.names) * self.agent_id), self.done[group[0]]

    @cached_property
    def state_space(self) -> Any:
        """Of what a centralised critic sees: the environment's state, or else what all agents observe, and who asks."""
        sizes = [math.prod(space.shape or (1,)) for space in self.observed]
        return _box((sum(sizes) if self.state_size is None else self.state_size) + len(self.names))


def make_parallel(config: EnvironmentConfig) -> Any:
    """One environment of several agents; DataError if its module has no ``parallel_env`` or the options don't fit."""
    where, module = f"environment {config.id!r}", config.id.removeprefix("pettingzoo:")
    try:
        make = importlib.import_module(module).parallel_env
    except ImportError as error:
        hint = "PettingZoo's environments need pip install hybridflow[agents]"
        raise DataError(f"{where} can't be imported: {error}; expected pettingzoo:<module>; {hint}") from error
    except AttributeError as error:
        raise DataError(f"{where}: {module} has no parallel_env, which environments of turns don't have either") from error
    try:
        return make(**config.options)
    except TypeError as error:
        raise DataError(f"{where} doesn't take the options {config.options}: {error}") from error


def agents_of(config: EnvironmentConfig) -> Agents:
    """Who acts in an environment; DataError if agents can't have seats of one kind."""
    environment = make_parallel(config)
    names = tuple(environment.possible_agents)
    observed = tuple(environment.observation_space(name) for name in names)
    done = tuple(environment.action_space(name) for name in names)
    environment.reset(seed=0)
    agents = Agents(names, observed, done, _state_size(environment), config.agent_id)
    environment.close()
    where = f"environment {config.id!r}"
    if agents.numbered and any(_kind(space) != "Box" or len(space.shape) != 1 for space in observed):
        raise DataError(f"{where}: to carry an agent id, observations need to be a Box of one dimension, found {observed}")
    if len(agents.groups) > 1 and any(_kind(space) != "Discrete" for space in done):
        raise DataError(f"{where}: agents with different spaces need Discrete actions, found {done}")
    return agents


def _state_size(environment: Any) -> int | None:
    try:
        return int(np.size(environment.state()))
    except NotImplementedError:
        return None


class SharedSlot(Replayable):
    """One environment of A agents. ``observation`` [A, ...]: what each sees next, ``present`` [A]: who is there to act,
    ``rewards`` [A]: of the last step, ``state``: of the environment, numbers."""

    def __init__(self, config: EnvironmentConfig, seed: int, slot: int, agents: Agents, purpose: str = "env") -> None:
        self.config, self.seed, self.slot, self.purpose, self.agents = config, seed, slot, purpose, agents
        self.environment = make_parallel(config)
        self._taking = [native_action(space) for space in agents.done]
        observed, number = agents.spaces[0], len(agents.names)
        self._empty = np.zeros((number, *(observed.shape or ())), observed.dtype)
        if agents.numbered:
            self._empty[:, agents.width :] = np.eye(number)
        self.num_steps = 0
        self.begin(0)

    def begin(self, episode: int) -> None:
        """Start an episode."""
        observations, _ = self.environment.reset(seed=derive(self.seed, self.purpose, self.slot, episode))
        self.episode, self.returns = episode, np.zeros(len(self.agents.names))
        self.actions = []
        self._see(observations)

    def _see(self, observations: Mapping[str, Any]) -> None:
        self.present = np.array([name in self.environment.agents for name in self.agents.names])
        self._seen = [observations.get(name) for name in self.agents.names]
        self.observation = self._empty.copy()
        for agent, seen in enumerate(self._seen):
            if seen is None:
                continue
            if self.agents.numbered:
                self.observation[agent, : len(seen)] = seen
            else:
                self.observation[agent] = seen

    def state(self) -> Array:
        """What a centralised critic sees, but for who asks; those who aren't there observe zeros."""
        if self.agents.state_size is not None:
            return np.asarray(self.environment.state(), np.float32).reshape(-1)
        shapes = [space.shape or () for space in self.agents.observed]
        parts = [np.zeros(shape) if seen is None else seen for seen, shape in zip(self._seen, shapes, strict=True)]
        return np.concatenate([np.asarray(part, np.float32).reshape(-1) for part in parts])

    def step(self, action: Array) -> list[tuple[int, bool, bool]]:
        """Everybody who is there takes one step, by ``action`` [A, ...]; (agent, terminated, truncated) of those who go.
        After that of the last one, ``begin`` must come next."""
        acting = [(agent, name) for agent, name in enumerate(self.agents.names) if self.present[agent]]
        given = {name: self._taking[agent](action[agent]) for agent, name in acting}
        observations, rewards, terminated, truncated, _ = self.environment.step(given)
        self.actions.append(action)
        self.num_steps += 1
        self.rewards = np.zeros(len(self.agents.names))
        going = list[tuple[int, bool, bool]]()
        for agent, name in acting:
            try:
                self.rewards[agent], ends = rewards[name], (bool(terminated[name]), bool(truncated[name]))
                observations[name]
            except KeyError as error:
                raise self._wrong(name, "acted and isn't in all that step returned") from error
            if any(ends) == (name in self.environment.agents):
                found = "ended, but is still in agents" if any(ends) else "left agents, but didn't end"
                raise self._wrong(name, f"{found}; step has to remove from agents just those who end")
            going += [(agent, *ends)] if any(ends) else []
        self.returns += self.rewards
        self._see(observations)
        return going

    def _wrong(self, name: str, what: str) -> DataError:
        return DataError(f"environment {self.config.id!r}, agent {name!r}, step {len(self.actions)}: {what}")


class SharedSlots(Slots):
    """``Slots`` whose environments have A agents each: S environments are open, and every array is of their S * A seats.

    ``present`` [S * A]: who is there to act. ``states`` [S * A, ...]: what a centralised critic sees, if ``with_states``.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        seed: int,
        spaces: tuple[Any, Any],
        purpose: str = "env",
        restart: bool = True,
        with_states: bool = False,
    ) -> None:
        super().__init__(config, seed, spaces, purpose, restart)
        self.agents, self.with_states = agents_of(config), with_states
        self.num_agents = len(self.agents.names)

    def _make(self, index: int) -> SharedSlot:
        return SharedSlot(self.config, self.seed, index, self.agents, self.purpose)

    def open(self, ids: Sequence[int], saved: Mapping[int, Mapping[str, Any]]) -> None:
        """See ``Slots.open``; ``ids`` are of environments."""
        slots = self._opened(ids, saved)
        seats = len(ids) * self.num_agents
        self._shared: list[SharedSlot] = slots
        self.observations, self.rewards = np.zeros(seats, self._type), np.zeros(seats, np.float32)
        self.present = np.zeros(seats, bool)
        size = self.agents.state_space.shape[0] if self.with_states else 0
        self.states = np.zeros((seats, size), np.float32)
        if self.with_states:
            self.states[:, -self.num_agents :] = np.tile(np.eye(self.num_agents), (len(ids), 1))
        for place in range(len(ids)):
            self._show(place)
        self.num_steps = np.array([slot.num_steps for slot in slots], np.int64).repeat(self.num_agents)

    def _show(self, place: int) -> None:
        """Arrays are those of the environment at ``place``."""
        slot, seats = self._shared[place], self._seats(place)
        self.observations[seats], self.present[seats] = slot.observation, slot.present
        if self.with_states:
            self.states[seats, : -self.num_agents] = slot.state()

    def _seats(self, place: int) -> slice:
        return slice(place * self.num_agents, (place + 1) * self.num_agents)

    def step(self, live: Sequence[int], actions: Array) -> list[Ended]:
        """See ``Slots.step``; ``live`` are the seats of everybody who is there in the environments to step."""
        ended, seats = list[Ended](), np.asarray(live, np.int64)
        given = np.zeros((len(self.present), *actions.shape[1:]), actions.dtype)
        given[seats] = actions
        for place in np.unique(seats // self.num_agents).tolist():
            slot, own = self._shared[place], self._seats(place)
            going = slot.step(given[own])
            self.rewards[own] = slot.rewards
            self._show(place)
            ended += self._ended(place, going)
            if not slot.present.any() and self.restart:
                slot.begin(slot.episode + 1)
                self._show(place)
        return ended

    def _ended(self, place: int, going: Sequence[tuple[int, bool, bool]]) -> list[Ended]:
        """Pieces that end, the last of them with the episode of the environment if nobody is left."""
        slot, ended = self._shared[place], list[Ended]()
        for number, (agent, terminated, truncated) in enumerate(going, 1):
            seat = place * self.num_agents + agent
            state = self.states[seat].copy() if self.with_states else None
            last = number == len(going) and not slot.present.any()
            episode = self._episode(slot) if last else None
            ended.append(Ended(seat, slot.observation[agent], terminated, truncated, episode, state))
        return ended

    def _episode(self, slot: SharedSlot) -> Episode:
        by_agent = dict(zip(self.agents.names, slot.returns.tolist(), strict=True))
        return Episode(sum(by_agent.values()), len(slot.actions), by_agent)


def _kind(space: Any) -> str:
    return type(space).__name__


def _box(size: int) -> Any:
    from gymnasium.spaces import Box

    return Box(-np.inf, np.inf, (size,), np.float32)


def _discrete(number: int) -> Any:
    from gymnasium.spaces import Discrete

    return Discrete(number)
