"""Continuous batching: who waits, who is admitted, who has to give way, who is done. No torch.

    add ──> waiting groups, one a distinct prompt ──admit: free slots, prefill budget──> active slots ──advance──> finished
                    ^                                                                         │
                    └────────────── preempt: the youngest, when longer rows leave less room <─┘

A prompt is prefilled once, however many requests share it: it lies in the cache's prompts, where all of them see it, and
stays until the last of them has ended. A prompt longer than a step may prefill lies there too, and is prefilled in chunks.
The prompt of a single request goes into the request's own row. Where a prompt begins with blocks of tokens that are in the
cache already, a copy of their keys and values is taken instead.

A preempted request waits in a group of its own, before all others; its prompt and its response so far are prefilled again.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridflow.generation.kv_cache import Copy, Place, Shape, SlotTable
from hybridflow.generation.prefix import Match, PrefixIndex, digests
from hybridflow.generation.request import IntArray
from hybridflow.generation.table import RequestTable

__all__ = ["Admission", "Group", "Prefill", "Scheduler"]


@dataclass(eq=False)
class Group:
    """Requests with the same tokens to prefill."""

    tokens: IntArray
    members: list[int]
    """who waits"""
    key: bytes | None = None
    """the prompt, while requests with the same one join"""
    entry: int = -1
    """place among the cache's prompts, -1: none"""
    filled: int = 0
    """tokens prefilled so far"""
    running: int = 0
    """active requests that see the prompt in its place"""

    @property
    def ready(self) -> bool:
        """Prefilled as a whole."""
        return self.filled == len(self.tokens)


@dataclass(frozen=True)
class Prefill:
    """Tokens ``start`` to ``end`` of a group go through the decoder, and their keys and values to ``place``."""

    group: Group
    start: int
    end: int
    place: Place

    @property
    def tokens(self) -> IntArray:
        """[end - start]"""
        return self.group.tokens[self.start : self.end]


@dataclass
class Admission:
    """What is new in a step: copies first, then prefills; requests enter the slots after the active ones."""

    copies: list[Copy] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    sources: list[Group] = field(default_factory=list)
    """for each request that enters, the group whose last hidden state it samples from"""


class Scheduler:
    """Which of the table's requests run in which slot. Groups come in the order of their first requests, whom later ones
    with the same prompt join until it is prefilled; the oldest active request is never preempted."""

    def __init__(self, table: RequestTable, max_slots: int, prefill_tokens: int, budget: int | None = None) -> None:
        """prefill_tokens: most prompt tokens of a step; budget: positions of the cache."""
        self.table, self.prefill_tokens, self.budget = table, prefill_tokens, budget
        self.waiting: deque[Group] = deque()
        self.slots = SlotTable(max_slots)
        self.prompts: list[Group] = []
        """what lies in the cache's prompts, by place"""
        self.num_preempted = self.num_reused = 0
        self._joinable: dict[bytes, Group] = {}
        self._group_of: dict[int, Group] = {}  # of active requests that see a shared prompt
        self._index: PrefixIndex[int | Group] = PrefixIndex()

    @property
    def done(self) -> bool:
        return not self.waiting and self.slots.num_active == 0

    @property
    def need(self) -> Shape:
        """What the cache has to hold now."""
        return self._needs(0, 0, 0)

    @property
    def most(self) -> Shape:
        """What the cache may come to hold."""
        rows = min(len(self.slots.requests), self.table.num_in_flight)
        shared = [group for group in self.waiting if group.entry < 0 and self._is_shared(group)] + self.prompts
        longest = max((len(group.tokens) for group in shared), default=0)
        return Shape(rows, self.table.longest, min(len(shared), rows), longest)

    def add(self, request: int) -> None:
        prompt = self.table.prompts[request]
        key = prompt.tobytes()
        if key in self._joinable:
            self._joinable[key].members.append(request)
            return
        self._joinable[key] = Group(prompt, [request], key)
        self.waiting.append(self._joinable[key])

    # ------------------------------------------------------------------------------------------------------------- room

    def make_room(self) -> list[Copy]:
        """Every active request has a place for its last token, or is preempted. Returns the moves in the cache."""
        moves: list[Copy] = []
        while not self._fits(self.need):
            idle = self._idle()
            moves += self._drop(idle[-1]) if idle else self._preempt_youngest()
        while self.waiting and self.slots.num_active == 0 and self._idle(self.waiting[0]) and not self._may_start():
            moves += self._drop(self._idle(self.waiting[0])[-1])
        return moves

    def restart(self) -> list[Copy]:
        """Nothing that was computed so far holds any longer: everything is prefilled again. Returns the moves."""
        moves: list[Copy] = []
        preempted = self.num_preempted
        for _ in range(self.slots.num_active):
            moves += self._preempt_youngest()
        self.num_preempted = preempted
        while self.prompts:
            moves += self._drop(self.prompts[-1])
        return moves

    def _fits(self, shape: Shape) -> bool:
        return self.budget is None or shape.rounded.size <= self.budget

    def _needs(self, rows: int, length: int, prompt: int) -> Shape:
        """With so many ``rows`` of ``length`` more, and one more prompt if it has tokens."""
        lengths, prompts = self.table.own_lengths(self.slots.active), [len(group.tokens) for group in self.prompts]
        prompts += [prompt] * (prompt > 0)
        longest = max(int(lengths.max(initial=0)), length if rows else 0)
        return Shape(len(lengths) + rows, longest, len(prompts), max(prompts, default=0))

    def _idle(self, but: Group | None = None) -> list[Group]:
        """Prompts that no active request sees."""
        return [group for group in self.prompts if group.running == 0 and group is not but]

    def _may_start(self) -> bool:
        return self._fits(self._place(self.waiting[0])[1])

    def _drop(self, group: Group) -> list[Copy]:
        """The prompt leaves the cache. Returns the move of the last one into its place."""
        self._index.remove(group)
        last, hole = self.prompts.pop(), group.entry
        group.entry, group.filled = -1, 0
        if last is group:
            return []
        self.prompts[hole] = last
        self.table.entries[self.table.entries == last.entry] = hole
        move = Copy(Place(True, last.entry), Place(True, hole), last.filled)
        last.entry = hole
        return [move]

    def _preempt_youngest(self) -> list[Copy]:
        """It waits again, before all others."""
        slot = int(self.table.arrivals[self.slots.active].argmax())
        request = int(self.slots.requests[slot])
        self.num_preempted += 1
        moves = self._leave(np.array([slot]))
        self.waiting.appendleft(Group(self.table.sequence(request), [request]))
        return moves

    def _leave(self, slots: IntArray) -> list[Copy]:
        """The slots are free again, and prompts that nobody needs any longer leave too. Returns the moves."""
        requests = self.slots.requests[slots].tolist()
        moves = [
            Copy(Place(False, source), Place(False, target), int(length))
            for source, target, length in self._moved(*self.slots.release(slots))
        ]
        for request in requests:
            self._index.remove(request)
            group = self._group_of.pop(request, None)
            if group is not None:
                self.table.share(request, -1, 0)
                group.running -= 1
                if not group.running and not group.members:
                    moves += self._drop(group)
        return moves

    def _moved(self, sources: IntArray, targets: IntArray) -> list[tuple[int, int, int]]:
        lengths = self.table.own_lengths(self.slots.requests[targets])
        return list(zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True))

    # -------------------------------------------------------------------------------------------------------- admission

    def admit(self) -> Admission:
        """Fill the free slots from the waiting groups, oldest first, and prefill at most ``prefill_tokens`` for them."""
        self._index.settle()
        admission, left = Admission(), self.prefill_tokens
        while self.waiting and self.slots.num_free:
            group = self.waiting[0]
            if not group.ready:
                count = self._prefill(group, left, admission)
                left -= count
                if not group.ready:
                    break
            if not self._enter(group, admission):
                break
            self.waiting.popleft()
        return admission

    def _place(self, group: Group) -> tuple[bool, Shape]:
        """Whether the group's tokens lie in the cache's prompts, and what the cache then has to hold."""
        if group.entry >= 0:
            return True, self._needs(1, 1, 0)
        if self._is_shared(group):
            return True, self._needs(1, 1, len(group.tokens))
        return False, self._needs(1, len(group.tokens) + 1, 0)

    def _is_shared(self, group: Group) -> bool:
        return len(group.members) > 1 or len(group.tokens) > self.prefill_tokens

    def _prefill(self, group: Group, limit: int, admission: Admission) -> int:
        """The next tokens of a group's prompt, at most ``limit``; returns how many, 0 if it has to wait."""
        shared, need = self._place(group)
        known = digests(group.tokens) if group.filled == 0 else []
        match = self._index.find(known)
        rest = len(group.tokens) - max(group.filled, match.length if match else 0)
        if not self._fits(need) or limit == 0 or (match and match.fresh) or (rest > limit and not shared):
            return 0
        place = self._take_place(group, shared) if group.entry < 0 else Place(True, group.entry)
        if match:
            self._reuse(match, place, admission)
            group.filled = match.length
        end = min(len(group.tokens), group.filled + limit)
        admission.prefills.append(Prefill(group, group.filled, end, place))
        start, group.filled = group.filled, end
        if group.ready:
            self._index.add(group if shared else group.members[0], known or digests(group.tokens))
        return end - start

    def _take_place(self, group: Group, shared: bool) -> Place:
        if group.key is not None:
            del self._joinable[group.key]  # whoever comes later takes a copy
            group.key = None
        if not shared:
            return Place(False, self.slots.num_active)
        group.entry = len(self.prompts)
        self.prompts.append(group)
        return Place(True, group.entry)

    def _reuse(self, match: Match[int | Group], place: Place, admission: Admission) -> None:
        if isinstance(match.owner, Group):
            source = Place(True, match.owner.entry)
        else:
            source = Place(False, self.slots.slot_of(match.owner))
        admission.copies.append(Copy(source, place, match.length))
        self.num_reused += match.length

    def _enter(self, group: Group, admission: Admission) -> bool:
        """As many members as there is room for become active; whether all did."""
        count = min(len(group.members), self.slots.num_free)
        if group.entry >= 0:
            while count and not self._fits(self._needs(count, 1, 0)):
                count -= 1
        entering = group.members[:count]
        del group.members[:count]
        self.slots.take(entering)
        admission.sources += [group] * count
        if group.entry >= 0:
            group.running += count
            for request in entering:
                self._group_of[request] = group
                self.table.share(request, group.entry, len(group.tokens))
        return not group.members

    def advance(self, stopped: NDArray[np.bool_]) -> tuple[IntArray, list[Copy]]:
        """Every active request got a token, stopped [num_active] says whose was its last; finished ones leave their slots.

        Returns the finished requests and the moves in the cache.
        """
        active = self.slots.active
        slots = np.flatnonzero(stopped | (self.table.num_new[active] == self.table.limits[active]))
        return active[slots], self._leave(slots) if len(slots) else []

    def remove(self, request: int) -> list[Copy]:
        """The request runs or waits no longer. Returns the moves in the cache."""
        for group in self.waiting:
            if request in group.members:
                group.members.remove(request)
                return self._forget(group) if not group.members else []
        return self._leave(np.array([self.slots.slot_of(request)]))

    def _forget(self, group: Group) -> list[Copy]:
        self.waiting.remove(group)
        if group.key is not None:
            del self._joinable[group.key]
        return self._drop(group) if group.entry >= 0 and not group.running else []
