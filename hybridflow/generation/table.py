"""The requests in flight and their growing responses. No torch.

Every request has a number, its row in the arrays below, from when it is added until it is taken out.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybridflow.generation.request import Completion, FloatArray, IntArray, Request

__all__ = ["RequestTable"]


class RequestTable:
    """Arrays over R numbers; responses have room for W tokens. Numbers that were taken out are given again."""

    def __init__(self) -> None:
        self.prompts: list[IntArray] = []
        self.sample_ids: IntArray = np.empty(0, np.int64)
        self.prompt_lengths: IntArray = np.empty(0, np.int64)
        self.limits: IntArray = np.empty(0, np.int64)
        """most new tokens"""
        self.num_new: IntArray = np.empty(0, np.int64)
        """tokens sampled so far"""
        self.arrivals: IntArray = np.empty(0, np.int64)
        """0, 1, ...: in the order of ``add``"""
        self.entries: IntArray = np.empty(0, np.int64)
        """place of the shared prompt that the request sees, -1: none, its row has all of it"""
        self.offsets: IntArray = np.empty(0, np.int64)
        """tokens of that prompt: where the request's own row begins"""
        self.tokens: IntArray = np.empty((0, 0), np.int64)
        self.log_probs: FloatArray = np.empty((0, 0), np.float32)
        self.versions: IntArray = np.empty((0, 0), np.int64)
        self.num_added = 0
        self.in_flight: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._free: list[int] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.prompts) - len(self._free)

    @property
    def longest(self) -> int:
        """Most tokens that a request may come to have."""
        end = len(self.prompts)
        return int((self.prompt_lengths[:end] + self.limits[:end]).max(initial=0))

    def reserve(self, count: int, limit: int) -> None:
        """Room for ``count`` numbers and responses of ``limit`` tokens; more room comes as needed."""
        rows, width = max(count, len(self.limits)), max(limit, self.tokens.shape[1])
        for name in ("sample_ids", "prompt_lengths", "limits", "num_new", "arrivals", "in_flight", "entries", "offsets"):
            setattr(self, name, _resized(getattr(self, name), rows))
        for name in ("tokens", "log_probs", "versions"):
            setattr(self, name, _resized(getattr(self, name), rows, width))

    def add(self, request: Request, limit: int) -> int:
        number = self._free.pop() if self._free else len(self.prompts)
        if number == len(self.prompts):
            self.prompts.append(request.prompt)
        if number == len(self.limits) or limit > self.tokens.shape[1]:
            self.reserve(2 * number + 1 if number == len(self.limits) else 0, limit)
        self.prompts[number], self.sample_ids[number] = request.prompt, request.sample_id
        self.prompt_lengths[number], self.limits[number], self.num_new[number] = len(request.prompt), limit, 0
        self.arrivals[number], self.in_flight[number] = self.num_added, True
        self.num_added += 1
        self.share(number, -1, 0)
        return number

    def share(self, number: int, entry: int, offset: int) -> None:
        """The request sees the prompt at ``entry``, of ``offset`` tokens."""
        self.entries[number], self.offsets[number] = entry, offset

    def numbers(self, sample_id: int) -> IntArray:
        """Of the requests in flight with this sample_id."""
        return np.flatnonzero(self.in_flight[: len(self.prompts)] & (self.sample_ids[: len(self.prompts)] == sample_id))

    @property
    def ids_in_flight(self) -> list[int]:
        """``sample_id`` of each of the requests in flight."""
        ids: list[int] = self.sample_ids[: len(self.prompts)][self.in_flight[: len(self.prompts)]].tolist()
        return ids

    def take(self, number: int, finish: Literal["stop", "length", "abort"]) -> Completion:
        """The request leaves with what it has so far."""
        span = (number, slice(self.num_new[number]))
        self._free.append(number)
        self.in_flight[number] = False
        return Completion(
            int(self.sample_ids[number]),
            self.tokens[span].copy(),
            self.log_probs[span].copy(),
            self.versions[span].copy(),
            finish,
        )

    def append(self, numbers: IntArray, tokens: IntArray, log_probs: FloatArray, version: int) -> None:
        """One more token for each of the numbers."""
        places = self.num_new[numbers]
        self.tokens[numbers, places], self.log_probs[numbers, places] = tokens, log_probs
        self.versions[numbers, places] = version
        self.num_new[numbers] += 1

    def lengths(self, numbers: IntArray | Sequence[int]) -> IntArray:
        """[len(numbers)]: tokens of prompt and response so far."""
        numbers = np.asarray(numbers, np.int64)
        lengths: IntArray = self.prompt_lengths[numbers] + self.num_new[numbers]
        return lengths

    def own_lengths(self, numbers: IntArray) -> IntArray:
        """[len(numbers)]: those of them that lie in the request's own row."""
        own: IntArray = self.lengths(numbers) - self.offsets[numbers]
        return own

    def sequence(self, number: int) -> IntArray:
        """Prompt and response so far."""
        return np.concatenate([self.prompts[number], self.tokens[number, : self.num_new[number]]])

    def last_tokens(self, numbers: IntArray) -> IntArray:
        """[len(numbers)]: of requests that have at least one."""
        last: IntArray = self.tokens[numbers, self.num_new[numbers] - 1]
        return last


def _resized(array: NDArray[Any], *shape: int) -> NDArray[Any]:
    """Without touching what is not filled yet: memory is taken as responses grow."""
    resized = np.empty(shape, array.dtype)
    resized[tuple(map(slice, array.shape))] = array
    return resized
