"""The sampler of environments: slots in, pieces of episodes out.

    all slots ──observations [S, ...]──> one forward of the policy ──actions [S]──> one step of every slot

Log-probabilities of all actions are computed together at the end.
A piece ends where its episode ends or where the collection limit cuts it; in the second case neither ``terminated`` nor
``truncated`` is set and the episode goes on in the next rollout. ``final_observations`` is what truly followed the last
step, so pieces that did not terminate bootstrap from it. Which numbers a row is drawn from depends on its slot and on the
slot's own counters, never on how slots are dealt to workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP
from hybridflow.core.batch import Array, Batch
from hybridflow.core.config import Config
from hybridflow.core.errors import ContractError, DataError, NonFiniteError
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext, control, remote
from hybridflow.core.seeding import uniforms
from hybridflow.data.envs import EVALUATION, EnvironmentConfig, spaces_of
from hybridflow.data.slot_processes import make_slots
from hybridflow.data.slots import Episode
from hybridflow.workers.rollout_steps import Ending, RolloutSteps

__all__ = ["EnvSampler", "ExplorationConfig", "NetworkSource"]

PIECES_PER_SEAT = 10**9
MAX_EVALUATION_STEPS = 10**6
WRITES = (
    "sample_id",
    "observations",
    "actions",
    "rewards",
    "log_probs",
    "response_mask",
    "terminated",
    "truncated",
    "final_observations",
    "policy_version",
)

Ints = NDArray[np.int64]


class NetworkSource(Protocol):
    """Where the sampler reads its policy, the network ``main``: the learner of the same process, or a replica of one
    elsewhere."""

    main: str
    networks: dict[str, torch.nn.Module]
    version: int


class ExplorationConfig(Config):
    """Keys of ``[exploration]``. Discrete actions: epsilon-greedy, where the chance of a uniformly drawn action falls
    linearly from 1 over the steps of all environments. Continuous ones: normal noise."""

    epsilon_end: float = Field(0.05, ge=0, le=1)
    """chance after the decay"""
    epsilon_decay_steps: int = Field(10_000, ge=1)
    """steps, over all environments together, in which it falls"""
    noise: float = Field(0.1, gt=0)
    """for td3 and ddpg: deviation of what is added to actions, in units of half the width of their bounds"""

    def epsilon(self, steps: Array) -> Array:
        """Chance of a uniform action after ``steps`` steps of all environments."""
        progress = np.minimum(steps / self.epsilon_decay_steps, 1.0)
        epsilon: Array = 1.0 + (self.epsilon_end - 1.0) * progress
        return epsilon


class EnvSampler:
    """Steps environments with the policy of the source that ``attach`` names.

    With ``exploration`` the policy is epsilon-greedy, with ``noise`` normal numbers of that deviation are added to its
    actions. Rollouts that begin within the first ``random_steps`` of all environments draw actions evenly within bounds.
    ``memory_size``: M, the numbers that the policy remembers of an episode; those of a slot go with its environment.
    ``max_piece``: a piece is cut after so many steps, as by the limit of a rollout, so that what it began with is known of
    every sequence that is replayed; 0: it isn't.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: EnvironmentConfig,
        seed: int,
        exploration: ExplorationConfig | None = None,
        noise: float = 0.0,
        random_steps: int = 0,
        with_states: bool = False,
        memory_size: int = 0,
        max_piece: int = 0,
    ) -> None:
        self.context, self.config, self.seed, self.exploration = context, config, seed, exploration
        self.noise, self.random_steps, self.memory_size, self.max_piece = noise, random_steps, memory_size, max_piece
        self.spaces = spaces_of(config)
        self.slots, self.with_states = make_slots(config, seed, self.spaces, with_states=with_states), with_states
        self._num_pieces: dict[int, Ints] = {}
        self._memory: dict[int, Array] = {}
        self._saved: dict[int, Mapping[str, Any]] = {}

    def attach(self, source: NetworkSource) -> None:
        """Act with the networks of ``source``, read in place at every step."""
        self.source = source

    @remote(
        THREE_D_ALL_MICRO_DP,
        reads=("slot", "num_steps"),
        writes=lambda args: (
            *WRITES,
            *(("states", "final_states") if args.get("with_states") else ()),
            *(("memory",) if args.get("memory_size") else ()),
        ),
        rows="new",
        kind="generate",
    )
    @torch.no_grad()
    def rollout(self, batch: Batch, /) -> Batch:
        """``num_steps`` steps of every ``slot``, one row a piece, ordered by slot, agent and time.

        ``sample_id`` is seat * 10^9 + the number of the seat's piece; agent k of A in slot s has seat s * A + k. A reward
        or an observation that isn't finite is a NonFiniteError.
        """
        order = np.argsort(batch["slot"], kind="stable")
        slots, num_steps = batch["slot"][order], batch["num_steps"][order]
        if len(np.unique(slots)) < len(slots):
            raise ContractError(f"rollout: a slot is named twice: {slots.tolist()}")
        saved = {index: self._saved[index]["state"] for index in slots.tolist() if index in self._saved}
        self.slots.open(slots.tolist(), saved)
        ids, states = self._seats(slots), self.slots.states if self.with_states else None
        steps = RolloutSteps(num_steps.repeat(self.slots.num_agents), self.spaces, states)
        drawn, epsilon = self._drawn(ids, steps)
        steps.at_random = self.slots.num_steps * self.config.num_envs < self.random_steps
        any_at_random = bool(steps.at_random.any())
        steps.begun = np.array([self._memory_of(index) for index in slots.tolist()], np.float32)
        steps.begun = steps.begun.reshape(len(ids), self.memory_size)
        memory, network = self._tensor(steps.begun.copy()), self._network
        for t, uniform in enumerate(drawn.unbind(1)):
            self.context.breathe()
            live, where = steps.live(t, self.slots.present)
            observations = self.slots.observations[where]
            seen, uniform = torch.from_numpy(observations).to(drawn.device), uniform[where]
            if self.memory_size:
                distribution, memory[where] = network.step(seen, memory[where])
            else:
                distribution = network.distribution(seen)
            distribution = self._exploring(distribution, None if epsilon is None else epsilon[where, t])
            actions = distribution.sample(uniform).cpu().numpy()
            if any_at_random and (at_random := steps.at_random[where]).any():
                actions[at_random] = distribution.bounds.fill(uniform[at_random]).cpu().numpy()
            steps.record(t, where, observations, actions, distribution)
            if self.with_states:
                steps.states[t, where] = self.slots.states[where]
            ended = self.slots.step(live, actions)
            steps.rewards[t, where] = self.slots.rewards[where]
            for end in ended:
                steps.ends[end.place, t] = Ending(end.observation, end.terminated, end.truncated, end.state)
                memory[end.place], steps.since[end.place] = 0, t + 1
                self._count(end.episode)
            for place in live if self.max_piece else ():
                if t + 1 - steps.since[place] >= self.max_piece:
                    steps.cut(place, t, self.slots, memory[place])
        pieces = steps.pieces(self._number(slots), self.slots.observations, self.slots.states, self.source.version)
        given = steps.num_pieces.reshape(len(slots), self.slots.num_agents)
        kept = memory.cpu().numpy().reshape(len(slots), self.slots.num_agents, self.memory_size)
        for place, index in enumerate(slots.tolist()):
            self._num_pieces[index], self._memory[index] = self._num_pieces_of(index) + given[place], kept[place]
        self._check_finite(pieces)
        self.context.metrics.count("steps", int(num_steps.sum()))
        return pieces

    def _drawn(self, ids: Ints, steps: RolloutSteps) -> tuple[torch.Tensor, Array | None]:
        """For every slot and step the uniform numbers [S, T, numbers of an action], and the chance to explore [S, T]."""
        counts = self.slots.num_steps[:, None] + np.arange(steps.width)
        width = math.prod(steps.types["actions"].shape)
        places = counts[:, :, None] * width + np.arange(width)
        drawn = torch.from_numpy(uniforms(self.seed, "act", ids[:, None, None], places)).to(self._network.device)
        if self.exploration is None:
            return drawn, None
        epsilon = self.exploration.epsilon(counts * self.config.num_envs)
        taken = epsilon[np.arange(steps.width) < steps.num_steps[:, None]]
        self.context.metrics.add("epsilon", float(taken.sum()), len(taken))
        return drawn, epsilon

    def _seats(self, slots: Ints) -> Ints:
        """Numbers of all seats in these slots."""
        seats: Ints = (slots[:, None] * self.slots.num_agents + np.arange(self.slots.num_agents)).reshape(-1)
        return seats

    def _number(self, slots: Ints) -> Ints:
        """The ``sample_id`` of the next piece of every seat."""
        given = [self._num_pieces_of(index) for index in slots.tolist()]
        return self._seats(slots) * PIECES_PER_SEAT + np.array(given, np.int64).reshape(-1)

    def _num_pieces_of(self, index: int) -> Ints:
        """How many pieces each seat of the slot has given, over its life."""
        none = {"num_pieces": np.zeros(self.slots.num_agents, np.int64)}
        saved: Ints = self._saved.get(index, none)["num_pieces"]
        return self._num_pieces.get(index, saved)

    def _memory_of(self, index: int) -> Array:
        """[A, M] what the policy remembers of each agent's running episode."""
        none = {"memory": np.zeros((self.slots.num_agents, self.memory_size), np.float32)}
        saved: Array = self._saved.get(index, none)["memory"]
        return self._memory.get(index, saved)

    def _count(self, episode: Episode | None) -> None:
        """An episode of an environment into the metrics, if one has ended."""
        if episode is not None:
            self.context.metrics.add("episode_return", episode.episode_return)
            self.context.metrics.add("episode_length", episode.episode_length)
            for name, own in episode.by_agent.items():
                self.context.metrics.add(f"episode_return/{name}", own)

    @property
    def _network(self) -> Any:
        return self.source.networks[self.source.main]

    def _exploring(self, distribution: Any, epsilon: Array | None) -> Any:
        """What actions are drawn from."""
        if epsilon is not None:
            return distribution.explore(_like(epsilon, distribution.log_probabilities))
        return distribution.noisy(self.noise) if self.noise else distribution

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._network.device)

    def _check_finite(self, pieces: Batch) -> None:
        for name in ("rewards", "observations"):
            column = pieces.ragged(name)
            finite = np.isfinite(column.values).all(axis=tuple(range(1, column.values.ndim)))
            if not finite.all():
                samples = ", ".join(map(str, np.unique(pieces["sample_id"][column.row_index[~finite]])[:8]))
                raise NonFiniteError(f"environment {self.config.id!r} gave {name} that aren't finite, samples {samples}")

    @control
    @torch.no_grad()
    def evaluate(self, num_episodes: int, options: Mapping[str, Any] | None = None) -> list[Episode]:
        """Whole episodes under the policy's mode, in fresh environments with these further ``options``: episode i is
        always the same one, and none of those that are trained on.

        DataError if an episode doesn't end within 10^6 steps.
        """
        config = self.config.with_options(options or {})
        slots, played = make_slots(config, self.seed, self.spaces, EVALUATION, restart=False), dict[int, Episode]()
        slots.open(range(num_episodes), {})
        each, there = slots.num_agents, slots.present
        live = list(range(num_episodes * each))
        memory = self._tensor(np.zeros((len(live), self.memory_size), np.float32))
        try:
            for _ in range(MAX_EVALUATION_STEPS):
                if there is not None:
                    live = np.flatnonzero(there).tolist()
                distribution, memory[live] = self._network.step(self._tensor(slots.observations[live]), memory[live])
                ended = slots.step(live, distribution.mode.cpu().numpy())
                played |= {end.place // each: end.episode for end in ended if end.episode is not None}
                live = [place for place in live if place // each not in played]
                if len(played) == num_episodes:
                    return [played[index] for index in range(num_episodes)]
        finally:
            slots.close()
        raise DataError(
            f"environment {self.config.id!r}: an episode did not end within {MAX_EVALUATION_STEPS} steps; "
            "set max_episode_steps among the environment's options"
        )

    @control(ONE_TO_ALL)
    def state_dict(self) -> list[dict[str, Any]]:
        """``slot`` and ``state`` of every slot that this rank has, and of the saved ones that it has yet to be dealt."""
        states = {index: dict(self._saved[index]) for index in self._saved if self._is_mine(index)}
        for index, state in self.slots.state_dicts().items():
            states[index] = {"num_pieces": self._num_pieces_of(index), "state": state, "memory": self._memory_of(index)}
        return [{"slot": index, **states[index]} for index in sorted(states)]

    def _is_mine(self, index: int) -> bool:
        """Whether this rank is dealt the slot when a rollout names all of them; rank 0 keeps those that it doesn't name."""
        mesh, rank = self.context.mesh, self.context.rank
        if index >= self.config.num_envs or rank >= mesh.size:
            return rank == 0
        return index in THREE_D_ALL_MICRO_DP.distribute(np.ones(self.config.num_envs, np.int64), mesh)[rank]

    @control
    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue where the slots stood, given those of all ranks, of however many: see ``state_dict``."""
        self.close()
        self._saved = _by_slot(state)

    def hand_over(self, mesh: Mesh, /) -> list[dict[str, Any]]:
        """See ``HandsOver``: of the slots that another rank is dealt from now on."""
        held = {state["slot"]: state for state in self.state_dict()}
        self.context.mesh = mesh
        gone = [index for index in held if not self._is_mine(index)]
        for index in gone:
            self._num_pieces.pop(index, None)
            self._memory.pop(index, None)
        self.slots.release(gone)
        return [held[index] for index in gone]

    def take_over(self, states: Sequence[Mapping[str, Any]], /) -> None:
        """See ``HandsOver``: running episodes are played again up to where they stood."""
        self._saved |= _by_slot([state for state in states if self._is_mine(state["slot"])])

    @control
    def close(self) -> None:
        """Close the environments."""
        self.slots.close()
        self._num_pieces.clear()
        self._memory.clear()
        self._saved.clear()


def _by_slot(states: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {saved["slot"]: {name: saved[name] for name in ("num_pieces", "state", "memory")} for saved in states}


def _like(array: Array, tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(array, dtype=tensor.dtype, device=tensor.device)
