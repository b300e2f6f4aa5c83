"""What it brings to know how long responses will be: the same rollouts as they come, and the longest first.

    python benchmarks/lengths.py [--slots 16] [--groups 16] [--calls 5] [--json]

Random decoders of about 5M and 20M parameters in float32, one thread, groups of 8 responses to prompts of 24 tokens.
Lengths are gamma distributed (mean 60, deviation as large, 400 at most): "prompt" is the variance of the mean lengths of
prompts, which are what is expected, relative to that of all; the rest nobody can know. Lengths are limits of requests, so
both sides draw the same tokens.

"gain": CPU-seconds as they come by those of the longest first; both take turns call by call; medians. "2 workers", ...: how
much later the last of so many workers is done than if work were even (by tokens), with groups dealt in even numbers and by
what is expected; means of 200 rollouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.controller.protocols import blocks
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.spec import DecoderSpec
from hybridflow.telemetry.graph_tables import aligned

MODELS = {
    "5M": DecoderSpec("qwen2", 8192, 192, 512, 6, 6, 2, 32, 1024),
    "20M": DecoderSpec("qwen2", 8192, 384, 1024, 10, 6, 2, 64, 1024),
}
SHARES, WORKERS = (0.0, 0.5, 0.9), (2, 4, 8)
MEAN, LONGEST, ROWS, PROMPT = 60.0, 400, 8, 24
Lengths = NDArray[np.int64]


def drawn(rng: np.random.Generator, groups: int, share: float) -> tuple[Lengths, Lengths]:
    """[groups, rows] lengths, and what is expected of them."""
    of_prompts = MEAN * _gamma(rng, share, (groups, 1))
    lengths = of_prompts * _gamma(rng, (1 - share) / (1 + share), (groups, ROWS))  # (1 + a) (1 + b) = 2
    return tuple(np.clip(np.rint(x), 1, LONGEST).astype(np.int64) for x in (lengths, of_prompts.repeat(ROWS, 1)))  # type: ignore[return-value]


def _gamma(rng: np.random.Generator, variance: float, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Of mean 1."""
    return rng.gamma(1 / variance, variance, shape) if variance else np.ones(shape)


def gain(spec: DecoderSpec, share: float, groups: int, slots: int, calls: int) -> float:
    """Of beginning with the longest."""
    decoder, rng = Decoder(spec), np.random.default_rng(0)
    init_weights(decoder, torch.Generator().manual_seed(0))
    engine, params = Engine(decoder, seed=0, max_slots=slots), SamplingParams(LONGEST)
    ratios = []
    for call in range(calls + 1):
        lengths, expected = drawn(rng, groups, share)
        prompts = rng.integers(0, spec.vocab_size, (groups, PROMPT)).repeat(ROWS, 0)
        took = []
        for known in (np.zeros_like(expected), expected)[:: 1 if call % 2 else -1]:
            columns = zip(prompts, range(lengths.size), lengths.ravel().tolist(), known.ravel().tolist(), strict=True)
            requests = [Request(*row) for row in columns]
            start = time.process_time()
            done = engine.generate(requests, params)
            took.append(time.process_time() - start)
            assert sum(len(one.tokens) for one in done) == lengths.sum()
        ratios.append(took[0] / took[1] if call % 2 else took[1] / took[0])
    return statistics.median(ratios[1:])


def lateness(share: float, groups: int, workers: int) -> tuple[float, float]:
    """Of the last worker over the mean of all, dealt without and with what is expected."""
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        lengths, expected = (x.ravel() for x in drawn(rng, groups, share))
        prompts = np.full_like(expected, PROMPT)
        found.append([_late(lengths, blocks(weights, workers)) for weights in (prompts, prompts + expected)])
    even, known = np.mean(found, 0)
    return float(even), float(known)


def _late(lengths: Lengths, dealt: list[NDArray[np.int64]]) -> float:
    return float(max(lengths[rows].sum() for rows in dealt) * len(dealt) / lengths.sum() - 1)


def rows(groups: int, slots: int, calls: int) -> Iterator[dict[str, float | str]]:
    for share in SHARES:
        row: dict[str, float | str] = {"prompt": share}
        row |= {f"gain {name}": gain(spec, share, groups, slots, calls) for name, spec in MODELS.items()}
        for workers in WORKERS:
            even, known = lateness(share, groups, workers)
            row |= {f"{workers} workers, even": even, f"{workers} workers, expected": known}
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [*rows(options.groups, options.slots, options.calls)]
    if options.json:
        print(json.dumps(found, indent=2))
        return
    header = ("prompt", *(f"gain, {name}" for name in MODELS), *(f"{n} workers" for n in WORKERS))
    table = [
        (
            f"{row['prompt']:.0%}",
            *(f"{row[f'gain {name}']:.2f}" for name in MODELS),
            *(f"{row[f'{n} workers, even']:.0%} -> {row[f'{n} workers, expected']:.0%}" for n in WORKERS),
        )
        for row in found
    ]
    print("\n".join(aligned([header, *table], right=header)))


if __name__ == "__main__":
    main()
