"""The rollout engine: continuous batching in the process and on the weights of the learner.

    admit ──> tokens of active rows | new prompts ──decoder──> hidden ──head──> logits ──sample──> a token for every row
      ^                                                                                             │
      └──────────────── finished rows leave, the last active rows move into the holes <─────────────┘

Every step is one forward of the decoder over one packed axis: the last token of every active row, then whole prompts of
those that are admitted. The decoder's parameters are read in place, so there is nothing to publish, export or refresh.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.core.errors import NonFiniteError, UserError
from hybridflow.core.seeding import uniforms
from hybridflow.generation.attention import KVCache, StepAttention
from hybridflow.generation.request import Completion, FloatArray, IntArray, Request, SamplingParams
from hybridflow.generation.sampling import sample
from hybridflow.generation.scheduler import Admission, Scheduler, pack
from hybridflow.models.decoder import Decoder, linear
from hybridflow.models.spec import DecoderSpec

__all__ = ["Engine"]

Decode = Callable[[Sequence[int]], str]


class Engine:
    """Draws responses from a decoder, whose parameters it reads and never changes.

    The response to a request depends on the weights, (seed, sample_id), the prompt and the sampling parameters alone, up to
    the rounding of matrix products: not on the other requests, their order, ``max_slots`` or ``prefill_tokens``.
    """

    def __init__(
        self, decoder: Decoder, *, seed: int, max_slots: int = 64, prefill_tokens: int = 2048, decode: Decode | None = None
    ) -> None:
        """max_slots: most responses in flight; prefill_tokens: most prompt tokens of a step (a longer prompt goes alone);
        decode: token ids -> text, needed for stop strings only."""
        if max_slots < 1 or prefill_tokens < 1:
            raise UserError(f"Engine: max_slots {max_slots} and prefill_tokens {prefill_tokens} have to be at least 1")
        self.decoder, self.seed, self.decode = decoder, seed, decode
        self.max_slots, self.prefill_tokens = max_slots, prefill_tokens
        self.num_prefilled = 0
        """Prompt tokens that went through the decoder so far: shared prompts count once a call."""
        self.num_steps = 0
        """Forwards of the decoder so far."""

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion a request, in their order. The cache lives for this call alone.

        Raises UserError before any work if a prompt is empty, holds an unknown token, or is too long for the model together
        with its response; NonFiniteError if the weights give NaN.
        """
        limits = np.array(
            [params.max_new_tokens if r.max_new_tokens is None else r.max_new_tokens for r in requests], dtype=np.int64
        )
        self._check(requests, limits, params)
        if not requests:
            return []
        call = _Call(self, requests, limits, params)
        while not call.scheduler.done:
            call.step()
        return [call.completion(request) for request in range(len(requests))]

    def _check(self, requests: Sequence[Request], limits: IntArray, params: SamplingParams) -> None:
        if params.stop_strings and self.decode is None:
            raise UserError(
                f"SamplingParams.stop_strings {params.stop_strings} need text: give the Engine its decode function"
            )
        for index, (request, limit) in enumerate(zip(requests, limits.tolist(), strict=True)):
            problem = _problem(self.decoder.spec, request.prompt, limit)
            if problem:
                raise UserError(f"request {index} (sample_id {request.sample_id}): {problem}")


def _problem(spec: DecoderSpec, prompt: IntArray, limit: int) -> str:
    if len(prompt) == 0:
        return "the prompt is empty; expected at least one token (a beginning-of-text token, for example)"
    if limit < 1:
        return f"max_new_tokens is {limit}; expected at least 1"
    if len(prompt) + limit > spec.max_positions:
        return (
            f"{len(prompt)} prompt tokens and max_new_tokens {limit} exceed the model's {spec.max_positions} positions; "
            "shorten the prompt or lower max_new_tokens"
        )
    if prompt.min() < 0 or prompt.max() >= spec.vocab_size:
        return f"prompt tokens go from {prompt.min()} to {prompt.max()}; expected 0 to {spec.vocab_size - 1}"
    return ""


class _Call:
    """One call of ``generate``. Arrays over requests are numpy and never move; only cache rows do."""

    def __init__(self, engine: Engine, requests: Sequence[Request], limits: IntArray, params: SamplingParams) -> None:
        self.engine, self.decoder, self.params = engine, engine.decoder, params
        self.prompts = [request.prompt for request in requests]
        self.sample_ids = np.array([request.sample_id for request in requests], dtype=np.int64)
        self.scheduler = Scheduler(self.prompts, limits, engine.max_slots, engine.prefill_tokens)
        # Responses lie one after the other, each with room for its limit.
        self.starts = np.concatenate([[0], np.cumsum(limits)])
        self.tokens = np.empty(self.starts[-1], dtype=np.int64)
        self.log_probs = np.empty(self.starts[-1], dtype=np.float32)
        self.stopped = np.zeros(len(requests), dtype=bool)
        self.stop_token_ids = np.array(params.stop_token_ids, dtype=np.int64)
        # A text of n bytes is at most n tokens; the slack is for tokens without text and for cut characters at the edge.
        self.tail = max((len(string.encode()) for string in params.stop_strings), default=0) + 8
        weight = self.decoder.embed.weight
        self.device = weight.device
        # The row behind the slots keeps the prompt whose requests could not all be admitted.
        self.kept_row = self.scheduler.slots.num_slots
        longest = int((self.scheduler.prompt_lengths + limits).max())
        self.cache = KVCache(self.decoder.spec, self.kept_row + 1, longest, weight)
        self.kept_hidden = weight.new_empty(0, self.decoder.spec.hidden_size)

    def step(self) -> None:
        scheduler = self.scheduler
        decoding = scheduler.slots.active
        admission = scheduler.admit() if scheduler.can_admit() else Admission()
        hidden = self.forward(decoding, admission)
        rows = scheduler.slots.active
        draws = uniforms(self.engine.seed, "sample", self.sample_ids[rows], scheduler.num_new[rows])
        logits = linear(hidden, self.decoder.head_weight).float()
        tokens, log_probs = sample(logits, draws, self.params)
        stopped = self.emit(rows, tokens.cpu().numpy(), log_probs.cpu().numpy())
        cached = int((scheduler.prompt_lengths[rows] + scheduler.num_new[rows]).max())
        sources, targets = scheduler.advance(stopped)
        if len(sources):
            self.cache.copy(self.tensor(sources), self.tensor(targets), cached)

    def forward(self, decoding: IntArray, admission: Admission) -> Tensor:
        """decoding [A]: requests that decode -> hidden [A + admitted, D]: the state before the next token of each."""
        num_new = self.scheduler.num_new[decoding]
        places = self.scheduler.prompt_lengths[decoding] + num_new - 1
        prompts = [self.prompts[request] for request in admission.prefills]
        lengths = [len(prompt) for prompt in prompts]
        packing = pack(places, lengths, admission, self.kept_row)
        if len(packing.restored):
            source = torch.full(packing.restored.shape, self.kept_row, device=self.device)
            cached = int(self.scheduler.prompt_lengths[admission.requests[0]])
            self.cache.copy(source, self.tensor(packing.restored), cached)
        hidden = self.kept_hidden[:0]
        if len(packing.positions):
            self.cache.reserve(int(packing.positions.max()) + 1)
            attend = StepAttention(self.cache, packing, lengths)
            tokens = np.concatenate([self.tokens[self.starts[decoding] + num_new - 1], *prompts])
            hidden = self.decoder(self.tensor(tokens), self.tensor(packing.positions), attend)
            self.engine.num_steps += 1
            self.engine.num_prefilled += sum(lengths)
        if not admission.requests:
            return hidden
        outputs = torch.cat([hidden, self.kept_hidden])[self.tensor(packing.outputs)]
        if admission.keep and lengths:
            self.kept_hidden = hidden[-1:].clone()
        return outputs

    def emit(self, rows: IntArray, tokens: IntArray, log_probs: FloatArray) -> NDArray[np.bool_]:
        """Append a token to the responses of ``rows``; -> [len(rows)]: whether it ended the response."""
        if not np.isfinite(log_probs).all():
            broken = self.sample_ids[rows[~np.isfinite(log_probs)]].tolist()
            raise NonFiniteError(
                f"generate: the log-probabilities of samples {broken} are NaN or infinite; check the weights"
            )
        ends = self.starts[rows] + self.scheduler.num_new[rows]
        self.tokens[ends], self.log_probs[ends] = tokens, log_probs
        stopped: NDArray[np.bool_] = (tokens[:, None] == self.stop_token_ids).any(1)
        if self.params.stop_strings:
            stopped |= [self.completes_string(*span) for span in zip(self.starts[rows], ends + 1, strict=True)]
        self.stopped[rows] = stopped
        return stopped

    def completes_string(self, start: int, end: int) -> bool:
        assert self.engine.decode is not None
        text = self.engine.decode(self.tokens[max(start, end - self.tail) : end].tolist())
        return any(string in text for string in self.params.stop_strings)

    def completion(self, request: int) -> Completion:
        start = self.starts[request]
        span = slice(start, start + self.scheduler.num_new[request])
        finish: Literal["stop", "length"] = "stop" if self.stopped[request] else "length"
        return Completion(self.tokens[span].copy(), self.log_probs[span].copy(), finish)

    def tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
