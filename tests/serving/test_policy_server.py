"""A policy over HTTP, on real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from served_policies import DONE, OBSERVED, Slow, acting, observations, remembering, weights
from served_policies import asked as asked_for

from hybridflow.core.errors import DataError, LateError, UserError
from hybridflow.serving.client import PolicyClient
from hybridflow.serving.served import ServedPolicy
from hybridflow.serving.server import Limits, PolicyServer

PATIENT = Limits(budget_s=60.0)


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    with PolicyServer(acting(), (OBSERVED, DONE), limits=PATIENT, version=5) as running:
        yield running


def asked(server: PolicyServer, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    with contextlib.closing(HTTPConnection(*server._address, timeout=30)) as connection:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_json_and_the_client_get_the_policy_s_actions(server: PolicyServer) -> None:
    seen = observations(3)
    expected = acting()(torch.from_numpy(seen)).numpy()
    body = json.dumps({"observations": seen.tolist()}).encode()
    status, answer = asked(server, "POST", "/act", body)
    assert status == 200 and answer["policy_version"] == 5
    np.testing.assert_array_equal(np.array(answer["actions"], np.float32), expected)
    with PolicyClient(server.url, timeout_s=30) as client:
        several, one = client.act(seen), client.act(seen[0])
        np.testing.assert_array_equal(several[0], expected)
        np.testing.assert_allclose(one[0], expected[0], atol=1e-6)
        assert several[0].dtype == one[0].dtype == np.float32 and one[0].shape == (2,) and several[1] == one[1] == 5
        np.testing.assert_array_equal(client.act(seen.astype(np.float64))[0], expected)
    np.testing.assert_array_equal(server.act(seen).actions, expected)


def test_numbered_observations_and_actions() -> None:
    observed, done = spaces.Discrete(5, start=2), spaces.Discrete(3, start=-1)
    with PolicyServer(acting(0, observed, done), (observed, done), limits=PATIENT) as server:
        with PolicyClient(server.url, timeout_s=30) as client:
            actions, _ = client.act(np.arange(2, 7))
            assert actions.dtype == np.int64 and set(actions) <= {-1, 0, 1}
            assert [int(client.act(seen)[0]) for seen in range(2, 7)] == actions.tolist()
            with pytest.raises(DataError, match="holds a number that is none of the space"):
                client.act(1)
        status, answer = asked(server, "POST", "/act", b'{"observations": [2, 3]}')
        assert (status, answer["actions"]) == (200, actions[:2].tolist())


def test_what_comes_during_a_forward_is_answered_by_the_next_one() -> None:
    slow = Slow(0.5)
    with PolicyServer(slow, (OBSERVED, DONE), limits=Limits(60.0, max_batch=4)) as server, ThreadPoolExecutor(7) as pool:
        clients = [PolicyClient(server.url, timeout_s=30) for _ in range(7)]
        slow.sizes.clear()
        first = pool.submit(clients[0].act, observations(1)[0])
        time.sleep(0.2)
        others = [pool.submit(client.act, one) for client, one in zip(clients[1:], observations(6), strict=True)]
        expected = acting()(torch.from_numpy(observations(6))).numpy()
        for other, action in zip(others, expected, strict=True):
            np.testing.assert_allclose(other.result()[0], action, atol=1e-6)  # each its own
        assert first.result()[1] == 0 and slow.sizes == [1, 4, 2]
        metrics = server.metrics()
        assert metrics["batches"] == {"forwards": 3, "observations": 7, "mean": 2.33, "largest": 4}
        assert metrics["requests"]["answered"] == 7 and metrics["latency_ms"]["max"] > 1000
        for client in clients:
            client.close()


def ask_until(over: threading.Event, url: str, seed: int) -> list[tuple[Any, Any, int]]:
    seen, answers = observations(50, seed), []
    with PolicyClient(url, timeout_s=30) as client:
        while not over.is_set():
            one = seen[len(answers) % 50]
            answers.append((one, *client.act(one)))
    return answers


def test_a_hundred_updates_lose_and_mix_nothing(server: PolicyServer) -> None:
    made, over = [weights(version) for version in range(100)], threading.Event()
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_until, over, server.url, seed) for seed in range(4)]
        for version, one in enumerate(made):
            server.update(one, 100 + version)
            time.sleep(0.005)
        over.set()
        answers = [future.result() for future in asking]
    policies = {5: ServedPolicy(acting())} | {100 + version: ServedPolicy(acting(version)) for version in range(100)}
    for per_connection in answers:
        told = [version for *_, version in per_connection]
        assert told == sorted(told) and len(told) > 20
        for seen, action, version in per_connection:
            np.testing.assert_allclose(action, policies[version].act(asked_for(seen[None])).actions[0], atol=1e-6)
    assert len({version for per in answers for *_, version in per}) > 50
    metrics = server.metrics()
    assert metrics["requests"]["answered"] == sum(map(len, answers)) and metrics["updates"] == 100
    assert sum(metrics["requests"].values()) == metrics["requests"]["answered"] and metrics["policy_version"] == 199


def test_versions_can_be_told_apart() -> None:
    """What the test above rests on: the policies' actions differ by far more than rounding."""
    seen = observations(50)
    found = np.array([ServedPolicy(acting(version)).act(asked_for(seen)).actions for version in range(8)])
    assert min(np.abs(one - other).mean() for i, one in enumerate(found) for other in found[:i]) > 0.05


def test_an_answer_after_the_budget_is_none() -> None:
    slow = Slow(0.1)
    with PolicyServer(slow, (OBSERVED, DONE), limits=Limits(0.05)) as server:
        with (
            PolicyClient(server.url, timeout_s=30) as client,
            pytest.raises(LateError, match=r"late: .* ms after the 50 ms"),
        ):
            client.act(observations(1)[0])
        assert asked(server, "POST", "/act", b'{"observations": [[0, 0, 0]]}')[0] == 504
        assert server.metrics()["requests"] | {"late": 2, "answered": 0} == server.metrics()["requests"]


def test_beyond_its_capacity_every_request_is_answered_in_time_or_refused() -> None:
    slow = Slow(0.1)
    with PolicyServer(slow, (OBSERVED, DONE), limits=Limits(0.45, max_batch=1)) as server, ThreadPoolExecutor(12) as pool:
        clients = [PolicyClient(server.url, timeout_s=30) for _ in range(12)]
        pool.submit(clients[0].act, observations(1)[0]).result()

        def timed(client: PolicyClient) -> tuple[float, str]:
            begun = time.monotonic()
            try:
                client.act(observations(1)[0])
                return time.monotonic() - begun, "answered"
            except LateError as error:
                return time.monotonic() - begun, str(error).split(": ")[1]

        slow.sizes.clear()
        answers = list(pool.map(timed, clients))
        counts = server.metrics()["requests"]
        told = [how for _, how in answers]
        assert told.count("answered") + told.count("busy") + told.count("late") == 12
        assert (told.count("answered") + 1, told.count("busy"), told.count("late")) == (
            counts["answered"],
            counts["busy"],
            counts["late"],
        )
        assert 1 <= told.count("answered") <= 5 and told.count("busy") >= 4
        assert len(slow.sizes) == 12 - told.count("busy")  # what is refused costs no forward
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"what", 400, "the request is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            b'{"observations": [[1, 2]]}',
            400,
            "observations have shape (1, 2); expected those of Box(-8.0, 8.0, (3,), float32)",
        ),
        (
            b'{"observations": [[1, 2, NaN]]}',
            400,
            "observation 0 holds a number that is not finite; expected those of Box(",
        ),
        (b" " * 10_000, 413, "over 7168 bytes; expected at most 64 observations"),
    ],
)
def test_a_request_that_is_wrong_is_told_in_a_line(server: PolicyServer, body: bytes, status: int, message: str) -> None:
    found, answer = asked(server, "POST", "/act", body)
    assert found == status and answer["error"].startswith(message) and "\n" not in answer["error"]
    assert server.metrics()["requests"]["malformed"] == 1
    assert asked(server, "POST", "/act", b'{"observations": [[1, 2, 3]]}')[0] == 200


def test_health_and_metrics(server: PolicyServer) -> None:
    told = asked(server, "GET", "/health")
    space, actions = {"shape": [3], "dtype": "float32"}, {"shape": [2], "dtype": "float32"}
    limits = {"budget_ms": 60_000.0, "max_batch": 64}
    assert told == (
        200,
        {"status": "ok", "policy_version": 5, "memory_size": 0, "observations": space, "actions": actions, **limits},
    )
    _, metrics = asked(server, "GET", "/metrics")
    assert metrics["latency_ms"] == {} and metrics["batches"]["mean"] == 0
    with PolicyClient(server.url, timeout_s=30) as client:
        for one in observations(20):
            client.act(one)
        latency = client.metrics()["latency_ms"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["p99.9"] <= latency["max"] < 60_000


def test_connections_beyond_the_limit_are_told_so() -> None:
    with PolicyServer(acting(), (OBSERVED, DONE), limits=Limits(60.0, max_connections=2)) as server:
        first, second, third = (PolicyClient(server.url, timeout_s=30) for _ in range(3))
        seen = observations(1)[0]
        for client in (first, second, first):
            client.act(seen)
        with pytest.raises(LateError, match="busy: more than 2 connections; close this one"):
            third.act(seen)
        assert server.metrics()["requests"]["refused_connections"] == 1
        first.close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # until the server has seen it
            with contextlib.suppress(LateError):
                third.act(seen)
                break
            time.sleep(0.01)
        second.act(seen)
        third.act(seen)
        second.close()
        third.close()


def test_what_has_been_asked_is_answered_before_the_end() -> None:
    with PolicyServer(Slow(0.5), (OBSERVED, DONE), limits=PATIENT) as server, ThreadPoolExecutor(2) as pool:
        asking, sent = [PolicyClient(server.url, timeout_s=30) for _ in range(2)], observations(2)
        first = pool.submit(asking[0].act, sent[0])
        time.sleep(0.2)  # in its forward
        second = pool.submit(asking[1].act, sent[1])  # still to be read
        time.sleep(0.1)
        server.__exit__(None, None, None)
        assert first.result()[1] == second.result()[1] == 0
        with pytest.raises(UserError, match="is it running"):
            asking[0].act(sent[0])
        server.__enter__()  # for the end of the block


def test_a_taken_port_is_one_line(server: PolicyServer) -> None:
    with pytest.raises(UserError, match=r"serve: 127.0.0.1:\d+: .*address already in use.*; give another") as caught:
        PolicyServer(acting(), (OBSERVED, DONE), server._address).__enter__()
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"serve: 127.0.0.1:99999: .*; give another --host"):
        PolicyServer(acting(), (OBSERVED, DONE), ("127.0.0.1", 99999)).__enter__()


def test_who_gives_up_disturbs_nobody(server: PolicyServer) -> None:
    body = b'{"observations": [[1, 2, 3]]}'
    for sent in (
        b"POST /act HTTP/1.1\r\nHost: x\r\nContent-Length: 29\r\n\r\n" + body,
        b"POST /act HT",
        b"\x00\x01\r\n\r\n",
    ):
        with socket.create_connection(server._address) as gone:
            gone.sendall(sent)
    assert asked(server, "POST", "/act", body)[0] == 200


def test_the_client_goes_on_after_a_late_answer() -> None:
    slow = Slow(0.3)
    with PolicyServer(slow, (OBSERVED, DONE), limits=PATIENT) as server:
        with PolicyClient(server.url, timeout_s=0.15) as client:
            seen = observations(2)
            with pytest.raises(LateError, match="no answer within 150 ms"):
                client.act(seen[0])
            slow.seconds = 0.0
            time.sleep(0.4)
            action, _ = client.act(seen[1])
        np.testing.assert_allclose(action, server.act(seen[1:]).actions[0], atol=1e-6)  # not that of seen[0]


def test_the_client_connects_anew_to_a_server_that_was_restarted() -> None:
    with PolicyServer(acting(), (OBSERVED, DONE), limits=PATIENT) as server:
        client, seen, address = PolicyClient(server.url, timeout_s=30), observations(1)[0], server._address
        client.act(seen)
    with PolicyServer(acting(1), (OBSERVED, DONE), address, PATIENT, 8):
        assert client.act(seen)[1] == 8
    with pytest.raises(UserError, match="refused; is it running"):
        client.act(seen)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8001", "expected a URL like http://127.0.0.1:8001"),
        ("http://127.0.0.1:port", "expected a URL like"),
        ("http://127.0.0.1:1", "refused; is it running"),
        ("{url}/there", "expected a URL like"),
    ],
)
def test_a_wrong_url_is_one_line(server: PolicyServer, url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        PolicyClient(url.format(url=server.url))
    assert "\n" not in str(caught.value)


def test_the_client_tells_observations_that_do_not_fit(server: PolicyServer) -> None:
    with PolicyClient(server.url, timeout_s=30) as client:
        for wrong, message in (
            (np.zeros(4), r"observations of shape \(4,\), expected \(3,\)"),
            (np.zeros((2, 2, 3)), r"observations of shape \(2, 2, 3\), expected \(3,\)"),
            (np.zeros(3, complex), "observations of complex128, expected float32"),
            (np.full(3, np.nan), "observation 0 holds a number that is not finite"),
        ):
            with pytest.raises(DataError, match=message):
                client.act(wrong)
        assert client.act(np.zeros(3))[1] == 5


def test_who_asks_brings_the_memory_of_the_episode() -> None:
    made, seen = remembering(), observations(6)
    with PolicyServer(made, (OBSERVED, DONE), limits=PATIENT) as server, PolicyClient(server.url, timeout_s=30) as client:
        expected, memory = [], torch.zeros(1, 16)
        for one in seen:
            action, memory = made(torch.from_numpy(one[None]), memory)
            expected.append(action[0].numpy())
        remembered, other = None, None
        for one, action in zip(seen, expected, strict=True):
            found, remembered, version = client.step(one, remembered)
            np.testing.assert_allclose(found, action, atol=1e-6)
            assert version == 0 and remembered.shape == (16,)
            _, other, _ = client.step(np.stack([one, -one]), other)  # two other episodes beside it
            assert other.shape == (2, 16)
        np.testing.assert_allclose(remembered, memory[0].numpy(), atol=1e-6)
        np.testing.assert_allclose(other[0], memory[0].numpy(), atol=1e-6)
        assert not np.allclose(client.step(seen[-1])[0], expected[-1], atol=1e-4)  # it does remember
        asked_with = {"observations": seen[:1].tolist(), "memory": np.zeros((1, 16)).tolist()}
        _, answer = asked(server, "POST", "/act", json.dumps(asked_with).encode())
        np.testing.assert_allclose(answer["actions"][0], expected[0], atol=1e-6)
        assert np.shape(answer["memory"]) == (1, 16)
        np.testing.assert_allclose(server.act(seen[:1]).actions[0], expected[0], atol=1e-6)
        for ask, message in (
            (lambda: client.act(seen[0]), r"the policy remembers; call step\(observation, memory\)"),
            (lambda: client.step(seen[0], np.zeros(15)), r"memory of shape \(15,\), expected that of the last answer"),
            (lambda: client.step(seen[0], np.full(16, np.nan)), "memory: expected that of the last answers"),
        ):
            with pytest.raises(DataError, match=message):
                ask()
