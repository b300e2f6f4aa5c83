"""State in files that hold no code comes back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.core.state_file import read_state, write_state
from hybridflow.core.tensor_file import Kind, kind_of, write_tensors

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text("abc", max_size=3), inner)
    ),
    max_leaves=10,
)


@settings(max_examples=30, deadline=None)
@given(state=PLAIN)
def test_plain_values_come_back(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("state")
    assert write_state(folder, "x", state) == ["x.json"]
    back = read_state(folder, "x")
    assert back == state and repr(back) == repr(state)


def test_arrays_and_batches_come_back(tmp_path: Path) -> None:
    empty = [np.ones((2, 0), np.float32), np.array([])]
    arrays = [np.arange(3, dtype=np.uint8), *empty, np.array(True), np.arange(6.0).reshape(2, 3).T]
    arrays[0].flags.writeable = False
    tokens = Ragged(np.arange(5), np.array([2, 0, 3]))
    batch = Batch({"tokens": tokens, "scores": np.ones(3, np.float32), "response": np.array(["a", "", "ü"], object)})
    names = write_state(tmp_path, "x", {"arrays": arrays, "queue": [(batch, 3)]})
    assert names == ["x.json", "x.safetensors"]
    back = read_state(tmp_path, "x")
    for one, other in zip(arrays, back["arrays"], strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
        other[...] = 0  # they can be written to
    ((same, version),) = back["queue"]
    assert version == 3 and same["response"].tolist() == ["a", "", "ü"] and same["scores"].tolist() == [1, 1, 1]
    assert [row.tolist() for row in same.ragged("tokens")] == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize("value", [object(), {1: 2}, {"$array": "0"}, {"a": {1, 2}}])
def test_what_is_no_plain_state_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="can't be saved; use numbers, texts and arrays"):
        write_state(tmp_path, "x", [value])


def test_a_file_of_tensors_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4, dtype=torch.float64).T,
        "none": torch.zeros(0, 2),
        "step": torch.tensor(7.0),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor([True, False, True]),
    }
    kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
    written = write_tensors(tmp_path / "x", kinds, iter(tensors.values()))
    back = load_file(tmp_path / "x")
    assert back.keys() == tensors.keys() and written.num_bytes == (tmp_path / "x").stat().st_size
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with pytest.raises(AssertionError, match="b is not where"):
        write_tensors(tmp_path / "x", {"c": Kind(torch.bool, (3,)), "b": kinds["b"]}, [tensors["c"], tensors["b"]])
