"""One GRPO step of hybridflow against TRL's GRPOTrainer: CPU-seconds on one thread, generation and update apart.

    python -m venv trl && trl/bin/pip install torch==2.13.0 && trl/bin/pip install "trl==1.16.*" transformers==5.24.0 psutil
    python benchmarks/vs_trl.py --trl-python trl/bin/python [--models 1M,5M,20M] [--cells fixed,varied] [--json]

Both sides load the same random Qwen2 folder in fp32 and take the same prompts (16 to 32 tokens), 4 responses to each,
top-k 50 at temperature 1, a reward that costs nothing, group-centred advantages, the clipped loss averaged over tokens,
no KL, and one step of fused AdamW with gradient clipping. Each side is a process of its own; they take turns step by step,
so a loaded machine slows both. A number is the median of the steps after a warm-up; reward processes are counted.

Cells. ``fixed``: 32 new tokens, no end token before. ``varied``: lengths evenly drawn from 4 to 64, the same on both
sides. hybridflow ends a response by the limit of its request. TRL has no limit for a row, so a logits processor lets the
end token appear where the length says, as it would from a model that ends by itself; a call of ``generate`` then runs until
its longest row is done, which is how TRL's own generation meets such lengths.

hybridflow runs with its defaults. TRL runs with what was best for it among those tried: gradient checkpointing off (it is
on by default), fp32 instead of bf16, all rows in one call of ``generate`` (``--trl-generation-rows``), and microbatches of
few rows (``--trl-rows``); with 32, about as many tokens as hybridflow's microbatch holds, it was slower.

Part of the distance depends on the processor: on AMD, torch's fp32 products, which TRL runs on, are half as fast as those
of oneDNN, which hybridflow takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GROUP, TOP_K, LR = 4, 50, 1e-5
CELLS = {"fixed": (32, 32), "varied": (4, 64)}
# (vocabulary, hidden, intermediate, layers, heads, kv heads); prompts; TRL's rows of a generate call, of a microbatch
MODELS: dict[str, tuple[tuple[int, ...], int, int, dict[str, int]]] = {
    "1M": ((2048, 128, 384, 4, 4, 2), 64, 256, {"fixed": 4, "varied": 16}),
    "5M": ((8192, 256, 704, 4, 4, 2), 64, 256, {"fixed": 4, "varied": 4}),
    "20M": ((8192, 512, 1376, 6, 8, 2), 16, 64, {"fixed": 8, "varied": 8}),
}
TARGETS = {"fixed": 1.5, "varied": 3.0}
PARTS = ("generation", "update", "step")


def distinct(response: str) -> float:
    """The reward: the share of characters that occur once or for the first time."""
    return len(set(response)) / max(1, len(response))


def response_lengths(job: dict[str, Any], step: int) -> list[int]:
    """Lengths of the responses of a step: the same on both sides."""
    low, high = CELLS[job["cell"]]
    draw = random.Random(step)
    return [draw.randint(low, high) for _ in range(job["prompts"] * GROUP)]


def cpu_seconds() -> float:
    """Of this process and its children, all threads."""
    import psutil

    children = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return time.process_time() + sum(times.user + times.system for times in children)


class Meter:
    """CPU-seconds of a step and of its generation; ``wrap`` times a function as generation."""

    def __init__(self) -> None:
        self.start, self.generation = 0.0, 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = cpu_seconds()
            result = function(*args)
            self.generation += cpu_seconds() - start
            return result

        return timed

    def begin(self) -> None:
        self.generation, self.start = 0.0, cpu_seconds()

    def end(self) -> dict[str, float]:
        step = cpu_seconds() - self.start
        return {"generation": self.generation, "update": step - self.generation, "step": step}


def run_hybridflow(job: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    from dataclasses import replace

    from hybridflow.build import build
    from hybridflow.config import validate
    from hybridflow.train import Step

    config = {
        "algorithm": "grpo",
        "run_dir": job["folder"],
        "threads": 1,
        "actor": {"model": job["folder"], "optimizer": {"lr": LR}},
        "data": {"prompts": job["data"]},
        "reward": {"functions": [f"{__file__}:distinct"], "workers": 1},
        "generation": {"max_new_tokens": CELLS[job["cell"]][1], "top_k": TOP_K},
        "train": {"steps": job["steps"], "prompts_per_step": job["prompts"], "group_size": GROUP},
    }
    run = build(validate(config, "benchmark"))
    meter, trainer, engine = Meter(), run.trainer, run.parts.actor.sampler.worker.engine  # type: ignore[attr-defined]
    generate = engine.generate

    def of_given_lengths(requests: Any, params: Any) -> Any:
        lengths = response_lengths(job, trainer.step)
        requests = [replace(r, max_new_tokens=length) for r, length in zip(requests, lengths, strict=True)]
        return generate(requests, replace(params, stop_token_ids=()))

    def report(step: Step) -> None:
        assert step.batch is not None
        tokens, mask = step.batch.ragged("tokens"), step.batch.ragged("response_mask")
        new = int(mask.values.sum())
        send(
            {
                **meter.end(),
                "prompt_tokens": len(tokens.values) - new,
                "new_tokens": new,
                "loss": step.metrics["actor/loss"],
            }
        )

    engine.generate = of_given_lengths
    trainer.algorithm.rollout = meter.wrap(trainer.algorithm.rollout)  # type: ignore[method-assign]
    trainer.hooks = [report]
    for step, _ in enumerate(sys.stdin, 1):
        meter.begin()
        trainer.train(step)
    run.runtime.stop()


def run_trl(job: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["folder"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
    meter, counts, longest = Meter(), {"prompt_tokens": 0, "new_tokens": 0}, CELLS[job["cell"]][1]

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = meter.wrap(super()._generate_and_score_completions)(inputs)
            counts["prompt_tokens"] += int(out["prompt_mask"].sum())
            counts["new_tokens"] += int(out["completion_mask"].sum())
            return out

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not sys.stdin.readline()
            counts.update(dict.fromkeys(counts, 0))
            rows.extend(response_lengths(job, state.global_step))
            meter.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            send({**meter.end(), **counts})

    rows: list[int] = []
    generate = model.generate

    def end_where_told(input_ids: Any, **kwargs: Any) -> Any:
        lengths = torch.tensor([rows.pop(0) for _ in range(len(input_ids))])
        start = input_ids.shape[1] - 1 + lengths

        def processor(ids: Any, scores: Any) -> Any:
            scores[:, tokenizer.eos_token_id] = -torch.inf
            ending = start == ids.shape[1]
            scores[ending] = -torch.inf
            scores[ending, tokenizer.eos_token_id] = 0.0
            return scores

        return generate(input_ids, logits_processor=LogitsProcessorList([processor]), **kwargs)

    if job["cell"] == "varied":
        model.generate = end_where_told
    config = GRPOConfig(
        output_dir=job["folder"] + "-trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=job["steps"],
        per_device_train_batch_size=job["trl_rows"],
        gradient_accumulation_steps=job["prompts"] * GROUP // job["trl_rows"],
        generation_batch_size=job["trl_generation_rows"],
        num_generations=GROUP,
        max_completion_length=longest,
        generation_kwargs={"min_new_tokens": longest} if job["cell"] == "fixed" else None,
        top_k=TOP_K,
        learning_rate=LR,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [distinct(text) for text in completions]

    lines = Path(job["data"]).read_text(encoding="utf-8").splitlines()
    data = Dataset.from_list([json.loads(line) for line in lines])
    Trainer(model, reward, config, data, processing_class=tokenizer, callbacks=[Turns()]).train()


def write_inputs(name: str, folder: Path) -> int:
    """Model, tokenizer and prompts; -> number of parameters."""
    import torch

    from hybridflow.data.text import Tokenizer
    from hybridflow.models.decoder import Decoder, init_weights
    from hybridflow.models.spec import DecoderSpec
    from hybridflow.models.weights import save_decoder

    (vocab, hidden, intermediate, layers, heads, kv_heads), prompts, *_ = MODELS[name]
    alphabet = "".join(chr(0x4E00 + i) for i in range(vocab - 3))  # three special tokens
    tokenizer = Tokenizer.characters(alphabet)
    spec = DecoderSpec(
        family="qwen2",
        vocab_size=tokenizer.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=2048,
        tied=True,
        qkv_bias=True,
    )
    decoder = Decoder(spec)
    init_weights(decoder, torch.Generator().manual_seed(0))
    tokenizer.save(folder / "tokenizer")
    save_decoder(decoder, folder / name, copy_from=folder / "tokenizer")
    draw = random.Random(0)
    texts = ["".join(draw.choices(alphabet, k=draw.randint(16, 32))) for _ in range(prompts)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return sum(parameter.numel() for parameter in decoder.parameters())


class Side:
    """A side as a process: ``step`` asks for one step and returns what it measured."""

    def __init__(self, name: str, python: str, job: dict[str, Any], folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self.errors = folder / f"{name}.log"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [python, __file__, "--side", name, "--job", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )

    def step(self) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # it ended early
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"a side ended early, {self.process.wait()}; the end of its log:\n{self.errors.read_text()[-3000:]}"
            )
        measured: dict[str, Any] = json.loads(line)
        return measured

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(name: str, cell: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One model and cell, both sides in turns."""
    _, prompts, generation_rows, rows = MODELS[name]
    job = {
        "folder": str(folder / name),
        "data": str(folder / f"{name}.jsonl"),
        "cell": cell,
        "prompts": prompts,
        "steps": args.steps + 1,
        "trl_rows": args.trl_rows or rows[cell],
        "trl_generation_rows": args.trl_generation_rows or generation_rows,
    }
    pythons = {"hybridflow": sys.executable, "trl": args.trl_python}
    sides = {side: Side(side, python, job, folder) for side, python in pythons.items()}
    try:
        measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(args.steps + 1):
            for side, process in sides.items():
                measured[side].append(process.step())
    finally:
        for process in sides.values():
            process.close()
    for ours, theirs in zip(*measured.values(), strict=True):
        if any(ours[count] != theirs[count] for count in ("prompt_tokens", "new_tokens")):
            raise SystemExit(f"{name} {cell}: the sides did different work: {ours}, {theirs}")
    medians = {
        side: {part: statistics.median(step[part] for step in steps[1:]) for part in PARTS}
        for side, steps in measured.items()
    }
    ratios = {part: medians["trl"][part] / medians["hybridflow"][part] for part in PARTS}
    tokens = {count: [step[count] for step in measured["trl"][1:]] for count in ("prompt_tokens", "new_tokens")}
    return {"model": name, "cell": cell, **tokens, **medians, "ratio": ratios, "target": TARGETS[cell], "job": job}


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Rows of the table."""
    job, new = result["job"], statistics.median(result["new_tokens"])
    yield (
        f"{result['model']} {result['cell']}: {job['prompts']} prompts x {GROUP}, {result['prompt_tokens'][0]} prompt and "
        f"{new:.0f} new tokens a step on both sides; TRL: {job['trl_rows']} rows a microbatch, "
        f"{job['trl_generation_rows']} a generate call"
    )
    yield f"  {'CPU-seconds':<12}{'hybridflow':>12}{'TRL':>10}{'ratio':>8}"
    for part in PARTS:
        goal = f"   target {result['target']}" if part == "step" else ""
        ours, theirs = result["hybridflow"][part], result["trl"][part]
        yield f"  {part:<12}{ours:>12.3f}{theirs:>10.3f}{result['ratio'][part]:>8.2f}{goal}"


def serve(side: str, job: dict[str, Any]) -> None:
    """Run a side; only measurements go to the real standard output."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        {"hybridflow": run_hybridflow, "trl": run_trl}[side](job, lambda message: print(json.dumps(message), file=out))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one of warm-up")
    parser.add_argument("--trl-rows", type=int)
    parser.add_argument("--trl-generation-rows", type=int)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.add_argument("--side", choices=("hybridflow", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.side and not args.trl_python:
        parser.error("--trl-python is missing; the top of this file says how to make that environment")
    return args


def main() -> None:
    args = parse_arguments()
    if args.side:
        serve(args.side, args.job)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models.split(","):
            parameters = write_inputs(name, Path(scratch))
            if not args.json:
                print(f"\nQwen2 {name}: {parameters:,} parameters, {MODELS[name][0][0]} tokens in the vocabulary")
            for cell in args.cells.split(","):
                result = compare(name, cell, args, Path(scratch))
                shown = [json.dumps({"parameters": parameters, **result})] if args.json else lines_of(result)
                print("\n".join(shown), flush=True)


if __name__ == "__main__":
    main()
