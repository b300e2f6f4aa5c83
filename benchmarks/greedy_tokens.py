"""Greedy responses in the generation layout of a cut actor, against one process's: how many are the same, token by token.

    python benchmarks/greedy_tokens.py [--model smollm2-135m] [--prompts 64] [--new-tokens 16] [--json]

Two processes over gloo hold the model as it trains, bring it into its generation layout (``HybridWeights``) and draw, each
replica its share of the prompts ("What is 37 + 25? Answer:"). ``halves`` is one process that draws the prompts in two
halves: what another number of rows changes by itself. Where responses differ, ``gaps`` are how much less likely the first
token that differs is than one process's own choice, in log-probability: a near-tie if about the rounding of the type.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.placement import Mesh
from hybridflow.data.text import Tokenizer
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.models.decoder import Decoder, Part
from hybridflow.models.policy import TextPolicy
from hybridflow.models.sources import resolve
from hybridflow.models.weights import load_decoder, read_spec
from hybridflow.parallel.mesh import ALONE, Line, ProcessMesh
from hybridflow.parallel.shard import cuts
from hybridflow.reshard.execute import HybridWeights
from hybridflow.workers.forward import forward

MESHES = {
    "1-2-1 to 1-1-2-1": Mesh(tp=2, generation_tp=1),
    "2-1-1 to 1-1-2-1": Mesh(pp=2, generation_pp=1),
    "2-1-1 to 1-2-1-1": Mesh(pp=2, generation_tp=2, generation_pp=1),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Responses = dict[int, np.ndarray]


def prompts(folder: Path, count: int) -> list[np.ndarray]:
    tokenizer, rng = Tokenizer.load(folder), np.random.default_rng(0)
    texts = [f"What is {a} + {b}? Answer:" for a, b in rng.integers(10, 100, (count, 2))]
    return [np.array(tokenizer.encode(text)) for text in texts]


def draw(decoder: Decoder, texts: list[np.ndarray], which: range, limit: int, pp: Line = ALONE) -> Responses:
    done = Engine(decoder, seed=0, pp=pp).generate([Request(texts[i], i) for i in which], SamplingParams(limit, 0.0))
    return {i: completion.tokens for i, completion in zip(which, done, strict=True)}


def work(rank: int, folder: Path, count: int, limit: int, scratch: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5))
    texts, spec, found = prompts(folder, count), read_spec(folder), dict[tuple[str, str], Responses]()
    for dtype in DTYPES:
        for name, mesh in MESHES.items():
            lines = ProcessMesh(mesh, rank, timedelta(minutes=5), {})
            stage = lines.pp.index
            part = Part(cuts(spec.num_layers, mesh.pp)[stage], stage == 0, stage == mesh.pp - 1, tp=lines.tp)
            weights = HybridWeights(load_decoder(folder, DTYPES[dtype], part), lines)
            which = cuts(count, mesh.num_replicas)[mesh.replica(rank)[0]]
            found[dtype, name] = draw(weights.generation(), texts, which, limit, weights.generation_pp)
    torch.save(found, scratch / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def gap(decoder: Decoder, prompt: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> float:
    """How much less likely their first other token is than ours."""
    end = min(len(ours), len(theirs))
    same = int(np.argmax(ours[:end] != theirs[:end]))
    rows = [np.concatenate([prompt, tokens[: same + 1]]) for tokens in (ours, theirs)]
    mask = [np.arange(len(row)) == len(row) - 1 for row in rows]
    batch = Batch({"tokens": Ragged.from_rows(rows, np.int64), "response_mask": Ragged.from_rows(mask, bool)})
    batch = batch.with_columns(sample_id=np.arange(2))
    found = forward(TextPolicy(decoder), batch, ("log_probs",), 4096)["log_probs"]
    mine, other = (row[-1] for row in found)
    return float(mine - other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder, count, limit = resolve(options.model), options.prompts, options.new_tokens
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(work, (folder, count, limit, Path(scratch)), 2)  # type: ignore[no-untyped-call]
        ranks = [torch.load(f"{scratch}/{rank}.pt", weights_only=False) for rank in range(2)]
    texts, rows = prompts(folder, count), []
    for dtype in DTYPES:
        decoder = load_decoder(folder, DTYPES[dtype])
        ours = draw(decoder, texts, range(count), limit)
        sides = {"halves": [draw(decoder, texts, half, limit) for half in cuts(count, 2)]}
        sides |= {name: [rank[dtype, name] for rank in ranks] for name in MESHES}
        for side, drawn in sides.items():
            other = [i for i in range(count) if any(i in part and not np.array_equal(part[i], ours[i]) for part in drawn)]
            told = {i: next(part[i] for part in drawn if i in part) for i in range(count)}
            gaps = sorted(gap(decoder, texts[i], ours[i], told[i]) for i in other)
            rows.append({"dtype": dtype, "side": side, "same": count - len(other), "of": count, "gaps": gaps})
    for row in rows:
        print(json.dumps(row) if options.json else row | {"gaps": [round(x, 4) for x in row["gaps"]]})


if __name__ == "__main__":
    main()
