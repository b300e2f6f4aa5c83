"""Where the columns that a worker is given lie in memory changes nothing of what it computes.

MKL's matrix products of numbers at addresses that are no multiple of 16 differ in the last digits. torch and numpy allocate
at multiples of 16; what comes from an object store, or is a view into a message, need not lie there. So workers copy what
goes into products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import with_keys
from test_runs import ENVIRONMENTS, records, run

from hybridflow.core.batch import Batch, Ragged


def moved(array: np.ndarray) -> np.ndarray:
    """A copy at an address that is 4 above a multiple of 64 for numbers of 4 bytes, 8 above it for those of 8."""
    if array.dtype == object or not array.nbytes:
        return array
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + array.itemsize
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("name", ["ppo-lstm", "dqn-cartpole", "impala-workers"])
def test_odd_addresses_of_columns_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Six numbers and a layer of eight are a product in which it shows.
    hidden = {"actor__net__hidden": [8]} | ({} if name.startswith("dqn") else {"critic__net__hidden": [8]})
    data = with_keys(ENVIRONMENTS[name], train__steps=4, environment__id="Acrobot-v1", **hidden)
    there, freeze, odd = run(data, tmp_path / "there"), Batch.freeze, list[bool]()

    def move(batch: Batch) -> Batch:
        columns: dict[str, Any] = batch.columns  # type: ignore[assignment]
        for name, column in list(columns.items()):
            if isinstance(column, Ragged):
                columns[name] = Ragged(moved(column.values), moved(column.lengths))
            elif isinstance(column, np.ndarray):
                columns[name] = moved(column)
        odd.extend(bool(batch.ragged(name).values.ctypes.data % 16) for name in batch.columns if name == "observations")
        return freeze(batch)

    monkeypatch.setattr(Batch, "freeze", move)
    assert records(run(data, tmp_path / "elsewhere")) == records(there)
    assert odd and all(odd)
