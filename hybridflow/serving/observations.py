"""Observations on their way to a policy: what is asked in JSON or in bytes becomes an array of the space's type, or one
line that says why it can't."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from hybridflow.core.batch import Array

__all__ = ["Observations"]

NUMBER = 32
"""characters of a number in JSON, at most, with what separates it from the next"""


class Observations:
    """Up to ``max_batch`` observations of a ``space`` (Gymnasium's) in a request."""

    def __init__(self, space: Any, max_batch: int) -> None:
        self.space, self.max_batch = space, max_batch
        self.shape, self.dtype = tuple(space.shape or ()), np.dtype(space.dtype)
        self._row_numbers: int = math.prod(self.shape)
        self._row_bytes: int = self.dtype.itemsize * self._row_numbers

    @property
    def max_bytes(self) -> int:
        """No request is larger."""
        return 1024 + self.max_batch * NUMBER * self._row_numbers

    def example(self, number: int) -> Array:
        """[number, ...] observations like those of the space."""
        return np.full((number, *self.shape), getattr(self.space, "start", 0), self.dtype)

    def from_json(self, body: bytes) -> Array:
        """[B, ...] of {"observations": [...]}. ValueError says what is wrong."""
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
        return self._checked(values)

    def from_bytes(self, body: bytes) -> Array:
        """[B, ...] of the numbers one behind the other, little-endian. ValueError says what is wrong."""
        if len(body) % self._row_bytes:
            raise ValueError(f"{len(body)} bytes, of {self._row_bytes} an observation; {self._expected()}")
        values = np.frombuffer(body, self.dtype.newbyteorder("<")).reshape(-1, *self.shape)
        return self._checked(values.astype(self.dtype))

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
