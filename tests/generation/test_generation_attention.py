from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.generation.attention import Decoding, KVCache, StepAttention
from hybridflow.generation.kv_cache import Place, Shape, round_up
from hybridflow.generation.scheduler import Group, Prefill
from hybridflow.models.spec import DecoderSpec

LAYERS, SIZE = 2, 8
HEADS = [(4, 2), (4, 4), (6, 1)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Sequence(NamedTuple):
    """Keys and values [layers, T, K, E] of all tokens."""

    keys: torch.Tensor
    values: torch.Tensor


class Step:
    """A cache that holds random sequences, and what of them is new in this step."""

    def __init__(self, heads, dtype, seed=0):
        self.heads, self.kv_heads = heads
        spec = DecoderSpec("llama", 10, 16, 16, LAYERS, *heads, SIZE, 200)
        self.random, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.cache = KVCache(spec, torch.zeros(1, dtype=dtype))
        self.decoding, self.prefills, self.new = [], [], []

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def reshape(self, shape):
        """Every place is full of remains of others, which nobody may see."""
        self.cache.reshape(shape)
        for rectangle in (self.cache.rows, self.cache.prompts):
            for tensor in rectangle.keys + rectangle.values:
                tensor.copy_(100 * self.normal(*tensor.shape))

    def sequence(self, length):
        return Sequence(*(self.normal(LAYERS, length, self.kv_heads, SIZE) for _ in range(2)))

    def hold(self, place, sequence, start, end):
        """Tokens start to end of the sequence are there, from the first position on."""
        rectangle = self.cache.of(place)
        for layer in range(LAYERS):
            rectangle.keys[layer][place.row, :, :, : end - start] = sequence.keys[layer, start:end].permute(1, 2, 0)
            rectangle.values[layer][place.row, :, : end - start] = sequence.values[layer, start:end].transpose(0, 1)

    def decode(self, own, entry=-1, prompt=None):
        """A row with ``own`` tokens and a new one, behind the prompt."""
        offset = 0 if prompt is None else prompt.keys.shape[1]
        sequence = self.sequence(own + 1)
        if prompt is not None:
            sequence = Sequence(*(torch.cat(pair, 1) for pair in zip(prompt, sequence, strict=True)))
        self.hold(Place(False, len(self.decoding)), sequence, offset, offset + own)
        self.decoding.append((own, entry, offset))
        self.new.append((sequence, offset + own, offset + own + 1))

    def prefill(self, start, end, place, sequence=None):
        sequence = sequence or self.sequence(end)
        self.hold(place, sequence, 0, start)
        self.prefills.append(Prefill(Group(np.zeros(end + 3, np.int64), []), start, end, place))
        self.new.append((sequence, start, end))

    def run(self):
        """-> what attention gives and what it ought to give, [layers, N, H, E] each."""
        columns = np.array(self.decoding, np.int64).reshape(-1, 3).T
        attend = StepAttention(self.cache, Decoding(*columns), self.prefills)
        queries = self.normal(LAYERS, sum(end - start for _, start, end in self.new), self.heads, SIZE)
        found, expected = [], []
        for layer in range(LAYERS):
            k, v = (torch.cat([s[kind][layer, start:end] for s, start, end in self.new]) for kind in (0, 1))
            found.append(attend(layer, queries[layer], k, v))
            expected.append(self.reference(layer, queries[layer]))
        return torch.stack(found), torch.stack(expected)

    def reference(self, layer, queries):
        """Token by token, head by head."""
        places = [(sequence, last) for sequence, start, end in self.new for last in range(start, end)]
        out = torch.empty(queries.shape, dtype=torch.float64)
        for i, (sequence, last) in enumerate(places):
            for head in range(self.heads):
                kv_head = head // (self.heads // self.kv_heads)
                keys = sequence.keys[layer, : last + 1, kv_head].double()
                scores = keys @ queries[i, head].double() / SIZE**0.5
                out[i, head] = scores.softmax(0) @ sequence.values[layer, : last + 1, kv_head].double()
        return out


def assert_right(step):
    found, expected = step.run()
    assert found.dtype == step.dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[step.dtype], rtol=TOLERANCE[step.dtype])
    assert_written(step)


def assert_written(step):
    """What later steps find."""
    places = [(Place(False, slot), own) for slot, (own, _, _) in enumerate(step.decoding)]
    places += [(prefill.place, prefill.start) for prefill in step.prefills]
    for (place, at), (sequence, start, end) in zip(places, step.new, strict=True):
        rectangle, span = step.cache.of(place), slice(at, at + end - start)
        for layer in range(LAYERS):
            keys, values = rectangle.keys[layer][place.row], rectangle.values[layer][place.row]
            assert torch.equal(keys[:, :, span].permute(2, 0, 1), sequence.keys[layer, start:end])
            assert torch.equal(values[:, span].transpose(0, 1), sequence.values[layer, start:end])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
def test_everything_at_once(heads, dtype):
    step = Step(heads, dtype)
    step.reshape(Shape(12, 48, 6, 64))
    shared = {entry: step.sequence(length) for entry, length in ((0, 20), (2, 1), (3, 48))}  # of 1, 4, 5 nobody sees any
    for entry, prompt in shared.items():
        step.hold(Place(True, entry), prompt, 0, prompt.keys.shape[1])
    for own, entry in [(0, 0), (5, -1), (17, 3), (3, 0), (0, -1), (31, 2), (16, 3), (7, 0), (47, -1)]:
        step.decode(own, entry, shared.get(entry))
    step.prefill(0, 21, Place(False, 9))
    step.prefill(0, 7, Place(True, 4))  # the first chunk of a long prompt
    step.prefill(0, 1, Place(False, 10))
    step.prefill(16, 23, Place(False, 11))  # behind a copy
    step.prefill(33, 50, Place(True, 5))
    assert_right(step)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
def test_one_kind_alone(heads, dtype):
    for fill in (lambda s, p: s.decode(9), lambda s, p: s.decode(9, 1, p), lambda s, p: s.prefill(0, 9, Place(True, 0)),
                 lambda s, p: s.prefill(5, 9, Place(False, 0))):  # fmt: skip
        step = Step(heads, dtype)
        step.reshape(Shape(1, 16, 2, 32))
        prompt = step.sequence(19)
        step.hold(Place(True, 1), prompt, 0, 19)
        fill(step, prompt)
        assert_right(step)


def test_a_prompt_and_a_row_that_differ_by_far_are_joined_right():
    """Where one part has all of the softmax's mass, or the scores are far from 0."""
    for scale in (0.0, 30.0, -30.0):
        step = Step((4, 2), torch.float32)
        step.reshape(Shape(2, 16, 1, 16))
        prompt = step.sequence(12)
        prompt.keys[:] += scale
        step.hold(Place(True, 0), prompt, 0, 12)
        step.decode(3, 0, prompt)
        step.decode(0, 0, prompt)
        found, expected = step.run()
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("place", [Place(True, 0), Place(False, 1)])
def test_chunks_give_what_the_whole_gives(place):
    whole = Step((4, 2), torch.float32)
    whole.reshape(Shape(2, 48, 1, 48))
    sequence, queries = whole.sequence(41), whole.normal(41, 4, SIZE)
    tokens, nobody = np.zeros(41, np.int64), Decoding(*(np.empty(0, np.int64) for _ in range(3)))

    def prefill(cache, start, end):
        attend = StepAttention(cache, nobody, [Prefill(Group(tokens, []), start, end, place)])
        return attend(1, queries[start:end], sequence.keys[1, start:end], sequence.values[1, start:end])

    expected = prefill(whole.cache, 0, 41)
    chunked = Step((4, 2), torch.float32)
    chunked.reshape(Shape(2, 48, 1, 48))
    found = torch.cat([prefill(chunked.cache, start, min(41, start + 5)) for start in range(0, 41, 5)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_any_mixture(data):
    step = Step(data.draw(st.sampled_from(HEADS)), torch.float32, data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(1, 40), max_size=4))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(-1, len(lengths) - 1)), max_size=6))
    spans = st.tuples(st.booleans(), st.integers(0, 20), st.integers(1, 20))
    prefills = sorted(data.draw(st.lists(spans, min_size=not rows, max_size=3)), key=lambda span: span[1] > 0)
    longest = max([own + 1 for own, _ in rows] + [start + count for _, start, count in prefills])
    longest_prompt = max(lengths + [start + count for _, start, count in prefills]) if lengths or prefills else 0
    step.reshape(Shape(len(rows) + 3, round_up(longest), len(lengths) + 3, round_up(longest_prompt)))
    prompts = [step.sequence(length) for length in lengths]
    for entry, prompt in enumerate(prompts):
        step.hold(Place(True, entry), prompt, 0, lengths[entry])
    for own, entry in rows:
        step.decode(own, entry, prompts[entry] if entry >= 0 else None)
    for i, (shared, start, count) in enumerate(prefills):
        step.prefill(start, start + count, Place(shared, i + (len(lengths) if shared else len(rows))))
    assert_right(step)
