"""A stream: calls that come and go share one engine, and new weights come between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder

from hybridflow.core.errors import WorkerError
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Completion, Request, SamplingParams
from hybridflow.generation.stream import Entry, Stream
from hybridflow.models.decoder import Decoder

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0)


class Weights:
    """A decoder whose weights change, as a replica's do."""

    def __init__(self) -> None:
        self.decoder, self.version = tiny_decoder(), 0

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(self.version)))
        self.version += 1


def stream_of(weights: Weights, partial: bool = True, slots: int = 64) -> Stream:
    engine = Engine(weights.decoder, seed=3, max_slots=slots)
    return Stream(engine, PARAMS, lambda: weights.version, partial, lambda: None)


def requests(*ids: int) -> list[Request]:
    return [Request(np.arange(1, 3 + number % 3), number) for number in ids]


def alone(decoder: Decoder, *ids: int) -> list[Completion]:
    return Engine(decoder, seed=3).generate(requests(*ids), PARAMS)


def same(found: list[Completion], expected: list[Completion]) -> bool:
    return [completion.tokens.tolist() for completion in found] == [completion.tokens.tolist() for completion in expected]


@pytest.mark.parametrize("slots", [2, 64])
def test_calls_get_their_own_responses_in_whatever_order_they_are_taken(slots: int) -> None:
    weights = Weights()
    stream = stream_of(weights, slots=slots)
    stream.begin(requests(1, 2))
    stream.begin(requests(3))
    stream.begin(requests(4, 5, 6))
    steps = stream.engine.num_steps
    assert same(stream.take([3]), alone(weights.decoder, 3))
    if slots == 64:
        assert stream.engine.num_steps - steps <= PARAMS.max_new_tokens + 1, "all of them were served together"
    assert same(stream.take([4, 5, 6]), alone(weights.decoder, 4, 5, 6))
    assert same(stream.take([1, 2]), alone(weights.decoder, 1, 2))
    assert not stream.engine.num_in_flight


def test_whoever_waits_is_served_when_its_requests_come_later() -> None:
    weights, taken = Weights(), list[Any]()
    stream = stream_of(weights)
    waiting = threading.Thread(target=lambda: taken.extend(stream.take([7])), daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert not taken
    stream.begin(requests(7))
    waiting.join(20)
    assert same(taken, alone(weights.decoder, 7))


@pytest.mark.parametrize("partial", [True, False])
def test_new_weights_come_at_the_next_token_or_when_all_responses_have_ended(partial: bool) -> None:
    """Another thread changes them in the middle of what is served; another call begins meanwhile."""
    weights = Weights()
    first = tiny_decoder()
    stream, taken = stream_of(weights, partial), list[Completion]()
    served, changed = threading.Event(), threading.Event()

    def breathe() -> None:
        if stream.engine.num_in_flight and stream.engine.num_steps >= 4:
            served.set()
            if partial:
                assert changed.wait(20)
            else:
                time.sleep(0.02)

    stream.breathe = breathe
    stream.begin(requests(1, 2))
    main = threading.Thread(target=lambda: taken.extend(stream.take([1, 2])), daemon=True)
    main.start()
    assert served.wait(20)
    stream.close(1)
    assert partial or not stream.engine.num_in_flight
    steps = stream.engine.num_steps
    changed.set()
    time.sleep(0.05)
    assert stream.engine.num_steps == steps, "no token while weights change"
    weights.change()
    stream.open()
    stream.begin(requests(8))
    main.join(20)
    later = stream.take([8])
    old, new = alone(first, 1, 2), alone(weights.decoder, 8)
    assert same(later, new) and set(later[0].versions.tolist()) == {1}
    versions = [completion.versions.tolist() for completion in taken]
    if not partial:
        assert same(taken, old) and versions == [[0] * len(completion.tokens) for completion in taken]
        return
    for completion, before in zip(taken, old, strict=True):
        kept = completion.versions.tolist().count(0)
        assert completion.versions.tolist() == [0] * kept + [1] * (len(completion.tokens) - kept)
        assert completion.tokens[:kept].tolist() == before.tokens[:kept].tolist()
    assert any(set(told) == {0, 1} for told in versions), "weights changed in the middle of a response"


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    weights = Weights()
    stream = stream_of(weights, slots=1)
    stream.begin(requests(1, 2))
    stream.take([1])
    stream.begin(requests(3))
    stream.close(1)
    stream.abandon()
    assert not stream.engine.num_in_flight
    stream.begin(requests(2, 3))
    assert same(stream.take([2, 3]), alone(weights.decoder, 2, 3))


Pauses = list[float]
CALLS = [(1, 2), (3,), (4, 5, 6), (7,), (8, 9)]
LANE: list[tuple[int, ...] | None] = [(1, 2), (3,), None, (4, 5, 6), None, None, (7,), (8, 9), None]
"""what comes, in this order: requests, and new weights (None)"""


def played(pauses: Pauses, partial: bool, tape: Iterable[Entry] = (), rest: int = 0) -> tuple[list[Completion], Any]:
    """All responses, and the tape, where each of the lane comes so many seconds after the one before; the main thread
    pauses as long, in the other order, but for the last one."""
    weights = Weights()
    stream, others = stream_of(weights, partial, slots=4), iter(pauses[-2::-1] * 99)
    stream.breathe = lambda: time.sleep(next(others))
    stream.follow(tape, rest)

    def lane() -> None:
        for requested, pause in zip(LANE, pauses, strict=True):
            time.sleep(pause)
            if requested is None:
                stream.close(weights.version + 1)
                weights.change()
                stream.open()
            else:
                stream.begin(requests(*requested))

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    done = [completion for call in CALLS for completion in stream.take(call)]
    thread.join(20)
    assert not thread.is_alive()
    return done, stream.recorded()


def told(done: list[Completion]) -> list[tuple[bytes, bytes, bytes]]:
    return [(one.tokens.tobytes(), one.log_probs.tobytes(), one.versions.tobytes()) for one in done]


PAUSES = st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004]), min_size=len(LANE), max_size=len(LANE))


@pytest.mark.parametrize("partial", [True, False])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(first=PAUSES, second=PAUSES)
def test_a_tape_is_repeated_bit_for_bit_however_early_or_late_all_comes(
    partial: bool, first: Pauses, second: Pauses
) -> None:
    done, recorded = played(first, partial)
    again, repeated = played(second, partial, *recorded)
    assert repeated == recorded and told(again) == told(done)
    tape, _ = recorded
    assert sum(entry.arrived for entry in tape) == 9
    assert partial or all(new.version == old.version or not new.in_flight for old, new in pairwise(tape))


def test_weights_that_came_when_nothing_was_under_way_any_more_come_no_earlier() -> None:
    done, recorded = played([0.0] * (len(LANE) - 1) + [0.3], partial=True)
    again, repeated = played([0.0] * len(LANE), True, *recorded)
    assert repeated == recorded and told(again) == told(done)


def test_tapes_differ_when_nothing_directs_them() -> None:
    late = [0.0] * (len(LANE) - 1) + [0.05]
    tapes = [played(pauses, partial=True)[1][0] for pauses in (late, [0.01] * len(LANE))]
    assert tapes[0] != tapes[1]


def test_after_the_end_of_a_tape_all_comes_as_it_does() -> None:
    done, (tape, _) = played([0.002] * len(LANE), partial=True)
    again, (longer, _) = played([0.0] * len(LANE), partial=True, tape=tape[:2])
    assert longer[:2] == tape[:2] and [len(one.tokens) for one in again] == [len(one.tokens) for one in done]


def test_a_tape_of_another_run_is_told() -> None:
    weights = Weights()
    stream = stream_of(weights)
    stream.follow([Entry(0, 0, 2, 0), Entry(3, 7, 1, 0)], 0)
    stream.begin(requests(1, 2, 3))
    with pytest.raises(WorkerError, match=r"replay: 2 responses are under way 3 steps .*, 7 after 3 in the run that is"):
        stream.take([1])
    stream = stream_of(weights)
    stream.follow([Entry(0, 0, 2, 0), Entry(99, 2, 1, 0)], 0)
    stream.begin(requests(1, 2, 3))
    with pytest.raises(WorkerError, match="replay: 0 responses are under way"):
        stream.take([3])


def test_a_stream_that_is_told_to_be_free_waits_no_longer() -> None:
    stream, taken = stream_of(Weights()), list[Completion]()
    stream.follow([Entry(0, 0, 3, 0)], 0)
    stream.begin(requests(1, 2))
    waiting = threading.Thread(target=lambda: taken.extend(stream.take([1, 2])), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and not taken
    stream.follow((), 0)
    waiting.join(20)
    assert len(taken) == 2


def test_of_a_call_those_begin_first_that_are_expected_to_be_longest() -> None:
    weights = Weights()
    stream = stream_of(weights, slots=1)
    short, long = (Request(np.arange(1, 4), number, 3, expected) for number, expected in ((1, 2), (2, 9)))
    stream.begin([short, long])
    steps = stream.engine.num_steps
    stream.take([2])
    assert stream.engine.num_steps - steps == 3 and stream.engine.num_in_flight == 1, "the other one has not begun"
    assert len(stream.take([1])[0].tokens) == 3
