"""Whatever is sent to a server, it answers with a status of its own or hangs up, and goes on to answer others."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import damaged, examples, values
from served_policies import DONE, OBSERVED, acting

from hybridflow.rollout.reward_server import RewardServer
from hybridflow.rollout.rewards import RewardPool, RewardSpec
from hybridflow.serving.observations import Observations
from hybridflow.serving.server import Limits, PolicyServer

SPACES = [OBSERVED, spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(4, start=2)]
ASKED = b'{"observations": [[1, 2, 3], [0.5, -1e3, 2]], "memory": [[0, 1], [2, 3]]}'
SCORED = b'{"rows": [{"prompt": "a", "response": "b", "answer": 3}]}'
Address = tuple[str, int]


def request(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def send(address: Address, data: bytes, more: bool = False) -> bytes:
    """The first bytes of the answer, none if the server hung up. ``more``: may follow, so the server waits for it."""
    with socket.create_connection(address, timeout=20) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        if not more:
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(12)
    return b""


def refuses_or_answers(address: Address, data: bytes, good: bytes) -> None:
    answered = send(address, data)
    assert answered == b"" or answered.startswith((b"HTTP/", b"<!DOCTYPE"))  # as HTTP 0.9 was answered
    assert not answered[9:].startswith(b"500"), data
    assert send(address, good, more=True)[9:12] == b"200"


@given(st.sampled_from(SPACES), st.booleans(), st.data())
@examples(60)
def test_observations(space: spaces.Space, remembers: bool, data: st.DataObject) -> None:
    read = Observations(space, 4, 2 * remembers)
    content = {"observations": data.draw(values), "memory": data.draw(values)}
    text = json.dumps(content).encode() if data.draw(st.booleans()) else data.draw(damaged(ASKED))
    for parse in (read.from_json, read.from_bytes):
        with contextlib.suppress(ValueError):
            found = parse(text)
            assert np.isfinite(found.observations).all() and found.memory.shape == (len(found.observations), 2 * remembers)


@pytest.fixture(scope="module")
def policies() -> Iterator[Address]:
    with PolicyServer(acting(), (OBSERVED, DONE), limits=Limits(budget_s=60.0)) as server:
        yield server._address


@given(
    damaged(request("/act", b'{"observations": [[1, 2, 3]]}'))
    | damaged(request("/act", b"\0" * 12, "application/octet-stream"))
)
@example(b"POST /act HTTP/1.1\r\nHost: x\r\nContent-Length: 1152921504606846976\r\n\r\n{}")
@example(b"POST /act HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}")
@example(b"POST /act HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n")
@example(b"GET /" + b"a" * 100_000)
@examples(40)
def test_requests_to_the_policy_server(policies: Address, data: bytes) -> None:
    refuses_or_answers(policies, data, request("/act", b'{"observations": [[1, 2, 3]]}'))


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    path: Path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text("def own(response):\n    return len(response)\n")
    with RewardPool([RewardSpec(f"{path}:own")], workers=1) as pool, RewardServer(pool) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[:2]
        server.shutdown()


@given(damaged(request("/score", SCORED)))
@example(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1152921504606846976\r\n\r\n{}")
@example(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}")
@example(request("/score", b'{"rows": ' + b"[" * 100_000))
@example(request("/score", b'{"rows": [{"prompt": "\\ud800", "response": "\\ud800", "n": ' + b"1" * 5000 + b"}]}"))
@example(request("/score", b'{"rows": [{"prompt": "\\ud800", "response": "\\ud800"}]}'))
@examples(40)
def test_requests_to_the_reward_server(rewards: Address, data: bytes) -> None:
    refuses_or_answers(rewards, data, request("/score", SCORED))
