"""The sampler of a language model: prompts in, responses out, through a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hybridflow.controller.protocols import THREE_D_ALL_MICRO_DP
from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.errors import UserError
from hybridflow.core.roles import WorkerContext, control, remote
from hybridflow.data.text import Tokenizer
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Completion, Request, SamplingParams
from hybridflow.generation.stream import Entry, Stream
from hybridflow.generation.vllm_engine import VLLMEngine
from hybridflow.generation.weights import Precision
from hybridflow.models.decoder import Decoder
from hybridflow.parallel.mesh import Line
from hybridflow.reshard.execute import Transition
from hybridflow.workers.parts import Lines
from hybridflow.workers.replica import Replica

__all__ = ["PolicySource", "TextSampler"]


class PolicySource(Protocol):
    """Whose policy a sampler draws from: a learner in the same process, or a replica of one elsewhere.

    ``lines``: how its networks are cut over processes. ``sampled`` and ``sampled_pp``: the part of a decoder, and the
    pipeline that it is a stage of, with which this process and its group draw the same responses together.
    """

    networks: dict[str, nn.Module]
    version: int
    lines: Lines

    @property
    def sampled(self) -> Decoder: ...

    @property
    def sampled_pp(self) -> Line: ...

    def reading(self) -> AbstractContextManager[Transition | None]:
        """``sampled`` has weights within it alone, and what it took to bring them there is told; all workers of the source
        enter it together."""
        ...


class RolloutEngine(Protocol):
    """What draws responses: ``Engine``, or vLLM in a process of its own."""

    version: int
    num_preempted: int

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]: ...


class TextSampler:
    """Samples responses with ``params``; ``attach`` must come first.

    ``max_length``: tokens of the longest prompt and response together; vLLM is started for it. ``streams``: calls of a
    member begin while others are under way, see ``Stream``, whose ``partial`` is ``partial_rollouts``.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        tokenizer: Tokenizer,
        params: SamplingParams,
        seed: int,
        max_slots: int,
        kv_cache_gb: float | None,
        engine: Literal["hybridflow", "vllm"] = "hybridflow",
        precision: Precision = "full",
        max_length: int = 0,
        streams: bool = False,
        partial_rollouts: bool = True,
    ) -> None:
        self.context, self.tokenizer, self.params = context, tokenizer, params
        self.seed, self.max_slots, self.kv_cache_gb = seed, max_slots, kv_cache_gb
        self.engine_name, self.max_length = engine, max_length
        self.precision: Precision = precision
        self.vllm: VLLMEngine | None = None
        self.streams, self.partial_rollouts = streams, partial_rollouts
        self.stream: Stream | None = None

    def attach(self, source: PolicySource) -> None:
        """Sample from the policy of ``source``: its weights in place, or pushed to vLLM when its version has changed.

        UserError: vLLM is to sample from a policy that is cut.
        """
        self.source = source
        args: dict[str, Any] = {
            "seed": self.seed,
            "max_slots": self.max_slots,
            "kv_cache_gb": self.kv_cache_gb,
            "decode": self.tokenizer.decode,
        }
        self.engine: RolloutEngine
        if self.engine_name == "vllm" and not source.lines.whole:
            cut = f"tp {source.lines.tp.size}, pp {source.lines.pp.size}"
            raise UserError(
                f'generation.engine: "vllm" draws from whole models, not from cut ones ({cut}); use "hybridflow"'
            )
        if self.engine_name == "vllm":
            with source.reading():
                self.engine = self.vllm = VLLMEngine(source.sampled, max_length=self.max_length, **args)
        else:
            engine = self.engine = Engine(source.sampled, precision=self.precision, pp=source.sampled_pp, **args)
            engine.between_steps = self.context.breathe
            if self.streams:
                self.stream = self._stream(Engine(source.sampled, precision=self.precision, **args))

    def _stream(self, engine: Engine) -> Stream:
        """Over an engine of its own: evaluations draw with other parameters, while requests are under way."""
        assert isinstance(self.source, Replica), "a sampler that streams has a pool of its own"
        source = self.source
        stream = Stream(engine, self.params, lambda: source.version, self.partial_rollouts, self.context.breathe)
        source.gate = stream
        return stream

    def begin(self, batch: Batch) -> None:
        """Responses to these rows will be asked for: begin with them."""
        assert self.stream is not None, "members' calls begin early in streams alone"
        self.stream.begin(_requests(batch))

    def abandon(self) -> None:
        """Of what has begun nothing will be asked for."""
        if self.stream is not None:
            self.stream.abandon()

    def recorded(self) -> tuple[list[Entry], int]:
        """Of the stream."""
        assert self.stream is not None
        return self.stream.recorded()

    def follow(self, tape: Sequence[Entry], rest: int) -> None:
        """Repeat what a stream has recorded."""
        assert self.stream is not None
        self.stream.follow(tape, rest)

    @control
    def close(self) -> None:
        """End the process of vLLM."""
        if self.vllm is not None:
            self.vllm.close()

    @remote(
        THREE_D_ALL_MICRO_DP,
        reads=("prompt", "sample_id", "expected_length"),
        writes=("tokens", "response_mask", "log_probs", "policy_version", "terminated", "truncated", "response"),
        kind="generate",
        begins="begin",
    )
    def rollout(self, batch: Batch, params: SamplingParams | None = None, /) -> Batch:
        """One response a row. ``params`` replaces the sampler's own, for evaluation or a greedy baseline.

        A response that the length limit cut is scored as it stands, so its episode has ended: ``terminated`` is True on
        every row, ``truncated`` on those.
        """
        prompts = batch.ragged("prompt")
        if self.stream is not None and params is None:
            engine: RolloutEngine = self.stream.engine
            preempted = engine.num_preempted
            done = self.stream.take(batch["sample_id"].tolist())
        else:
            engine, preempted = self.engine, self.engine.num_preempted
            engine.version = self.source.version
            with self.source.reading() as transition:
                done = engine.generate(_requests(batch), params or self.params)
            if transition is not None:
                self._observe_transition(transition)
        if params is None and done:
            self._observe_lengths(prompts.lengths, done)
        self._observe(done, engine.num_preempted - preempted)
        return Batch(
            {
                "tokens": Ragged.from_rows(
                    [np.concatenate([p, c.tokens]) for p, c in zip(prompts, done, strict=True)], np.int64
                ),
                "response_mask": _after(prompts, [np.ones(len(c.tokens), bool) for c in done], bool),
                "log_probs": _after(prompts, [c.log_probs for c in done], np.float32),
                "policy_version": _after(prompts, [c.versions for c in done], np.int64),
                "terminated": np.ones(len(done), bool),
                "truncated": np.array([c.finish == "length" for c in done], bool),
                "response": objects(self.tokenizer.decode(c.tokens.tolist()) for c in done),
            },
            len(done),
        )

    def _observe_lengths(self, prompts: NDArray[Any], completions: list[Completion]) -> None:
        """Of what is learned from."""
        metrics, count = self.context.metrics, len(completions)
        lengths = np.array([len(completion.tokens) for completion in completions])
        metrics.add("prompt_length", float(prompts.sum()), count)
        metrics.add("response_length", float(lengths.sum()), count)
        metrics.deviation("response_length_std", lengths)
        metrics.maximum("response_length_max", float(lengths.max()))
        metrics.add("truncated", sum(completion.finish == "length" for completion in completions), count)

    def _observe(self, completions: list[Completion], preempted: int) -> None:
        self.context.metrics.count("tokens", sum(len(c.tokens) for c in completions))
        if self.kv_cache_gb is not None:
            self.context.metrics.count("preempted", preempted)

    def _observe_transition(self, transition: Transition) -> None:
        """The most that a process of those whose responses count took for it, and holds."""
        told = {
            "transition_s": transition.seconds,
            "transition_sent_bytes": transition.sent,
            "transition_received_bytes": transition.received,
            "weights_peak_bytes": transition.peak,
            "weights_redundant_bytes": transition.redundant,
        }
        for name, value in told.items():
            self.context.metrics.maximum(name, value)


def _requests(batch: Batch) -> list[Request]:
    columns = batch.ragged("prompt"), batch["sample_id"].tolist(), batch["expected_length"].tolist()
    return [Request(prompt, sample_id, expected=expected) for prompt, sample_id, expected in zip(*columns, strict=True)]


def _after(prompts: Ragged, responses: list[np.ndarray], dtype: Any) -> Ragged:
    """A time column: zeros over the prompt, then the response's values."""
    pairs = zip(prompts.lengths, responses, strict=True)
    return Ragged.from_rows([np.concatenate([np.zeros(n, dtype), r.astype(dtype)]) for n, r in pairs], dtype)
