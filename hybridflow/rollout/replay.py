"""Experience replay: an index that says what is held and what is drawn, and rows that may lie elsewhere.

    batch ──> index (this process): numbers, rewards, ends, priorities
          ──> rows (a role of one or several worker processes): observations, actions, what followed
    draw: the index names places; whoever learns gets their rows from where they lie

The index is a pure function of what was added and of (seed, number of the draw), so how many processes hold the rows, and
whether they lie in memory or in files, changes nothing of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.config import Config
from hybridflow.core.errors import CheckpointError
from hybridflow.core.metrics import Metrics
from hybridflow.core.seeding import uniforms
from hybridflow.rollout.buffer import Dropped
from hybridflow.rollout.replay_layout import Cut, cut
from hybridflow.rollout.sum_tree import SumTree

__all__ = ["REPLAYED", "SAMPLED", "Replay", "ReplayConfig", "ReplayRows"]

REPLAYED = (
    "sample_id",
    "observations",
    "actions",
    "rewards",
    "response_mask",
    "terminated",
    "truncated",
    "final_observations",
)
"""What a replay buffer reads of a batch; of policies with a memory "memory", too."""

SAMPLED = ("sample_id", "observations", "actions", "rewards", "response_mask", "discounts", "weights", "final_observations")
"""What it gives; for networks with a memory "memory", too."""

INDEXED = ("sample_id", "rewards", "response_mask", "terminated", "truncated")
"""What the index reads of it, in the driver."""

COUNTERS = ("num_added", "num_steps", "num_given", "num_draws")

SMALLEST_ERROR = 1e-6
"""added to TD errors, so that everything is drawn now and then"""

NOTHING = Batch({}, 0)


class ReplayConfig(Config):
    """Keys of ``[replay]``: experience replay."""

    capacity: int = Field(100_000, ge=1)
    """transitions kept; the oldest are overwritten"""
    batch_size: int = Field(128, ge=1)
    """transitions (or sequences) of one update"""
    sequence: int = Field(1, ge=1)
    """steps in a row that a network with a memory learns from together, from the memory that it had there (R2D2)"""
    warmup: int = Field(1_000, ge=1)
    """transitions collected before the first update; sac, td3 and ddpg draw their continuous actions evenly meanwhile"""
    n_steps: int = Field(1, ge=1)
    """steps whose rewards are added up before a value is bootstrapped"""
    priority: float = Field(0.0, ge=0)
    """draw in proportion to this power of the TD error, prioritised replay; 0: all alike"""
    importance: float = Field(0.4, ge=0, le=1)
    """power of the weights that make up for it; it rises to 1 over the run"""
    samples_per_insert: float | None = Field(None, gt=0)
    """instead of train.updates_per_step: how often each transition after the warmup is drawn, on average"""
    dataset: str | None = None
    """what the buffer begins with: a Minari dataset, by its folder or its id"""
    shards: int = Field(1, ge=1)
    """worker processes of the role replay that share the rows out, of as many as its pool has"""
    spill: str | None = None
    """a folder in whose disk space the rows lie, instead of in memory: for buffers that are larger than it"""

    @property
    def num_units(self) -> int:
        """Transitions, or sequences, for which there is room."""
        return max(1, self.capacity // self.sequence)

    @property
    def draw_steps(self) -> int:
        """Transitions of one draw; of sequences, at most."""
        return self.batch_size * self.sequence


class ReplayRows(Protocol):
    """Where the rows lie. ``insert``: the units of a batch, the first of which has this number. ``steps`` and ``finals``:
    ``observations`` and ``actions``, or ``final_observations``, of the units at these places of the ring."""

    def insert(self, batch: Batch, first: int, /) -> Batch: ...
    def steps(self, batch: Batch, places: Array, lengths: Array, /) -> Batch: ...
    def finals(self, batch: Batch, places: Array, /) -> Batch: ...


class Replay:
    """Experience replay (Lin 1992): pieces of episodes become transitions in a ring.

    A sampled row is one transition: time columns of length 1, ``final_observations`` what followed, ``discounts`` what its
    value counts: ``gamma``, or 0 if the episode ended there. ``sample_id`` numbers transitions in the order of adding. A
    sample is ``draws`` draws, one below the other. Draw number n of ``num_draws`` depends on (seed, n) and the contents
    alone.

    With a ``sequence`` of more than one step a row is up to so many steps of one piece, one behind the other, its
    ``sample_id`` numbers such sequences, and ``discounts`` is of what followed the last step. Rewards are single ones;
    whose loss it is adds up those of ``n_steps``. Policies with a memory give the ``memory`` with which its piece began.

    With ``n_steps``, a row's ``rewards`` are r_0 + gamma r_1 + ... of up to so many steps (Sutton 1988): fewer where the
    episode ended, or where no more has been collected yet. A piece that neither terminated nor was truncated goes on in the
    one with the next ``sample_id``.

    With ``priority`` alpha, rows are drawn in proportion to |td_error|^alpha, those never learned from as the largest, and
    weigh (N P)^-beta, over the largest such weight of the batch (Schaul et al. 2016, proportional; beta is ``importance``).
    Of a sequence, 0.9 of the largest and 0.1 of the mean |td_error| count (Kapturowski et al. 2019).

    With ``samples_per_insert``, a draw has to wait until it makes no more rows than that for each that was added after the
    warmup, as in Reverb (Cassirer et al. 2021), and a sample may be fewer draws.

    ``begin``: what the buffer holds before anything is collected.
    """

    def __init__(
        self,
        config: ReplayConfig,
        seed: int,
        gamma: float,
        rows: ReplayRows,
        *,
        num_draws: int = 1,
        draws: int = 1,
        row_bytes: int = 0,
        begin: Callable[[], Iterable[Batch]] = tuple,
    ) -> None:
        self.config, self.seed, self.gamma, self.rows, self.sequence = config, seed, gamma, rows, config.sequence
        self.capacity, self.begin = config.num_units, begin
        self._all_draws, self.draws, self._row_bytes = num_draws, draws, row_bytes
        self.num_added = self.num_steps = self.num_given = self.num_draws = 0
        self._index = self._empty()
        self._going_on: dict[int, int] = {}
        """by the ``sample_id`` with which an episode goes on, its last transition so far"""
        self._tree = SumTree(self.capacity) if config.priority else None
        self._largest, self._metrics = 1.0, Metrics()

    def _empty(self) -> dict[str, Array]:
        """What the index has of the unit at each place."""
        steps = (self.capacity,) if self.sequence == 1 else (self.capacity, self.sequence)
        index: dict[str, Array] = {
            "rewards": np.zeros(steps, np.float32),
            "terminated": np.zeros(self.capacity, bool),
            "version": np.zeros(self.capacity, np.int64),
        }
        if self.sequence > 1:
            index["lengths"] = np.zeros(self.capacity, np.int64)
        elif self.config.n_steps > 1:
            index["following"] = np.zeros(self.capacity, np.int64)
        return index

    def __len__(self) -> int:
        """Transitions, or sequences, held."""
        return min(self.num_added, self.capacity)

    def add(self, batch: Batch, version: int, /) -> None:
        """Append every action step of ``batch``."""
        self._begin()
        self._add(batch, version)

    def _begin(self) -> None:
        if self.num_added == 0:
            begin, self.begin = self.begin, tuple
            for batch in begin():
                self._add(batch, 0)
            self.num_given = self.num_steps

    def _add(self, batch: Batch, version: int) -> None:
        known = batch.select(INDEXED).load()
        mask = known.ragged("response_mask")
        units = cut(mask, self.sequence)
        new = self._described(known, units, mask, version)
        left_out = max(0, len(units) - self.capacity)
        places = (self.num_added + np.arange(left_out, len(units))) % self.capacity
        for name, values in new.items():
            self._index[name][places] = values[left_out:]
        self.rows.insert(batch, self.num_added)
        if self._tree is not None:
            self._tree.set(places, self._largest)
        self.num_added += len(units)
        self.num_steps += len(units.positions)
        self._metrics.count("inserted", len(units))

    def _described(self, batch: Batch, units: Cut, mask: Ragged, version: int) -> dict[str, Array]:
        """What the index has of new units."""
        unit, within, positions = units.steps()
        rewards = batch.ragged("rewards").values[positions]
        of_last = units.last == mask.offsets[units.rows + 1] - 1
        new = {"terminated": batch["terminated"][units.rows] & of_last, "version": np.full(len(units), version)}
        if self.sequence == 1:
            following = {"following": self._following(batch)} if self.config.n_steps > 1 else {}
            return new | {"rewards": rewards} | following
        new |= {"rewards": np.zeros((len(units), self.sequence), np.float32), "lengths": units.lengths}
        new["rewards"][unit, within] = rewards
        return new

    def _following(self, batch: Batch) -> Array:
        """The number of the transition that follows each new one in its episode, -1 where there is none (yet)."""
        mask = batch.ragged("response_mask")
        counts = np.bincount(mask.row_index[mask.values], minlength=len(batch))
        ends = self.num_added + np.cumsum(counts)
        following = self.num_added + 1 + np.arange(int(counts.sum()))
        following[ends[counts > 0] - 1 - self.num_added] = -1
        goes_on = ~(batch["terminated"] | batch["truncated"])
        for row, sample in enumerate(batch["sample_id"].tolist()):
            last = self._going_on.pop(sample, None)
            if last is not None and counts[row]:
                self._continue(last, int(ends[row] - counts[row]), following)
            if goes_on[row] and counts[row]:
                self._going_on[sample + 1] = int(ends[row]) - 1
        return following

    def _continue(self, last: int, first: int, following: Array) -> None:
        """Transition ``first`` follows ``last``, which is held, among the new ones, or overwritten."""
        if last >= self.num_added:
            following[last - self.num_added] = first
        elif last >= self.num_added - len(self):
            self._index["following"][last % self.capacity] = first

    def sample(self, version: int, /) -> Batch | None:
        """``draws`` times ``batch_size`` transitions or sequences drawn with replacement; None before ``warmup``
        transitions were added, and as long as ``samples_per_insert`` doesn't allow a draw."""
        self._begin()
        draws = self._due()
        if self.num_steps < self.config.warmup or draws <= 0:
            return None
        places, weights = self._draw(draws)
        self.num_draws += draws
        numbers = self._number(places)
        self._metrics.count("drawn", len(places))
        self._metrics.add("age_steps", float((self.num_added - numbers).sum()), len(places))
        self._metrics.add("age_updates", float((version - self._index["version"][places]).sum()), len(places))
        return self._gathered(places, numbers, weights)

    def _due(self) -> int:
        """How many draws the next sample may be."""
        ratio, inserted = self.config.samples_per_insert, self.num_steps - self.config.warmup
        if ratio is None:
            return self.draws
        return min(self.draws, math.floor(ratio * inserted / self.config.draw_steps) - self.num_draws)

    def _gathered(self, places: Array, numbers: Array, weights: Array) -> Batch:
        index = self._index
        lengths = index["lengths"][places] if self.sequence > 1 else np.ones(len(places), np.int64)
        if self.sequence == 1:
            last, rewards, discounts = self._returns(places)
        else:
            last, discounts = places, np.full(len(places), self.gamma, np.float32)
            rewards = index["rewards"][places][np.arange(self.sequence) < lengths[:, None]]
        steps = self.rows.steps(NOTHING, places, lengths)
        return Batch(
            {
                "sample_id": numbers,
                **{name: column for name, column in steps.columns.items() if name != "sample_id"},
                "rewards": Ragged(rewards, lengths),
                "response_mask": Ragged(np.ones(len(rewards), bool), lengths),
                "discounts": np.where(index["terminated"][last], np.float32(0), discounts),
                "weights": weights,
                "final_observations": self.rows.finals(NOTHING, last).columns["final_observations"],
            },
            len(places),
        )

    def _draw(self, draws: int) -> tuple[Array, Array]:
        """Places [B] in the ring, and their weights."""
        size, number = self.config.batch_size, self.num_draws + np.arange(draws)[:, None]
        random = uniforms(self.seed, "replay", number, np.arange(size))
        if self._tree is None:
            return (random * len(self)).astype(np.int64).ravel(), np.ones(random.size, np.float32)
        total = self._tree.total
        places = self._tree.find(((np.arange(size) + random) * (total / size)).ravel())
        progress = min(1.0, self.num_draws / self._all_draws)
        beta = self.config.importance + (1 - self.config.importance) * progress
        weights = (len(self) * self._tree.priorities[places] / total) ** -beta
        return places, (weights / weights.max()).astype(np.float32)

    def _returns(self, places: Array) -> tuple[Array, Array, Array]:
        """Of the transitions at ``places``: where their last steps are, the sums of rewards up to there, and gamma to the
        number of steps."""
        rewards, discounts = self._index["rewards"][places], np.full(len(places), self.gamma, np.float32)
        for _ in range(self.config.n_steps - 1):
            following = self._index["following"][places]
            goes_on = following >= 0
            places = np.where(goes_on, following % self.capacity, places)
            rewards += np.where(goes_on, discounts * self._index["rewards"][places], np.float32(0))
            discounts = np.where(goes_on, discounts * np.float32(self.gamma), discounts)
        return places, rewards, discounts

    def learned(self, batch: Batch, /) -> None:
        """Priorities of what was learned from, by its ``td_errors``."""
        if self._tree is None:
            return
        numbers, errors = batch["sample_id"], batch.ragged("td_errors")
        held = numbers >= self.num_added - len(self)
        sizes, starts = np.abs(errors.values.astype(np.float64)), errors.offsets[:-1]
        largest, mean = np.maximum.reduceat(sizes, starts), np.add.reduceat(sizes, starts) / errors.lengths
        priorities = (mean + 0.9 * (largest - mean) + SMALLEST_ERROR)[held] ** self.config.priority
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))
        self._tree.set(numbers[held] % self.capacity, priorities)

    def _number(self, places: Array) -> Array:
        """The number of the transition at each place of the ring: the largest below num_added that was written there."""
        last = self.num_added - 1
        numbers: Array = last - (last - places) % self.capacity
        return numbers

    def metrics(self) -> dict[str, float]:
        """What was added and drawn since the last call, how old that was, how full the buffer is."""
        measured, held = self._metrics.values(), len(self)
        self._metrics.clear()
        after_warmup = self.num_steps - self.config.warmup
        if after_warmup > 0:
            measured["samples_per_insert"] = self.num_draws * self.config.draw_steps / after_warmup
        measured |= {"size": held, "occupancy": held / self.capacity, "bytes": held * self._row_bytes}
        return {f"replay/{name}": value for name, value in measured.items()}

    def waiting(self) -> Sequence[Batch]:
        """None: what is held may be drawn any number of times. See ``totals``."""
        return ()

    def dropped(self) -> list[Dropped]:
        """None by name: the oldest rows are overwritten."""
        return []

    def totals(self) -> dict[str, int]:
        """Steps ``added``, of which it was ``given`` some to begin with; ``units`` that they became, transitions or
        sequences, of which it has ``held`` the newest and ``overwritten`` the others; and how many rows were ``drawn``."""
        held = len(self)
        units = {"units": self.num_added, "held": held, "overwritten": self.num_added - held}
        drawn = self.num_draws * self.config.batch_size
        return {"added": self.num_steps, "given": self.num_given, **units, "drawn": drawn}

    def state_dict(self) -> dict[str, Any]:
        """Copies of the index, and the counters; the rows are saved where they lie."""
        state: dict[str, Any] = {"index": {name: values[: len(self)].copy() for name, values in self._index.items()}}
        state |= {name: getattr(self, name) for name in ("capacity", "sequence", *COUNTERS)}
        going_on = np.array([*self._going_on.items()], np.int64).reshape(-1, 2)
        priorities = None if self._tree is None else self._tree.priorities[: len(self)].copy()
        return {**state, "going_on": going_on, "priorities": priorities, "largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """CheckpointError: the keys that say where rows lie are others than when it was saved."""
        if state["sequence"] != self.sequence:
            was = state["sequence"]
            raise CheckpointError(f"replay.sequence = {self.sequence}: the run was saved with {was}; set it back")
        if state["capacity"] != self.capacity:
            was, now = state["capacity"] * self.sequence, self.capacity * self.sequence
            raise CheckpointError(f"replay.capacity = {now}: the run was saved with {was}; set it back")
        for name in COUNTERS:
            setattr(self, name, state[name])
        self._index = self._empty()
        for name, values in self._index.items():
            values[: len(self)] = state["index"][name]
        self._going_on, self._largest = dict(state["going_on"].tolist()), state["largest"]
        self._metrics.clear()  # of a step that was begun and comes again
        if self._tree is not None:
            self._tree = SumTree(self.capacity)
            self._tree.set(np.arange(len(self)), state["priorities"])
