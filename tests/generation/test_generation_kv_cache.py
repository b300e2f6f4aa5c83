import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder

from hybridflow.generation.attention import KVCache
from hybridflow.generation.kv_cache import Copy, Place, Shape, SlotTable, position_bytes, round_up, shortage


def test_the_last_active_row_moves_into_the_hole():
    table = SlotTable(6)
    table.take([10, 11, 12, 13, 14])
    sources, targets = table.release(np.array([1, 3]))
    assert (sources.tolist(), targets.tolist()) == ([4], [1])
    assert table.requests.tolist() == [10, 14, 12, -1, -1, -1]
    assert (table.num_active, table.num_free, table.slot_of(14)) == (3, 3, 1)


def test_there_are_no_more_requests_than_slots():
    table = SlotTable(2)
    table.take([7])
    with pytest.raises(AssertionError, match="2 requests for 1 free slots"):
        table.take([8, 9])
    assert table.active.tolist() == [7]


@settings(max_examples=30, deadline=None, derandomize=True)
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
        assert [table.slot_of(request) for request in table.active] == list(range(table.num_active))


def test_lengths_are_multiples_of_16():
    assert [round_up(length) for length in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert Shape(3, 17, 2, 16).rounded == Shape(3, 32, 2, 16)
    assert Shape(3, 32, 2, 16).size == 3 * 32 + 2 * 16


def test_a_shape_holds_what_is_smaller_in_every_dimension():
    shape = Shape(3, 32, 2, 16)
    assert shape.holds(shape) and shape.holds(Shape(1, 17, 0, 0))
    larger = [Shape(4, 1, 1, 1), Shape(1, 33, 1, 1), Shape(1, 1, 3, 1), Shape(1, 1, 1, 17)]
    assert not any(shape.holds(other) for other in larger)


def test_rows_grow_by_half_and_everything_else_at_once():
    most = Shape(8, 100, 3, 40)
    first = Shape().grown(Shape(2, 10, 1, 20), most, None)
    assert first == Shape(8, 64, 3, 48)
    assert Shape(8, 64, 3, 48).grown(Shape(2, 65, 1, 20), most, None) == Shape(8, 96, 3, 48)
    assert Shape(8, 96, 3, 48).grown(Shape(2, 97, 1, 20), most, None) == Shape(8, 112, 3, 48)  # never beyond the longest
    assert Shape().grown(Shape(2, 10), Shape(8, 40), None) == Shape(8, 48)


def test_a_budget_leaves_what_is_needed_and_rows_as_far_as_they_go():
    most = Shape(8, 100, 3, 40)
    assert Shape().grown(Shape(2, 10, 1, 20), most, 8 * 64 + 3 * 48) == Shape(8, 64, 3, 48)
    assert Shape().grown(Shape(2, 10, 1, 20), most, 8 * 64 + 3 * 48 - 1) == Shape(8, 16, 1, 32)
    assert Shape().grown(Shape(2, 10, 1, 20), most, 5 * 16 + 32) == Shape(5, 16, 1, 32)
    assert Shape().grown(Shape(2, 10, 1, 20), most, 2 * 16 + 32) == Shape(2, 16, 1, 32)


def shapes():
    some = st.builds(Shape, st.integers(0, 12), st.integers(0, 90), st.integers(1, 6), st.integers(1, 70))
    return some | st.builds(Shape, st.integers(0, 12), st.integers(0, 90))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shapes(), shapes(), shapes(), st.integers(0, 1500) | st.none())
def test_a_grown_shape_holds_the_need_within_the_budget(old, need, most, budget):
    assume(budget is None or need.rounded.size <= budget)
    grown = old.rounded.grown(need, most, budget)
    assert grown.holds(need.rounded) and grown == grown.rounded
    assert budget is None or grown.size <= budget
    assert budget is not None or (grown.rows >= most.rows and grown.prompts >= most.prompts)
    assert grown.length <= max(need.rounded.length, most.rounded.length)


def test_a_position_is_the_key_and_the_value_of_every_layer():
    assert position_bytes(tiny_decoder().spec, itemsize=2) == 2 * 2 * 2 * 8 * 2


def test_shortage_is_told_from_the_first_position_too_many():
    # 17 and 33 tokens take 32 and 48 positions, and 16 more when both are prefilled anew: 96 of 1 MB.
    assert shortage(10**6, 0.096, prompt=17, limit=33) == ""
    told = shortage(10**6, 0.0959, prompt=17, limit=33)
    assert told.startswith("17 prompt tokens and max_new_tokens 33 need 0.096 GB") and "raise kv_cache_gb" in told
    assert shortage(10**6, 0.096, prompt=32, limit=48) == ""
    assert shortage(10**6, 0.096, prompt=32, limit=49) and shortage(10**6, 0.096, prompt=33, limit=48)


def empty_cache():
    decoder = tiny_decoder()
    return KVCache(decoder.spec, weight=decoder.embed.weight.detach())


ROWS, PROMPTS = False, True


def filled_cache():
    """Random everywhere, so that every misplaced number shows."""
    cache = empty_cache()
    cache.reshape(Shape(3, 16, 2, 32))
    for rectangle in (cache.rows, cache.prompts):
        for tensor in rectangle.keys + rectangle.values:
            tensor.normal_(generator=torch.Generator().manual_seed(tensor.numel()))
    return cache


def content(cache, shared, row, length):
    """[layers, 2, K, E, length] of one place."""
    rectangle = cache.of(Place(shared, row))
    pairs = zip(rectangle.keys, rectangle.values, strict=True)
    return torch.stack([torch.stack([k[row, :, :, :length], v[row, :, :length].mT]) for k, v in pairs]).clone()


def test_the_cache_keeps_what_it_holds():
    cache = filled_cache()
    row, prompt = content(cache, ROWS, 1, 16), content(cache, PROMPTS, 1, 32)
    cache.reshape(Shape(5, 48, 3, 32))
    assert cache.shape == Shape(5, 48, 3, 32)
    assert torch.equal(content(cache, ROWS, 1, 16), row) and torch.equal(content(cache, PROMPTS, 1, 32), prompt)
    for new in (content(cache, ROWS, 1, 48)[..., 16:], content(cache, ROWS, 4, 48), content(cache, PROMPTS, 2, 32)):
        assert new.numel() > 0 and new.count_nonzero() == 0
    cache.reshape(Shape(2, 16, 2, 16))
    assert torch.equal(content(cache, ROWS, 1, 16), row)
    assert torch.equal(content(cache, PROMPTS, 1, 16), prompt[..., :16])


def test_written_entries_are_where_they_belong():
    cache = filled_cache()
    before, (k, v) = content(cache, ROWS, 2, 16), torch.randn(2, 2, 2, 8)
    cache.rows.write(1, torch.tensor([0, 2]), torch.tensor([3, 15]), k, v)
    after = content(cache, ROWS, 2, 16)
    assert torch.equal(after[1, 0, :, :, 15], k[1]) and torch.equal(after[1, 1, :, :, 15], v[1])
    assert torch.equal(content(cache, ROWS, 0, 16)[1, 0, :, :, 3], k[0])
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, ..., :15], before[1, ..., :15])


@pytest.mark.parametrize("source", [Place(ROWS, 0), Place(PROMPTS, 0)])
@pytest.mark.parametrize("target", [Place(ROWS, 2), Place(PROMPTS, 1)])
def test_copies_go_from_any_place_to_any_other(source, target):
    cache = filled_cache()
    taken, left = content(cache, *source, 16), content(cache, *target, 16)
    cache.copy([Copy(source, target, 11)])
    now = content(cache, *target, 16)
    assert torch.equal(now[..., :11], taken[..., :11]) and torch.equal(now[..., 11:], left[..., 11:])
    assert torch.equal(content(cache, *source, 16), taken)


def test_copies_run_one_after_another():
    cache = filled_cache()
    first = content(cache, ROWS, 0, 16)
    cache.copy([Copy(Place(ROWS, 0), Place(ROWS, 1), 16), Copy(Place(ROWS, 1), Place(PROMPTS, 0), 16)])
    assert torch.equal(content(cache, PROMPTS, 0, 16), first)


def test_windows_are_views_of_the_current_cache():
    cache = filled_cache()
    cache.rows.window(2, 16)
    cache.reshape(Shape(3, 48, 2, 32))
    keys, values = cache.rows.window(2, 16)[1]
    cache.rows.write(1, torch.tensor([1]), torch.tensor([4]), torch.ones(1, 2, 8), torch.full((1, 2, 8), 2.0))
    assert keys.shape == (4, 8, 16) and values.shape == (4, 16, 8)
    assert torch.equal(keys[2:, :, 4], torch.ones(2, 8)) and torch.equal(values[2:, 4], torch.full((2, 8), 2.0))
