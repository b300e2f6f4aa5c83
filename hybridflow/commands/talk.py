"""Commands that let a model speak: generate and chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from hybridflow.core.errors import ModelError
from hybridflow.data.text import Messages, Template, Tokenizer
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Completion, Request, SamplingParams
from hybridflow.models.sources import resolve
from hybridflow.models.weights import load_decoder

__all__ = ["Speaker", "chat", "generate"]


@dataclass
class Speaker:
    """A model with its tokenizer and sampling settings."""

    tokenizer: Tokenizer
    engine: Engine
    params: SamplingParams

    @staticmethod
    def load(model: str, max_new_tokens: int, temperature: float, seed: int) -> Speaker:
        """``model``: a name, a Hugging Face folder, or a run directory with an exported model."""
        folder = resolve(model_folder(model))
        tokenizer, decoder = Tokenizer.load(folder), load_decoder(folder)
        params = SamplingParams(max_new_tokens, temperature, stop_token_ids=tokenizer.eos_token_ids)
        return Speaker(tokenizer, Engine(decoder, seed=seed), params)

    def respond(self, prompts: list[list[int]], count: int = 1, first_id: int = 0) -> list[Completion]:
        """``count`` responses to each prompt, side by side."""
        repeated = [np.array(prompt, np.int64) for prompt in prompts for _ in range(count)]
        requests = [Request(prompt, first_id + i) for i, prompt in enumerate(repeated)]
        return self.engine.generate(requests, self.params)


def model_folder(model: str) -> str:
    """A run directory stands for the model that it exported."""
    path = Path(model)
    if (path / "config.toml").is_file():
        if not (path / "model").is_dir():
            raise ModelError(f"{path}: this run has exported no model yet; it does so after its last step")
        return str(path / "model")
    return model


def generate(speaker: Speaker, prompts: list[str], template: Template, count: int, as_json: bool) -> None:
    """Print responses to prompts."""
    completions = speaker.respond(template.encode(speaker.tokenizer, prompts), count)
    texts = [prompt for prompt in prompts for _ in range(count)]
    rows = [
        {
            "prompt": prompt,
            "response": speaker.tokenizer.decode(completion.tokens.tolist()),
            "finish": completion.finish,
            "log_prob": float(completion.log_probs.sum()),
        }
        for prompt, completion in zip(texts, completions, strict=True)
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['prompt']}{row['response']}" if template.kind == "plain" else row["response"])


def chat(speaker: Speaker, system: str | None) -> None:
    """Talk until the end of the input; /reset forgets the conversation."""
    console, opening = Console(), [{"role": "system", "content": system}] if system else []
    template, messages = Template("chat"), list(opening)
    console.print("empty line or Ctrl-D ends, /reset forgets", style="dim")
    for turn, text in enumerate(_lines(console)):
        if text == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": text})
        response = _answer(speaker, template, messages, turn)
        messages.append({"role": "assistant", "content": response})
        console.print(response, style="cyan", markup=False, highlight=False)


def _answer(speaker: Speaker, template: Template, messages: Messages, turn: int) -> str:
    (completion,) = speaker.respond(template.encode(speaker.tokenizer, [messages]), first_id=turn)
    return speaker.tokenizer.decode(completion.tokens.tolist())


def _lines(console: Console) -> Iterator[str]:
    """What the user types, line by line; a prompt only on a terminal."""
    while True:
        try:
            line = console.input("[bold]> [/bold]") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if not line.strip():
            return
        yield line
