"""Looks at calls: what they find, and that they stay below their share of the time."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.effort import SHARE, Meter
from hybridflow.core.metrics import Effort
from hybridflow.core.resident import MemoryMeter

TEXT = Batch({"sample_id": np.arange(3), "tokens": Ragged.from_rows([[1, 2], [3], [4, 5, 6]], np.int64)})


def used() -> Meter:
    """A meter that looks at every call of "call"."""
    meter = Meter(share=math.inf)
    with meter.call("call"):
        pass
    return meter


def test_the_first_call_is_not_looked_at_and_the_second_is() -> None:
    meter = Meter()
    found = list[Effort | None]()
    for _ in range(2):
        with meter.call("call") as measured:
            time.sleep(0.01)
        found.append(measured.effort(TEXT, TEXT))
    assert found[0] is None and found[1] is not None
    assert 0.01 <= measured.duration_s <= time.perf_counter() - measured.start_s


def test_looks_take_no_more_than_their_share_of_the_time() -> None:
    """But for one look more."""
    meter, looked = Meter(), list[bool]()
    for _ in range(1000):
        with meter.call("call") as measured:
            deadline = time.perf_counter() + 1e-4
            while time.perf_counter() < deadline:
                pass
        looked.append(measured.effort(TEXT, TEXT) is not None)
    most = meter.looking["call"] / max(1, sum(looked))
    assert 1 <= sum(looked) < 100
    assert meter.looking["call"] <= SHARE * meter.took["call"] + 4 * most


def test_rows_tokens_and_bytes() -> None:
    with used().call("call") as measured:
        pass
    slots = Batch({"sample_id": np.arange(2)})
    found = measured.effort(slots, TEXT)
    assert found is not None and (found.rows, found.tokens) == (2, 6)
    assert (found.read_bytes, found.written_bytes) == (16, 24 + 6 * 8)
    shared = measured.effort(TEXT, slots, workers=2, view=True, pulled_bytes=7)
    assert shared is not None and (shared.rows, shared.tokens, shared.workers, shared.read_bytes) == (1.5, 3, 2, 7)
    children = measured.effort(TEXT, slots, processes=3)
    assert children is not None and (children.rows, children.tokens, children.workers) == (1, 2, 3)
    words = measured.effort(Batch({"response": objects(["a", "b"])}), slots)
    assert words is not None and words.tokens == 0 and words.threads == torch.get_num_threads()


def test_processor_time_is_that_of_all_threads_and_child_processes() -> None:
    meter = used()
    burn = "import time\nwhile time.process_time() < 0.4: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE)
    try:
        meter._search_s = 0.0
        others_s = meter._children_s()  # of earlier tests, which may be there still
        with meter.call("call") as measured:
            start = time.process_time()
            while time.process_time() - start < 0.1:
                pass
            while meter._children_s() < others_s + 0.3:
                time.sleep(0.01)
        found = measured.effort(TEXT, TEXT)
    finally:
        child.communicate(b"\n")
    assert found is not None and 0.1 + 0.3 - 0.03 < found.cpu_s < 0.1 + 0.4 + 0.4


def test_a_peak_is_that_of_its_call_and_the_meter_of_a_run_keeps_the_largest() -> None:
    meter, run = used(), MemoryMeter()
    sizes = list[int]()
    for number_of_bytes in (200_000_000, 0):
        with meter.call("call") as measured:
            block = np.ones(number_of_bytes // 8 + 1)
            del block
        found = measured.effort(TEXT, TEXT)
        assert found is not None
        sizes.append(found.memory_bytes)
    assert sizes[0] > 190_000_000 and sizes[1] < sizes[0] - 150_000_000
    assert run.grown > 190_000_000


def test_operations_are_counted_if_they_are_asked_for() -> None:
    meter = used()
    with meter.call("call") as measured:
        pass
    plain = measured.effort(TEXT, TEXT)
    meter.counts = True
    with meter.call("call") as measured:
        torch.ones(3, 4) @ torch.ones(4, 5)
    found = measured.effort(TEXT, TEXT)
    assert plain is not None and plain.flops is None
    assert found is not None and found.flops == 2 * 3 * 4 * 5 and found.gpu_s == 0


def test_an_error_of_a_call_is_raised_and_ends_counting() -> None:
    meter = used()
    meter.counts = True
    with pytest.raises(ZeroDivisionError), meter.call("call"):
        raise ZeroDivisionError
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
