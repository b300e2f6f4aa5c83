"""A column without values: what the batches of a traced program carry instead of arrays.

It knows how many rows it has, how many bytes, and which call wrote each of them. Whatever would read a value raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.errors import ContractError

__all__ = ["Part", "Traced"]


@dataclass(frozen=True)
class Part:
    """Rows of a column that one call wrote. ``writer``: the call's number in the trace, None if it is a constant.

    ``steps``: mean entries of a row; 1 for row and object fields.
    """

    writer: int | None
    rows: int
    steps: float

    @property
    def entries(self) -> float:
        return self.rows * self.steps


@dataclass(frozen=True, eq=False)
class Traced:
    """A column called ``name`` in ``parts``, one below the other. ``dtype``: of an entry, with its shape.

    ``num_groups``: how many different values it has, where that is known (``group_id`` of a source).
    """

    name: str
    dtype: np.dtype[Any]
    parts: tuple[Part, ...]
    num_groups: int | None = None

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def entries(self) -> float:
        """Entries of all rows together."""
        return sum(part.entries for part in self.parts)

    def rows(self, index: NDArray[np.int64]) -> Traced:
        """The rows at ``index``; rows of one part are alike."""
        ends = np.cumsum([part.rows for part in self.parts])
        counts = np.bincount(np.searchsorted(ends, index, side="right"), minlength=len(self.parts))
        parts = (replace(part, rows=int(count)) for part, count in zip(self.parts, counts, strict=True))
        return Traced(self.name, self.dtype, tuple(part for part in parts if part.rows))

    @staticmethod
    def concat(columns: Sequence[Traced]) -> Traced:
        first = columns[0]
        return Traced(first.name, first.dtype, tuple(part for column in columns for part in column.parts))

    def refuse(self, *_: Any) -> NoReturn:
        raise ContractError(
            f"the program reads values of column {self.name!r} on the driver, but rollout and learn may not depend on "
            "values: let a role compute with them, such as estimator.compute with a declared function"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of Python (copy, pickle ...) ask for what they may use
            raise AttributeError(name)
        self.refuse()

    __array__ = __array_ufunc__ = __getitem__ = __iter__ = __bool__ = __int__ = __float__ = refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __and__ = __or__ = __xor__ = __neg__ = __invert__ = refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rand__ = __ror__ = __rxor__ = refuse
    __hash__ = None  # type: ignore[assignment]
