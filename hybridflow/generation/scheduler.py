"""Continuous batching: who waits, who is admitted, who is done. No torch.

    waiting groups, one a distinct prompt ──admit: free slots, prefill budget──> active slots ──advance: stop, limit──> done

A prompt is prefilled once, however many requests share it. Requests with the same prompt are admitted one after the other,
so at most one prompt, that of the first waiting group, is prefilled while some of its requests still wait for a slot. Its
keys, values and last hidden state are kept until the last of them is admitted.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridflow.generation.kv_cache import SlotTable
from hybridflow.generation.request import IntArray

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
    """The last prompt used has requests that still wait: keep it."""


class Scheduler:
    """Bookkeeping of one call. Requests are numbered 0 .. R - 1 in the order of the caller."""

    def __init__(self, prompts: Sequence[IntArray], limits: IntArray, max_slots: int, prefill_tokens: int) -> None:
        """limits [R]: most new tokens of each request; prefill_tokens: most prompt tokens of a step, but one fits."""
        groups: dict[bytes, list[int]] = {}
        for request, prompt in enumerate(prompts):
            groups.setdefault(prompt.tobytes(), []).append(request)
        self.waiting = deque(groups.values())
        self.prompt_lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        self.limits, self.prefill_tokens = limits, prefill_tokens
        self.num_new = np.zeros(len(prompts), dtype=np.int64)
        self.slots = SlotTable(min(max_slots, len(prompts)))
        self.kept = False
        """The prompt of the first waiting group is prefilled already."""

    @property
    def done(self) -> bool:
        return not self.waiting and self.slots.num_active == 0

    def can_admit(self) -> bool:
        return bool(self.waiting) and self.slots.can_take(1)

    def admit(self) -> Admission:
        """Fill the free slots from the waiting groups, within the prefill budget."""
        requests: list[int] = []
        sources: list[int] = []
        prefills: list[int] = []
        budget = self.prefill_tokens
        while self.waiting and self.slots.can_take(len(requests) + 1):
            group = self.waiting[0]
            if not self.kept:
                length = int(self.prompt_lengths[group[0]])
                if prefills and length > budget:
                    break
                budget -= length
                prefills.append(group[0])
            source = KEPT if self.kept else len(prefills) - 1
            count = min(len(group), self.slots.num_free - len(requests))
            requests += group[:count]
            sources += [source] * count
            self.kept = self._shorten(count)
        self.slots.take(requests)
        return Admission(tuple(requests), tuple(sources), tuple(prefills), self.kept)

    def _shorten(self, count: int) -> bool:
        """Take ``count`` requests off the first group; whether some remain."""
        group = self.waiting.popleft()
        if count < len(group):
            self.waiting.appendleft(group[count:])
        return count < len(group)

    def advance(self, stopped: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """Every active request got a token, stopped [num_active] says whose was its last; finished ones leave their slots.

        Returns the moves of cache rows (see ``SlotTable.release``).
        """
        active = self.slots.active
        self.num_new[active] += 1
        return self.slots.release(np.flatnonzero(stopped | (self.num_new[active] == self.limits[active])))


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
    """Slots that get the kept prompt by copying its row."""


def pack(places: IntArray, lengths: Sequence[int], admission: Admission, kept_row: int) -> Packing:
    """places [A]: positions of the decode tokens; lengths [P]: of the prompts to prefill; kept_row: where one is kept."""
    decoding = np.arange(len(places))
    if not admission.requests:
        return Packing(positions=places, copies=decoding, rows=decoding, outputs=decoding, restored=decoding[:0])
    ends = len(places) + np.cumsum(lengths, dtype=np.int64)
    spans = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    slots = range(len(places), len(places) + len(admission.requests))
    targets = [(source, slot) for source, slot in zip(admission.sources, slots, strict=True) if source != KEPT]
    if admission.keep and lengths:
        targets.append((len(lengths) - 1, kept_row))
    return Packing(
        positions=np.concatenate([places, *map(np.arange, lengths)]),
        copies=np.concatenate([decoding, *(spans[source] for source, _ in targets)]),
        rows=np.concatenate([decoding, *(np.full(lengths[source], row) for source, row in targets)]),
        outputs=np.concatenate([decoding, np.append(ends - 1, KEPT)[list(admission.sources)]]),
        restored=np.array(
            [slot for source, slot in zip(admission.sources, slots, strict=True) if source == KEPT], dtype=np.int64
        ),
    )
