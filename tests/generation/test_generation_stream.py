"""A stream: calls that come and go share one engine, and new weights come between two tokens."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from tiny_decoders import tiny_decoder

from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Completion, Request, SamplingParams
from hybridflow.generation.stream import Stream
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
    stream.close()
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
    stream.close()
    stream.abandon()
    assert not stream.engine.num_in_flight
    stream.begin(requests(2, 3))
    assert same(stream.take([2, 3]), alone(weights.decoder, 2, 3))
