"""Continuous batching: who waits, who is admitted, who has to give way, who is done. No torch.

    add ──> waiting groups, one a distinct prompt ──admit: free slots, prefill budget──> active slots ──advance──> finished
                    ^                                                                          │
                    └────────────── preempt: the youngest, when longer rows leave less room <──┘

A prompt is prefilled once, however many waiting requests share it. Requests with one prompt are admitted one after the
other, so at most one prompt, that of the first group never preempted, is prefilled while some of its requests still wait
for a slot. Its keys, values and last hidden state are kept until the last of them is admitted, or their room is needed.

A preempted request waits in a group of its own, before all others; its prompt and its response so far are prefilled again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridflow.generation.kv_cache import Room, SlotTable
from hybridflow.generation.request import IntArray
from hybridflow.generation.table import RequestTable

__all__ = ["KEPT", "Admission", "Packing", "Scheduler", "pack"]

KEPT = -1
"""As a source: the prompt that was kept by an earlier admission."""


@dataclass(frozen=True)
class Admission:
    """Requests that enter a step, in the slots after the active ones.

    Ex. requests (4, 5, 6), sources (KEPT, 0, 0), prefills (5,), keep False: request 4 has the kept prompt, 5 and 6 share
    the prompt of request 5, which is prefilled now.
    """

    requests: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    """For each request, the index of its prompt in ``prefills``, or KEPT."""
    prefills: tuple[int, ...] = ()
    """A request of each prompt to prefill."""
    keep: bool = False
    """The last prefilled prompt has requests that still wait: keep it."""


@dataclass(eq=False)
class Group:
    """Requests that wait with the same tokens to prefill."""

    length: int
    key: bytes | None
    """The prompt; None once preempted: nobody joins."""
    members: list[int]


class Scheduler:
    """Which of the table's requests run in which slot. Oldest first, by order of arrival: the oldest is never preempted."""

    def __init__(self, table: RequestTable, max_slots: int, prefill_tokens: int, budget: int | None = None) -> None:
        """prefill_tokens: most prompt tokens of a step, but one prompt always fits; budget: positions of the cache."""
        self.table, self.prefill_tokens = table, prefill_tokens
        self.waiting: deque[Group] = deque()
        self.slots, self.room = SlotTable(max_slots), Room(max_slots, budget)
        self.num_preempted = 0
        self.kept: Group | None = None
        """The waiting group whose prompt is prefilled already."""
        self._by_prompt: dict[bytes, Group] = {}

    @property
    def done(self) -> bool:
        return not self.waiting and self.slots.num_active == 0

    def add(self, request: int) -> None:
        key = self.table.prompts[request].tobytes()
        if key in self._by_prompt:
            self._by_prompt[key].members.append(request)
            return
        self._by_prompt[key] = Group(int(self.table.prompt_lengths[request]), key, [request])
        self.waiting.append(self._by_prompt[key])

    def make_room(self) -> tuple[IntArray, IntArray]:
        """Every active request has a place for its last token, or is preempted. Returns the moves of cache rows."""
        lengths = self.table.lengths(self.slots.active)
        need = int(lengths.max(initial=0))
        if self.waiting and self.room.rows(need) <= len(lengths):
            self.room.shorten(need)
        self._lengthen(need, len(lengths))
        if self.room.rows(need) < len(lengths):
            self.drop_kept()
        return self._preempt_youngest(max(0, len(lengths) - self.room.rows(need)))

    def _lengthen(self, need: int, rows: int) -> None:
        if need > self.room.length:
            rows = min(self.room.max_rows, max(rows, self.table.num_in_flight))
            self.room.lengthen(need, self.table.longest, rows)

    def _preempt_youngest(self, count: int) -> tuple[IntArray, IntArray]:
        self.num_preempted += count
        order = np.argsort(self.table.arrivals[self.slots.active])
        return self.preempt(order[len(order) - count :])

    def preempt(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """The requests in the slots wait again. Returns the moves of cache rows."""
        requests = self.slots.requests[slots]
        for request in requests[np.argsort(-self.table.arrivals[requests])].tolist():
            self.waiting.appendleft(Group(int(self.table.lengths([request])[0]), None, [request]))
        return self.slots.release(slots)

    def restart(self) -> None:
        """Nothing that was computed so far holds any longer: everything is prefilled again."""
        self.drop_kept()
        self.preempt(np.arange(self.slots.num_active))

    def drop_kept(self) -> None:
        self.kept, self.room.kept = None, 0

    def admit(self) -> Admission:
        """Fill the free slots from the waiting groups, within the prefill budget."""
        requests: list[int] = []
        sources: list[int] = []
        prefills: list[int] = []
        budget = self.prefill_tokens
        while self.waiting:
            group, active = self.waiting[0], self.slots.num_active
            free = self._free(group)
            if free < 1 or (prefills and group is not self.kept and group.length > budget):
                break
            if group is not self.kept:
                budget -= group.length
                prefills.append(group.members[0])
            self._lengthen(group.length + 1, active)
            admitted = group.members[:free]
            self.slots.take(admitted)
            requests += admitted
            sources += [KEPT if group is self.kept else len(prefills) - 1] * len(admitted)
            keep = self._shorten(group, len(admitted))
            if keep or group.members:
                return Admission(tuple(requests), tuple(sources), tuple(prefills), keep)
        return Admission(tuple(requests), tuple(sources), tuple(prefills))

    def _free(self, group: Group) -> int:
        """Slots for requests of this length, one at least if none is active."""
        active = self.slots.num_active
        if active == 0 and self.room.rows(group.length + 1) < 1:
            self.drop_kept()
        free = self.room.rows(group.length + 1) - active
        splits = group is not self.kept and len(group.members) > free
        if splits and active + free > 1 and not self.room.can_keep(group.length, active + free):
            return free - 1  # the kept prompt takes the place of a row: prefilling it again costs more
        return free

    def _shorten(self, group: Group, count: int) -> bool:
        """The first members of the first group left it; whether its prompt has to be kept for the others from now on."""
        del group.members[:count]
        if not group.members:
            self._forget(group)
            return False
        if group is self.kept or not self.room.can_keep(group.length, self.slots.num_active):
            return False
        self.kept, self.room.kept = group, group.length
        return True

    def _forget(self, group: Group) -> None:
        self.waiting.remove(group)
        if group.key is not None:
            del self._by_prompt[group.key]
        if group is self.kept:
            self.drop_kept()

    def advance(self, stopped: NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
        """Every active request got a token, stopped [num_active] says whose was its last; finished ones leave their slots.

        Returns the finished requests and the moves of cache rows (see ``SlotTable.release``).
        """
        active = self.slots.active
        slots = np.flatnonzero(stopped | (self.table.num_new[active] == self.table.limits[active]))
        return active[slots], *self.slots.release(slots)

    def remove(self, request: int) -> tuple[IntArray, IntArray]:
        """The request runs or waits no longer. Returns the moves of cache rows."""
        for group in self.waiting:
            if request in group.members:
                group.members.remove(request)
                if not group.members:
                    self._forget(group)
                break
        return self.slots.release(np.flatnonzero(self.slots.active == request))


@dataclass(frozen=True)
class Packing:
    """Where the packed tokens of a step go: A decode tokens, one a slot, then the prompts, N tokens in all."""

    positions: IntArray
    """[N]: place of each token in its sequence."""
    copies: IntArray
    """[M]: the token whose keys and values go to each written entry of the cache, at the token's position ..."""
    rows: IntArray
    """[M]: ... and in this row. Decode tokens come first, each in its own row."""
    outputs: IntArray
    """[A + admitted]: the token whose hidden state each slot samples from, KEPT for the kept one."""
    restored: IntArray
    """Slots that get the kept prompt."""


def pack(places: IntArray, lengths: Sequence[int], admission: Admission) -> Packing:
    """places [A]: positions of the decode tokens; lengths [P]: of the prompts to prefill."""
    decoding = np.arange(len(places))
    if not admission.requests:
        return Packing(positions=places, copies=decoding, rows=decoding, outputs=decoding, restored=decoding[:0])
    ends = len(places) + np.cumsum(lengths, dtype=np.int64)
    spans = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    slots = range(len(places), len(places) + len(admission.requests))
    targets = [(source, slot) for source, slot in zip(admission.sources, slots, strict=True) if source != KEPT]
    return Packing(
        positions=np.concatenate([places, *map(np.arange, lengths)]),
        copies=np.concatenate([decoding, *(spans[source] for source, _ in targets)]),
        rows=np.concatenate([decoding, *(np.full(lengths[source], row) for source, row in targets)]),
        outputs=np.concatenate([decoding, np.append(ends - 1, KEPT)[list(admission.sources)]]),
        restored=np.array(
            [slot for source, slot in zip(admission.sources, slots, strict=True) if source == KEPT], dtype=np.int64
        ),
    )
