"""Which requests share a forward, and which are refused."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from hybridflow.serving.batches import ArrivalClock, Batcher, BusyError, OverdueError
from hybridflow.serving.served import Actions, Asked


class Forwards:
    """Doubles observations, taking ``seconds``; ``sizes`` of its batches."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.sizes, self.wrong = seconds, list[int](), False

    def __call__(self, asked: Asked) -> Actions:
        self.sizes.append(len(asked.observations))
        time.sleep(self.seconds)
        if self.wrong:
            raise ZeroDivisionError
        return Actions(2 * asked.observations, len(self.sizes), asked.memory + 1)


async def together(*answers: Awaitable[Actions]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 20)


def rows(*values: float) -> Asked:
    observations = np.array(values, np.float32)[:, None]
    return Asked(observations, 10 * observations)


def now() -> float:
    return time.monotonic()


def test_requests_share_forwards_in_their_order_and_are_never_cut() -> None:
    forwards = Forwards()
    batcher = Batcher(forwards, 20.0, max_batch=4)

    async def ask() -> list[Any]:
        asked = [rows(1, 2), rows(3), rows(4, 5), rows(6), rows(7, 8, 9)]
        return await together(*(batcher.answer(one, now()) for one in asked))

    found = asyncio.run(ask())
    assert [actions.actions[:, 0].tolist() for actions in found] == [[2, 4], [6], [8, 10], [12], [14, 16, 18]]
    assert [actions.memory[:, 0].tolist() for actions in found] == [[11, 21], [31], [41, 51], [61], [71, 81, 91]]
    assert forwards.sizes == [3, 3, 3] and [actions.version for actions in found] == [1, 1, 2, 2, 3]


def test_what_comes_too_late_is_no_answer() -> None:
    async def ask(batcher: Batcher) -> list[Any]:
        return await together(batcher.answer(rows(1), now()))

    [late] = asyncio.run(ask(Batcher(Forwards(0.05), 0.02, 4)))
    assert isinstance(late, OverdueError) and str(late).startswith("late: ")


def test_who_waited_before_being_read_has_so_much_less() -> None:
    forwards = Forwards()

    async def ask() -> list[Any]:
        batcher = Batcher(forwards, 0.5, 4)
        return await together(batcher.answer(rows(1), now()), batcher.answer(rows(2), now() - 0.6))

    answered, refused = asyncio.run(ask())
    assert answered.actions.tolist() == [[2]] and isinstance(refused, BusyError) and forwards.sizes == [1]


def test_forwards_are_not_lost_on_who_cannot_be_answered_in_time() -> None:
    forwards = Forwards(0.1)

    async def ask() -> tuple[list[Any], list[Any]]:
        batcher = Batcher(forwards, 0.25, 1)
        await together(batcher.answer(rows(0), now()))
        first = await together(*(batcher.answer(rows(i), now()) for i in range(6)))
        forwards.seconds = 0.3
        await together(batcher.answer(rows(0), now()))  # late, and now forwards are known to take longer
        forwards.seconds = 0.0
        return first, await together(batcher.answer(rows(7), now()))

    first, [tried] = asyncio.run(ask())
    answered = [isinstance(one, Actions) for one in first]
    assert answered == [True, True, False, False, False, False]
    assert all(isinstance(one, BusyError) for one in first[2:]) and forwards.sizes == [1] * 5
    assert tried.actions.tolist() == [[14]]


def test_an_error_is_theirs_whose_forward_it_was() -> None:
    forwards = Forwards()

    async def ask() -> tuple[list[Any], list[Any]]:
        batcher = Batcher(forwards, 20.0, 2)
        forwards.wrong = True
        failed = await together(batcher.answer(rows(1), now()), batcher.answer(rows(2), now()))
        forwards.wrong = False
        return failed, await together(batcher.answer(rows(3), now()))

    failed, [answered] = asyncio.run(ask())
    assert [type(one) for one in failed] == [ZeroDivisionError] * 2 and answered.actions.tolist() == [[6]]


def test_who_gives_up_takes_nobody_along() -> None:
    async def ask() -> list[Any]:
        batcher = Batcher(Forwards(), 20.0, 4)
        gone, stays = (asyncio.ensure_future(batcher.answer(rows(i), now())) for i in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        return await together(gone, stays)

    gone, stays = asyncio.run(ask())
    assert isinstance(gone, asyncio.CancelledError) and stays.actions.tolist() == [[4]]


def test_the_clock_knows_since_when_a_request_can_have_waited() -> None:
    clock, (ours, theirs) = ArrivalClock(), socket.socketpair()

    async def look(send: Callable[[], None]) -> tuple[float, float]:
        """When the byte that ``send`` sends can have arrived at the earliest, and when it began to be read."""
        loop = asyncio.get_running_loop()
        handled: asyncio.Future[float] = loop.create_future()
        loop.add_reader(theirs, lambda: (theirs.recv(1), loop.call_soon(lambda: handled.set_result(clock.arrived))))
        begun = now()
        send()
        arrived = await handled
        loop.remove_reader(theirs)
        return begun, arrived

    def busy() -> None:
        time.sleep(0.1)
        ours.send(b"x")
        time.sleep(0.2)

    with ours, theirs, asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        begun, arrived = runner.run(look(busy))
        assert begun - 0.05 < arrived < begun + 0.1  # and it was read after 0.3 s
        timer = threading.Timer(0.3, ours.send, [b"x"])
        begun, arrived = runner.run(look(timer.start))
        assert begun + 0.25 < arrived  # a loop that sleeps is not busy
        timer.join()
