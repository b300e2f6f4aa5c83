"""The learner against transformers with torch's AdamW, and what meshes send, wait for and hold against formulas.

    python benchmarks/parallel.py [--sections learner,traffic,bubble,memory,peaks,recipe,context] [--models 5M,20M]
                                  [--dtypes float32,bfloat16] [--json]

``learner``: one optimizer step of PPO's clipped loss on the same weights, rows and numbers: CPU-seconds of one thread; the
sides take turns in this process, and a number is the median of the rounds after a shorter one. In float32 losses and
gradient norms of both are compared too. The peer is what a user of transformers writes: right-padded microbatches with an
attention mask, logits from the end of the shortest prompt on, the fused cross entropy, clipping, fused AdamW; ``MICRO``
are its rows a microbatch: the fastest of 2, 4, 8, 16 and 64 at 5M, of 1, 2, 4 and 8 at 20M. hybridflow also computes
entropies. In bfloat16 it keeps float32 masters; the peer does so in ``autocast``, and in ``pure`` weights and moments are
bfloat16 alone.
``share_of_peak``: the FLOPs that a step needs, at the speed of a product that suits the processor, over its time.
Rows: prompts of 16 to 48 tokens and responses of 4 to 96 ("varied"), or of 32 and 50 ("equal").

``traffic``: bytes that the ranks of a mesh of real processes over gloo hand to the axis' collectives and messages in one
step, as they count them (an all-reduce as a ring), against the same from sizes alone; beside it what the kernel counted
on their TCP connections, where a mesh has one axis. "tiny" has 2 layers of 64.

``bubble``: the share of time that ranks wait, by the plan with a backward of twice the forward's time, and measured on
processes whose stages sleep, against (p - 1) / (chunks m + p - 1).

``memory``: bytes of weights, gradients and optimizer on the rank of a mesh that has most, counted after a step, against
``hybridflow graph``. ``peaks``: the most that a process takes in a step, by what torch allocates and by how far its
resident memory grows from before the model, against what ``hybridflow plan`` says. 135M has the sizes of SmolLM2.

``recipe``: the same optimizer step on 2 x 2 processes, dp 2 x tp 2, beside transformers' Llama parallelised as torchtitan
does (parallelize_module, then fully_shard), on the same weights and rows in the same processes, taking turns: CPU-seconds
of all four; losses and gradient norms are compared. All take the same rows a microbatch and reduce gradients once a step,
but for our "fsdp", which does so in every microbatch.

``context``: bytes that are saved for the backward pass of one sequence of ``LONG`` tokens, on the rank that has most of
them, against 1 / cp of one process; and CPU-seconds of a forward and backward pass, of all ranks together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from hybridflow.build_model import DecoderSource, actor_tokenizer, decoder_source, policy_networks, text_networks
from hybridflow.build_plan import rank_need
from hybridflow.build_trace import trace
from hybridflow.commands.bench import RANDOM, random_spec
from hybridflow.commands.bench import _peak as peak_flops
from hybridflow.config import RunConfig, validate
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.graph import Call
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext
from hybridflow.core.seeding import generator, torch_generator
from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.policy import TextPolicy
from hybridflow.models.sources import resolve
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import load_decoder, save_decoder
from hybridflow.ops.losses import ppo_clip
from hybridflow.parallel.mesh import ProcessMesh
from hybridflow.parallel.pipeline import Wire, run_pipeline
from hybridflow.parallel.pipeline_plan import bubble, interleaved
from hybridflow.parallel.shard import cuts
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks, all_tensors
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.zero import ShardMode

CLIP, LR, MAX_NORM, ROUNDS = 0.2, 1e-5, 1.0, 3
AXES = ("copies", "tp", "pp", "cp")
ROWS = {"5M": 64, "20M": 64, "smollm2-135m": 16}
MICRO = {"5M": 2, "20M": 4, "smollm2-135m": 4}
PROMPTS, RESPONSES = (16, 48), (4, 96)
TIMEOUT = timedelta(seconds=120)
LEARNER_TARGET, TRAFFIC_TARGET, MEMORY_TARGET = 1.3, 0.02, 0.1
TINY = DecoderSpec("llama", 259, 64, 176, 2, 4, 2, 16, 2048)
MESHES = (
    *(Mesh(dp=2), Mesh(tp=2), Mesh(pp=2), Mesh(dp=2, tp=2, pp=2)),
    *(Mesh(cp=2), Mesh(cp=4), Mesh(dp=2, tp=2, cp=2), Mesh(pp=2, cp=2)),
)
LONG, RANKS = 4096, (1, 2, 4)
SPECS = {
    "8 heads, 8 kv": DecoderSpec("llama", 512, 256, 688, 4, 8, 8, 32, LONG),
    "8 heads, 2 kv": DecoderSpec("llama", 512, 256, 688, 4, 8, 2, 32, LONG),
}
PIPELINES = ((2, 1, 4), (4, 1, 4), (4, 1, 8), (4, 2, 8))
"""ranks, chunks, microbatches"""
FORWARD, BACKWARD = 0.04, 0.08
FRESH = {
    "family": "qwen2",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
}
HELD: tuple[tuple[str, str, Mesh, ShardMode], ...] = (
    ("fresh", "float32", Mesh(tp=2), "none"),
    ("fresh", "float32", Mesh(pp=2), "none"),
    ("fresh", "bfloat16", Mesh(tp=2, pp=2), "none"),
    ("fresh", "float32", Mesh(dp=4), "none"),
    ("fresh", "float32", Mesh(dp=4), "zero1"),
    ("fresh", "float32", Mesh(dp=4), "fsdp"),
    ("fresh", "float32", Mesh(dp=4, shard_ranks=2), "zero1"),
    ("fresh", "float32", Mesh(dp=4, shard_ranks=2), "fsdp"),
    ("fresh", "bfloat16", Mesh(dp=4), "none"),
    ("fresh", "bfloat16", Mesh(dp=4), "zero1"),
    ("fresh", "bfloat16", Mesh(dp=4), "fsdp"),
    ("fresh", "bfloat16", Mesh(dp=2, tp=2), "fsdp"),
    ("smollm2-135m", "float32", Mesh(tp=2), "none"),
    ("smollm2-135m", "bfloat16", Mesh(pp=2), "none"),
)
PEAKS = (
    ("20M", "float32", Mesh(), {"budget": 4096}),
    ("20M", "float32", Mesh(), {"budget": 512}),
    ("20M", "float32", Mesh(), {"budget": 512, "checkpointing": True}),
    ("20M", "bfloat16", Mesh(), {"budget": 512}),
    ("135M", "float32", Mesh(), {"budget": 512}),
    ("135M", "bfloat16", Mesh(), {"budget": 512}),
    ("20M", "float32", Mesh(dp=2), {"budget": 512}),
    ("20M", "float32", Mesh(dp=2), {"budget": 512, "shard": "zero1"}),
    ("20M", "float32", Mesh(dp=2), {"budget": 512, "shard": "fsdp"}),
    ("20M", "bfloat16", Mesh(dp=2), {"budget": 512, "shard": "fsdp"}),
    ("20M", "float32", Mesh(tp=2), {"budget": 512}),
    ("20M", "float32", Mesh(pp=2), {"budget": 512}),
)
LLAMA = DecoderSpec("llama", 8192, 512, 1376, 6, 8, 2, 64, 2048, tied=False)
RECIPE_ROWS, RECIPE_MICRO = 32, 8
SIZES = {"135M": DecoderSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 2048)}
Row = dict[str, Any]


def rows(number: int, vocab: int, varied: bool) -> Batch:
    draw = generator(0, "benchmark", number)
    prompts, responses = (draw.integers(low, high + 1, number) for low, high in (PROMPTS, RESPONSES))
    if not varied:
        prompts, responses = np.full(number, sum(PROMPTS) // 2), np.full(number, sum(RESPONSES) // 2)
    lengths = prompts + responses
    total = int(lengths.sum())
    mask = np.concatenate([np.arange(n) >= p for p, n in zip(prompts, lengths, strict=True)])
    like = partial(Ragged, lengths=lengths)
    return Batch(
        {
            "sample_id": np.arange(number),
            "tokens": like(draw.integers(0, vocab, total)),
            "response_mask": like(mask),
            "log_probs": like(np.full(total, -np.log(vocab), np.float32)),
            "advantages": like(draw.normal(size=total).astype(np.float32)),
        }
    )


class Ours:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        networks = Networks(lambda: {"policy": TextPolicy(load_decoder(folder, dtype))}, "policy", ("tokens",))
        optimizer = OptimizerConfig(lr=LR, max_grad_norm=MAX_NORM)
        self.context = WorkerContext()
        self.learner = Learner(
            self.context, networks=networks, optimizer=optimizer, plan=UpdatePlan(), total_steps=100, seed=0
        )
        self.loss = ppo_clip.bind(clip=CLIP)

    def step(self, batch: Batch) -> tuple[float, float]:
        """(loss, gradient norm)"""
        self.learner.update(batch, self.loss)
        metrics = self.context.metrics.values()
        self.context.metrics.clear()
        return metrics["loss"], metrics["grad_norm"]


class Theirs:
    def __init__(self, folder: Path, dtype: torch.dtype, autocast: bool, micro: int) -> None:
        from transformers import AutoModelForCausalLM

        self.autocast, self.micro = autocast, micro
        kept = torch.float32 if autocast else dtype
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=kept)
        self.adamw = torch.optim.AdamW(self.model.parameters(), LR, weight_decay=0.0, fused=True)

    def step(self, batch: Batch) -> tuple[float, float]:
        total, count = 0.0, int(batch.ragged("response_mask").values.sum())
        self.adamw.zero_grad()
        for start in range(0, len(batch), self.micro):
            padded = pad(batch.rows(np.arange(start, min(start + self.micro, len(batch)))))
            loss = self.loss(**padded) / count
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))
        self.adamw.step()
        return total, norm

    def loss(self, tokens: Tensor, attended: Tensor, mask: Tensor, log_probs: Tensor, advantages: Tensor) -> Tensor:
        """The sum over response tokens."""
        first = int(mask.int().argmax(1).min())  # logits of what is before it are not needed
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.model(tokens, attention_mask=attended, logits_to_keep=tokens.shape[1] - first + 1).logits
        mask, targets = mask[:, first:], tokens[:, first:]
        new = -F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, reduction="none")
        ratio, gain = (new - log_probs[:, first:]).exp(), advantages[:, first:]
        terms = -torch.minimum(ratio * gain, ratio.clip(1 - CLIP, 1 + CLIP) * gain)
        return terms.where(mask, 0.0).sum()


def pad(batch: Batch) -> dict[str, Tensor]:
    lengths = torch.from_numpy(batch.lengths)
    valid = torch.arange(int(lengths.max())) < lengths[:, None]

    def padded(name: str) -> Tensor:
        values = torch.tensor(batch.ragged(name).values)
        return values.new_zeros(valid.shape).masked_scatter(valid, values)

    names = {"tokens": "tokens", "mask": "response_mask", "log_probs": "log_probs", "advantages": "advantages"}
    return {"attended": valid.long(), **{key: padded(name) for key, name in names.items()}}


# ------------------------------------------------------------------------------------------------- the one-process learner


def learner(args: argparse.Namespace) -> Iterator[Row]:
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = resolve(name) if name not in RANDOM else saved(name, Path(scratch) / name)
            for dtype in args.dtypes.split(","):
                yield from compared(name, folder, dtype)


def saved(name: str, folder: Path) -> Path:
    """A random model, as a folder."""
    decoder = Decoder(random_spec(name))
    init_weights(decoder, torch_generator(0, "benchmark"))
    save_decoder(decoder, folder)
    return folder


def compared(name: str, folder: Path, dtype: str) -> Iterator[Row]:
    """Both kinds of batches; ``flops`` are those of the matrix products that the step can't do without."""
    kind = getattr(torch, dtype)
    micro = MICRO[name]
    sides: dict[str, Ours | Theirs] = {"hybridflow": Ours(folder, kind)}
    if dtype == "float32":
        sides["transformers"] = Theirs(folder, kind, False, micro)
    else:
        sides |= {"autocast": Theirs(folder, kind, True, micro), "pure": Theirs(folder, kind, False, micro)}
    decoder = sides["hybridflow"].learner.model.decoder
    for cell in ("varied", "equal"):
        batch = rows(ROWS[name], decoder.spec.vocab_size, cell == "varied")
        for side in sides.values():
            side.step(batch.rows(np.arange(8)))
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        peaks = []
        for _ in range(ROUNDS):
            told = {}
            for side, worker in sides.items():
                start = time.process_time()
                told[side] = worker.step(batch)
                seconds[side].append(time.process_time() - start)
            peaks.append(peak_flops(kind))
            if dtype == "float32":
                assert np.allclose(told["hybridflow"], told["transformers"], rtol=1e-3, atol=1e-5), told
        tokens, actions = len(batch.ragged("tokens").values), int(batch.ragged("response_mask").values.sum())
        medians = {side: statistics.median(times) for side, times in seconds.items()}
        ours = medians["hybridflow"]
        row = {
            "section": "learner",
            "model": name,
            "dtype": dtype,
            "cell": cell,
            "tokens": tokens,
            "tokens_per_cpu_second": {side: tokens / time for side, time in medians.items()},
            "ratio": {
                side: statistics.median(b / a for a, b in zip(seconds["hybridflow"], times, strict=True))
                for side, times in seconds.items()
                if side != "hybridflow"
            },
            "target": LEARNER_TARGET,
            "share_of_peak": flops(decoder, tokens, actions) / ours / statistics.median(peaks),
        }
        yield row


def flops(decoder: Decoder, tokens: int, actions: int) -> float:
    """Of the matrix products of a step: forward, and twice as many backward. The last layer's output projection and MLP and
    the head see the tokens alone that decide about an action."""
    *layers, last = ([p.numel() for p in layer.parameters() if p.dim() == 2] for layer in decoder.layers)
    everywhere, decisive = sum(map(sum, layers)) + last[0], sum(last[1:]) + decoder.head_weight.numel()
    return 6.0 * (everywhere * tokens + decisive * actions)


# ---------------------------------------------------------------------------------------------------- processes over gloo


def in_processes(function: Callable[[int], Any], size: int) -> list[Any]:
    """What ``function(rank)`` returns in each of ``size`` processes, which are one gloo group."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (function, size, folder), size)  # type: ignore[no-untyped-call]
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def _process(rank: int, function: Callable[[int], Any], size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    torch.save(function(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_mesh(
    networks: Callable[[], Networks], mesh: Mesh, rank: int, groups: Any, shard: ShardMode = "none", budget: int = 512
) -> Learner | None:
    """The learner of this process, if it is in the mesh; all processes of the world call this."""
    lines = ProcessMesh(mesh, rank, TIMEOUT, groups)
    if rank >= mesh.size:
        return None
    reduce = lines.dp.all_reduce if mesh.dp > 1 else None
    context = WorkerContext(mesh=mesh, rank=rank, reduce=reduce, lines=lines)
    optimizer = OptimizerConfig(lr=LR, max_grad_norm=MAX_NORM)
    plan = UpdatePlan(token_budget=budget)
    return Learner(context, networks=networks(), optimizer=optimizer, plan=plan, total_steps=100, seed=0, shard=shard)


def networks_of(spec: DecoderSpec, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> Networks:
    source = DecoderSource("random", spec, None, dtype, torch.device("cpu"), 0, checkpointing)
    return text_networks(partial(policy_networks, source, 1.0), "policy", "random")


# --------------------------------------------------------------------------------------------------------- what is sent


def traffic(args: argparse.Namespace) -> Iterator[Row]:
    """Bytes by mesh, model and axis, summed over the ranks."""
    for ranks in zip(*in_processes(count_traffic, max(mesh.size for mesh in MESHES)), strict=True):
        mesh, model = ranks[0]["mesh"], ranks[0]["model"]
        there = [rank for rank in ranks if rank["counted"]]
        for axis in AXES:
            counted, formula = (sum(rank[what][axis] for rank in there) for what in ("counted", "formula"))
            if formula:
                yield {
                    "section": "traffic",
                    "model": model,
                    "mesh": f"{mesh.dp}x{mesh.tp}x{mesh.pp}" + (f"x{mesh.cp}" if mesh.cp > 1 else ""),
                    "axis": axis,
                    "counted": counted,
                    "formula": formula,
                    "ratio": counted / formula,
                    "target": TRAFFIC_TARGET,
                    "kernel": sum(rank["kernel"] for rank in there) if mesh.size == 2 and mesh.cp == 1 else None,
                }


def count_traffic(rank: int) -> list[Row]:
    found, groups = [], {}
    for name, spec in (("tiny", TINY), ("5M", random_spec("5M"))):
        half = rows(16, spec.vocab_size, varied=True)
        # Each row's length occurs twice, so that two data-parallel blocks get equally many tokens.
        batch = Batch.concat([half, half]).with_columns(sample_id=np.arange(32))
        for mesh in MESHES:
            worker = on_mesh(partial(networks_of, spec), mesh, rank, groups)
            row: Row = {"mesh": mesh, "model": name, "counted": {}, "formula": {}, "kernel": 0}
            if worker is not None:
                worker.update(batch, ppo_clip.bind(clip=CLIP))  # makes the connections
            dist.barrier()
            before = sent_bytes()
            if worker is not None:
                lines = {axis: getattr(worker.context.lines, axis.replace("copies", "dp_cp")) for axis in AXES}
                for line in lines.values():
                    line.traffic.clear()
                worker.update(batch, ppo_clip.bind(clip=CLIP))
                row["counted"] = {axis: line.traffic.total() for axis, line in lines.items()}
                row["formula"] = formula(spec, mesh, rank, batch)
            dist.barrier()
            row["kernel"] = sent_bytes() - before
            found.append(row)
    return found


def sent_bytes() -> int:
    """What the TCP connections of this process have sent, as the kernel counts (tcp_info: bytes_acked)."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 120)[0]
    return total


def formula(spec: DecoderSpec, mesh: Mesh, rank: int, batch: Batch) -> dict[str, float]:
    """Bytes that a rank sends in a step in fp32, from sizes alone; N tokens, M of them decide about an action.

    copies: all gradients of the rank, once. tp: [N, D] or [M, D] forward at each of a layer's two exits, back at its two
    entries, at the embedding's exit and at the head's entry; four numbers a token between the parts of the vocabulary. pp:
    [N, D] forward to the next stage and back to the one before, and the tied matrix. cp: keys and values to all others, or
    the heads that each needs, and back; two numbers of each action. Each rank of a ring of s sends
    2 (s - 1) / s of what is summed.
    """
    _, stage, _ = mesh.coordinates(rank)
    first, last = stage == 0, stage == mesh.pp - 1
    layers = cuts(spec.num_layers, mesh.pp)[stage]
    tokens = len(batch.ragged("tokens").values) / mesh.copies
    actions = int(batch.ragged("response_mask").values.sum()) / mesh.copies
    hidden, table = spec.hidden_size, spec.vocab_size * spec.hidden_size / mesh.tp
    summed = 2 * (mesh.tp - 1) / mesh.tp * 4 * hidden
    tp = summed * (4 * tokens * len(layers) + tokens * first)
    if last:
        tp += summed * (actions - 3 * (tokens - actions)) + 16 * actions * (mesh.tp - 1)
    pp = 4 * hidden * tokens * ((not first) + (not last)) + 4 * table * (first != last)
    copies = 1 if mesh.pp == 1 else first + last
    parameters = table * copies + sum(layer_size(spec, mesh.tp) for _ in layers) + hidden * last
    heads, kv_heads, others = spec.num_heads / mesh.tp, spec.num_kv_heads / mesh.tp, mesh.cp - 1
    gathered, exchanged = 2 * kv_heads, (2 * heads + 2 * max(kv_heads, mesh.cp)) / mesh.cp
    cp = 2 * 4 * tokens * others * spec.head_dim * min(gathered, exchanged) * len(layers) + 8 * actions * others * last
    copies = 2 * (mesh.copies - 1) / mesh.copies * 4 * parameters
    return {"copies": copies, "tp": tp, "pp": pp, "cp": cp}


def layer_size(spec: DecoderSpec, tp: int) -> float:
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    matrices = qkv + spec.num_heads * spec.head_dim + 3 * spec.intermediate_size
    return (spec.hidden_size * matrices + qkv * spec.qkv_bias) / tp + 2 * spec.hidden_size


# ----------------------------------------------------------------------------------------------------- waiting in pipelines


def bubbles(args: argparse.Namespace) -> Iterator[Row]:
    slept = in_processes(sleep_through, max(ranks for ranks, *_ in PIPELINES))
    for number, (ranks, chunks, microbatches) in enumerate(PIPELINES):
        plan = interleaved(ranks, chunks, microbatches)
        expected = (ranks - 1) / (chunks * microbatches + ranks - 1)
        turns = [[rank[number][turn] for rank in slept[:ranks]] for turn in range(ROUNDS)]
        shares = [1 - sum(busy for busy, _ in turn) / ranks / max(span for _, span in turn) for turn in turns]
        yield {
            "section": "bubble",
            "ranks": ranks,
            "chunks": chunks,
            "microbatches": microbatches,
            "formula": expected,
            "plan": bubble(plan, lambda *_: FORWARD, lambda *_: BACKWARD),
            "processes": statistics.median(shares),
        }


def sleep_through(rank: int) -> list[list[tuple[float, float]]]:
    """(seconds in stages, seconds in all) of this rank in every turn of every pipeline, from when all of them start."""
    seconds = []
    for ranks, chunks, microbatches in PIPELINES:
        group = dist.new_group(list(range(ranks)), TIMEOUT)
        plan, turns = interleaved(ranks, chunks, microbatches), []
        wire = Wire(group, rank, ranks, lambda _: (4,), torch.float32, torch.device("cpu"))
        for _ in range(ROUNDS if rank < ranks else 0):
            slept: list[float] = []
            stages = [partial(asleep, slept, rank + chunk * ranks == plan.stages - 1) for chunk in range(chunks)]
            dist.barrier(group)
            start = time.perf_counter()
            run_pipeline(plan, stages, wire)
            turns.append((sum(slept), time.perf_counter() - start))
        seconds.append(turns)
    return seconds


class _Sleep(torch.autograd.Function):
    """Sleeps, and writes down how long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slept: list[float]) -> Tensor:
        ctx.slept = slept
        slept.append(sleep(FORWARD))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.slept.append(sleep(BACKWARD))
        return grad, None


def sleep(seconds: float) -> float:
    """How long it really took."""
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


def asleep(slept: list[float], last: bool, microbatch: int, received: Tensor | None) -> Tensor:
    x = torch.ones(4, requires_grad=True) if received is None else received
    out: Tensor = _Sleep.apply(x, slept)  # type: ignore[no-untyped-call]
    return out.sum() if last else out


# ---------------------------------------------------------------------------------------------------------- what is held


def memory(args: argparse.Namespace) -> Iterator[Row]:
    """Bytes of the rank that holds most, counted after a step, against the call graph's."""
    for ranks in zip(*in_processes(count_memory, 4), strict=True):
        counted = max((rank["bytes"] for rank in ranks if rank["bytes"]), key=lambda held: sum(held.values()))
        mesh, model, dtype, shard = (ranks[0][key] for key in ("mesh", "model", "dtype", "shard"))
        predicted = predict(model, dtype, mesh, shard)
        yield {
            "section": "memory",
            "model": model,
            "dtype": dtype,
            "mesh": f"dp {mesh.dp}, tp {mesh.tp}, pp {mesh.pp}, shard {shard}"
            + f" by {mesh.shard_ranks}" * bool(mesh.shard_ranks),
            "counted": counted,
            "predicted": predicted,
            "ratio": sum(counted.values()) / sum(predicted.values()),
            "target": MEMORY_TARGET,
        }


def configuration(model: str, dtype: str, mesh: Mesh, shard: ShardMode) -> RunConfig:
    size = {"fresh": FRESH} if model == "fresh" else {"model": model}
    cut = {"tp": mesh.tp, "pp": mesh.pp, "shard": shard, "shard_ranks": mesh.shard_ranks}
    return validate(
        {
            "algorithm": "grpo",
            "run_dir": "unused",
            "actor": {**size, "dtype": dtype, "mesh": cut},
            "data": {"task": "addition", "options": {"format": "compact"}},
            "generation": {"max_new_tokens": 8},
            "train": {"group_size": 2},
            "runtime": {"kind": "ray"},
            "placement": {"pools": {"main": mesh.size}},
        },
        "benchmark",
    )


def predict(model: str, dtype: str, mesh: Mesh, shard: ShardMode) -> dict[str, int]:
    """What ``hybridflow graph`` says that a rank of the actor holds."""
    role = next(role for role in trace(configuration(model, dtype, mesh, shard)).roles if role.name == "actor")
    return {"weights": role.weight_bytes, "gradients": role.gradient_bytes, "optimizer": role.optimizer_bytes}


def count_memory(rank: int) -> list[Row]:
    found, groups = [], {}
    for model, dtype, mesh, shard in HELD:
        config = configuration(model, dtype, mesh, shard)
        tokenizer = actor_tokenizer(config.actor, alphabet="0123456789+=")
        source = decoder_source(config.actor, config, tokenizer.vocab_size)
        networks = text_networks(partial(policy_networks, source, 1.0), "policy", model)
        worker = on_mesh(lambda networks=networks: networks, mesh, rank, groups, shard)
        row: Row = {"model": model, "dtype": dtype, "mesh": mesh, "shard": shard, "bytes": {}}
        if worker is not None:
            added = gradients_added_up(worker)
            worker.update(rows(4, tokenizer.vocab_size, varied=True), ppo_clip.bind(clip=CLIP))
            held = held_bytes(worker)
            row["bytes"] = held | {"gradients": max(held["gradients"], *added)}
        found.append(row)
    return found


def gradients_added_up(worker: Learner) -> list[int]:
    """For every minibatch from now on, the bytes of the gradients before they are reduced."""
    reduce, found = worker.optimizer.reduce_gradients, list[int]()

    def counted(over_ranks: Any) -> None:
        found.append(sum(gradient.nbytes for gradient in worker.optimizer._gradients().values()))
        reduce(over_ranks)

    worker.optimizer.reduce_gradients = counted
    return found


def held_bytes(worker: Learner) -> dict[str, int]:
    gradients = [master.grad for master in worker.optimizer.masters.values()]
    tensors = {
        "weights": all_tensors(*worker.networks.values()) if worker.fsdp is None else worker.fsdp.tensors(),
        "gradients": (gradient for gradient in gradients if gradient is not None),
        "optimizer": worker.optimizer.tensors(),
    }
    storages = {
        key: {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in xs} for key, xs in tensors.items()
    }
    return {key: sum(sizes.values()) for key, sizes in storages.items()}


# ------------------------------------------------------------------------------------------------------- peaks of a step


def peaks(args: argparse.Namespace) -> Iterator[Row]:
    """The most that a process takes in a step, as torch allocates it and as the system sees it, against the prediction."""
    # Tensors of 128 KiB and more go back to the system at once, so that what is resident is what is used.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**17)
    for name, dtype, mesh, options in PEAKS:
        ranks = in_processes(partial(measure_peak, name, dtype, mesh, options), mesh.size)
        for rank in ranks if mesh.pp > 1 else ranks[:1]:
            yield {"section": "peaks", "model": name, "dtype": dtype, "mesh": str(mesh), **options, **rank}


def measure_peak(name: str, dtype: str, mesh: Mesh, options: dict[str, Any], rank: int) -> Row:
    spec = SIZES.get(name) or random_spec(name)
    batch = rows(32 * mesh.dp, spec.vocab_size, varied=False)
    networks = networks_of(spec, getattr(torch, dtype), options.get("checkpointing", False))
    before = resident()
    worker = on_mesh(lambda: networks, mesh, rank, {}, options.get("shard", "none"), options["budget"])
    assert worker is not None
    loss = ppo_clip.bind(clip=CLIP)
    worker.update(batch, loss)  # makes the optimizer's states
    held = held_bytes(worker)
    counted = allocated(lambda: worker.update(batch, loss)) + held["weights"] + held["optimizer"]
    tokens, decisive = len(batch.ragged("tokens").values), float(batch.ragged("response_mask").values.mean())
    call = Call(0, "actor", "update", "train", "", len(batch), tokens, 0, ())
    plan = UpdatePlan(token_budget=options["budget"])
    needed = {"networks": networks, "optimizer": OptimizerConfig(), "plan": plan, "shard": options.get("shard", "none")}
    _, footprint = rank_need(needed, worker.lines, mesh, [call], decisive, "cpu")
    return {
        "rank": rank,
        "counted": counted,
        "resident": resident("VmHWM") - before,
        "predicted": footprint.peak,
        "ratio": counted / footprint.peak,
        "parts": {key: value for key, value in asdict(footprint).items() if value},
        "target": MEMORY_TARGET,
    }


def allocated(call: Callable[[], object]) -> int:
    """The most that torch allocates at once in a call, beyond what was there; what was there before may be freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    pending, events = list(recorded.profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    sizes: dict[int, int] = {}
    live = most = 0
    for _, place, size in sorted(events, key=lambda event: event[0]):
        live += size if size > 0 else -sizes.pop(place, 0)
        if size > 0:
            sizes[place] = size
        most = max(most, live)
    return most


def count_activations(model: Any) -> list[int]:
    """For every call of ``model.outputs`` from now on, the bytes that are saved for its backward pass."""
    outputs, weights = model.outputs, {parameter.data_ptr() for parameter in model.parameters()}
    sizes: list[int] = []

    def counted(batch: Batch) -> dict[str, Tensor]:
        kept: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out: dict[str, Tensor] = outputs(batch)
        sizes.append(sum(size for place, size in kept.items() if place not in weights))
        return out

    model.outputs = counted
    return sizes


# ------------------------------------------------------------------------------------------------------- long sequences


def context(args: argparse.Namespace) -> Iterator[Row]:
    """What a rank saves for the backward pass, and what all of them compute."""
    alone: dict[str, Row] = {}
    for cells in zip(*in_processes(measure_context, max(RANKS)), strict=True):
        there = [cell for cell in cells if "activations" in cell]
        cp, model = cells[0]["cp"], cells[0]["model"]
        row: Row = {"section": "context", "model": model, "cp": cp}
        row |= {"activations": max(cell["activations"] for cell in there)}
        row |= {"cpu_s": sum(cell["cpu_s"] for cell in there)}
        one = alone.setdefault(model, row)
        yield row | {"ratio": row["activations"] * cp / one["activations"], "cpu_ratio": row["cpu_s"] / one["cpu_s"]}


def measure_context(rank: int) -> list[Row]:
    found, groups = [], {}
    for model, spec in SPECS.items():
        length = np.array([LONG])
        tokens = generator(0, "benchmark", LONG).integers(0, spec.vocab_size, LONG)
        batch = Batch({"tokens": Ragged(tokens, length), "response_mask": Ragged(np.arange(LONG) >= LONG // 2, length)})
        for cp in RANKS:
            worker = on_mesh(partial(networks_of, spec), Mesh(cp=cp), rank, groups)
            row: Row = {"cp": cp, "model": model}
            if worker is not None:
                sizes, seconds = count_activations(worker.model), []
                for _ in range(ROUNDS):
                    start = time.process_time()
                    worker.model.outputs(batch)["log_probs"].sum().backward()
                    seconds.append(time.process_time() - start)
                row |= {"activations": max(sizes), "cpu_s": statistics.median(seconds)}
            dist.barrier()
            found.append(row)
    return found


def resident(what: str = "VmRSS") -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(what))


# ------------------------------------------------------------------------------------------ the recipe of FSDP2 and DTensor


class Recipe(Theirs):
    """A Llama of transformers with torch's tensor parallelism and FSDP2, this rank of ``mesh`` (dp, tp)."""

    def __init__(self, folder: Path, mesh: DeviceMesh, micro: int) -> None:
        from transformers import AutoModelForCausalLM

        self.autocast, self.micro, self.dp = False, micro, mesh["dp"]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        column, row = ColwiseParallel, RowwiseParallel
        layer = {
            **{f"self_attn.{name}_proj": column() for name in "qkv"},
            "self_attn.o_proj": row(),
            **{f"mlp.{name}_proj": column() for name in ("gate", "up")},
            "mlp.down_proj": row(),
        }
        ends = {"model.embed_tokens": row(input_layouts=Replicate()), "lm_head": column(output_layouts=Replicate())}
        parallelize_module(self.model, mesh["tp"], ends)
        for block in self.model.model.layers:
            parallelize_module(block, mesh["tp"], layer)
            fully_shard(block, mesh=self.dp)
        fully_shard(self.model, mesh=self.dp)
        self.adamw = torch.optim.AdamW(self.model.parameters(), LR, weight_decay=0.0, fused=True)

    def step(self, batch: Batch) -> tuple[float, float]:
        total, count = torch.zeros(()), int(batch.ragged("response_mask").values.sum())
        own = batch.rows(np.array_split(np.arange(len(batch)), self.dp.size())[self.dp.get_local_rank()])
        self.adamw.zero_grad()
        for start in range(0, len(own), self.micro):
            self.model.set_requires_gradient_sync(start + self.micro >= len(own))
            loss = self.loss(**pad(own.rows(np.arange(start, min(start + self.micro, len(own)))))) / count
            (loss * self.dp.size()).backward()  # FSDP takes the mean over its ranks
            total += loss.detach()
        dist.all_reduce(total, group=self.dp.get_group())
        norm = self.clip()
        self.adamw.step()
        return float(total), norm

    def clip(self) -> float:
        """Parameters on one axis of the mesh and on both have to be clipped apart."""
        groups: dict[Any, list[Tensor]] = {}
        for parameter in self.model.parameters():
            groups.setdefault(parameter.device_mesh, []).append(parameter)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in group]).full_tensor() for group in groups.values()]
        norm = torch.stack(norms).norm()
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, MAX_NORM, norm)
        return float(norm)


def recipe(args: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        decoder = Decoder(LLAMA)
        init_weights(decoder, torch_generator(0, "benchmark"))
        save_decoder(decoder, Path(scratch) / "llama")
        ranks = in_processes(partial(follow_recipe, Path(scratch) / "llama"), 4)
    seconds = {
        side: [sum(rank["seconds"][side][turn] for rank in ranks) for turn in range(ROUNDS)] for side in ranks[0]["seconds"]
    }
    ours = seconds.pop("hybridflow zero1")
    for side, times in {"hybridflow zero1": ours, **seconds}.items():
        ratios = [theirs / one for one, theirs in zip(ours, times, strict=True)]
        yield {
            "section": "recipe",
            "side": side,
            "cpu_seconds": statistics.median(times),
            "ratio": statistics.median(ratios),
            "loss": ranks[0]["told"][side][0],
            "grad_norm": ranks[0]["told"][side][1],
        }


def follow_recipe(folder: Path, rank: int) -> Row:
    """CPU-seconds of this rank by side and turn, and loss and gradient norm of the first step."""
    mesh, groups = Mesh(dp=2, tp=2), {}  # type: ignore[var-annotated]
    source = DecoderSource("llama", LLAMA, folder, torch.float32, torch.device("cpu"), 0)
    batch = rows(RECIPE_ROWS, LLAMA.vocab_size, varied=False)
    width = int(batch.lengths.max())
    networks = text_networks(partial(policy_networks, source, 1.0), "policy", "llama")
    sides: dict[str, Callable[[Batch], tuple[float, float]]] = {}
    for shard in ("zero1", "none", "fsdp"):
        worker = on_mesh(lambda: networks, mesh, rank, groups, shard, RECIPE_MICRO * width)
        assert worker is not None
        sides[f"hybridflow {shard}"] = partial(update_on_mesh, worker)
    sides["recipe"] = Recipe(folder, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), RECIPE_MICRO).step
    told = {side: step(batch) for side, step in sides.items()}
    losses = np.array(list(told.values()))
    assert np.allclose(losses, losses[0], rtol=1e-3, atol=1e-5), told
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, step in sides.items():
            dist.barrier()
            start = time.process_time()
            step(batch)
            seconds[side].append(time.process_time() - start)
    return {"seconds": seconds, "told": told}


def update_on_mesh(worker: Learner, batch: Batch) -> tuple[float, float]:
    """(loss, gradient norm); blocks of equally many tokens have equal weight."""
    worker.update(batch, ppo_clip.bind(clip=CLIP))
    metrics = worker.context.metrics.values()
    worker.context.metrics.clear()
    loss = worker.context.sum(torch.tensor(metrics["loss"])) / worker.context.mesh.dp
    return float(loss), metrics["grad_norm"]


# ---------------------------------------------------------------------------------------------------------- the display


def line_of(row: Row) -> str:
    match row["section"]:
        case "learner":
            rates = ", ".join(f"{side} {rate:,.0f}" for side, rate in row["tokens_per_cpu_second"].items())
            ratios = ", ".join(f"{ratio:.2f} of {side}" for side, ratio in row["ratio"].items())
            return (
                f"{row['model']} {row['dtype']} {row['cell']}, {row['tokens']} tokens: {rates} tokens a CPU-second; "
                f"{ratios}, target {row['target']}; {row['share_of_peak']:.0%} of peak"
            )
        case "traffic":
            kernel = "" if row["kernel"] is None else f"; the kernel: {row['kernel']:,}"
            return (
                f"{row['model']} {row['mesh']} {row['axis']}: {row['counted']:,} of {row['formula']:,.0f} bytes = "
                f"{row['ratio']:.4f}, target 1 +- {row['target']}{kernel}"
            )
        case "bubble":
            return (
                f"{row['ranks']} ranks x {row['chunks']} chunks, {row['microbatches']} microbatches: formula "
                f"{row['formula']:.4f}, plan {row['plan']:.4f}, processes {row['processes']:.4f}"
            )
        case "memory":
            counted, predicted = (
                " + ".join(f"{n / 2**20:.1f}" for n in row[key].values()) for key in ("counted", "predicted")
            )
            return (
                f"{row['model']} {row['dtype']}, {row['mesh']}: {counted} MiB of {predicted} = {row['ratio']:.4f}, "
                f"target 1 +- {row['target']}"
            )
        case "recipe":
            return (
                f"dp 2 x tp 2, {row['side']}: {row['cpu_seconds']:.2f} CPU-seconds a step, {row['ratio']:.2f} of ours; "
                f"loss {row['loss']:.6f}, gradient norm {row['grad_norm']:.5f}"
            )
        case "context":
            return (
                f"{row['model']}, {LONG} tokens, cp {row['cp']}: {row['activations'] / 2**20:.1f} MiB saved = "
                f"{row['ratio']:.3f} of 1 / cp; {row['cpu_s']:.2f} CPU-seconds of all ranks = {row['cpu_ratio']:.2f}"
            )
    mib = {key: row[key] / 2**20 for key in ("counted", "predicted", "resident")}
    options = ", ".join(f"{key} {row[key]}" for key in ("budget", "checkpointing", "shard") if key in row)
    return (
        f"{row['model']} {row['dtype']}, {row['mesh']}, {options}, rank {row['rank']}: {mib['counted']:.1f} MiB of "
        f"{mib['predicted']:.1f} = {row['ratio']:.3f}, target 1 +- {row['target']}; resident {mib['resident']:.1f} = "
        f"{row['resident'] / row['predicted']:.3f}"
    )


SECTIONS = {
    "learner": learner,
    "traffic": traffic,
    "bubble": bubbles,
    "memory": memory,
    "peaks": peaks,
    "recipe": recipe,
    "context": context,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default=",".join(list(ROWS)[:2]))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for section in args.sections.split(","):
        for row in SECTIONS[section](args):
            print(json.dumps(row) if args.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
