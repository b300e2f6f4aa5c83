import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder

from hybridflow.core.errors import NonFiniteError, UserError
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.models.decoder import CausalAttention

POSITION = 2 * 2 * 2 * 8 * 4  # bytes of a cache position of tiny_decoder


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def requests_of(count, *, members=1, longest=20, most=40, seed=0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 150, rng.integers(1, longest + 1)) for _ in range(-(-count // members))]
    limits = rng.integers(1, most + 1, count)
    return [Request(prompts[index // members], 100 + index, int(limits[index])) for index in range(count)]


def budget_of(positions):
    return positions * POSITION / 1e9


def drain(engine):
    completions = []
    while engine.num_in_flight:
        completions += engine.step()
    return completions


def assert_same(left, right):
    assert [completion.sample_id for completion in left] == [completion.sample_id for completion in right]
    for one, other in zip(left, right, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


def forward_log_probs(decoder, prompt, response):
    """The uncached forward over prompt and response."""
    tokens = torch.from_numpy(np.concatenate([prompt, response]))
    attend = CausalAttention(torch.tensor([len(tokens)]))
    log_probs = (decoder(tokens, attend.positions, attend) @ decoder.head_weight.T).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, torch.from_numpy(response)[:, None])[:, 0].detach().numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tight_budget_changes_nothing_but_the_time(decoder, temperature):
    requests, params = requests_of(30, members=3), SamplingParams(1, temperature=temperature)
    tight = Engine(decoder, seed=4, max_slots=16, kv_cache_gb=budget_of(160))
    completions = tight.generate(requests, params)
    assert tight.num_preempted > 5
    free = Engine(decoder, seed=4, max_slots=16)
    assert_same(completions, free.generate(requests, params))
    assert free.num_preempted == 0 and free.num_steps < tight.num_steps
    for request, completion in zip(requests, completions, strict=True):
        expected = forward_log_probs(decoder, request.prompt, completion.tokens)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)


def test_two_thousand_requests_with_room_for_twenty(decoder):
    requests = requests_of(2000, members=4, longest=10, most=40)
    engine = Engine(decoder, seed=1, max_slots=100, kv_cache_gb=budget_of(20 * 48))
    params = SamplingParams(1, stop_token_ids=(3,))
    completions = engine.generate(requests, params)
    assert [completion.sample_id for completion in completions] == [request.sample_id for request in requests]
    assert engine.num_preempted > 0
    assert_same(completions[::50], Engine(decoder, seed=1).generate(requests[::50], params))


def test_the_cache_stays_within_the_budget(decoder):
    positions = 150
    engine = Engine(decoder, seed=0, max_slots=16, kv_cache_gb=budget_of(positions))
    for request in requests_of(20, members=5):
        engine.add(request, SamplingParams(1))
    while engine.num_in_flight:
        flight = engine._flight
        engine.step()
        rectangles = (flight.cache.rows, flight.cache.prompts)
        tensors = [tensor for each in rectangles for tensor in each.keys + each.values]
        assert sum(tensor.numel() * 4 for tensor in tensors) <= positions * POSITION
    assert engine.num_preempted > 0


def test_a_request_beyond_the_budget_is_told_before_any_work(decoder):
    engine = Engine(decoder, seed=0, kv_cache_gb=budget_of(96))
    small, large = Request(np.arange(16), 1, 60), Request(np.arange(17), 2, 60)
    told = r"sample_id 2\): 17 prompt tokens and max_new_tokens 60 need 2.87e-05 GB .* over kv_cache_gb 2.46e-05"
    with pytest.raises(UserError, match=told):
        engine.generate([small, large], SamplingParams(1))
    with pytest.raises(UserError, match=told):
        engine.add(large, SamplingParams(1))
    assert engine.num_steps == engine.num_in_flight == 0
    assert len(engine.generate([small], SamplingParams(1))[0].tokens) == 60


@pytest.mark.parametrize("size", [0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_positive_number(decoder, size):
    with pytest.raises(UserError, match="kv_cache_gb is"):
        Engine(decoder, seed=0, kv_cache_gb=size)


@settings(max_examples=25, deadline=None, derandomize=True)  # a draw may lie on the edge between two tokens
@given(st.data())
def test_requests_come_and_go(data):
    decoder, count = tiny_decoder(), data.draw(st.integers(1, 16))
    requests = requests_of(count, members=data.draw(st.integers(1, 4)), seed=data.draw(st.integers(0, 99)))
    params = SamplingParams(1, temperature=data.draw(st.sampled_from([0.0, 1.0])), stop_token_ids=(5, 6, 7, 8))
    arrivals = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    aborts = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 40), max_size=3))
    engine = Engine(
        decoder,
        seed=0,
        max_slots=data.draw(st.integers(1, 8)),
        prefill_tokens=data.draw(st.sampled_from([1, 30, 2048])),
        kv_cache_gb=data.draw(st.sampled_from([None, budget_of(96), budget_of(150)])),
    )
    alone = {r.sample_id: Engine(decoder, seed=0).generate([r], params)[0] for r in requests}
    seen, partial = [], []
    for time in range(32):
        for request in [r for r, arrival in zip(requests, arrivals, strict=True) if arrival == time]:
            engine.add(request, params)
        for index in [index for index, moment in aborts.items() if moment == time and arrivals[index] < time]:
            if requests[index].sample_id not in [completion.sample_id for completion in seen + partial]:
                partial.append(engine.abort(requests[index].sample_id))
        seen += engine.step()
    seen += drain(engine)
    assert sorted(c.sample_id for c in seen + partial) == [request.sample_id for request in requests]
    assert_same(seen, [alone[completion.sample_id] for completion in seen])
    for completion in partial:
        whole = alone[completion.sample_id].tokens
        assert completion.finish == "abort" and completion.tokens.tolist() == whole[: len(completion.tokens)].tolist()
    assert engine.num_in_flight == 0 and engine.step() == []


@pytest.mark.parametrize("positions", [None, 150])
def test_every_token_has_the_log_prob_of_its_version(positions):
    decoders = [tiny_decoder() for _ in range(3)]
    for version, decoder in enumerate(decoders):
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.mul_(1 + 0.1 * version)
    running = tiny_decoder()
    budget = None if positions is None else budget_of(positions)
    engine, params = Engine(running, seed=0, max_slots=6, kv_cache_gb=budget), SamplingParams(1)
    requests = {request.sample_id: request for request in requests_of(16, members=4)}
    for request in requests.values():
        engine.add(request, params)
    completions = []
    for version, decoder in enumerate(decoders):
        running.load_state_dict(decoder.state_dict())
        engine.version = version
        completions += drain(engine) if version == 2 else [c for _ in range(12) for c in engine.step()]
    assert len(completions) == 16 and any(len(set(c.versions.tolist())) > 1 for c in completions)
    assert (positions is not None) == (engine.num_preempted > 0)
    for completion in completions:
        prompt = requests[completion.sample_id].prompt
        expected = np.stack([forward_log_probs(decoder, prompt, completion.tokens) for decoder in decoders])
        stamped = expected[completion.versions, np.arange(len(completion.tokens))]
        np.testing.assert_allclose(completion.log_probs, stamped, atol=1e-4)
        assert (np.diff(completion.versions) >= 0).all() and completion.versions.dtype == np.int64


def test_mistakes_of_a_caller_who_streams(decoder):
    engine, request = Engine(decoder, seed=0), Request(np.array([1, 2]), 7)
    with pytest.raises(UserError, match="no request with sample_id 7 is in flight"):
        engine.abort(7)
    engine.add(request, SamplingParams(3))
    with pytest.raises(UserError, match="a request with sample_id 7 is in flight"):
        engine.add(request, SamplingParams(3))
    with pytest.raises(UserError, match="other sampling parameters are in flight"):
        engine.add(Request(np.array([1]), 8), SamplingParams(4))
    with pytest.raises(UserError, match=r"1 requests of Engine\.add are in flight"):
        engine.generate([request], SamplingParams(3))
    assert engine.abort(7).tokens.tolist() == []
    engine.add(Request(np.array([1]), 7), SamplingParams(4))  # nothing of the former is left
    assert len(drain(engine)[0].tokens) == 4


def test_an_engine_recovers_from_broken_weights():
    decoder = tiny_decoder()
    engine, params = Engine(decoder, seed=0), SamplingParams(3)
    engine.add(Request(np.array([1, 2]), 4), params)
    engine.step()
    with torch.no_grad():
        decoder.norm.weight[3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"samples \[4\]"):
        engine.step()
    with torch.no_grad():
        decoder.norm.weight[3] = 1.0
    assert engine.num_in_flight == 0 and len(engine.generate([Request(np.array([1, 2]), 4)], params)[0].tokens) == 3
