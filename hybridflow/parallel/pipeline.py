"""Pipeline parallelism: runs a plan of ``pipeline_plan`` on one rank of a pipeline line.

    stage 0                       stage 1                             last stage
    forward(m, None) ─activation─► forward(m, received) ─activation─► forward(m, received) = loss of m, normalised
    gradients of its  ◄─gradient── backward               ◄─gradient── backward
    parameters add up

Why not torch.distributed.pipelining: its stages fix one shape for all microbatches of a schedule and hang on another one,
and packed sequences have a new shape in every microbatch. Here every rank knows the shapes of all microbatches beforehand,
so none is exchanged.

Who waits for whom. A rank waits for what its next action reads, and sends without waiting for the reader, but for the last
few sends. All ranks post sends and receives in the one order of ``Plan.messages``, and a receive one action before it is
read, so that it overlaps with the work. So the message that is earliest in this order always has both its sides posted
soon: nobody waits for ever, whether a backend buffers or waits for the other side, and backends that match messages by
order (NCCL) do so rightly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridflow.core.errors import ContractError, WorkerError
from hybridflow.parallel.pipeline_plan import Action, Forward, Message, Plan

__all__ = ["Stage", "Wire", "run_pipeline"]

Stage = Callable[[int, Tensor | None], Any]

# Sends that nobody has received yet and that a rank goes on beside. Each holds its tensor.
UNDER_WAY = 2


@dataclass(frozen=True)
class Wire:
    """How the ``size`` ranks of a pipeline reach each other, and what microbatch m sends: ``shape_of(m)`` of ``dtype``.

    ``rank`` is the place in the line. ``group`` None is the whole world, or nothing for a line of one.
    ``traffic``: bytes that this rank has sent, by "activation" and "gradient".
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    shape_of: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    traffic: Counter[str] = field(default_factory=Counter, compare=False)


def run_pipeline(plan: Plan, stages: Sequence[Stage], wire: Wire) -> dict[int, Any]:
    """Run this rank's part of ``plan``; all ranks of the line call it with the same plan and shapes.

    ``stages[chunk](microbatch, received)``: received is None on the first stage of the model, elsewhere what the stage
    before returned, [*shape_of(microbatch)]. It returns a tensor of the same shape; the last stage returns the loss of the
    microbatch, one number that is already divided by the normaliser. Gradients of parameters add up in ``.grad``.

    Returns what the last stage returned, by microbatch (losses without their graph), and nothing on other ranks. When the
    plan only goes forward, this runs without gradients, and the last stage may return anything.

    Raises what a stage raises; the other ranks of the line then raise WorkerError at the group's timeout, and the group is
    of no more use. Raises ContractError for an output of another shape or dtype than was promised.
    """
    if (plan.ranks, plan.chunks) != (wire.size, len(stages)):
        raise ContractError(
            f"pipeline plan for {plan.ranks} ranks x {plan.chunks} chunks on {wire.size} ranks x {len(stages)} chunks"
        )
    with torch.set_grad_enabled(plan.trains):
        return _Executor(plan, stages, wire).run()


class _Executor:
    """Runs actions one by one; ``held`` is what their way back needs."""

    def __init__(self, plan: Plan, stages: Sequence[Stage], wire: Wire) -> None:
        self.plan, self.stages, self.wire, self.mail = plan, stages, wire, _Mail(plan, wire)
        self.held: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.outputs: dict[int, Any] = {}

    def run(self) -> dict[int, Any]:
        rank, awaits = self.wire.rank, self.plan.awaits
        for action, following in zip_longest(self.plan.actions[rank], self.plan.actions[rank][1:]):
            self.mail.post(awaits(rank, following) if following else None)
            step = self._forward if isinstance(action, Forward) else self._backward
            step(action, self.mail.take(awaits(rank, action)))
        self.mail.close()
        return self.outputs

    def _forward(self, action: Action, received: Tensor | None) -> None:
        if self.plan.trains and received is not None:
            received.requires_grad_()
        output = self.stages[action.chunk](action.microbatch, received)
        message = self.plan.message(self.wire.rank, action)
        if message is not None or self.plan.trains:
            self._check(action, output, self.wire.shape_of(action.microbatch) if message else ())
        if self.plan.trains:
            # The graph alone: the output itself, which the way back doesn't need, is freed once it is sent.
            edge = get_gradient_edge(output) if output.requires_grad else None
            self.held[action.chunk, action.microbatch] = received, edge
            output = output.detach()
        if message is None:
            self.outputs[action.microbatch] = output
        else:
            self.mail.put(message, output)

    def _backward(self, action: Action, gradient: Tensor | None) -> None:
        received, edge = self.held.pop((action.chunk, action.microbatch))
        if edge is not None:  # None: nothing is trained up to here
            torch.autograd.backward(edge, gradient)
        if (message := self.plan.message(self.wire.rank, action)) is not None:
            assert received is not None
            self.mail.put(message, torch.zeros_like(received) if received.grad is None else received.grad)

    def _check(self, action: Action, output: Tensor, shape: tuple[int, ...]) -> None:
        expected = shape, self.wire.dtype if shape else output.dtype
        if (tuple(output.shape), output.dtype) != expected:
            raise ContractError(
                f"pipeline stage {self.plan.stage(self.wire.rank, action)}, microbatch {action.microbatch}: returned "
                f"{list(output.shape)} of {output.dtype}; expected {list(shape)} of {expected[1]}"
            )


class _Mail:
    """The sends and receives of one rank. Empty tensors and those between two chunks of a rank never leave it."""

    def __init__(self, plan: Plan, wire: Wire) -> None:
        self.plan, self.wire = plan, wire
        tagged = [(tag, message) for tag, message in enumerate(plan.messages) if self._travels(message)]
        self.queue = deque(pair for pair in tagged if wire.rank in (pair[1].source, pair[1].target))
        self.ready: dict[Message, Tensor] = {}
        self.coming: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.leaving: deque[tuple[Message, dist.Work, Tensor]] = deque()

    def _travels(self, message: Message) -> bool:
        return message.source != message.target and prod(self.wire.shape_of(message.action.microbatch)) > 0

    def put(self, message: Message, tensor: Tensor) -> None:
        """Send ``tensor``, after everything that comes before it in the order of messages."""
        if self._travels(message):
            self.ready[message] = tensor.contiguous()  # gloo would send the bytes in whatever order they lie
            self.post(message)
        elif message.source == message.target:
            self.coming[message] = None, tensor

    def take(self, message: Message | None) -> Tensor | None:
        """What the message brought: None without a message."""
        if message is None:
            return None
        if message.source != message.target and not self._travels(message):
            return self._room(message)
        self.post(message)
        work, tensor = self.coming.pop(message)
        self._wait(work, message)
        return tensor

    def post(self, last: Message | None) -> None:
        """Post what is due up to ``last``, or up to the first send that isn't ready."""
        while self.queue and last is not None and self._travels(last) and last not in self.coming:
            tag, message = self.queue[0]
            if message.target == self.wire.rank:
                room = self._room(message)
                self.coming[message] = dist.irecv(room, group=self.wire.group, group_src=message.source, tag=tag), room
            elif message in self.ready:
                self._send(message, tag)
            else:
                return
            self.queue.popleft()
            if message == last:
                return

    def _send(self, message: Message, tag: int) -> None:
        tensor = self.ready.pop(message)
        work = dist.isend(tensor, group=self.wire.group, group_dst=message.target, tag=tag)
        assert work is not None
        self.wire.traffic[_what(message)] += tensor.nbytes
        self.leaving.append((message, work, tensor))
        while len(self.leaving) > UNDER_WAY:
            self._finish_send()

    def close(self) -> None:
        """Wait until everything that was sent has been received."""
        while self.leaving:
            self._finish_send()

    def _finish_send(self) -> None:
        message, work, _ = self.leaving.popleft()
        self._wait(work, message)

    def _room(self, message: Message) -> Tensor:
        shape = self.wire.shape_of(message.action.microbatch)
        return torch.empty(shape, dtype=self.wire.dtype, device=self.wire.device)

    def _wait(self, work: dist.Work | None, message: Message) -> None:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise WorkerError(
                f"pipeline rank {self.wire.rank}: the {_what(message)} of microbatch {message.action.microbatch} from rank "
                f"{message.source} for rank {message.target} never came through: {error}"
            ) from error


def _what(message: Message) -> str:
    return "activation" if isinstance(message.action, Forward) else "gradient"
