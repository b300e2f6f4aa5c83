"""The sampler of environments: slots in, pieces of episodes out.

    all slots ──observations [S, ...]──> one forward of the policy ──actions [S]──> one step of every slot

A piece ends where its episode ends or where the collection limit cuts it; in the second case neither ``terminated`` nor
``truncated`` is set and the episode goes on in the next rollout. ``final_observations`` is what truly followed the last
step, so pieces that did not terminate bootstrap from it. Which numbers a row is drawn from depends on its slot and on the
slot's own counters, never on how slots are dealt to workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP
from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.config import Config
from hybridflow.core.errors import ContractError, DataError, NonFiniteError
from hybridflow.core.roles import WorkerContext, control, remote
from hybridflow.core.seeding import uniforms
from hybridflow.data.envs import EnvironmentConfig, Slot, entry_types, spaces_of

__all__ = ["EnvSampler", "ExplorationConfig", "NetworkSource"]

PIECES_PER_SLOT = 10**9
MAX_EVALUATION_STEPS = 10**6

Ints = NDArray[np.int64]


class NetworkSource(Protocol):
    """Where the sampler reads its policy: the learner of the same process, or a replica of one elsewhere."""

    networks: dict[str, torch.nn.Module]
    version: int


class ExplorationConfig(Config):
    """Epsilon-greedy: the chance of a uniformly drawn action falls linearly over the steps of all environments."""

    epsilon_start: float = Field(1.0, ge=0, le=1)
    """chance at the first step"""
    epsilon_end: float = Field(0.05, ge=0, le=1)
    """chance after the decay"""
    epsilon_decay_steps: int = Field(10_000, ge=1)
    """steps, over all environments together, in which it falls"""

    def epsilon(self, steps: Array) -> Array:
        """Chance of a uniform action after ``steps`` steps of all environments."""
        progress = np.minimum(steps / self.epsilon_decay_steps, 1.0)
        epsilon: Array = self.epsilon_start + (self.epsilon_end - self.epsilon_start) * progress
        return epsilon


class EnvSampler:
    """Steps environments with the policy of the source that ``attach`` names.

    With ``exploration`` the policy is epsilon-greedy in the network "q", otherwise it is the network "policy".
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: EnvironmentConfig,
        seed: int,
        exploration: ExplorationConfig | None = None,
    ) -> None:
        self.context, self.config, self.seed, self.exploration = context, config, seed, exploration
        self.spaces = spaces_of(config)
        self._slots: dict[int, Slot] = {}
        self._saved: dict[int, Mapping[str, Any]] = {}

    def attach(self, source: NetworkSource) -> None:
        """Act with the networks of ``source``, read in place at every step."""
        self.source = source

    @remote(
        THREE_D_ALL_MICRO_DP,
        reads=("slot", "num_steps"),
        writes=(
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
        ),
        rows="new",
        kind="generate",
    )
    def rollout(self, batch: Batch, /) -> Batch:
        """``num_steps`` steps of every ``slot``, one row a piece, ordered by slot and time.

        ``sample_id`` is slot * 10^9 + the number of the slot's piece. A reward that isn't finite is a NonFiniteError.
        """
        order = np.argsort(batch["slot"], kind="stable")
        ids, num_steps = batch["slot"][order], batch["num_steps"][order]
        if len(np.unique(ids)) < len(ids):
            raise ContractError(f"rollout: a slot is named twice: {ids.tolist()}")
        slots = [self._slot(int(i)) for i in ids]
        steps = _Steps(len(slots), int(num_steps.max(initial=0)), self.spaces)
        for t in range(steps.width):
            self.context.breathe()
            self._step(slots, np.flatnonzero(num_steps > t), t, steps)
        for index, slot in enumerate(slots):
            steps.cut(index, int(num_steps[index]), slot)
        pieces = steps.pieces(num_steps, self.source.version)
        self._check_rewards(pieces)
        self.context.metrics.count("steps", int(num_steps.sum()))
        return pieces

    def _slot(self, index: int) -> Slot:
        """Slots are made when they are first asked for, where they stood if they were saved: a worker holds those that it
        is dealt. CheckpointError if an environment can't be brought back there."""
        if index not in self._slots:
            slot = Slot(self.config, self.seed, index)
            if index in self._saved:
                slot.load_state_dict(self._saved[index])
            self._slots[index] = slot
        return self._slots[index]

    def _step(self, slots: list[Slot], live: Ints, t: int, steps: _Steps) -> None:
        """Step the ``live`` slots once and record it as their step ``t``."""
        observations = np.stack([slots[index].observation for index in live])
        actions, log_probs = self._act(observations, [slots[index] for index in live])
        steps.observations[live, t], steps.actions[live, t], steps.log_probs[live, t] = observations, actions, log_probs
        for index, action in zip(live.tolist(), actions, strict=True):
            slot = slots[index]
            transition = slot.step(action)
            steps.rewards[index, t] = transition.reward
            if transition.terminated or transition.truncated:
                steps.end(index, t, slot, transition.terminated, transition.truncated)
                self.context.metrics.add("episode_return", slot.episode_return)
                self.context.metrics.add("episode_length", len(slot.actions))
                slot.begin(slot.episode + 1)

    @torch.no_grad()
    def _act(self, observations: Array, slots: list[Slot]) -> tuple[Array, Array]:
        """Actions and their log-probabilities, [S, ...] and [S]."""
        counts = np.array([slot.num_steps for slot in slots])
        distribution = self._distribution(observations)
        if self.exploration:
            epsilon = self.exploration.epsilon(counts * self.config.num_envs)
            self.context.metrics.add("epsilon", float(epsilon.sum()), len(epsilon))
            distribution = distribution.explore(_like(epsilon, distribution.log_probabilities))
        width = distribution.num_uniforms
        ids, places = np.array([slot.slot for slot in slots])[:, None], counts[:, None] * width + np.arange(width)
        drawn = torch.from_numpy(uniforms(self.seed, "act", ids, places)).to(self._network.device)
        actions = distribution.sample(drawn)
        return actions.cpu().numpy(), distribution.log_prob(actions).float().cpu().numpy()

    @property
    def _network(self) -> Any:
        return self.source.networks["q" if self.exploration else "policy"]

    def _distribution(self, observations: Array) -> Any:
        return self._network.distribution(torch.from_numpy(observations).to(self._network.device))

    def _check_rewards(self, pieces: Batch) -> None:
        rewards = pieces.ragged("rewards")
        bad = rewards.row_index[~np.isfinite(rewards.values)]
        if len(bad):
            samples = ", ".join(map(str, np.unique(pieces["sample_id"][bad])[:8]))
            raise NonFiniteError(f"environment {self.config.id!r} gave a reward that is NaN or infinite, samples {samples}")

    @control
    def evaluate(self, num_episodes: int) -> list[float]:
        """Returns of whole episodes under the policy's mode, in fresh environments: episode i is always the same one.

        DataError if an episode doesn't end within 10^6 steps.
        """
        slots = [Slot(self.config, self.seed, index, "eval-env") for index in range(num_episodes)]
        live = slots
        for _ in range(MAX_EVALUATION_STEPS):
            live = self._advance(live)
            if not live:
                return [slot.episode_return for slot in slots]
        raise DataError(
            f"environment {self.config.id!r}: an episode did not end within {MAX_EVALUATION_STEPS} steps; "
            "set max_episode_steps among the environment's options"
        )

    @torch.no_grad()
    def _advance(self, slots: list[Slot]) -> list[Slot]:
        """One greedy step of every slot; those whose episode goes on."""
        if not slots:
            return []
        actions = self._distribution(np.stack([slot.observation for slot in slots])).mode.cpu().numpy()
        going = []
        for slot, action in zip(slots, actions, strict=True):
            transition = slot.step(action)
            if transition.terminated or transition.truncated:
                slot.close()
            else:
                going.append(slot)
        return going

    @control(ONE_TO_ALL)
    def state_dict(self) -> list[dict[str, Any]]:
        """``slot`` and ``state`` of every slot that this rank has, and of the saved ones that it has yet to be dealt."""
        states = {index: self._saved[index] for index in self._saved if self._is_mine(index)}
        states |= {index: slot.state_dict() for index, slot in self._slots.items()}
        return [{"slot": index, "state": states[index]} for index in sorted(states)]

    def _is_mine(self, index: int) -> bool:
        """Whether this rank is dealt the slot when a rollout names all of them; rank 0 keeps those that it doesn't name."""
        if index >= self.config.num_envs:
            return self.context.rank == 0
        dealt = THREE_D_ALL_MICRO_DP.distribute(np.ones(self.config.num_envs, np.int64), self.context.mesh)
        return index in dealt[self.context.rank]

    @control
    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue where the slots stood, given those of all ranks, of however many: see ``_slot``."""
        self.close()
        self._saved = {saved["slot"]: saved["state"] for saved in state}

    @control
    def close(self) -> None:
        """Close the environments."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._saved.clear()


class _Ending(NamedTuple):
    """How a piece ended."""

    sample_id: int
    observation: Array
    terminated: bool
    truncated: bool


class _Steps:
    """What one rollout records: arrays [S, T, ...] of steps, and the endings of pieces by (index of the slot, step)."""

    def __init__(self, num_slots: int, width: int, spaces: tuple[Any, Any]) -> None:
        shape, self.width, self.types = (num_slots, width), width, entry_types(spaces)
        self.observations = np.zeros(shape, self.types["observations"])
        self.actions = np.zeros(shape, self.types["actions"])
        self.rewards, self.log_probs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.endings: dict[tuple[int, int], _Ending] = {}

    def end(self, index: int, t: int, slot: Slot, terminated: bool, truncated: bool) -> None:
        """A piece ends with step ``t``; the slot still shows what followed it."""
        sample_id = slot.slot * PIECES_PER_SLOT + slot.num_pieces
        slot.num_pieces += 1
        self.endings[index, t] = _Ending(sample_id, slot.observation, terminated, truncated)

    def cut(self, index: int, num_steps: int, slot: Slot) -> None:
        """The collection limit: whatever has not ended by then ends as a piece of an episode that goes on."""
        if num_steps and (index, num_steps - 1) not in self.endings:
            self.end(index, num_steps - 1, slot, False, False)

    def pieces(self, num_steps: Ints, version: int) -> Batch:
        """One row a piece; slot ``index`` has taken ``num_steps[index]`` steps."""
        ends = sorted(self.endings)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_steps)])
        lengths = np.diff([starts[index] + t + 1 for index, t in ends], prepend=0).astype(np.int64)
        taken = np.arange(self.width) < num_steps[:, None]
        count = int(taken.sum())
        endings = [self.endings[end] for end in ends]
        final = np.zeros(len(ends), self.types["final_observations"])
        for index, ending in enumerate(endings):
            final[index] = ending.observation
        return Batch(
            {
                "sample_id": np.array([ending.sample_id for ending in endings], np.int64),
                "observations": Ragged(self.observations[taken], lengths),
                "actions": Ragged(self.actions[taken], lengths),
                "rewards": Ragged(self.rewards[taken], lengths),
                "log_probs": Ragged(self.log_probs[taken], lengths),
                "response_mask": Ragged(np.ones(count, bool), lengths),
                "policy_version": Ragged(np.full(count, version, np.int64), lengths),
                "terminated": np.array([ending.terminated for ending in endings], bool),
                "truncated": np.array([ending.truncated for ending in endings], bool),
                "final_observations": final,
            }
        )


def _like(array: Array, tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(array, dtype=tensor.dtype, device=tensor.device)
