"""What goes into the rollout engine and what comes out. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.errors import UserError

__all__ = ["Completion", "FloatArray", "IntArray", "Request", "SamplingParams", "problem_of"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn, for all requests of a call.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep the whole vocabulary; with both, top-p is taken of the
    renormalised top-k distribution. A response ends with the first of: a token of ``stop_token_ids``, the token that
    completes one of ``stop_strings``, ``max_new_tokens``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "a finite number, 0 (greedy) or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("stop_strings", self.stop_strings, "" not in self.stop_strings, "strings of at least one character"),
        )
        for name, value, ok, expected in checks:
            if not ok:
                raise UserError(f"SamplingParams.{name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class Request:
    """A prompt [T] to respond to. ``sample_id`` names the randomness of the response; ``max_new_tokens`` overrides the
    limit of the call. ``expected``: tokens that the response will take, as far as one can tell."""

    prompt: IntArray
    sample_id: int
    max_new_tokens: int | None = None
    expected: int = 0

    @staticmethod
    def longest_first(requests: Sequence[Request]) -> list[int]:
        """Their places in the order in which they had best begin, where they can't all at once: what takes long is then not
        left for the end. Neighbours that are expected to take as long, such as those of a group, stay neighbours."""
        return sorted(range(len(requests)), key=lambda place: -requests[place].expected)


def problem_of(prompt: IntArray, limit: int, vocab_size: int, max_length: int, of_what: str) -> str:
    """Why no engine can respond to ``prompt`` [T] with ``limit`` tokens, "" if it can. ``of_what``: whose limit
    ``max_length`` tokens are, and what to do."""
    if len(prompt) == 0:
        return "the prompt is empty; expected at least one token (a beginning-of-text token, for example)"
    if limit < 1:
        return f"max_new_tokens is {limit}; expected at least 1"
    if len(prompt) + limit > max_length:
        return f"{len(prompt)} prompt tokens and max_new_tokens {limit} exceed the {max_length} {of_what}"
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        return f"prompt tokens go from {prompt.min()} to {prompt.max()}; expected 0 to {vocab_size - 1}"
    return ""


@dataclass(frozen=True)
class Completion:
    """A response: ``tokens`` [T] (the stop token included), ``log_probs`` [T] and ``versions`` [T].

    ``log_probs`` are of each sampled token under softmax(logits / temperature) over the whole vocabulary, before top-k and
    top-p: what the training forward computes at that temperature. Greedy responses carry those of temperature 1.
    ``versions``: the engine's ``version`` when each token was sampled. ``finish`` "abort": cut short by ``Engine.abort``.

    ``Completion(sample_id=4, tokens=[15, 7, 2], log_probs=[-0.1, -2.3, -0.4], versions=[3, 3, 4], finish="stop")``: of
    three tokens, 2 is the stop token, and the weights changed before it.
    """

    sample_id: int
    tokens: IntArray
    log_probs: FloatArray
    versions: IntArray
    finish: Literal["stop", "length", "abort"]
