"""The bench command: how near the rollout engine comes to what this machine can do.

    every repetition, every model:  product, read ──> limit;  generate ──> tokens, seconds, CPU-seconds
    once more, under a profiler:    generate ──> shares of linear layers, attention, sampling and the rest

The limit is that of the weights: prompts at FLOPs / peak, and each decode step at max(weight bytes / bandwidth,
FLOPs / peak). Attention, sampling, norms and bookkeeping count as nothing in it, so 100 % is out of reach.
"""

from __future__ import annotations

import cProfile
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

from hybridflow.commands.show import Row, print_table
from hybridflow.commands.talk import model_folder
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import UserError
from hybridflow.core.seeding import generator, torch_generator
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.generation.weights import Precision, rollout_dtype
from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.policy import TextPolicy
from hybridflow.models.sources import resolve
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import load_decoder
from hybridflow.ops.linear import linear

__all__ = ["RANDOM", "Workload", "bench_rollout", "random_spec"]

_COLUMNS = ("tok/s", "tok/CPU-s", "limit", "share", "linear", "attend", "sample", "rest")
# vocabulary, hidden, intermediate, layers, heads, kv heads
RANDOM = {
    "5M": (8192, 256, 704, 4, 4, 2),
    "20M": (8192, 512, 1376, 6, 8, 2),
    "100M": (32768, 768, 2048, 12, 12, 4),
}
_REPETITIONS = 3
_PARTS = {
    "ops/linear.py": "linear",
    "generation/attention.py": "attention",
    "generation/kv_cache.py": "attention",
    "generation/weights.py": "linear",
    "generation/sampling.py": "sampling",
}
"""A part begins where a function of its file is called."""


@dataclass(frozen=True)
class Workload:
    """``prompts`` distinct prompts of ``prompt_tokens``, ``group`` responses of ``new_tokens`` to each."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"bench rollout: --{name.replace('_', '-')} is {value}; expected at least 1")

    @property
    def total(self) -> int:
        """New tokens of all responses."""
        return self.prompts * self.group * self.new_tokens

    def requests(self, vocab_size: int) -> list[Request]:
        draws = generator(0, "bench").integers(0, vocab_size, (self.prompts, self.prompt_tokens))
        return [Request(prompt, i * self.group + j) for i, prompt in enumerate(draws) for j in range(self.group)]


@dataclass
class _Bench:
    """A model and what was measured of it, an entry a repetition."""

    name: str
    engine: Engine
    workload: Workload
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices that the limit is reckoned with: int8's are the learner's."""
        return rollout_dtype(self.engine.precision, self.engine.decoder.embed.weight.dtype)

    def generate(self, workload: Workload) -> None:
        """Random weights never give an end that stops a response: no stop token is set."""
        requests = workload.requests(self.engine.decoder.spec.vocab_size)
        self.engine.generate(requests, SamplingParams(workload.new_tokens))

    def repeat(self) -> None:
        self.peak.append(_peak(self.dtype))
        self.bandwidth.append(_bandwidth(_matrix_size(self.engine.decoder) * self.dtype.itemsize))
        wall, cpu = time.perf_counter(), time.process_time()
        self.generate(self.workload)
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)

    def row(self) -> dict[str, Any]:
        decoder, workload = self.engine.decoder, self.workload
        peak, bandwidth = statistics.median(self.peak), statistics.median(self.bandwidth)
        rate = workload.total / statistics.median(self.cpu)
        limit = workload.total / _least_seconds(decoder, workload, self.engine.max_slots, peak, bandwidth, self.dtype)
        return {
            "model": self.name,
            "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
            "dtype": str(decoder.embed.weight.dtype).removeprefix("torch."),
            "precision": self.engine.precision,
            "threads": torch.get_num_threads(),
            "tokens_per_second": workload.total / statistics.median(self.wall),
            "tokens_per_cpu_second": rate,
            "limit_tokens_per_cpu_second": limit,
            "share_of_limit": rate / limit,
            "peak_flops_per_cpu_second": peak,
            "bytes_per_cpu_second": bandwidth,
            "log_prob_error": _log_prob_error(self.engine, workload),
            "time_split": _time_split(lambda: self.generate(workload)),
        }


def bench_rollout(
    model: str | None, workload: Workload, dtype: str, precision: Precision, threads: int | None, as_json: bool
) -> None:
    """Measure the rollout engine on ``model`` (name, folder, run directory), or on random Qwen2-like ones.

    Raises UserError if the workload does not fit the model; ModelError if there is no such model.
    """
    if threads is not None:
        if threads < 1:
            raise UserError(f"bench rollout: --threads is {threads}; expected at least 1")
        torch.set_num_threads(threads)
    decoders = _decoders(model, getattr(torch, dtype))
    benches = [_Bench(name, Engine(decoder, seed=0, precision=precision), workload) for name, decoder in decoders]
    warm_up = replace(workload, new_tokens=min(2, workload.new_tokens))
    for bench in benches:  # first calls allocate and compile kernels
        bench.generate(warm_up)
    for _ in range(_REPETITIONS):
        for bench in benches:
            bench.repeat()
    rows = [bench.row() for bench in benches]
    print_table(rows if as_json else [_shown(row) for row in rows], as_json)
    if not as_json:
        for row in rows:
            print(f"{Path(row['model']).name}: {_machine(row)}")


def random_spec(name: str) -> DecoderSpec:
    """Sizes of a random Qwen2-like model, a name of ``RANDOM``."""
    vocab, hidden, intermediate, layers, heads, kv_heads = RANDOM[name]
    return DecoderSpec(
        family="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=32768,
        qkv_bias=True,
    )


def _decoders(model: str | None, dtype: torch.dtype) -> Iterator[tuple[str, Decoder]]:
    if model is not None:
        yield model, load_decoder(resolve(model_folder(model)), dtype)
        return
    for name in RANDOM:
        decoder = Decoder(random_spec(name))
        init_weights(decoder, torch_generator(0, "bench"))
        yield name, decoder.to(dtype)


def _log_prob_error(engine: Engine, workload: Workload) -> float:
    """Mean distance of log-probabilities from those of the learner's forward, over some responses."""
    requests = workload.requests(engine.decoder.spec.vocab_size)[:16]
    completions = engine.generate(requests, SamplingParams(workload.new_tokens))
    rows = [np.concatenate([request.prompt, done.tokens]) for request, done in zip(requests, completions, strict=True)]
    batch = Batch(
        {
            "tokens": Ragged.from_rows(rows),
            "response_mask": Ragged.from_rows([np.arange(len(row)) >= workload.prompt_tokens for row in rows]),
        }
    )
    with torch.no_grad():
        exact = TextPolicy(engine.decoder).outputs(batch)["log_probs"]
    return float(np.abs(np.concatenate([done.log_probs for done in completions]) - exact.numpy()).mean())


# -------------------------------------------------------------------------------------------------------------- the limit


def _matrix_size(decoder: Decoder, head: bool = True) -> int:
    """Entries of the matrices that a token is multiplied with."""
    size = sum(parameter.numel() for parameter in decoder.layers.parameters() if parameter.dim() == 2)
    return size + decoder.head_weight.numel() * head


def _least_seconds(
    decoder: Decoder, workload: Workload, slots: int, peak: float, bandwidth: float, dtype: torch.dtype
) -> float:
    """CPU-seconds. A prompt goes through the layers once; its last state and those of decode steps through the head too."""
    rows, layers, whole = workload.prompts * workload.group, _matrix_size(decoder, head=False), _matrix_size(decoder)
    prompts = 2 * layers * workload.prompts * workload.prompt_tokens + 2 * (whole - layers) * rows
    num_bytes = whole * dtype.itemsize
    waves = [slots] * (rows // slots) + [rows % slots] * (rows % slots > 0)
    steps = sum(max(num_bytes / bandwidth, 2 * whole * wave / peak) for wave in waves)
    return prompts / peak + (workload.new_tokens - 1) * steps


def _peak(dtype: torch.dtype) -> float:
    """FLOPs a CPU-second of the product that the engine uses, on matrices that suit the processor's caches."""
    x, weight = torch.ones(256 * torch.get_num_threads(), 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    with torch.inference_mode():
        return 2 * x.numel() * len(weight) / _fastest(lambda: linear(x, weight), calls=10)


def _bandwidth(num_bytes: int) -> float:
    """Bytes read a CPU-second, from as many bytes as the weights have: small weights stay in the processor's caches."""
    memory = torch.ones(max(1, num_bytes // 4))
    return memory.nbytes / _fastest(memory.sum, calls=5)


def _fastest(call: Callable[[], object], calls: int) -> float:
    """CPU-seconds of the fastest of some calls, of at least 2 ms each so that the clock and the call itself don't count."""
    call()
    start = time.process_time()
    call()
    count = 1 + int(2e-3 / max(1e-6, time.process_time() - start))
    seconds = []
    for _ in range(calls):
        start = time.process_time()
        for _ in range(count):
            call()
        seconds.append((time.process_time() - start) / count)
    return min(seconds)


# --------------------------------------------------------------------------------------------------------- the time split


def _time_split(call: Callable[[], object]) -> dict[str, float]:
    """Shares of the time: a part's is what its functions take, less what they spend in those of other parts."""
    profile = cProfile.Profile()
    start = time.perf_counter()
    profile.runcall(call)
    total = time.perf_counter() - start
    seconds = dict.fromkeys(_PARTS.values(), 0.0)
    for caller in profile.getstats():
        outside = _part(caller.code)
        for callee in caller.calls or ():
            inside = _part(callee.code)
            if inside not in ("", outside):
                seconds[inside] += callee.totaltime
                if outside:
                    seconds[outside] -= callee.totaltime
    shares = {part: value / total for part, value in seconds.items()}
    return {**shares, "rest": 1 - sum(shares.values())}


def _part(code: CodeType | str) -> str:
    """ "" for code of no part; built-in functions have a text for code."""
    path = "" if isinstance(code, str) else code.co_filename.replace("\\", "/")
    return next((part for file, part in _PARTS.items() if path.endswith(f"hybridflow/{file}")), "")


# ------------------------------------------------------------------------------------------------------------ the display


def _shown(row: Row) -> Row:
    values = (
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_cpu_second']:,.0f}",
        f"{row['limit_tokens_per_cpu_second']:,.0f}",
        *(f"{share:.0%}" for share in (row["share_of_limit"], *row["time_split"].values())),
    )
    name, size = Path(row["model"]).name, f"{row['parameters'] / 1e6:.1f}M"
    return {"model": name, "size": size, **dict(zip(_COLUMNS, values, strict=True))}


def _machine(row: Row) -> str:
    """What the columns have no room for."""
    peak, bandwidth = row["peak_flops_per_cpu_second"] / 1e9, row["bytes_per_cpu_second"] / 1e9
    return (
        f"{row['dtype']}, precision: {row['precision']}, log-probs {row['log_prob_error']:.1g} off the learner's; "
        f"threads: {row['threads']}; at most {peak:.0f} GFLOP, {bandwidth:.0f} GB of weights a CPU-second"
    )
