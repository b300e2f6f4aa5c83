import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder

from hybridflow.generation.attention import KVCache
from hybridflow.generation.kv_cache import Room, SlotTable


def test_the_last_active_row_moves_into_the_hole():
    table = SlotTable(6)
    table.take([10, 11, 12, 13, 14])
    sources, targets = table.release(np.array([1, 3]))
    assert (sources.tolist(), targets.tolist()) == ([4], [1])
    assert table.requests.tolist() == [10, 14, 12, -1, -1, -1]
    assert (table.num_active, table.num_free) == (3, 3)


def test_what_cannot_be_done_is_said_and_refused():
    table = SlotTable(2)
    assert table.can_take(2) and not table.can_take(3)
    with pytest.raises(AssertionError):
        table.take([1, 2, 3])
    table.take([1])
    assert table.can_release(np.array([0])) and not table.can_release(np.array([1]))
    with pytest.raises(AssertionError):
        table.release(np.array([1]))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 255)), max_size=12))
def test_moves_keep_rows_and_requests_together(num_slots, events):
    table, cache, fresh = SlotTable(num_slots), np.full(num_slots, -1), 0
    for arrivals, leaving in events:
        arrivals = min(arrivals, table.num_free)
        cache[table.num_active : table.num_active + arrivals] = range(fresh, fresh + arrivals)
        table.take(range(fresh, fresh + arrivals))
        fresh += arrivals
        before = set(table.active.tolist())
        slots = np.array([slot for slot in range(table.num_active) if leaving >> slot & 1], dtype=np.int64)
        gone = set(table.requests[slots].tolist())
        sources, targets = table.release(slots)
        assert not set(sources) & set(targets)
        cache[targets] = cache[sources]
        assert cache[: table.num_active].tolist() == table.active.tolist()
        assert set(table.active.tolist()) == before - gone
        assert (table.requests[table.num_active :] == -1).all()


def test_the_longer_the_rows_the_fewer_fit():
    room = Room(max_rows=10, budget=200)
    room.lengthen(10, longest=100, rows=3)
    assert (room.length, room.rows(10), room.rows(17)) == (16, 10, 6)
    room.lengthen(33, longest=100, rows=3)
    assert room.length == 48  # what it needs
    room.lengthen(49, longest=100, rows=2)
    assert room.length == 80  # by half more
    room.kept = 50
    assert room.rows(1) == 1 and room.can_keep(40, 2) and not room.can_keep(41, 2)
    room.shorten(41)
    assert room.length == 80
    room.shorten(40)
    assert room.length == 48


def test_without_a_budget_only_slots_are_scarce():
    room = Room(max_rows=10, budget=None)
    room.lengthen(90, longest=1000, rows=10)
    room.lengthen(100, longest=1000, rows=10)
    assert room.length == 144 and room.rows(10**6) == 10
    room.lengthen(145, longest=150, rows=10)
    assert room.length == 160
    room.shorten(1)
    assert room.length == 160


def empty_cache():
    decoder = tiny_decoder()
    return KVCache(decoder.spec, weight=decoder.embed.weight.detach())


def test_the_cache_keeps_what_it_holds():
    cache = empty_cache()
    cache.reshape(3, 16)
    k, v = torch.randn(2, 2, 2, 8)
    cache.write(1, torch.tensor([0, 2]), torch.tensor([3, 15]), k, v)
    cache.reshape(4, 32)
    assert torch.equal(cache.keys[1][[0, 2], :, :, [3, 15]], k) and torch.equal(cache.values[1][[0, 2], :, [3, 15]], v)
    assert int(sum(keys.count_nonzero() for keys in cache.keys)) == k.numel()
    cache.copy(torch.tensor([2]), torch.tensor([1]), 16)
    cache.keep(2, 16)
    cache.reshape(2, 16)
    assert torch.equal(cache.keys[1][1, :, :, 15], k[1]) and torch.equal(cache.values[1][1, :, 15], v[1])
    cache.restore(torch.tensor([0]))
    assert torch.equal(cache.keys[1][0, :, :, 15], k[1]) and torch.equal(cache.values[1][0, :, 15], v[1])


def test_windows_are_views_of_the_current_cache():
    cache = empty_cache()
    cache.reshape(3, 16)
    cache.window(2, 16)
    cache.reshape(3, 48)
    keys, values = cache.window(2, 16)[1]
    cache.write(1, torch.tensor([1]), torch.tensor([4]), torch.ones(1, 2, 8), torch.full((1, 2, 8), 2.0))
    assert keys.shape == (4, 8, 16) and values.shape == (4, 16, 8)
    assert torch.equal(keys[2:, :, 4], torch.ones(2, 8)) and torch.equal(values[2:, 4], torch.full((2, 8), 2.0))
