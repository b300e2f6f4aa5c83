"""In which order the ranks of a pipeline run the stages of their microbatches, as plain data.

A model of S = ranks x chunks stages is dealt out in turns: rank r holds stages r, r + ranks, r + 2 ranks, ... as its chunks
0, 1, 2, ... A plan lists for every rank which microbatch goes forward or backward through which chunk next:

    print(one_f_one_b(ranks=2, microbatches=3))

    rank 0: F0 F1 B0 F2 B1 B2
    rank 1: F0 B0 F1 B1 F2 B2

Nothing here knows torch: a plan can be printed, checked and timed before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest

from hybridflow.core.errors import ContractError

__all__ = [
    "Action",
    "Backward",
    "Forward",
    "Message",
    "Plan",
    "bubble",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
]


@dataclass(frozen=True)
class Forward:
    """Run a microbatch through a chunk, on what the stage before sent, and send the result to the stage behind."""

    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Backward:
    """Run a microbatch back through a chunk, on the gradient from the stage behind, and send that of its input back."""

    chunk: int
    microbatch: int


Action = Forward | Backward


@dataclass(frozen=True)
class Message:
    """What rank ``source`` made and rank ``target`` needs for ``action``: an activation, or the gradient of one."""

    source: int
    target: int
    action: Action


@dataclass(frozen=True)
class Plan:
    """``actions[rank]``: what each rank runs, in order. An action waits for its message alone: ranks run side by side."""

    chunks: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def trains(self) -> bool:
        return any(isinstance(action, Backward) for actions in self.actions for action in actions)

    def stage(self, rank: int, action: Action) -> int:
        return action.chunk * self.ranks + rank

    def message(self, rank: int, action: Action) -> Message | None:
        """What ``action`` of ``rank`` sends on: None at the ends of the pipeline."""
        reader = self._beside(rank, action, 1)
        return None if reader is None else Message(rank, *reader)

    def awaits(self, rank: int, action: Action) -> Message | None:
        """What ``action`` of ``rank`` has to receive first: None at the ends of the pipeline."""
        maker = self._beside(rank, action, -1)
        return None if maker is None else Message(maker[0], rank, action)

    def needs(self, rank: int, action: Action) -> set[tuple[int, Action]]:
        """The (rank, action) that have to be over before ``action`` of ``rank`` can run."""
        maker = self._beside(rank, action, -1)
        needs: set[tuple[int, Action]] = set() if maker is None else {maker}
        if isinstance(action, Backward):
            needs.add((rank, Forward(action.chunk, action.microbatch)))
        return needs

    def _beside(self, rank: int, action: Action, step: int) -> tuple[int, Action] | None:
        """The same on the stage that is ``step`` further in the direction of the action."""
        stage = self.stage(rank, action) + (step if isinstance(action, Forward) else -step)
        beside = type(action)(stage // self.ranks, action.microbatch)
        return (stage % self.ranks, beside) if 0 <= stage < self.stages else None

    @cached_property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """(rank, action) of the whole pipeline, as they would run if all took the same time.

        Raises ContractError for a plan in which ranks wait for each other for ever, or go back before they went forward.
        """
        done: set[tuple[int, Action]] = set()
        order: list[tuple[int, Action]] = []
        places = [0] * self.ranks
        while len(order) < sum(map(len, self.actions)):
            ready = [
                (rank, actions[place])
                for rank, (actions, place) in enumerate(zip(self.actions, places, strict=True))
                if place < len(actions) and self.needs(rank, actions[place]) <= done
            ]
            if not ready:
                stuck = zip(self.actions, places, strict=True)
                shown = [f"rank {r} at {self._shown(a[i])}" for r, (a, i) in enumerate(stuck) if i < len(a)]
                raise ContractError(f"pipeline plan: the ranks wait for each other for ever: {', '.join(shown)}")
            for rank, _ in ready:
                places[rank] += 1
            order += ready
            done |= set(ready)
        return tuple(order)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Everything that is sent, in the one order that all ranks post it in: that of the actions that make it."""
        sent = (self.message(rank, action) for rank, action in self.order)
        return tuple(message for message in sent if message is not None)

    def in_flight(self, rank: int, sizes: Sequence[int] = ()) -> int:
        """The most (microbatch, chunk) pairs whose activations a rank holds for their way back at any time; with the
        ``sizes`` of a microbatch's activations, by chunk, the most that they take."""
        held, most, sizes = 0, 0, sizes or (1,) * self.chunks
        for action in self.actions[rank]:
            held += sizes[action.chunk] * (1 if isinstance(action, Forward) else -1)
            most = max(most, held)
        return most if self.trains else 0

    def __str__(self) -> str:
        lines = [" ".join(map(self._shown, actions)) for actions in self.actions]
        return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))

    def _shown(self, action: Action) -> str:
        chunk = f"{action.chunk}." if self.chunks > 1 else ""
        return f"{type(action).__name__[0]}{chunk}{action.microbatch}"


def gpipe(ranks: int, microbatches: int) -> Plan:
    """All forward, then all back: every rank holds all microbatches (Huang et al. 2019). Its bubble is that of 1F1B."""
    actions: list[Action] = [kind(0, m) for kind in (Forward, Backward) for m in range(microbatches)]
    return Plan(1, (tuple(actions),) * ranks)


def one_f_one_b(ranks: int, microbatches: int) -> Plan:
    """One forward, one back: rank r holds at most ranks - r microbatches (PipeDream-flush, Narayanan et al. 2021)."""
    forwards = [Forward(0, m) for m in range(microbatches)]
    backwards = [Backward(0, m) for m in range(microbatches)]
    return Plan(1, tuple(_alternate(forwards, backwards, ranks - rank - 1) for rank in range(ranks)))


def interleaved(ranks: int, chunks: int, microbatches: int) -> Plan:
    """1F1B on ``chunks`` stages a rank: 1/chunks of the idle time, chunks times the messages (Narayanan et al. 2021, 2.2).

    Microbatches take turns in groups of ``ranks``. The paper wants full groups; here the plan is that of full groups,
    without the microbatches that aren't there.
    """
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    forwards = _in_groups(Forward, range(chunks), ranks, microbatches)
    backwards = _in_groups(Backward, range(chunks)[::-1], ranks, microbatches)
    plans: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        plan = _alternate(forwards, backwards, warm_up)
        plans.append(tuple(action for action in plan if action.microbatch < microbatches))
    return Plan(chunks, tuple(plans))


def forward_only(ranks: int, chunks: int, microbatches: int) -> Plan:
    """Values and log-probabilities: nothing goes back and nothing is held."""
    forwards = _in_groups(Forward, range(chunks), ranks, microbatches)
    return Plan(chunks, (tuple(action for action in forwards if action.microbatch < microbatches),) * ranks)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """``warm_up`` forwards, then a forward and a backward in turns, then the backwards that are left."""
    actions = [*forwards[:warm_up]]
    for pair in zip_longest(forwards[warm_up:], backwards):
        actions += [action for action in pair if action is not None]
    return tuple(actions)


def _in_groups(kind: type[Action], chunks: Sequence[int], ranks: int, microbatches: int) -> list[Action]:
    """Groups of ``ranks`` microbatches, each through all chunks. Where they don't divide, every group has nearly as many,
    which waits less than one short group at the end, and is filled up with microbatches of too high a number."""
    count = -(-microbatches // ranks)
    bounds = [group * microbatches // count for group in range(count + 1)] if count else []
    groups = [[*range(*ends), *[microbatches] * (ranks - ends[1] + ends[0])] for ends in pairwise(bounds)]
    return [kind(chunk, microbatch) for group in groups for chunk in chunks for microbatch in group]


def bubble(plan: Plan, forward_time: Callable[[int, int], float], backward_time: Callable[[int, int], float]) -> float:
    """The share of the ranks' time that they wait, given the times of (stage, microbatch); messages take no time.

    (p - 1) / (chunks m + p - 1) with p ranks and m microbatches of equal times, for every plan whose groups are full; the
    time that is lost is (p - 1) / (chunks m) of the time that is used.
    """
    ends: dict[tuple[int, Action], float] = {}
    free, busy = [0.0] * plan.ranks, 0.0
    for rank, action in plan.order:
        time = forward_time if isinstance(action, Forward) else backward_time
        cost = time(plan.stage(rank, action), action.microbatch)
        start = max(free[rank], *(ends[need] for need in plan.needs(rank, action)), 0.0)
        ends[rank, action] = free[rank] = start + cost
        busy += cost
    span = max(free) * plan.ranks
    return 1 - busy / span if span else 0.0
