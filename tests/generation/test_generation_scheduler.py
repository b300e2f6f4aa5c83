from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.generation.kv_cache import Copy, Place, Shape, shortage
from hybridflow.generation.prefix import BLOCK
from hybridflow.generation.request import Request
from hybridflow.generation.scheduler import Scheduler
from hybridflow.generation.table import RequestTable

ROWS, PROMPTS = False, True


def scheduler_of(prompts, limits, max_slots=4, prefill_tokens=100, budget=None):
    table = RequestTable()
    scheduler = Scheduler(table, max_slots, prefill_tokens, budget)
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        scheduler.add(table.add(Request(np.array(prompt), index), int(limit)))
    return scheduler


def scheduler(lengths, *, members=1, limit=3, **settings):
    """A group of so many members for each length."""
    prompts = [np.full(length, index) for index, length in enumerate(lengths) for _ in range(members)]
    return scheduler_of(prompts, [limit] * len(prompts), **settings)


def advance(scheduler, stopped=None):
    """A token for every active request; -> who finished, the moves."""
    active = scheduler.slots.active
    scheduler.table.append(active, active, active.astype(np.float32), 0)
    finished, moves = scheduler.advance(np.zeros(len(active), bool) if stopped is None else np.array(stopped, bool))
    return finished.tolist(), moves


def prefilled(admission):
    return [(int(p.group.tokens[0]), p.start, p.end, p.place) for p in admission.prefills]


def active(scheduler):
    return scheduler.slots.active.tolist()


def test_admission_stops_at_the_free_slots_and_at_the_tokens_of_a_step():
    waiting = scheduler([3, 3, 3, 3, 3], prefill_tokens=7)
    first = waiting.admit()
    assert prefilled(first) == [(0, 0, 3, Place(ROWS, 0)), (1, 0, 3, Place(ROWS, 1))]
    assert (
        first.copies == [] and first.sources == [prefill.group for prefill in first.prefills] and active(waiting) == [0, 1]
    )
    assert prefilled(waiting.admit()) == [(2, 0, 3, Place(ROWS, 2)), (3, 0, 3, Place(ROWS, 3))]
    assert prefilled(waiting.admit()) == []
    finished, moves = advance(waiting, [0, 1, 0, 0])
    assert finished == [1] and moves == [Copy(Place(ROWS, 3), Place(ROWS, 1), 4)]
    assert prefilled(waiting.admit()) == [(4, 0, 3, Place(ROWS, 3))] and active(waiting) == [0, 3, 2, 4]


def test_a_long_prompt_is_prefilled_in_chunks_beside_those_that_run():
    waiting = scheduler([2, 9, 2], prefill_tokens=5)
    assert prefilled(waiting.admit()) == [(0, 0, 2, Place(ROWS, 0)), (1, 0, 3, Place(PROMPTS, 0))]
    assert active(waiting) == [0] and waiting.need == Shape(1, 2, 1, 9)
    assert prefilled(waiting.admit()) == [(1, 3, 8, Place(PROMPTS, 0))] and active(waiting) == [0]
    last = waiting.admit()
    assert prefilled(last) == [(1, 8, 9, Place(PROMPTS, 0)), (2, 0, 2, Place(ROWS, 2))]
    assert active(waiting) == [0, 1, 2] and last.sources == [prefill.group for prefill in last.prefills]
    assert waiting.table.own_lengths(waiting.slots.active).tolist() == [2, 0, 2]


def test_a_shared_prompt_stays_until_the_last_that_needs_it():
    waiting = scheduler([5], members=3, max_slots=2, limit=2)
    admission = waiting.admit()
    assert prefilled(admission) == [(0, 0, 5, Place(PROMPTS, 0))] and active(waiting) == [0, 1]
    assert len(admission.sources) == 2 and waiting.table.entries[:2].tolist() == [0, 0]
    advance(waiting)
    assert advance(waiting)[0] == [0, 1] and len(waiting.prompts) == 1  # the third still waits
    later = waiting.admit()
    assert later.prefills == [] and later.sources == waiting.prompts and active(waiting) == [2]
    assert advance(waiting, [1])[0] == [2] and waiting.prompts == [] and waiting.done


def test_the_last_prompt_moves_into_the_hole():
    waiting = scheduler([5, 7], members=2, limit=5)
    waiting.admit()
    assert advance(waiting, [1, 1, 0, 0])[1] == [
        Copy(Place(ROWS, 2), Place(ROWS, 0), 1),
        Copy(Place(ROWS, 3), Place(ROWS, 1), 1),
        Copy(Place(PROMPTS, 1), Place(PROMPTS, 0), 7),
    ]
    assert waiting.table.entries[[2, 3]].tolist() == [0, 0] and waiting.need == Shape(2, 1, 1, 7)


def test_equal_prompts_are_one_group_wherever_they_stand():
    waiting = scheduler_of([[1, 2], [3], [1, 2]], [5, 5, 5])
    assert prefilled(waiting.admit()) == [(1, 0, 2, Place(PROMPTS, 0)), (3, 0, 1, Place(ROWS, 2))]
    assert active(waiting) == [0, 2, 1]


def test_who_comes_after_the_prefill_takes_a_copy():
    base = np.arange(2 * BLOCK + 5)
    waiting = scheduler_of([base, base, base[:BLOCK] + 1], [9, 9, 9], max_slots=6)
    waiting.admit()
    for late in (base, np.append(base[: BLOCK + 3], 99), base + 1):
        waiting.add(waiting.table.add(Request(late, 7), 9))
    advance(waiting)
    admission = waiting.admit()
    assert admission.copies == [
        Copy(Place(PROMPTS, 0), Place(ROWS, 3), 2 * BLOCK),
        Copy(Place(PROMPTS, 0), Place(ROWS, 4), BLOCK),
    ]
    assert [(p.start, p.end) for p in admission.prefills] == [(32, 37), (16, 20), (0, 37)]
    assert waiting.num_reused == 3 * BLOCK  # base + 1 begins with no whole block before the last token of base[:16] + 1


def test_a_prefix_that_another_computes_in_this_step_is_waited_for():
    base = np.arange(40)
    waiting = scheduler_of([base, np.append(base, 7)], [3, 3])
    assert [(p.start, p.end) for p in waiting.admit().prefills] == [(0, 40)]
    advance(waiting)
    second = waiting.admit()
    assert second.copies == [Copy(Place(ROWS, 0), Place(ROWS, 1), 32)]
    assert [(p.start, p.end) for p in second.prefills] == [(32, 41)]


def test_a_copy_is_no_prefill():
    base = np.arange(200)
    waiting = scheduler_of([base], [9], prefill_tokens=60)
    for _ in range(4):
        waiting.admit()
    advance(waiting)
    waiting.add(waiting.table.add(Request(np.append(base[:180], 5), 1), 9))
    admission = waiting.admit()
    assert admission.copies[0].length == 176 and [(p.start, p.end) for p in admission.prefills] == [(176, 181)]
    assert active(waiting) == [0, 1]


def test_limits_are_per_request():
    waiting = scheduler_of([[0], [1], [2]], [1, 3, 2])
    waiting.admit()
    left = []
    while not waiting.done:
        advance(waiting)
        left.append(sorted(active(waiting)))
    assert left == [[1, 2], [1], []]
    assert waiting.table.num_new[:3].tolist() == [1, 3, 2]


def test_the_youngest_gives_way_when_rows_outgrow_the_budget():
    waiting = scheduler([14, 14, 14, 14], limit=30, budget=48)
    waiting.admit()
    assert active(waiting) == [0, 1, 2]  # three rows of 16 positions
    for _ in range(2):
        advance(waiting)
        assert waiting.make_room() == []
    advance(waiting)
    assert waiting.make_room() == [] and active(waiting) == [0]  # of rows of 32 there is room for one
    assert waiting.num_preempted == 2 and waiting.admit().prefills == []
    advance(waiting, [1])
    waiting.make_room()
    assert prefilled(waiting.admit()) == [(1, 0, 17, Place(ROWS, 0))]  # the oldest first, with what it had
    assert [len(group.tokens) for group in waiting.waiting] == [17, 14]


def test_a_prompt_that_nobody_sees_goes_before_a_request_that_runs():
    waiting = scheduler([20, 40], prefill_tokens=30, limit=50, budget=112)
    assert prefilled(waiting.admit()) == [(0, 0, 20, Place(ROWS, 0)), (1, 0, 10, Place(PROMPTS, 0))]
    for _ in range(44):
        advance(waiting)
        waiting.make_room()
    assert len(waiting.prompts) == 1  # a row of 64 beside 48
    advance(waiting)
    waiting.make_room()
    assert active(waiting) == [0] and waiting.prompts == [] and waiting.num_preempted == 0
    assert waiting.waiting[0].filled == 0


def test_prompts_that_are_in_the_way_of_the_first_in_the_queue_leave():
    waiting = scheduler([20, 40], prefill_tokens=30, limit=40, budget=100)
    waiting.admit()
    for _ in range(21):
        advance(waiting)
        waiting.make_room()
    waiting.restart()
    assert [len(group.tokens) for group in waiting.waiting] == [41, 40] and waiting.num_preempted == 0
    assert prefilled(waiting.admit()) == [(0, 0, 30, Place(PROMPTS, 0))]
    waiting.waiting.rotate()  # another goes first, as a preempted one does
    assert waiting.make_room() == [] and waiting.prompts == []
    assert prefilled(waiting.admit())[0] == (1, 0, 30, Place(PROMPTS, 0))


def test_requests_leave_from_wherever_they_are():
    waiting = scheduler([3, 2], members=3, max_slots=2)
    waiting.admit()
    advance(waiting)
    assert waiting.remove(0) == [Copy(Place(ROWS, 1), Place(ROWS, 0), 1)] and active(waiting) == [1]
    assert waiting.remove(2) == [] and [group.members for group in waiting.waiting] == [[3, 4, 5]]
    assert len(waiting.prompts) == 1
    waiting.remove(4)
    waiting.remove(1)
    assert waiting.prompts == []
    waiting.admit()
    assert active(waiting) == [3, 5]
    waiting.remove(3)
    waiting.remove(5)
    assert waiting.done and waiting.prompts == []


def test_the_prompt_of_one_that_left_may_come_again():
    waiting = scheduler([3])
    waiting.remove(0)
    assert waiting.done
    waiting.add(waiting.table.add(Request(waiting.table.prompts[0], 1), 3))
    waiting.admit()
    assert active(waiting) == [1]


def test_a_prompt_in_chunks_leaves_with_its_only_request():
    waiting = scheduler([9, 8, 2], prefill_tokens=5)
    waiting.admit()
    assert waiting.remove(0) == [] and waiting.prompts == []
    assert prefilled(waiting.admit()) == [(1, 0, 5, Place(PROMPTS, 0))]


def test_a_restart_prefills_everything_anew_and_in_order():
    waiting = scheduler([9, 3], members=2, max_slots=3)
    waiting.admit()
    advance(waiting)
    assert active(waiting) == [0, 1, 2]
    waiting.restart()
    assert waiting.slots.num_active == 0 and waiting.prompts == [] and waiting.num_preempted == 0
    assert [group.members for group in waiting.waiting] == [[0], [1], [2], [3]]
    admission = waiting.admit()
    assert prefilled(admission) == [(0, 0, 10, Place(ROWS, 0)), (0, 0, 10, Place(ROWS, 1)), (1, 0, 4, Place(ROWS, 2))]
    assert admission.copies == []


def test_a_stream_of_one_prompt_does_not_starve_another():
    """Who comes later may join a group ahead of it, but only until that group's turn comes."""
    waiting = scheduler_of([], [], max_slots=3, prefill_tokens=4, budget=3 * 32)
    table, rare, number = waiting.table, 20, None
    for step in range(400):
        for _ in range(2):
            waiting.add(table.add(Request(np.zeros(6, np.int64), 0), 4))
        if step == rare:
            number = table.add(Request(np.ones(6, np.int64), 1), 4)
            waiting.add(number)
        waiting.make_room()
        waiting.admit()
        for request in advance(waiting)[0]:
            if request == number:
                # 42 are ahead of it, three at a time, 4 steps each: at most 60 steps in which 120 more may join.
                assert step < rare + (42 + 120) * 4 / 3 + 10
                return
            table.take(request, "length")
    raise AssertionError("never served")


class Machine:
    """A cache of what a decoder would hold, driven by the scheduler's word alone, as the engine drives the real one.

    The state of a token depends on the weights, on the token and on the state before it, where that is found: whoever sees
    another's keys and values, too few of them, or those of former weights, has another state.
    """

    def __init__(self, scheduler, decoder_version=0):
        self.scheduler, self.table, self.version = scheduler, scheduler.table, decoder_version
        self.cells, self.shape, self.last_hidden, self.num_prefilled, self.num_reused = {}, Shape(), {}, 0, 0

    def state(self, before, token):
        return hash((before, int(token), self.version))

    def expected(self, tokens):
        """[len(tokens)] states."""
        states = [0]
        for token in tokens:
            states.append(self.state(states[-1], token))
        return states[1:]

    def capacity(self, place):
        return self.shape.prompt_length if place.shared else self.shape.length

    def copy(self, copies):
        for source, target, length in copies:
            old = self.cells.get(source, [])[:length]  # none: nothing was written yet
            self.cells[target] = old + self.cells.get(target, [])[len(old) :]

    def write(self, place, position, state):
        assert position < self.capacity(place)
        assert place.row < (self.shape.prompts if place.shared else self.shape.rows)
        row = self.cells.setdefault(place, [])
        row.extend([None] * (position + 1 - len(row)))
        row[position] = state

    def reshape(self):
        need = self.scheduler.need
        if not self.shape.holds(need):
            self.shape = self.shape.grown(need, self.scheduler.most, self.scheduler.budget)
        assert self.shape.holds(need)
        for place in list(self.cells):
            if place.row >= (self.shape.prompts if place.shared else self.shape.rows):
                del self.cells[place]
            else:
                del self.cells[place][self.capacity(place) :]
        assert self.scheduler.budget is None or self.shape.size <= self.scheduler.budget

    def view(self, slot, request):
        """States that the request in the slot sees."""
        offset, entry = int(self.table.offsets[request]), int(self.table.entries[request])
        shared = self.cells[Place(PROMPTS, entry)][:offset] if entry >= 0 else []
        own = int(self.table.own_lengths(np.array([request]))[0])
        return shared + self.cells.get(Place(ROWS, slot), [])[:own]

    def prefill(self, prefills):
        for prefill in prefills:
            state = self.cells[prefill.place][prefill.start - 1] if prefill.start else 0
            for position in range(prefill.start, prefill.end):
                state = self.state(state, prefill.group.tokens[position])
                self.write(prefill.place, position, state)
            yield state

    def decode(self, decoding):
        for slot, request in enumerate(decoding.tolist()):
            position = int(self.table.own_lengths(np.array([request]))[0]) - 1
            seen = self.view(slot, request)[: self.table.lengths([request])[0] - 1]
            state = self.state(seen[-1], self.table.last_tokens(np.array([request]))[0])
            self.write(Place(ROWS, slot), position, state)
            yield state

    def step(self):
        """One token for each active request; -> (request, its last state) before that token."""
        scheduler = self.scheduler
        before = scheduler.slots.active
        self.copy(scheduler.make_room())
        decoding = scheduler.slots.active
        arrivals, gone = self.table.arrivals, np.setdiff1d(before, decoding)
        assert len(before) == 0 or arrivals[gone].min(initial=2**62) > arrivals[decoding].max()
        admission = scheduler.admit()
        spent = sum(prefill.end - prefill.start for prefill in admission.prefills)
        assert spent <= scheduler.prefill_tokens and (spent or scheduler.slots.num_active)
        assert all(prefill.end > prefill.start for prefill in admission.prefills)
        self.num_prefilled += spent
        self.num_reused += sum(copy.length for copy in admission.copies)
        self.reshape()
        self.copy(admission.copies)
        states = list(self.decode(decoding))
        groups = [prefill.group for prefill in admission.prefills]
        self.last_hidden.update(zip(groups, self.prefill(admission.prefills), strict=True))
        states += [self.last_hidden[group] for group in admission.sources]
        kept = {group for group in scheduler.prompts if group.members}
        self.last_hidden = {group: state for group, state in self.last_hidden.items() if group in kept}
        requests = scheduler.slots.active.tolist()
        for slot, (request, state) in enumerate(zip(requests, states, strict=True)):
            expected = self.expected(self.table.sequence(request))
            assert self.view(slot, request) == expected and state == expected[-1]
        return requests, states

    def check_bookkeeping(self):
        """Nobody is lost or doubled, and every prompt is there for somebody."""
        scheduler, table = self.scheduler, self.table
        running = scheduler.slots.active.tolist()
        held = Counter(running + [request for group in scheduler.waiting for request in group.members])
        assert held == Counter(np.flatnonzero(table.in_flight[: len(table.prompts)]).tolist())
        assert len(running) <= len(scheduler.slots.requests)
        seeing = Counter(int(table.entries[request]) for request in running)
        for entry, group in enumerate(scheduler.prompts):
            assert group.entry == entry and group.running == seeing[entry] and (group.running or group.members)
        assert set(seeing) <= {-1, *range(len(scheduler.prompts))}
        assert all(group.members for group in scheduler.waiting)


BASES = [np.random.default_rng(seed).integers(0, 9, 80) for seed in range(3)]


@st.composite
def prompts(draw):
    base, length = draw(st.sampled_from(BASES)), draw(st.integers(1, 70) | st.sampled_from([16, 17, 32, 33, 48, 49]))
    return np.append(base[: length - 1], draw(st.integers(0, 2)))


@st.composite
def loads(draw):
    """(arrival, prompt, limit, stops after, aborted at) of requests, many of them with the prompt of another."""
    pool = draw(st.lists(prompts(), min_size=1, max_size=6))
    one = st.tuples(
        st.integers(0, 25), st.sampled_from(pool), st.integers(1, 45), st.integers(1, 60),
        st.integers(0, 40) | st.just(10**6) | st.just(10**6),
    )  # fmt: skip
    return draw(st.lists(one, min_size=1, max_size=24))


SETTINGS = st.tuples(
    st.integers(1, 8),  # slots
    st.sampled_from([1, 3, 7, 16, 20, 50, 500]),  # prefill_tokens
    st.sampled_from([None, None, 0, 0, 16, 50, 200, 400]),  # positions beyond what the largest request needs
)


def budget_for(load, beyond):
    """The least budget that lets every request in, and so many more positions."""
    if beyond is None:
        return None
    least = 0
    for _, prompt, limit, *_ in load:
        while shortage(10**9, least, len(prompt), limit):
            least += 16
    return least + beyond


@settings(max_examples=100, deadline=None, derandomize=True)
@given(loads(), SETTINGS, st.sets(st.integers(1, 60), max_size=3))
def test_every_request_sees_exactly_its_tokens(load, limits, restarts):
    slots, prefill_tokens, beyond = limits
    scheduler = scheduler_of([], [], slots, prefill_tokens, budget_for(load, beyond))
    table, machine = scheduler.table, Machine(scheduler)
    finished, aborted, time, oldest = {}, {}, 0, None
    while time <= 25 or not scheduler.done:
        assert time < 6000
        for index, (arrival, prompt, limit, *_) in enumerate(load):
            if arrival == time:
                scheduler.add(table.add(Request(prompt, index), limit))
        for index, (*_, moment) in enumerate(load):
            if moment == time and len(numbers := table.numbers(index)):
                machine.copy(scheduler.remove(int(numbers[0])))
                aborted[index] = table.take(int(numbers[0]), "abort")
        time += 1
        if time in restarts:
            machine.copy(scheduler.restart())
            machine.version += 1
            oldest = None
            assert scheduler.prompts == [] and scheduler.slots.num_active == 0
        machine.check_bookkeeping()
        if scheduler.done:
            continue
        requests, states = machine.step()
        ids = table.sample_ids[requests] if requests else np.empty(0, np.int64)
        assert oldest is None or oldest in aborted or oldest in ids
        tokens = np.array([(state + int(i)) % 9 for state, i in zip(states, ids, strict=True)], np.int64)
        table.append(np.array(requests, np.int64), tokens, np.zeros(len(requests), np.float32), machine.version)
        stops = np.array([load[index][3] for index in ids], np.int64)
        done, moves = scheduler.advance(table.num_new[requests] >= stops if requests else np.empty(0, bool))
        machine.copy(moves)
        for number in done.tolist():
            completion = table.take(number, "stop")
            assert completion.sample_id not in finished
            finished[completion.sample_id] = completion
        in_flight = np.flatnonzero(table.in_flight[: len(table.prompts)])
        first = min(in_flight, key=table.arrivals.__getitem__, default=None)
        oldest = int(table.sample_ids[first]) if first in scheduler.slots.active else None
    machine.check_bookkeeping()
    assert set(finished) | set(aborted) == set(range(len(load))) and not set(finished) & set(aborted)
    assert all(len(completion.tokens) == min(load[index][2:4]) for index, completion in finished.items())
    assert scheduler.need == Shape() and machine.num_reused == scheduler.num_reused
    assert beyond is not None or scheduler.num_preempted == 0
    # What is known of the past is gone too: a copy of it would be a copy of nothing.
    for index, (_, prompt, *_) in enumerate(load):
        scheduler.add(table.add(Request(prompt, index), 1))
    assert scheduler.admit().copies == []
