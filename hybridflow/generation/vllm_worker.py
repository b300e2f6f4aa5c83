"""The process that runs vLLM, the other side of ``vllm_engine``: it imports vllm, the rest of hybridflow never does.

It answers one call at a time: ``generate``, ``load`` (weights that the parent wrote into shared memory) and ``probe``.
Answers are ("done", result); while it generates, ("beat", None) says every few seconds that it goes on.
"""

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from hybridflow.generation.vllm_engine import Item, Response, StopStrings

__all__ = ["LogProbs", "main"]

_BEAT_S = 2.0


class LogProbs(LogitsProcessor):  # type: ignore[misc]
    """Turns logits into T log softmax(logits / T): the same samples, and scores that are log-probabilities.

    vLLM has two kinds of log-probabilities: before the temperature, or after top-k and top-p. We need those in between. Its
    "processed logits" are what this returns, divided by T and masked by top-k and top-p, and a sampled token isn't masked.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.temperature = 1.0

    def is_argmax_invariant(self) -> bool:
        return False  # it is; but vLLM would then skip it in greedy steps and apply it after the temperature in others

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Requests that run together have one temperature."""
        for _, params, _, _ in batch_update.added if batch_update else ():
            self.temperature = params.temperature or 1.0

    def apply(self, logits: Tensor) -> Tensor:
        return logits.div_(self.temperature).log_softmax(-1).mul_(self.temperature)


class Server:
    """vLLM's engine and the memory in which weights arrive."""

    def __init__(self, arguments: dict[str, Any], memory: int, beat: Callable[[], None]) -> None:
        self.llm, self.beat = LLM(**arguments), beat
        self.sleeps = arguments["enable_sleep_mode"]
        self.memory = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.uint8)
        self.sleep()

    def load(self, items: Sequence[Item], tied: bool) -> None:
        """Take over the weights that lie in the shared memory."""
        self.wake()
        self.llm.collective_rpc(_reload, args=(self.tensors(items), tied))
        self.llm.reset_prefix_cache()

    def tensors(self, items: Sequence[Item]) -> Iterator[tuple[str, Tensor]]:
        for item in items:
            flat = self.memory[item.offset : item.offset + item.num_bytes]
            yield item.name, flat.view(getattr(torch, item.dtype)).view(item.shape)

    def probe(self, prompt: list[int], arguments: dict[str, Any]) -> tuple[list[float], Response]:
        """(logit of every prompt token after the first, a response)."""
        self.wake()
        params = SamplingParams(**arguments, prompt_logprobs=0)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        response = Response([], [])
        _extend(response, output.outputs[0])
        places = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return [scores[token].logprob for token, scores in places], response

    def generate(
        self, prompts: Sequence[list[int]], arguments: Sequence[dict[str, Any]], stop: StopStrings | None
    ) -> tuple[list[Response], int]:
        """(a response to each prompt, how often a running request had to wait again)."""
        self.wake()
        self.llm.reset_prefix_cache()  # what was cached before would change the rounding
        engine, preempted, said = self.llm.llm_engine, self.num_preempted(), time.monotonic()
        kind = RequestOutputKind.FINAL_ONLY if stop is None else RequestOutputKind.DELTA
        for number, (prompt, each) in enumerate(zip(prompts, arguments, strict=True)):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, SamplingParams(**each, output_kind=kind))
        responses = [Response([], []) for _ in prompts]
        while engine.has_unfinished_requests():
            for output in engine.step():
                response = responses[int(output.request_id)]
                if _extend(response, output.outputs[0], stop):
                    engine.abort_request([output.request_id])
            if time.monotonic() - said > _BEAT_S:
                self.beat()
                said = time.monotonic()
        preempted = self.num_preempted() - preempted
        self.sleep()
        return responses, preempted

    def num_preempted(self) -> int:
        counts = [metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions"]
        return sum(counts)

    def sleep(self) -> None:
        """Give the GPU's memory to the learner: the cache is dropped, the weights wait in the processor's memory."""
        if self.sleeps:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()


def _extend(response: Response, output: Any, stop: StopStrings | None = None) -> bool:
    """Append what came; True if it completes a stop string, behind which nothing is appended."""
    for token, scores in zip(output.token_ids, output.logprobs, strict=True):
        response.tokens.append(token)
        response.log_probs.append(scores[token].logprob)
        if stop is not None and stop.completed_by(response.tokens):
            return output.finish_reason is None
    return False


def _reload(worker: Any, tensors: Iterator[tuple[str, Tensor]], tied: bool) -> None:
    """Runs in vLLM's worker, which lives in this process."""
    worker.model_runner.reload_weights(weights_iterator=tensors)
    if tied and current_platform.is_cpu():  # the head is a packed copy of the embedding, which reloading leaves as it was
        dispatch_cpu_unquantized_gemm(worker.model_runner.model.lm_head, remove_weight=False)


def main(calls: int, memory: int) -> None:
    """Answer the parent until it closes the connection ``calls``; ``memory`` is the file of the weights."""
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    connection: Connection[Any, Any] = Connection(calls)
    server = Server(connection.recv(), memory, lambda: connection.send(("beat", None)))
    connection.send(("done", None))
    verbs: dict[str, Callable[..., Any]] = {"load": server.load, "probe": server.probe, "generate": server.generate}
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            sys.stdout.flush()
            os._exit(0)  # vLLM's own threads and exit hooks may take long
        connection.send(("done", verbs[name](*arguments)))


def _follow_parent(parent: int) -> None:
    """End with the parent, also in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
