"""How long responses will be, from those that have been drawn: work is dealt, and begun, by it.

It changes no response, only who draws it, beside which others, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["ExpectedLengths"]

DECAY = 0.9
"""of what earlier observations count in the line, with every new one"""


class ExpectedLengths:
    """Tokens of the responses to each record of a data set: as many as the last ones had in the mean.

    Of a record that nobody has responded to yet: what a line through the lengths of prompts and of recent responses says,
    by least squares. 0 of all of them before the first observation. ``prompts`` [records]: lengths of prompts.
    """

    def __init__(self, prompts: NDArray[np.int64]) -> None:
        self._prompts = prompts.astype(np.float64)
        self._last = np.full(len(prompts), -1.0)
        """-1: nobody has responded"""
        self._moments = np.zeros(5)
        """of x = prompt and y = response: weights of all, of x, y, x x, x y"""

    def of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        last = np.rint(self._last[records]).astype(np.int64)
        return np.where(last < 0, self.of_others(self._prompts[records]), last)

    def of_others(self, prompts: ArrayLike) -> NDArray[np.int64]:
        """Of prompts of these lengths that nobody has responded to."""
        count, of_x, of_y, of_xx, of_xy = self._moments
        x = np.asarray(prompts, np.float64)
        if not count:
            return np.zeros(len(x), np.int64)
        variance, covariance = of_xx / count - (of_x / count) ** 2, of_xy / count - of_x * of_y / count**2
        slope = covariance / variance if variance > 1e-6 else 0.0
        return np.rint(np.maximum(of_y / count + slope * (x - of_x / count), 0)).astype(np.int64)

    def observe(self, records: NDArray[np.int64], lengths: ArrayLike) -> None:
        """Responses [n] to these records, several to one or one to each."""
        known, where = np.unique(records, return_inverse=True)
        if len(known):
            y = np.bincount(where, np.asarray(lengths, np.float64)) / np.bincount(where)
            x = self._prompts[known]
            self._last[known] = y
            self._moments = DECAY * self._moments + [len(x), x.sum(), y.sum(), x @ x, x @ y]

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._last, self._moments = np.array(state["last"]), np.array(state["moments"])
