"""Observations on their way to a policy: what is asked in JSON or in bytes becomes an array of the space's type, or one
line that says why it can't."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from hybridflow.core.batch import Array
from hybridflow.serving.served import Asked

__all__ = ["Observations"]

NUMBER = 32
"""characters of a number in JSON, at most, with what separates it from the next"""


class Observations:
    """Up to ``max_batch`` observations of a ``space`` (Gymnasium's) in a request, each with ``memory_size`` numbers."""

    def __init__(self, space: Any, max_batch: int, memory_size: int = 0) -> None:
        self.space, self.max_batch, self.memory_size = space, max_batch, memory_size
        self.shape, self.dtype = tuple(space.shape or ()), np.dtype(space.dtype)
        self._row_numbers: int = math.prod(self.shape)
        self._row_bytes: int = self.dtype.itemsize * self._row_numbers

    @property
    def max_bytes(self) -> int:
        """No request is larger."""
        return 1024 + self.max_batch * NUMBER * (self._row_numbers + self.memory_size)

    def example(self, number: int) -> Asked:
        """Observations like those of the space, of episodes that begin."""
        return self.beginning(np.full((number, *self.shape), getattr(self.space, "start", 0), self.dtype))

    def beginning(self, observations: Array) -> Asked:
        """Observations [B, ...] of episodes that begin."""
        return Asked(observations, np.zeros((len(observations), self.memory_size), np.float32))

    def from_json(self, body: bytes) -> Asked:
        """Of {"observations": [...], "memory": [[...], ...]}; without memory episodes begin. ValueError: what is wrong."""
        try:
            content = json.loads(body)
        except RecursionError:
            raise ValueError("the request is nested too deep") from None
        except ValueError as error:
            raise ValueError(f"the request is not JSON: {error}") from None
        rows = content.get("observations") if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise ValueError('expected {"observations": [observation, ...]}')
        try:
            values = np.array(rows)
        except ValueError:
            raise ValueError(f"observations differ in shape; {self._expected()}") from None
        begun = self.beginning(self._checked(values))
        if "memory" not in content:
            return begun
        try:
            memory = np.array(content["memory"], np.float32)
        except (ValueError, TypeError):
            memory = np.zeros(0, np.float32)
        return self._remembered(begun, memory)

    def from_bytes(self, body: bytes) -> Asked:
        """Of the observations' numbers, one behind the other, little-endian, and those of the memories behind them, of four
        bytes. ValueError says what is wrong."""
        row = self._row_bytes + 4 * self.memory_size
        if len(body) % row:
            raise ValueError(f"{len(body)} bytes, of {row} an observation; {self._expected()}")
        observed = len(body) // row * self._row_bytes
        values = np.frombuffer(body[:observed], self.dtype.newbyteorder("<")).reshape(-1, *self.shape)
        memory = np.frombuffer(body[observed:], "<f4").reshape(len(values), self.memory_size)
        return self._remembered(self.beginning(self._checked(values.astype(self.dtype))), memory.astype(np.float32))

    def _remembered(self, begun: Asked, memory: Array) -> Asked:
        if memory.shape != begun.memory.shape or not np.isfinite(memory).all():
            raise ValueError(f"memory: expected that of the last answers, {begun.memory.shape} finite numbers")
        return Asked(begun.observations, memory)

    def _checked(self, values: Array) -> Array:
        if values.ndim == 0 or values.shape[1:] != self.shape or len(values) == 0:
            raise ValueError(f"observations have shape {values.shape}; {self._expected()}")
        if len(values) > self.max_batch:
            raise ValueError(f"{len(values)} observations in a request; expected at most {self.max_batch}")
        if values.dtype.kind not in "iuf":
            raise ValueError(f"observations hold what is no number of {self.dtype}; {self._expected()}")
        with np.errstate(over="ignore", invalid="ignore"):
            cast = values.astype(self.dtype)
        bad = ~np.isfinite(cast) if self.dtype.kind == "f" else self._outside(values)
        if bad.any():
            row = int(np.argmax(bad.reshape(len(values), -1).any(1)))
            kind = "a number that is not finite" if self.dtype.kind == "f" else "a number that is none of the space"
            raise ValueError(f"observation {row} holds {kind}; {self._expected()}")
        return cast

    def _outside(self, values: Array) -> Array:
        """Whether each of the numbers, which should be whole, is none of the space."""
        low, high = np.iinfo(self.dtype).min, np.iinfo(self.dtype).max
        if type(self.space).__name__ == "Discrete":
            low, high = int(self.space.start), int(self.space.start + self.space.n) - 1
        outside: Array = (values < low) | (values > high) | (values % 1 != 0)
        return outside

    def _expected(self) -> str:
        return f"expected those of {' '.join(str(self.space).split())}, a list of them"
