import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.generation.scheduler import KEPT, Admission, Scheduler, pack


def scheduler(lengths, *, members=1, limit=3, max_slots=4, prefill_tokens=100):
    prompts = [np.full(length, index) for index, length in enumerate(lengths) for _ in range(members)]
    return Scheduler(prompts, np.full(len(prompts), limit), max_slots, prefill_tokens)


def test_admission_stops_at_the_free_slots_and_the_prefill_budget():
    waiting = scheduler([3, 3, 3, 3, 3], max_slots=4, prefill_tokens=7)
    assert waiting.admit() == Admission(requests=(0, 1), sources=(0, 1), prefills=(0, 1))
    assert waiting.admit() == Admission(requests=(2, 3), sources=(0, 1), prefills=(2, 3))
    assert not waiting.can_admit()
    waiting.advance(np.array([False, True, False, False]))
    assert waiting.admit() == Admission(requests=(4,), sources=(0,), prefills=(4,))
    assert waiting.slots.active.tolist() == [0, 3, 2, 4]


def test_a_prompt_beyond_the_budget_goes_alone():
    waiting = scheduler([2, 9, 2], prefill_tokens=5)
    assert [waiting.admit().prefills for _ in range(3)] == [(0,), (1,), (2,)]


def test_a_group_that_does_not_fit_keeps_its_prompt():
    waiting = scheduler([3, 2], members=3, max_slots=2, limit=1)
    nobody = np.array([False, False])
    assert waiting.admit() == Admission(requests=(0, 1), sources=(0, 0), prefills=(0,), keep=True)
    waiting.advance(nobody)
    assert waiting.admit() == Admission(requests=(2, 3), sources=(KEPT, 0), prefills=(3,), keep=True)
    waiting.advance(nobody)
    assert waiting.admit() == Admission(requests=(4, 5), sources=(KEPT, KEPT), prefills=())
    waiting.advance(nobody)
    assert waiting.done


def test_equal_prompts_are_one_group_wherever_they_stand():
    prompts = [np.array(prompt) for prompt in ([1, 2], [3], [1, 2])]
    admission = Scheduler(prompts, np.full(3, 5), 3, 100).admit()
    assert admission == Admission(requests=(0, 2, 1), sources=(0, 0, 1), prefills=(0, 1))


def test_limits_are_per_request():
    waiting = Scheduler([np.array([index]) for index in range(3)], np.array([1, 3, 2]), 3, 100)
    waiting.admit()
    left = []
    while not waiting.done:
        waiting.advance(np.zeros(waiting.slots.num_active, dtype=bool))
        left.append(sorted(waiting.slots.active.tolist()))
    assert left == [[1, 2], [1], []]
    assert waiting.num_new.tolist() == [1, 3, 2]


def test_packing_of_decode_tokens_and_a_shared_prompt():
    # Two rows decode at positions 7 and 4; slot 2 restores the kept prompt, 3 and 4 share a prompt of three tokens that
    # others still wait for, so it is kept too.
    admission = Admission(requests=(5, 6, 7), sources=(KEPT, 0, 0), prefills=(6,), keep=True)
    packing = pack(np.array([7, 4]), [3], admission, kept_row=9)
    assert packing.positions.tolist() == [7, 4, 0, 1, 2]
    assert packing.copies.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4]
    assert packing.rows.tolist() == [0, 1, 3, 3, 3, 4, 4, 4, 9, 9, 9]
    assert packing.outputs.tolist() == [0, 1, KEPT, 4, 4]
    assert packing.restored.tolist() == [2]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nothing_is_lost_doubled_or_mixed(data):
    count = data.draw(st.integers(1, 20))
    kinds = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    limits = np.array(data.draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)))
    slots, budget = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 12))
    prompts = [np.full(1 + kind, kind) for kind in kinds]
    waiting = Scheduler(prompts, limits, slots, budget)
    rows, prefilled, admitted, tokens = {}, [], [], np.zeros(count, dtype=int)
    stop_at = np.array(data.draw(st.lists(st.integers(1, 8), min_size=count, max_size=count)))
    while not waiting.done:
        decoding = waiting.slots.active
        admission = waiting.admit() if waiting.can_admit() else Admission()
        assert len(decoding) or admission.requests
        lengths = [len(prompts[request]) for request in admission.prefills]
        assert len(lengths) < 2 or sum(lengths) <= budget
        packing = pack(np.zeros(len(decoding), dtype=int), lengths, admission, kept_row=slots)
        # A cache whose rows hold (what kind of prompt, of which length), driven by the packing alone.
        for slot in packing.restored.tolist():
            rows[slot] = rows[slots]
        packed = [None] * len(decoding) + [kinds[request] for request in admission.prefills for _ in prompts[request]]
        for token, row in zip(packing.copies.tolist(), packing.rows.tolist(), strict=True):
            if token >= len(decoding):
                place = packing.positions[token]
                rows[row] = (packed[token], place + 1)
        for request, slot in zip(admission.requests, range(len(decoding), waiting.slots.num_active), strict=True):
            assert rows[slot] == (kinds[request], len(prompts[request]))
        prefilled += [kinds[request] for request in admission.prefills]
        admitted += admission.requests
        active = waiting.slots.active
        assert len(active) <= slots and len(set(active.tolist())) == len(active)
        tokens[active] += 1
        sources, targets = waiting.advance(tokens[active] >= stop_at[active])
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            rows[target] = rows[source]
        assert all(rows[slot][0] == kinds[request] for slot, request in enumerate(waiting.slots.active))
    assert sorted(admitted) == list(range(count))
    assert sorted(prefilled) == sorted(set(kinds))
    assert tokens.tolist() == np.minimum(limits, stop_at).tolist() == waiting.num_new.tolist()
