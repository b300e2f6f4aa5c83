"""Whether compiling layers pays: a learner's step with torch.compile on both sides of attention, against one without.

    python benchmarks/compiled.py --shape bert --dtype bfloat16

Both sides take turns on the same rows with one thread; CPU-seconds of the process count. The first step of each side, in
which one compiles, isn't counted. Why the product has no key for it: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from types import MethodType
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from parallel import networks_of, rows
from torch import Tensor

import hybridflow.ops.linear as products
from hybridflow.core.roles import WorkerContext
from hybridflow.models.decoder import Attend, Layer, rotate
from hybridflow.models.spec import DecoderSpec
from hybridflow.ops.losses import ppo_clip
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.optimizer import OptimizerConfig

SHAPES = {
    "bert": DecoderSpec("llama", 30522, 768, 3072, 12, 12, 12, 64, 2048),
    "smollm2": DecoderSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 2048),
}
eager_product = products._onednn


@torch.library.custom_op("benchmark::product", mutates_args=())
def hidden_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The compiler takes oneDNN's product with constant weights only, so it is hidden from it."""
    return eager_product(x, weight, bias)


@hidden_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return (hidden_product if torch.compiler.is_compiling() else eager_product)(x, weight, bias)


def before(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = layer.spec.num_heads, layer.spec.num_kv_heads
    qkv = layer.qkv(layer.attention_norm(x)).unflatten(-1, (heads + 2 * kv_heads, layer.spec.head_dim))
    qk, v = qkv.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
    q, k = rotate(qk, cos, sin).split_with_sizes([heads, kv_heads], dim=1)
    return q, k, v


def behind(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.out(attended)
    gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
    return x + layer.down(F.silu(gate) * up)  # type: ignore[no-any-return]


compiled_before, compiled_behind = torch.compile(before, dynamic=True), torch.compile(behind, dynamic=True)


def forward(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, outputs: Tensor | None) -> Tensor:
    q, k, v = compiled_before(layer, x, cos, sin)
    attended = attend(layer.index, q, k, v).flatten(1)
    if outputs is not None:
        x, attended = x[outputs], attended[outputs]
    return compiled_behind(layer, x, attended)


def step(learner: Learner, batch: Any) -> tuple[float, float]:
    """(CPU-seconds, loss) of an update."""
    start = time.process_time()
    learner.update(batch, ppo_clip.bind(clip=0.2))
    seconds, loss = time.process_time() - start, learner.context.metrics.values()["loss"]
    learner.context.metrics.clear()
    return seconds, loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="bert")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    products._onednn = product
    spec, dtype = SHAPES[options.shape], getattr(torch, options.dtype)
    sides = {
        name: Learner(
            WorkerContext(),
            networks=networks_of(spec, dtype),
            optimizer=OptimizerConfig(lr=1e-5),
            plan=UpdatePlan(token_budget=1024),
            total_steps=100,
            seed=0,
        )
        for name in ("eager", "compiled")
    }
    for layer in sides["compiled"].model.decoder.layers:
        layer.forward = MethodType(forward, layer)
    batch = rows(options.rows, spec.vocab_size, False)
    for name, learner in sides.items():
        print(f"{name}: first step {step(learner, batch)[0]:.1f} CPU-seconds", flush=True)
        step(learner, batch)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.turns):
        for name, learner in sides.items():
            seconds, loss = step(learner, batch)
            taken[name].append(seconds)
            print(f"{name}: {seconds:.2f} CPU-seconds, loss {loss:.6f}", flush=True)
    ratios = [eager / compiled for eager, compiled in zip(taken["eager"], taken["compiled"], strict=True)]
    print(
        f"{options.shape} {options.dtype}: eager / compiled {statistics.median(ratios):.2f}", [round(r, 2) for r in ratios]
    )


if __name__ == "__main__":
    main()
