"""Damaged data, and how much of it is tried: FUZZ_EXAMPLES=2000 for a long run."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hybridflow.core.errors import HybridFlowError

__all__ = ["damaged", "examples", "little_memory", "survives", "values"]

LARGE = [0, 1, 0x7F, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1]


def examples(few: int) -> Any:
    """So ``few`` in the fast tests."""
    number = int(os.environ.get("FUZZ_EXAMPLES", few))
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=number, deadline=None, derandomize=number == few, database=None, suppress_health_check=health
    )


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with some of it changed, left out, put in, or cut off."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        # Headers come first, and damage there is what matters.
        at = draw(st.integers(0, min(len(result), draw(st.sampled_from([8, 64, 1024, 2**30])))))
        match draw(st.sampled_from(["flip", "number", "cut", "leave out", "put in", "repeat"])):
            case "flip" if at < len(result):
                result[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                width = draw(st.sampled_from([1, 2, 4, 8]))
                result[at : at + width] = (draw(st.sampled_from(LARGE)) % 256**width).to_bytes(width, "little")
            case "cut":
                del result[at:]
            case "leave out":
                del result[at : at + draw(st.integers(1, 16))]
            case "put in":
                result[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "repeat":
                piece = bytes(result[at : at + draw(st.integers(1, 8))])
                result[at:at] = piece * draw(st.sampled_from([2, 50, 3000]))
    return bytes(result)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, -1, 2**31, 10**12])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "\ud800", "a\0b", "llama"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
"""What JSON may hold."""


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A claim of a header that is believed is a MemoryError here, not a machine without memory."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def survives(read: Callable[[], object]) -> None:
    """Nothing else than an error of ours, which tells something, leaves it."""
    try:
        read()
    except HybridFlowError as error:
        assert str(error)
