import numpy as np
import pytest
import torch
import transformers
from tiny_decoders import tiny_decoder

from hybridflow.core.errors import NonFiniteError, UserError
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.models.decoder import CausalAttention, Decoder
from hybridflow.models.weights import load_hf_state, read_spec
from hybridflow.ops.linear import linear

HF = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
}


@pytest.fixture
def decoder():
    return tiny_decoder()


def prompts_of(count, *, longest=20, vocab=150, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(1, longest + 1)) for _ in range(count)]


def requests_of(prompts, *, members=1, limits=None):
    return [
        Request(prompts[index // members], 100 + index, None if limits is None else int(limits[index]))
        for index in range(len(prompts) * members)
    ]


def forward_log_probs(decoder, prompt, response, temperature):
    """The uncached forward over prompt and response."""
    tokens = torch.from_numpy(np.concatenate([prompt, response]))
    attend = CausalAttention(torch.tensor([len(tokens)]))
    hidden = decoder(tokens, attend.positions, attend)
    log_probs = ((hidden @ decoder.head_weight.T).float() / temperature).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, torch.from_numpy(response)[:, None])[:, 0]


def assert_same(left, right):
    assert [completion.tokens.tolist() for completion in left] == [completion.tokens.tolist() for completion in right]
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert one.finish == other.finish


@pytest.mark.parametrize("family", HF)
def test_greedy_equals_transformers(family, tmp_path):
    config_class, model_class, extra = HF[family]
    torch.manual_seed(0)
    config = config_class(
        **extra, vocab_size=150, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.15, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = model_class(config).eval()
    with torch.no_grad():  # transformers starts them at 0, which would hide a wrong bias
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    config.save_pretrained(tmp_path)
    decoder = Decoder(read_spec(tmp_path))
    load_hf_state(decoder, model.state_dict().items())
    prompts = prompts_of(6)
    completions = Engine(decoder, seed=0, max_slots=4).generate(requests_of(prompts), SamplingParams(24, temperature=0))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.from_numpy(prompt)[None]
        with torch.no_grad():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert completion.tokens.tolist() == expected[0, len(prompt) :].tolist()
    assert len({token for completion in completions for token in completion.tokens.tolist()}) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_log_probs_are_those_of_the_training_forward(temperature, qk_norm):
    decoder = tiny_decoder(qk_norm=qk_norm, tied=False)
    requests = requests_of(prompts_of(5), members=3, limits=np.arange(15) + 1)
    params = SamplingParams(20, temperature=temperature, top_k=20, top_p=0.9)
    for request, completion in zip(
        requests, Engine(decoder, seed=3, max_slots=4, prefill_tokens=30).generate(requests, params), strict=True
    ):
        expected = forward_log_probs(decoder, request.prompt, completion.tokens, temperature or 1.0)
        np.testing.assert_allclose(completion.log_probs, expected.detach().numpy(), atol=1e-4)
        assert completion.log_probs.dtype == np.float32 and completion.tokens.dtype == np.int64


@pytest.mark.parametrize(("max_slots", "prefill_tokens"), [(1, 1), (3, 25), (64, 2048)])
def test_a_response_does_not_depend_on_its_company(decoder, max_slots, prefill_tokens):
    requests = requests_of(prompts_of(7), members=3, limits=np.random.default_rng(1).integers(1, 40, 21))
    params = SamplingParams(10)
    together = Engine(decoder, seed=5, max_slots=max_slots, prefill_tokens=prefill_tokens).generate(requests, params)
    alone = [Engine(decoder, seed=5).generate([request], params)[0] for request in requests]
    assert_same(together, alone)
    order = np.random.default_rng(2).permutation(21)
    shuffled = Engine(decoder, seed=5, max_slots=max_slots).generate([requests[index] for index in order], params)
    assert_same(shuffled, [alone[index] for index in order])
    assert len({tuple(completion.tokens[:3]) for completion in alone if len(completion.tokens) > 2}) > 10


def test_randomness_comes_from_seed_and_sample_id(decoder):
    prompt, params = prompts_of(1)[0], SamplingParams(12)
    first, again, other = Engine(decoder, seed=0).generate(
        [Request(prompt, 1), Request(prompt, 1), Request(prompt, 2)], params
    )
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    assert Engine(decoder, seed=1).generate([Request(prompt, 1)], params)[0].tokens.tolist() != first.tokens.tolist()


def test_more_requests_than_slots(decoder):
    limits = np.random.default_rng(0).integers(1, 30, 50)
    requests = requests_of(prompts_of(50), limits=limits)
    engine = Engine(decoder, seed=0, max_slots=6)
    completions = engine.generate(requests, SamplingParams(5))
    assert [len(completion.tokens) for completion in completions] == limits.tolist()
    assert_same(completions, Engine(decoder, seed=0, max_slots=50).generate(requests, SamplingParams(5)))
    # A row that finishes is replaced at once: no slot idles until the tail.
    assert engine.num_steps <= limits.sum() / 6 + limits.max()


@pytest.mark.parametrize("max_slots", [1, 3, 8, 64])
def test_a_group_shares_its_prefill(decoder, max_slots):
    prompts = prompts_of(4)
    engine = Engine(decoder, seed=0, max_slots=max_slots)
    completions = engine.generate(requests_of(prompts, members=8), SamplingParams(6))
    assert engine.num_prefilled == sum(map(len, prompts))
    assert all(len({tuple(c.tokens) for c in completions[start : start + 8]}) > 4 for start in range(0, 32, 8))


def test_chunks_change_nothing(decoder):
    rng = np.random.default_rng(3)
    requests = requests_of([rng.integers(0, 150, length) for length in (40, 40, 4, 40)], members=2)
    chunked = Engine(decoder, seed=0, max_slots=5, prefill_tokens=5)
    whole = Engine(decoder, seed=0, max_slots=5, prefill_tokens=2048)
    for params in (SamplingParams(12), SamplingParams(12, temperature=0)):
        assert_same(chunked.generate(requests, params), whole.generate(requests, params))
    assert chunked.num_prefilled == whole.num_prefilled == 2 * 124
    assert chunked.num_steps > whole.num_steps


def test_those_that_run_go_on_while_a_long_prompt_comes_in_chunks(decoder):
    engine, params = Engine(decoder, seed=0, prefill_tokens=5), SamplingParams(6)
    engine.add(Request(np.arange(3), 0), params)
    engine.step()
    engine.add(Request(np.arange(40), 1), params)
    assert [completion.sample_id for _ in range(5) for completion in engine.step()] == [0]
    assert engine.num_prefilled == 3 + 25 and engine.num_steps == 6


def test_a_whole_prompt_behind_the_end_of_a_long_one(decoder):
    """What a step prefills of different kinds is sorted for the decoder, and everybody samples from the own."""
    prompts = [np.arange(12), np.arange(40, 43), np.arange(90, 92)]
    requests, params = requests_of(prompts), SamplingParams(8, temperature=0)
    engine = Engine(decoder, seed=0, prefill_tokens=10)
    assert_same(engine.generate(requests, params), Engine(decoder, seed=0).generate(requests, params))
    assert engine.num_steps == 9  # the rest of the first and the two others in the second


@pytest.mark.parametrize("prefill_tokens", [50, 2048])
@pytest.mark.parametrize("members", [1, 3])
def test_prompts_that_begin_alike_are_computed_once(decoder, members, prefill_tokens):
    rng = np.random.default_rng(4)
    system = rng.integers(0, 150, 70)
    prompts = [np.concatenate([system, rng.integers(0, 150, length)]) for length in (1, 12, 12, 30)]
    requests, params = requests_of(prompts, members=members), SamplingParams(10)
    engine = Engine(decoder, seed=0, prefill_tokens=prefill_tokens)
    alone = [Engine(decoder, seed=0).generate([request], params)[0] for request in requests]
    assert_same(engine.generate(requests, params), alone)
    assert engine.num_reused == 3 * 64 and engine.num_prefilled == sum(map(len, prompts)) - 3 * 64
    engine.generate(requests[:1], params)
    assert engine.num_reused == 3 * 64  # nothing outlives a call


@pytest.mark.parametrize("members", [1, 4])
def test_who_comes_later_reuses_the_prompt_of_those_that_run(decoder, members):
    prompt, params = np.arange(50), SamplingParams(12)
    engine = Engine(decoder, seed=0)
    for sample_id in range(members):
        engine.add(Request(prompt, sample_id), params)
    for _ in range(4):
        assert engine.step() == []
    engine.add(Request(prompt, 9), params)
    done = []
    while engine.num_in_flight:
        done += engine.step()
    assert (engine.num_reused, engine.num_prefilled) == (48, 52)
    done = sorted(done, key=lambda completion: completion.sample_id)
    assert_same(done, [Engine(decoder, seed=0).generate([Request(prompt, c.sample_id)], params)[0] for c in done])


def test_new_weights_reuse_nothing_of_the_old(decoder):
    engine, params, prompt = Engine(decoder, seed=0), SamplingParams(12), np.arange(50)
    engine.add(Request(prompt, 0), params)
    engine.step()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)
    engine.version = 1
    engine.add(Request(prompt, 1), params)
    done = {completion.sample_id: completion for _ in range(15) for completion in engine.step()}
    assert_same([done[1]], Engine(decoder, seed=0).generate([Request(prompt, 1)], params))


def test_a_stop_token_ends_the_response(decoder):
    requests = requests_of(prompts_of(8), limits=np.full(8, 20))
    engine = Engine(decoder, seed=0, max_slots=3)
    free = engine.generate(requests, SamplingParams(1))
    stops = (int(free[0].tokens[4]), int(free[1].tokens[19]))
    for whole, cut in zip(free, engine.generate(requests, SamplingParams(1, stop_token_ids=stops)), strict=True):
        hits = np.flatnonzero(np.isin(whole.tokens, stops))
        length = hits[0] + 1 if len(hits) else 20
        assert cut.tokens.tolist() == whole.tokens[:length].tolist()
        assert cut.finish == ("stop" if len(hits) else "length")
        np.testing.assert_allclose(cut.log_probs, whole.log_probs[:length], atol=1e-4)


def spell(tokens):
    return "".join(f"{'aeiou'[token % 5]}{'kst'[token % 3]}" for token in tokens)


def test_a_stop_string_may_span_tokens(decoder):
    requests = requests_of(prompts_of(8))
    engine = Engine(decoder, seed=0, max_slots=3, decode=spell)
    free = engine.generate(requests, SamplingParams(30))
    stops = (spell(free[0].tokens)[13:18], spell(free[1].tokens)[20:25])
    for whole, cut in zip(free, engine.generate(requests, SamplingParams(30, stop_strings=stops)), strict=True):
        ends = [end for end in range(1, 31) if any(stop in spell(whole.tokens[:end]) for stop in stops)]
        assert cut.tokens.tolist() == whole.tokens[: ends[0] if ends else 30].tolist()
        assert cut.finish == ("stop" if ends else "length")
    assert free[0].finish == "length" and len(cut.tokens) <= 30


def test_a_stop_at_the_limit_is_a_stop(decoder):
    request = Request(prompts_of(1)[0], 0)
    engine = Engine(decoder, seed=0)
    last = int(engine.generate([request], SamplingParams(1))[0].tokens[-1])
    assert engine.generate([request], SamplingParams(1, stop_token_ids=(last,)))[0].finish == "stop"


def test_bf16():
    decoder = tiny_decoder().to(torch.bfloat16)
    requests = requests_of(prompts_of(6), members=2)
    completions = Engine(decoder, seed=0, max_slots=5).generate(requests, SamplingParams(16))
    distances = [
        completion.log_probs - forward_log_probs(decoder, request.prompt, completion.tokens, 1.0).detach().numpy()
        for request, completion in zip(requests, completions, strict=True)
    ]
    assert np.abs(np.concatenate(distances)).mean() < 0.05


@pytest.mark.parametrize("training", [True, False])
def test_training_and_generation_take_turns_on_the_same_weights(decoder, training):
    decoder.train(training)
    engine, request = Engine(decoder, seed=0), Request(prompts_of(1)[0], 0)
    before = engine.generate([request], SamplingParams(12))[0]  # grows the rotary tables in inference mode
    assert decoder.training is training
    forward_log_probs(decoder, request.prompt, before.tokens, 1.0).sum().backward()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter -= 0.1 * parameter.grad.sign()
    after = engine.generate([request], SamplingParams(12))[0]
    expected = forward_log_probs(decoder, request.prompt, after.tokens, 1.0).detach().numpy()
    np.testing.assert_allclose(after.log_probs, expected, atol=1e-4)
    assert after.tokens.tolist() != before.tokens.tolist()


def test_no_requests(decoder):
    assert Engine(decoder, seed=0).generate([], SamplingParams(1)) == []


@pytest.mark.parametrize(
    ("prompt", "limit", "params", "told"),
    [
        ([], None, SamplingParams(1), r"request 1 \(sample_id 7\): the prompt is empty"),
        (
            [1] * 190,
            None,
            SamplingParams(11),
            "190 prompt tokens and max_new_tokens 11 exceed the 200 positions of ",
        ),
        ([1] * 190, 11, SamplingParams(5), "190 prompt tokens and max_new_tokens 11 exceed"),
        ([1, 150], None, SamplingParams(1), "prompt tokens go from 1 to 150; expected 0 to 149"),
        ([1], 0, SamplingParams(1), "max_new_tokens is 0"),
        ([1], None, SamplingParams(1, stop_strings=("x",)), "give the Engine its decode function"),
    ],
)
def test_mistakes_are_told_before_any_work(decoder, prompt, limit, params, told):
    engine = Engine(decoder, seed=0)
    with pytest.raises(UserError, match=told):
        engine.generate([Request(np.array([1]), 0), Request(np.array(prompt, dtype=np.int64), 7, limit)], params)
    assert engine.num_steps == 0


def test_an_engine_needs_a_slot(decoder):
    with pytest.raises(UserError, match="max_slots 0"):
        Engine(decoder, seed=0, max_slots=0)


@pytest.mark.parametrize("params", [SamplingParams(3), SamplingParams(3, temperature=0), SamplingParams(3, top_p=0.5)])
def test_broken_weights_are_told(decoder, params):
    with torch.no_grad():
        decoder.norm.weight[3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"samples \[4\]"):
        Engine(decoder, seed=0).generate([Request(np.array([1, 2]), 4)], params)


@pytest.mark.parametrize("bias", [False, True])
def test_large_products_in_inference_mode_equal_those_of_training(bias):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 300, generator=generator), torch.randn(400, 300, generator=generator)
    offset = torch.randn(400, generator=generator) if bias else None
    with torch.inference_mode():
        fast = [linear(x, weight, offset), linear(x, weight.T.contiguous().T, offset), linear(x[:1], weight, offset)]
    exact = linear(x, weight, offset)
    torch.testing.assert_close(fast, [exact, exact, exact[:1]], atol=2e-4, rtol=0)


@pytest.mark.parametrize(("expected", "order"), [((2, 9, 9, 0), (1, 2, 0, 3)), ((0, 0, 0, 0), (0, 1, 2, 3))])
def test_those_that_are_expected_to_be_longest_begin_first(decoder, expected, order):
    """One slot; the version is the number of the step, so every token says when it was drawn."""
    prompts = prompts_of(4)
    requests = [Request(prompt, 7 + i, i + 2, e) for i, (prompt, e) in enumerate(zip(prompts, expected, strict=True))]
    engine = Engine(decoder, seed=5, max_slots=1)

    def count():
        engine.version += 1

    engine.between_steps = count
    done = engine.generate(requests, SamplingParams(10))
    assert [completion.sample_id for completion in done] == [7, 8, 9, 10]
    assert [len(completion.tokens) for completion in done] == [2, 3, 4, 5]
    assert tuple(np.argsort([completion.versions[0] for completion in done])) == order
    assert_same(done, Engine(decoder, seed=5).generate(requests, SamplingParams(10)))
