"""Slots that child processes step side by side, for environments that take longer than talking to a process.

    sampler ──actions──> child 0: slots 0, 2, 4 ...      by a pipe
            ──actions──> child 1: slots 1, 3, 5 ...
            <──rewards, ends of episodes──               by the same pipe
            <══observations══                            in memory that all of them map

Children run ``Slots``, so seeds, restarts and what is saved are the same for any number of them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.core.batch import Array
from hybridflow.core.errors import WorkerError
from hybridflow.data.agents import SharedSlots, agents_of
from hybridflow.data.envs import EnvironmentConfig, entry_types
from hybridflow.data.slots import Ended, Slots

__all__ = ["SlotProcesses", "make_slots"]

Spaces = tuple[Any, Any]
START_S = 120.0
"""what a child may take at least to import and make its environments"""


def make_slots(
    config: EnvironmentConfig,
    seed: int,
    spaces: Spaces,
    purpose: str = "env",
    restart: bool = True,
    with_states: bool = False,
) -> Slots | SlotProcesses:
    """Slots in this process or, with ``config.processes``, in others; ``with_states``: see ``SharedSlots``."""
    return (SlotProcesses if config.processes else _slots)(config, seed, spaces, purpose, restart, with_states)


def _slots(config: EnvironmentConfig, seed: int, spaces: Spaces, purpose: str, restart: bool, with_states: bool) -> Slots:
    if config.shared:
        return SharedSlots(config, seed, spaces, purpose, restart, with_states)
    return Slots(config, seed, spaces, purpose, restart)


class SlotProcesses:
    """What ``Slots`` is, with the environments in ``config.processes`` children: slot number i in child i modulo those.

    Children start with the first ``open``. An error of an environment is raised here; a child that dies, or is
    silent for ``config.timeout_s``, is a WorkerError.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        seed: int,
        spaces: Spaces,
        purpose: str = "env",
        restart: bool = True,
        with_states: bool = False,
    ) -> None:
        self.config, self._arguments = config, (config, seed, spaces, purpose, restart, with_states)
        self.agents = agents_of(config) if config.shared else None
        self.num_agents = 1 if self.agents is None else len(self.agents.names)
        self.present: Array | None = None
        self.states: Array = np.zeros((0, 0), np.float32)
        self._type = entry_types(spaces)["observations"]
        self.observations: Array = np.zeros(0, self._type.base)
        self._children: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for number in range(self.config.processes):
            here, there = context.Pipe()
            name = f"environments-{number}"
            child = context.Process(target=_serve, args=(there, *self._arguments), daemon=True, name=name)
            child.start()
            there.close()
            self._children.append(child)
            self._pipes.append(here)

    def open(self, ids: Sequence[int], saved: Mapping[int, Mapping[str, Any]]) -> None:
        """See ``Slots.open``."""
        if not self._children:
            self._start()
        count, each = len(self._pipes), self.num_agents
        own = [slot for slot in ids for _ in range(each)]
        places = [[place for place, slot in enumerate(own) if slot % count == child] for child in range(count)]
        self._home = [(slot % count, places[slot % count].index(place)) for place, slot in enumerate(own)]
        self._places, self.rewards = places, np.zeros(len(own), np.float32)
        with tempfile.NamedTemporaryFile(dir=_memory()) as file:  # whoever has mapped it keeps it
            self.observations = np.memmap(file.name, self._type.base, "w+", shape=(max(1, len(own)), *self._type.shape))
            for child, theirs in enumerate(places):
                numbers = [own[place] for place in theirs[::each]]
                begun = {slot: saved[slot] for slot in numbers if slot in saved}
                self._send(child, ("open", numbers, begun, file.name, self.observations.shape, theirs))
            counts = [self._answer(child, START_S) for child in range(count)]
        self.observations = self.observations[: len(own)]
        self.num_steps = np.zeros(len(own), np.int64)
        if self.agents is not None:
            self.present = np.zeros(len(own), bool)
            self.states = np.zeros((len(own), *self.agents.state_space.shape), np.float32)
        for child, (steps, there) in enumerate(counts):
            self.num_steps[places[child]] = steps
            self._take(child, there)

    def _take(self, child: int, there: tuple[Array, Array | None] | None) -> None:
        """Who is there, and what a centralised critic sees, in the environments of ``child``."""
        if there is not None and self.present is not None:
            places, (present, states) = self._places[child], there
            self.present[places] = present
            if states is not None:
                self.states[places] = states

    def step(self, live: Sequence[int], actions: Array) -> list[Ended]:
        """See ``Slots.step``."""
        rows: dict[int, list[int]] = {}
        for row, place in enumerate(live):
            rows.setdefault(self._home[place][0], []).append(row)
        for child, own in rows.items():
            self._send(child, ("step", [self._home[live[row]][1] for row in own], actions[own]))
        ended: list[Ended] = []
        for child, own in rows.items():
            rewards, ends, there = self._answer(child)
            self._take(child, there)
            self.rewards[[live[row] for row in own]] = rewards
            ended += [end._replace(place=self._places[child][end.place]) for end in ends]
        return sorted(ended, key=lambda end: end.place)

    def state_dicts(self) -> dict[int, dict[str, Any]]:
        """See ``Slots.state_dicts``."""
        for child in range(len(self._pipes)):
            self._send(child, ("state_dicts",))
        states = [self._answer(child) for child in range(len(self._pipes))]
        return {slot: state for part in states for slot, state in part.items()}

    def release(self, ids: Sequence[int]) -> None:
        """See ``Slots.release``."""
        count = len(self._pipes)
        for child in range(count):
            self._send(child, ("release", [slot for slot in ids if slot % count == child]))
        for child in range(count):
            self._answer(child)

    def close(self) -> None:
        """Close the environments and end the children."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(5)
            child.kill()
        self._children.clear()
        self._pipes.clear()

    def _send(self, child: int, message: tuple[Any, ...]) -> None:
        try:
            self._pipes[child].send(message)
        except BrokenPipeError as error:
            raise self._died(child) from error

    def _answer(self, child: int, at_least_s: float = 0.0) -> Any:
        patience_s = max(at_least_s, self.config.timeout_s)
        try:
            if not self._pipes[child].poll(patience_s):
                raise self._hangs(child, patience_s)
            answer = self._pipes[child].recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died(child) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _hangs(self, child: int, patience_s: float) -> WorkerError:
        self._children[child].kill()
        who = f"environment {self.config.id!r}: process {child} of {len(self._pipes)}"
        return WorkerError(f"{who} did not answer for {patience_s:g} s (environment.timeout_s)")

    def _died(self, child: int) -> WorkerError:
        self._children[child].join(1)
        code = self._children[child].exitcode
        return WorkerError(f"environment {self.config.id!r}: process {child} of {len(self._pipes)} died, exit code {code}")


def _memory() -> str | None:
    """Where files are memory; None for the usual temporary folder."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _serve(pipe: Connection, *arguments: Any) -> None:
    """A child: does what it is told until the pipe closes."""
    child = _Child(*arguments)
    while True:
        try:
            what, *given = pipe.recv()
        except EOFError:
            break
        try:
            answer = getattr(child, what)(*given)
        except Exception as error:  # the sampler raises it
            answer = error
        pipe.send(answer)
    child.slots.close()


class _Child:
    """The slots of a child, and where it shows their observations."""

    def __init__(
        self, config: EnvironmentConfig, seed: int, spaces: Spaces, purpose: str, restart: bool, with_states: bool
    ) -> None:
        self.slots = _slots(config, seed, spaces, purpose, restart, with_states)
        self._type, self._with_states = entry_types(spaces)["observations"].base, with_states

    def open(self, ids: list[int], saved: Any, path: str, shape: tuple[int, ...], places: list[int]) -> tuple[Any, ...]:
        self.slots.open(ids, saved)
        self._places, self._shown = places, np.memmap(path, self._type, "r+", shape=shape)
        self._shown[places] = self.slots.observations
        return self.slots.num_steps, self._there()

    def _there(self) -> tuple[Array, Array | None] | None:
        present = self.slots.present
        return None if present is None else (present, self.slots.states if self._with_states else None)

    def step(self, live: list[int], actions: Array) -> tuple[Any, ...]:
        ended = self.slots.step(live, actions)
        self._shown[self._places] = self.slots.observations
        return self.slots.rewards[live], ended, self._there()

    def state_dicts(self) -> dict[int, dict[str, Any]]:
        return self.slots.state_dicts()

    def release(self, ids: list[int]) -> None:
        self.slots.release(ids)
