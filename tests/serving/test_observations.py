"""What may be asked."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from served_policies import OBSERVED

from hybridflow.serving.observations import Observations

BYTES, NUMBERED = spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(4, start=2)


def asked(rows: Any) -> bytes:
    return json.dumps({"observations": rows}).encode()


@pytest.mark.parametrize(
    ("space", "rows"),
    [
        (OBSERVED, [[1, 0.1, -2.5]]),
        (OBSERVED, [[1.1, 2, 3], [4, 5, 1e-9]]),
        (BYTES, [[[0, 255], [3, 4]]]),
        (NUMBERED, [2, 5]),
    ],
)
def test_json_and_bytes_are_the_same_observations(space: Any, rows: Any) -> None:
    read = Observations(space, 4)
    expected = np.array(rows, space.dtype)
    for found, memory in (read.from_json(asked(rows)), read.from_bytes(expected.tobytes())):
        assert memory.shape == (len(rows), 0)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == space.dtype and found.flags.writeable


@pytest.mark.parametrize(
    ("space", "body", "message"),
    [
        (OBSERVED, b"{", "the request is not JSON: "),
        (OBSERVED, b"\xff", "the request is not JSON: "),
        (OBSERVED, b"[" * 100_000, "the request is nested too deep"),
        (OBSERVED, b"[[1, 2, 3]]", 'expected {"observations": [observation, ...]}'),
        (OBSERVED, b'{"observations": 1}', 'expected {"observations": [observation, ...]}'),
        (OBSERVED, asked([]), "observations have shape (0,); expected those of Box("),
        (OBSERVED, asked([1, 2, 3]), "observations have shape (3,); "),
        (OBSERVED, asked([[1, 2]]), "observations have shape (1, 2); "),
        (OBSERVED, asked([[[1, 2, 3]]]), "observations have shape (1, 1, 3); "),
        (OBSERVED, asked([[1, 2, 3], [1]]), "observations differ in shape; "),
        (OBSERVED, asked([[1, 2, 3]] * 5), "5 observations in a request; expected at most 4"),
        (OBSERVED, asked([[1, 2, "3"]]), "observations hold what is no number of float32; "),
        (OBSERVED, asked([[1, 2, None]]), "observations hold what is no number of float32; "),
        (OBSERVED, asked([[True, False, True]]), "observations hold what is no number of float32; "),
        (OBSERVED, asked([[1, 2, 10**400]]), "observations hold what is no number of float32; "),
        (OBSERVED, asked([[1, 2, 3], [1, float("nan"), 3]]), "observation 1 holds a number that is not finite; "),
        (OBSERVED, asked([[1, 2, 1e39]]), "observation 0 holds a number that is not finite; "),
        (BYTES, asked([[[0, 0], [0, 256]]]), "observation 0 holds a number that is none of the space; "),
        (BYTES, asked([[[0, 0], [0, -1]]]), "observation 0 holds a number that is none of the space; "),
        (BYTES, asked([[[0, 0], [0, 0.5]]]), "observation 0 holds a number that is none of the space; "),
        (BYTES, asked([[[0, 0], [0, float("nan")]]]), "observation 0 holds a number that is none of the space; "),
        (NUMBERED, asked([2, 6]), "observation 1 holds a number that is none of the space; "),
        (NUMBERED, asked([1]), "observation 0 holds a number that is none of the space; "),
    ],
)
def test_what_is_wrong_is_told_in_a_line(space: Any, body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Observations(space, 4).from_json(body)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "observations have shape (0, 3); "),
        (b"1234567", "7 bytes, of 12 an observation; "),
        (np.full(3, np.inf, np.float32).tobytes(), "observation 0 holds a number that is not finite; "),
        (np.zeros(15, np.float32).tobytes(), "5 observations in a request; expected at most 4"),
    ],
)
def test_what_is_wrong_with_bytes_is_told_in_a_line(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Observations(OBSERVED, 4).from_bytes(body)
    assert str(caught.value).startswith(message)


def test_a_full_request_is_within_the_largest() -> None:
    read = Observations(OBSERVED, 4)
    full = json.dumps({"observations": np.full((4, 3), -1.2345678901234567e-300).tolist()}, indent=1).encode()
    assert len(full) <= read.max_bytes < 2000


def test_memories_come_with_their_observations() -> None:
    read, observed = Observations(OBSERVED, 4, memory_size=2), np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    memory = np.array([[0.5, -1], [0.25, 8]], np.float32)
    body = json.dumps({"observations": observed.tolist(), "memory": memory.tolist()}).encode()
    for found in (read.from_json(body), read.from_bytes(observed.tobytes() + memory.tobytes())):
        np.testing.assert_array_equal(found.observations, observed)
        np.testing.assert_array_equal(found.memory, memory)
    np.testing.assert_array_equal(read.from_json(asked(observed.tolist())).memory, np.zeros((2, 2)))
    for wrong in ([[1, 2]], [[1], [2]], [[1, 2], [3, float("nan")]], "x", None, [[1, 2], [3]]):
        with pytest.raises(ValueError, match=r"memory: expected that of the last answers, \(2, 2\) finite numbers"):
            read.from_json(json.dumps({"observations": observed.tolist(), "memory": wrong}).encode())
    with pytest.raises(ValueError, match="12 bytes, of 20 an observation"):
        read.from_bytes(observed[0].tobytes())
