"""Which prefixes are in the cache: prompts that begin alike are computed once. No torch.

A prompt is cut into blocks of 16 tokens, and a block is known by a digest of itself and all blocks before it, so equal
digests mean equal prefixes.
"""

import hashlib
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from hybridflow.generation.request import IntArray

__all__ = ["BLOCK", "Match", "PrefixIndex", "digests"]

BLOCK = 16
Owner = TypeVar("Owner", bound=Hashable)


def digests(tokens: IntArray) -> list[bytes]:
    """One for each whole block of ``tokens`` [T], without the last token: its hidden state is needed, so it is computed."""
    found, last = [], b""
    for start in range(0, len(tokens) - BLOCK, BLOCK):
        last = hashlib.blake2b(last + tokens[start : start + BLOCK].tobytes(), digest_size=16).digest()
        found.append(last)
    return found


class Match(NamedTuple, Generic[Owner]):
    """The longest known prefix: who has it, and how many tokens it has; ``fresh``: only from the next step on."""

    owner: Owner
    length: int
    fresh: bool


class PrefixIndex(Generic[Owner]):
    """Owners of prefixes by digest."""

    def __init__(self) -> None:
        self._owners: dict[bytes, list[Owner]] = {}
        self._digests: dict[Owner, Sequence[bytes]] = {}
        self._fresh: set[Owner] = set()

    def add(self, owner: Owner, digests: Sequence[bytes]) -> None:
        """``owner`` has these blocks once the step under way is done."""
        self._digests[owner] = digests
        self._fresh.add(owner)
        for digest in digests:
            self._owners.setdefault(digest, []).append(owner)

    def settle(self) -> None:
        """The step is done: what was added is there."""
        self._fresh.clear()

    def remove(self, owner: Owner) -> None:
        """Without effect if it was never added."""
        for digest in self._digests.pop(owner, ()):
            self._owners[digest].remove(owner)
            if not self._owners[digest]:
                del self._owners[digest]

    def find(self, digests: Sequence[bytes]) -> Match[Owner] | None:
        """The longest prefix that somebody has."""
        for count in range(len(digests), 0, -1):
            owners = self._owners.get(digests[count - 1])
            if owners:
                owner = next((owner for owner in owners if owner not in self._fresh), owners[0])
                return Match(owner, count * BLOCK, owner in self._fresh)
        return None
