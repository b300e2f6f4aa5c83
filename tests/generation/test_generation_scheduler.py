import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.generation.request import Request
from hybridflow.generation.scheduler import KEPT, Admission, Scheduler, pack
from hybridflow.generation.table import RequestTable


def scheduler_of(prompts, limits, max_slots=4, prefill_tokens=100, budget=None):
    table = RequestTable()
    scheduler = Scheduler(table, max_slots, prefill_tokens, budget)
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        scheduler.add(table.add(Request(np.array(prompt), index), int(limit)))
    return scheduler


def scheduler(lengths, *, members=1, limit=3, **settings):
    prompts = [np.full(length, index) for index, length in enumerate(lengths) for _ in range(members)]
    return scheduler_of(prompts, [limit] * len(prompts), **settings)


def advance(scheduler, stopped):
    """A token for every active request."""
    active = scheduler.slots.active
    scheduler.table.append(active, active, active.astype(np.float32), 0)
    return scheduler.advance(np.array(stopped, dtype=bool))


def test_admission_stops_at_the_free_slots_and_the_prefill_budget():
    waiting = scheduler([3, 3, 3, 3, 3], max_slots=4, prefill_tokens=7)
    assert waiting.admit() == Admission(requests=(0, 1), sources=(0, 1), prefills=(0, 1))
    assert waiting.admit() == Admission(requests=(2, 3), sources=(0, 1), prefills=(2, 3))
    assert waiting.admit() == Admission()
    advance(waiting, [0, 1, 0, 0])
    assert waiting.admit() == Admission(requests=(4,), sources=(0,), prefills=(4,))
    assert waiting.slots.active.tolist() == [0, 3, 2, 4]


def test_a_prompt_beyond_the_budget_goes_alone():
    waiting = scheduler([2, 9, 2], prefill_tokens=5)
    assert [waiting.admit().prefills for _ in range(3)] == [(0,), (1,), (2,)]


def test_a_group_that_does_not_fit_keeps_its_prompt():
    waiting = scheduler([3, 2], members=3, max_slots=2, limit=1)
    assert waiting.admit() == Admission(requests=(0, 1), sources=(0, 0), prefills=(0,), keep=True)
    advance(waiting, [0, 0])
    assert waiting.admit() == Admission(requests=(2, 3), sources=(KEPT, 0), prefills=(3,), keep=True)
    advance(waiting, [0, 0])
    assert waiting.admit() == Admission(requests=(4, 5), sources=(KEPT, KEPT), prefills=())
    advance(waiting, [0, 0])
    assert waiting.done


def test_equal_prompts_are_one_group_wherever_they_stand():
    assert scheduler_of([[1, 2], [3], [1, 2]], [5, 5, 5]).admit() == Admission(
        requests=(0, 2, 1), sources=(0, 0, 1), prefills=(0, 1)
    )


def test_limits_are_per_request():
    waiting = scheduler_of([[0], [1], [2]], [1, 3, 2])
    waiting.admit()
    left = []
    while not waiting.done:
        advance(waiting, np.zeros(waiting.slots.num_active))
        left.append(sorted(waiting.slots.active.tolist()))
    assert left == [[1, 2], [1], []]
    assert waiting.table.num_new[:3].tolist() == [1, 3, 2]


def test_packing_of_decode_tokens_and_a_shared_prompt():
    # Two rows decode at positions 7 and 4; slot 2 restores the kept prompt, 3 and 4 share a prompt of three tokens.
    admission = Admission(requests=(5, 6, 7), sources=(KEPT, 0, 0), prefills=(6,), keep=True)
    packing = pack(np.array([7, 4]), [3], admission)
    assert packing.positions.tolist() == [7, 4, 0, 1, 2]
    assert packing.copies.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert packing.rows.tolist() == [0, 1, 3, 3, 3, 4, 4, 4]
    assert packing.outputs.tolist() == [0, 1, KEPT, 4, 4]
    assert packing.restored.tolist() == [2]


def test_the_youngest_gives_way_when_rows_outgrow_the_budget():
    waiting = scheduler([14, 14, 14, 14], limit=30, budget=48)
    assert waiting.admit().requests == (0, 1, 2)  # three rows of 16 positions
    for _ in range(2):
        advance(waiting, [0, 0, 0])
        waiting.make_room()
    assert (waiting.room.length, waiting.num_preempted) == (16, 0)
    advance(waiting, [0, 0, 0])
    sources, targets = waiting.make_room()  # a row of 17 positions takes 32 or more: one remains
    assert (waiting.slots.active.tolist(), sources.tolist(), targets.tolist()) == ([0], [], [])
    assert waiting.num_preempted == 2 and waiting.admit() == Admission()
    advance(waiting, [1])
    waiting.make_room()
    assert waiting.admit() == Admission(requests=(1,), sources=(0,), prefills=(1,))  # the oldest first, with what it had
    assert [group.length for group in waiting.waiting] == [17, 14]


def test_a_kept_prompt_goes_before_a_running_request():
    waiting = scheduler([10], members=4, limit=30, max_slots=2, budget=42)
    assert waiting.admit() == Admission(requests=(0, 1), sources=(0, 0), prefills=(0,), keep=True)
    assert waiting.room.rows(16) == 2
    for _ in range(7):
        advance(waiting, [0, 0])
    waiting.make_room()  # 17 positions: a row of 32 fits, with the kept prompt or without
    assert waiting.kept is None and waiting.slots.active.tolist() == [0]


def test_a_prompt_that_is_still_needed_takes_the_place_of_a_row():
    waiting = scheduler([14], members=6, budget=48)  # three rows, or two and the prompt
    assert waiting.admit() == Admission(requests=(0, 1), sources=(0, 0), prefills=(0,), keep=True)
    advance(waiting, [1, 1])
    waiting.make_room()
    assert waiting.admit() == Admission(requests=(2, 3), sources=(KEPT, KEPT))


def test_requests_leave_from_wherever_they_are():
    waiting = scheduler([3, 2], members=3, max_slots=2)
    waiting.admit()
    advance(waiting, [0, 0])
    sources, targets = waiting.remove(0)
    assert (sources.tolist(), targets.tolist(), waiting.slots.active.tolist()) == ([1], [0], [1])
    waiting.remove(2)  # the last for which the prompt is kept
    assert waiting.kept is None and [group.members for group in waiting.waiting] == [[3, 4, 5]]
    waiting.remove(4)
    assert waiting.admit() == Admission(requests=(3,), sources=(0,), prefills=(3,), keep=True)
    waiting.restart()
    assert waiting.slots.num_active == 0 and [group.members for group in waiting.waiting] == [[1], [3], [5]]


class Rows:
    """A cache whose rows hold (which kind of prompt, how many positions), driven by the scheduler's word alone."""

    def __init__(self, scheduler, budget):
        self.scheduler, self.budget, self.rows, self.kept = scheduler, budget, {}, None

    def move(self, sources, targets):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.rows[target] = self.rows[source]

    def step(self):
        scheduler, table = self.scheduler, self.scheduler.table
        self.move(*scheduler.make_room())
        decoding = scheduler.slots.active
        admission = scheduler.admit()
        assert len(decoding) or admission.requests
        lengths = table.lengths(admission.prefills).tolist()
        assert len(lengths) < 2 or sum(lengths) <= scheduler.prefill_tokens
        packing = pack(table.lengths(decoding) - 1, lengths, admission)
        for slot in packing.restored.tolist():
            self.rows[slot] = self.kept
        packed = [table.prompts[request][0] for request in decoding]
        packed += [table.prompts[r][0] for r, n in zip(admission.prefills, lengths, strict=True) for _ in range(n)]
        for token, row in zip(packing.copies.tolist(), packing.rows.tolist(), strict=True):
            place = packing.positions[token]
            assert place == 0 or self.rows[row] == (packed[token], place)
            self.rows[row] = (packed[token], place + 1)
        active = scheduler.slots.active
        if admission.keep:
            self.kept = self.rows[len(active) - 1]
        assert len(set(active.tolist())) == len(active) <= scheduler.slots.num_slots
        for slot, request in enumerate(active.tolist()):
            assert self.rows[slot] == (table.prompts[request][0], table.lengths([request])[0])
        longest = max(length for _, length in list(self.rows.values())[: len(active)])
        assert scheduler.room.length >= longest
        if self.budget is not None:
            assert len(active) * scheduler.room.length + scheduler.room.kept <= self.budget
        return active


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nothing_is_lost_doubled_or_mixed(data):
    count = data.draw(st.integers(1, 20))
    lists = {"min_size": count, "max_size": count}
    kinds = data.draw(st.lists(st.integers(0, 5), **lists))
    limits = np.array(data.draw(st.lists(st.integers(1, 40), **lists)))
    stop_at = np.array(data.draw(st.lists(st.integers(1, 50), **lists)))
    arrivals = np.array(data.draw(st.lists(st.integers(0, 8), **lists))).cumsum()
    budget = data.draw(st.sampled_from([None, 48, 70, 200]))
    waiting = scheduler_of([], [], data.draw(st.integers(1, 7)), data.draw(st.integers(1, 12)), budget)
    table, rows, finished, aborted = waiting.table, Rows(waiting, budget), {}, set()
    to_abort, step, waiting_for = data.draw(st.sets(st.integers(0, count - 1), max_size=3)), 0, list(range(count))
    while waiting_for or not waiting.done:
        for index in [index for index in waiting_for if arrivals[index] <= step]:
            waiting_for.remove(index)
            number = table.add(Request(np.full(1 + kinds[index], kinds[index]), index), int(limits[index]))
            waiting.add(number)
        step += 1
        for index in to_abort - aborted - set(finished):
            if step > arrivals[index] + 3:
                (number,) = table.numbers(index)
                rows.move(*waiting.remove(number))
                table.take(number, "abort")
                aborted.add(index)
        if waiting.done:
            continue
        active = rows.step()
        table.append(active, table.sample_ids[active], active.astype(np.float32), step)
        done, *moves = waiting.advance(table.num_new[active] >= stop_at[table.sample_ids[active]])
        rows.move(*moves)
        for number in done.tolist():
            completion = table.take(number, "stop")
            assert completion.sample_id not in finished
            finished[completion.sample_id] = completion
    assert set(finished) == set(range(count)) - aborted
    for index, completion in finished.items():
        assert completion.tokens.tolist() == [index] * min(limits[index], stop_at[index])
        assert (np.diff(completion.versions) > 0).all()
    assert table.num_in_flight == 0 and waiting.slots.num_active == 0 and waiting.kept is None
    assert budget is not None or waiting.num_preempted == 0
