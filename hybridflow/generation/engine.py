"""The rollout engine: continuous batching in the process and on the weights of the learner.

    add ──> waiting ──admit──> tokens of active rows | new prompts ──decoder──> hidden ──head──> logits ──sample──┐
               ^                   ^                                                                              │
               └──preempt──────────┴─── finished rows leave, the last active rows move into the holes <───────────┘

Every step is one forward of the decoder over one packed axis: the last token of every active row, then prompts, or chunks
of them, of those that are admitted. The engine runs on the learner's parameters; there is nothing to publish or export.

A decoder may be cut over a group of processes. Each has an engine of its own, and all of them are given the same requests:
then they schedule alike, since no decision depends on anything but requests and sampled tokens, and meet inside a step.

    tensor parallelism    each has some of the heads, and their keys and values; sums over the line in every layer
    pipeline parallelism  hidden states go from stage to stage; the last one samples, and hands the tokens to all others
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.core.errors import ContractError, NonFiniteError, UserError
from hybridflow.core.seeding import uniforms
from hybridflow.generation.attention import Decoding, KVCache, StepAttention
from hybridflow.generation.kv_cache import position_bytes, shortage
from hybridflow.generation.request import Completion, FloatArray, IntArray, Request, SamplingParams, problem_of
from hybridflow.generation.sampling import sample
from hybridflow.generation.scheduler import Admission, Group, Scheduler
from hybridflow.generation.table import RequestTable
from hybridflow.generation.weights import Precision, RolloutWeights, rollout_dtype
from hybridflow.models.decoder import Decoder
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import ALONE, Line

__all__ = ["Engine"]

Decode = Callable[[Sequence[int]], str]


class Engine:
    """Draws responses from a decoder, whose parameters it reads and never changes.

    The response to a request depends on the weights, (seed, sample_id), the prompt and the sampling parameters alone, up to
    the rounding of matrix products: not on the other requests, their order, ``max_slots``, ``prefill_tokens`` or
    ``kv_cache_gb``.

    ``generate`` serves a list of requests; ``add``, ``step`` and ``abort`` serve requests that come and go. The weights may
    change between two steps (who doesn't call ``step`` pauses it): set ``version``, and what was cached of the old ones is
    computed anew, so that every token has the log-probability that the weights of its version give it.

    Where ``decoder`` is a part, the processes of its group have to make the same calls, and set the same ``version``, in
    the same order; all of them get the same completions, and raise the same errors.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        seed: int,
        max_slots: int = 64,
        prefill_tokens: int = 2048,
        kv_cache_gb: float | None = None,
        precision: Precision = "full",
        decode: Decode | None = None,
        pp: Line = ALONE,
    ) -> None:
        """max_slots: most responses in flight; prefill_tokens: most prompt tokens of a step, so that long prompts are
        prefilled in chunks; kv_cache_gb: most memory (10^9 bytes) of keys and values, None for as much as max_slots rows
        need (while rows grow, one layer is held twice), on each process of a group; precision: see ``generation.weights``;
        decode: token ids -> text, needed for stop strings only; pp: the pipeline that the decoder is a stage of."""
        if max_slots < 1 or prefill_tokens < 1:
            raise UserError(f"Engine: max_slots {max_slots} and prefill_tokens {prefill_tokens} have to be at least 1")
        if kv_cache_gb is not None and not 0 < kv_cache_gb < float("inf"):
            raise UserError(f"Engine: kv_cache_gb is {kv_cache_gb}; expected a finite number above 0, or None")
        if (decoder.part.first, decoder.part.last) != (pp.index == 0, pp.index == pp.size - 1):
            raise ContractError(f"Engine: pp is rank {pp.index} of {pp.size}, but the decoder holds {decoder.part}")
        self.decoder, self.seed, self.decode, self.pp = decoder, seed, decode, pp
        self.max_slots, self.prefill_tokens, self.kv_cache_gb = max_slots, prefill_tokens, kv_cache_gb
        self.precision: Precision = precision
        self.version = 0
        """Of the weights, for the caller to set: every token carries the one in force when it was sampled."""
        self.num_prefilled = 0
        """Prompt tokens that went through the decoder so far: a shared prompt counts once, reused tokens don't."""
        self.num_preempted = 0
        """Times that a running request had to wait again because the cache was full."""
        self.num_reused = 0
        """Prompt tokens whose keys and values were copied from another prompt that begins alike."""
        self.num_steps = 0
        """Forwards of the decoder so far."""
        self.between_steps: Callable[[], None] = lambda: None
        """Called before every step of ``generate``, which goes on when it returns."""
        self._flight: _Flight | None = None

    @cached_property
    def held(self) -> DecoderSpec:
        """The sizes of what this process computes: its layers and heads."""
        return replace(self.decoder.local, num_layers=len(self.decoder.layers))

    @cached_property
    def position_bytes(self) -> int:
        """Of keys and values of a token, on the process of the group that has most of them; agreed on at the first use."""
        own = position_bytes(self.held, rollout_dtype(self.precision, self.decoder.anchor.dtype).itemsize)
        return self.pp.most(self.decoder.part.tp.most(own))

    @property
    def num_in_flight(self) -> int:
        """Requests that were added and have not ended."""
        return 0 if self._flight is None else self._flight.table.num_in_flight

    @property
    def sample_ids(self) -> list[int]:
        """Of the requests in flight."""
        return [] if self._flight is None else self._flight.table.ids_in_flight

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion a request, in their order; those that are expected to be longest begin first. The cache lives for
        this call alone.

        Raises UserError before any work if a prompt is empty, holds an unknown token, is too long for the model together
        with its response or for ``kv_cache_gb``, or if requests of ``add`` are in flight; NonFiniteError if the weights
        give NaN.
        """
        if self._flight is not None:
            raise UserError(
                f"generate: {self.num_in_flight} requests of Engine.add are in flight; step them to their end first"
            )
        limits = [self._checked(request, params, f"request {index} ") for index, request in enumerate(requests)]
        if not requests:
            return []
        done: dict[int, Completion] = {}
        flight = _Flight(self, params, max(limits))
        flight.table.reserve(len(requests), max(limits))
        numbers = {place: flight.add(requests[place], limits[place]) for place in Request.longest_first(requests)}
        while not flight.scheduler.done:
            self.between_steps()
            done.update(flight.step())
        return [done[numbers[place]] for place in range(len(requests))]

    def add(self, request: Request, params: SamplingParams) -> None:
        """Take a request in, to be served by the next steps beside those in flight, which have to have the same ``params``.

        Raises UserError, and takes nothing in, if the request can't be served (see ``generate``), if ``params`` differ, or
        if a request with its ``sample_id`` is in flight.
        """
        limit = self._checked(request, params, "")
        if self._flight is None:
            self._flight = _Flight(self, params, params.max_new_tokens)
        if params != self._flight.params:
            raise UserError(
                f"add: requests with other sampling parameters are in flight: {self._flight.params}, not {params}"
            )
        if len(self._flight.table.numbers(request.sample_id)):
            raise UserError(f"add: a request with sample_id {request.sample_id} is in flight; expected a new one")
        self._flight.add(request, limit)

    def step(self) -> list[Completion]:
        """One more token for the requests in flight, as many as there are slots; returns those that ended, in any order.

        Without requests in flight it does nothing. If the weights give NaN, it raises NonFiniteError and drops all of them.
        """
        if self._flight is None:
            return []
        flight, self._flight = self._flight, None
        finished = flight.step()
        self._flight = None if flight.scheduler.done else flight
        return list(finished.values())

    def abort(self, sample_id: int) -> Completion:
        """End a request that is in flight; returns what it has so far. Raises UserError if there is none."""
        numbers = [] if self._flight is None else self._flight.table.numbers(sample_id).tolist()
        if self._flight is None or not numbers:
            raise UserError(f"abort: no request with sample_id {sample_id} is in flight")
        completion = self._flight.abort(numbers[0])
        if self._flight.scheduler.done:
            self._flight = None
        return completion

    def _checked(self, request: Request, params: SamplingParams, name: str) -> int:
        """The most new tokens of the request."""
        if params.stop_strings and self.decode is None:
            raise UserError(
                f"SamplingParams.stop_strings {params.stop_strings} need text: give the Engine its decode function"
            )
        limit = params.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        spec, of_what = self.decoder.spec, "positions of the model; shorten the prompt or lower max_new_tokens"
        problem = problem_of(request.prompt, limit, spec.vocab_size, spec.max_positions, of_what)
        if self.kv_cache_gb is not None and not problem:
            problem = shortage(self.position_bytes, self.kv_cache_gb, len(request.prompt), limit)
        if problem:
            raise UserError(f"{name or 'request '}(sample_id {request.sample_id}): {problem}")
        return limit


class _Flight:
    """Requests that run together, with their sampling parameters and their cache."""

    def __init__(self, engine: Engine, params: SamplingParams, steps: int) -> None:
        self.engine, self.params = engine, params
        budget = None if engine.kv_cache_gb is None else int(engine.kv_cache_gb * 1e9) // engine.position_bytes
        self.table = RequestTable()
        self.scheduler = Scheduler(self.table, engine.max_slots, engine.prefill_tokens, budget)
        self.stop_token_ids = np.array(params.stop_token_ids, dtype=np.int64)
        # A text of n bytes is at most n tokens; the slack is for tokens without text and for cut characters at the edge.
        self.tail = max((len(string.encode()) for string in params.stop_strings), default=0) + 8
        self.device, self.version = engine.decoder.anchor.device, engine.version
        self.last_hidden: dict[Group, Tensor] = {}
        """of the prompts that requests still wait for to sample from: the state [1, D] after the last token; on the last
        stage"""
        with torch.inference_mode():
            self.weights = RolloutWeights(engine.decoder, steps, engine.precision)
            like = engine.decoder.anchor.new_empty(0, dtype=rollout_dtype(engine.precision, engine.decoder.anchor.dtype))
            (layers,) = engine.decoder.part.chunks(engine.decoder.spec.num_layers)
            self.cache = KVCache(engine.held, like, layers.start)

    def add(self, request: Request, limit: int) -> int:
        number = self.table.add(request, limit)
        self.scheduler.add(number)
        return number

    @torch.inference_mode()
    def abort(self, number: int) -> Completion:
        self.cache.copy(self.scheduler.remove(number))
        return self.table.take(number, "abort")

    @torch.inference_mode()
    def step(self) -> dict[int, Completion]:
        """A token for every active request -> the finished ones, by number."""
        scheduler, engine = self.scheduler, self.engine
        preempted, reused = scheduler.num_preempted, scheduler.num_reused
        if self.version != engine.version:
            self.cache.copy(scheduler.restart())
            self.weights.refresh()
            self.version = engine.version
        self.cache.copy(scheduler.make_room())
        decoding = scheduler.slots.active
        admission = scheduler.admit()
        engine.num_preempted += scheduler.num_preempted - preempted
        engine.num_reused += scheduler.num_reused - reused
        if not self.cache.shape.holds(scheduler.need):
            self.cache.reshape(self.cache.shape.grown(scheduler.need, scheduler.most, scheduler.budget))
        self.cache.copy(admission.copies)
        hidden = self.forward(decoding, admission)
        rows = scheduler.slots.active
        if not len(rows):  # the first chunks of a long prompt
            return {}
        stopped = self.emit(rows, *self.draw(hidden, rows))
        ended = set(rows[stopped].tolist())
        finished, moves = scheduler.advance(stopped)
        self.cache.copy(moves)
        return {n: self.table.take(n, "stop" if n in ended else "length") for n in finished.tolist()}

    def draw(self, hidden: Tensor | None, rows: IntArray) -> tuple[IntArray, FloatArray]:
        """hidden [len(rows), D], None before the last stage -> the next token of each and its log-probability, on every
        process of the group."""
        pp, drawn = self.engine.pp, torch.empty(2, len(rows), dtype=torch.float64, device=self.device)
        if hidden is not None:
            draws = uniforms(self.engine.seed, "sample", self.table.sample_ids[rows], self.table.num_new[rows])
            shard = self.engine.decoder.vocabulary
            drawn = torch.stack([x.double() for x in sample(self.weights.logits(hidden), draws, self.params, shard)])
        tokens, log_probs = pp.broadcast(drawn, pp.size - 1).cpu().numpy()
        return tokens.astype(np.int64), log_probs.astype(np.float32)

    def run(self, tokens: Tensor, positions: Tensor, attend: StepAttention, wanted: Tensor | None) -> Tensor | None:
        """The decoder, or a stage of it, which receives its inputs and sends its outputs: hidden states on the last one."""
        decoder, pp, inputs = self.weights.decoder, self.engine.pp, tokens
        if not decoder.part.first:
            shape = decoder.num_states(len(tokens)), decoder.spec.hidden_size
            inputs = pp.receive(torch.empty(shape, dtype=self.cache.dtype, device=self.device), pp.index - 1)
        hidden: Tensor = decoder(inputs, positions, attend, wanted)
        if decoder.part.last:
            return hidden
        pp.send(hidden, pp.index + 1)
        return None

    def forward(self, decoding: IntArray, admission: Admission) -> Tensor | None:
        """decoding [A]: requests that decode -> hidden [A + entered, D]: the state before the next token of each; None
        before the last stage."""
        prefills = sorted(admission.prefills, key=lambda prefill: prefill.start > 0)
        lengths, offsets = self.table.lengths(decoding), self.table.offsets[decoding]
        where = Decoding(lengths - 1 - offsets, self.table.entries[decoding], offsets)
        tokens = np.concatenate([self.table.last_tokens(decoding), *(p.tokens for p in prefills)])
        positions = np.concatenate([lengths - 1, *(np.arange(p.start, p.end) for p in prefills)])
        if not len(tokens):  # every request that enters samples from a prompt that is there
            return torch.cat([self.last_hidden[g] for g in admission.sources]) if self.weights.decoder.part.last else None
        attend = StepAttention(self.cache, where, prefills)
        wanted = None
        if prefills:  # of a prompt, only the last state is needed
            ends = len(decoding) + np.cumsum([p.end - p.start for p in prefills], dtype=np.int64) - 1
            wanted = self.tensor(np.concatenate([np.arange(len(decoding)), ends]))
        hidden = self.run(self.tensor(tokens), self.tensor(positions), attend, wanted)
        self.engine.num_steps += 1
        self.engine.num_prefilled += len(tokens) - len(decoding)
        if hidden is None or (not prefills and not admission.sources):
            return hidden
        for place, prefill in enumerate(prefills, len(decoding)):
            self.last_hidden[prefill.group] = hidden[place : place + 1]
        outputs = torch.cat([hidden[: len(decoding)], *(self.last_hidden[group] for group in admission.sources)])
        waiting = {group for group in self.scheduler.prompts if group.members}
        self.last_hidden = {group: state.clone() for group, state in self.last_hidden.items() if group in waiting}
        return outputs

    def emit(self, rows: IntArray, tokens: IntArray, log_probs: FloatArray) -> NDArray[np.bool_]:
        """Append a token to the responses of ``rows``; -> [len(rows)]: whether it ended the response."""
        if not np.isfinite(log_probs).all():
            broken = self.table.sample_ids[rows[~np.isfinite(log_probs)]].tolist()
            raise NonFiniteError(
                f"generate: the log-probabilities of samples {broken} are NaN or infinite; check the weights"
            )
        self.table.append(rows, tokens, log_probs, self.version)
        stopped: NDArray[np.bool_] = (tokens[:, None] == self.stop_token_ids).any(1)
        if self.params.stop_strings:
            stopped |= [self.completes_string(row) for row in rows.tolist()]
        return stopped

    def completes_string(self, row: int) -> bool:
        assert self.engine.decode is not None
        end = int(self.table.num_new[row])
        text = self.engine.decode(self.table.tokens[row, max(0, end - self.tail) : end].tolist())
        return any(string in text for string in self.params.stop_strings)

    def tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
