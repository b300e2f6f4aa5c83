"""Rewards from a service over HTTP: another process, machine or program that scores rows.

    POST <the URL>   {"rows": [{"prompt": "...", "response": "...", <fields>}, ...]}
    answer           {"results": [{"score": 1.0, "metrics": {...}} or {"failure": "reason"}, ...]}, one a row, in order
    GET health       (the URL's last part replaced) {"fields": [...]}: the fields that every row must have; optional

``hybridflow serve-rewards`` is such a service (``rollout.reward_server``). Without an answer after all tries, or with one
that doesn't say the above, the rows of the request have failed, with the reason; they never get a zero.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np

from hybridflow.core.errors import RewardError
from hybridflow.rollout.reward_outcomes import Failures, Outcome, outcome
from hybridflow.rollout.reward_process import checked, short

__all__ = ["RewardService", "is_url"]

_ROWS = 64  # of a request: a batch for a model behind the service, and few enough rows to lose with it
_IN_FLIGHT = 4
_BACKOFF_S = (0.2, 5.0)  # before the second try, doubled before each further one, at most
_THERE = (*range(200, 300), 405, 501)  # answers to HEAD of a path that exists: many services know only POST


def is_url(spec: str) -> bool:
    """Whether a reward is a service."""
    return spec.startswith(("http://", "https://"))


class RewardService:
    """Asks the service at ``url``: a few requests at a time, each of many rows and answered within ``timeout_s``.

    A request is tried ``retries`` times again if there was no connection, no answer in time or one that blames the server
    (5xx). RewardError if nothing answers at the URL, before anything is scored.
    """

    def __init__(self, url: str, timeout_s: float, retries: int) -> None:
        self.url, self.timeout_s, self.retries = url, timeout_s, retries
        self._host, self._port = _host_and_port(url)
        self.required = self._probe()
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="reward")

    def start(self, rows: Sequence[Mapping[str, Any]], failures: Failures) -> list[Future[list[Outcome]]]:
        """Start asking: the outcomes of successive parts of the rows. RewardError if a field can't be sent."""
        texts = [self._encode(row) for row in rows]
        firsts = range(0, len(texts), _ROWS)
        return [self._threads.submit(self._score, first, texts[first : first + _ROWS], failures) for first in firsts]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _probe(self) -> Collection[str]:
        """The fields that rows must have, if the service tells them."""
        try:
            there, _ = self._ask("HEAD", self.url, b"", threading.Event())
            status, data = self._ask("GET", urljoin(self.url, "health"), b"", threading.Event())
        except _NoAnswerError as error:
            raise RewardError(f"reward {self.url!r}: {error}; is the service running?") from None
        if there not in _THERE:
            hint = "is the path right? that of hybridflow serve-rewards is /score"
            raise RewardError(f"reward {self.url!r}: answered {there}; {hint}")
        with contextlib.suppress(ValueError):  # another program may tell its health otherwise
            health = json.loads(data) if status == 200 else None
            if isinstance(health, dict) and isinstance(health.get("fields"), list):
                return [str(name) for name in health["fields"]]
        return ()

    def _score(self, first: int, texts: Sequence[str], failures: Failures) -> list[Outcome]:
        try:
            status, data = self._ask("POST", self.url, f'{{"rows": [{", ".join(texts)}]}}'.encode(), failures.over)
            results = _results(status, data, len(texts))
        except _NoAnswerError as error:
            results = [{"failure": str(error)}] * len(texts)
        outcomes = [outcome(self.url, _report(result)) for result in results]
        for row, made in enumerate(outcomes, first):
            if made.failure is not None:
                failures.add(row, made.failure)
        return outcomes

    def _ask(self, method: str, url: str, body: bytes, over: threading.Event) -> tuple[int, bytes]:
        """Status below 500 and body of the answer; _NoAnswerError after the last try, or once the batch is over."""
        (pause_s, longest_s), left = _BACKOFF_S, self.retries
        while True:
            try:
                return self._exchange(method, url, body)
            except _NoAnswerError:
                if not left or over.wait(pause_s):
                    raise
            left, pause_s = left - 1, min(2 * pause_s, longest_s)

    def _exchange(self, method: str, url: str, body: bytes) -> tuple[int, bytes]:
        parts, end = urlsplit(url), time.monotonic() + self.timeout_s
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.connect()
            with _deadline(connection.sock, end - time.monotonic()):
                connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
                response = connection.getresponse()
                status, data = response.status, response.read()
        except TimeoutError:
            raise _NoAnswerError(f"timed out after {self.timeout_s:g} s") from None
        except (OSError, HTTPException) as error:
            raise _NoAnswerError(f"no answer: {short(str(error)) or type(error).__name__}") from None
        finally:
            connection.close()
        if status >= 500 and status not in _THERE:
            raise _NoAnswerError(_told(status, data))
        return status, data

    def _encode(self, row: Mapping[str, Any]) -> str:
        try:
            return json.dumps(row, default=_plain, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward {self.url!r}: a row can't be sent as JSON: {error}; leave that field out") from None


class _NoAnswerError(Exception):
    """Why a request got nothing to use."""


@contextlib.contextmanager
def _deadline(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Shut a connection down when its time is over: the socket's own timeout starts again with every byte."""
    over = threading.Event()

    def cut() -> None:
        over.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, seconds), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException):
        if not over.is_set():
            raise
    finally:
        timer.cancel()
    if over.is_set():
        raise TimeoutError


def _host_and_port(url: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(url)
        if parts.hostname:
            return parts.hostname, parts.port
        problem = "it names no host"
    except ValueError as error:
        problem = str(error)
    raise RewardError(f"reward {url!r}: {problem}; expected a URL like http://127.0.0.1:8000/score")


def _results(status: int, data: bytes, count: int) -> list[Any]:
    """One entry for each row. _NoAnswerError if the answer has another form."""
    if status != 200:
        raise _NoAnswerError(_told(status, data))
    try:
        answer = json.loads(data)
    except ValueError:
        raise _NoAnswerError(f"answered what is not JSON: {_text(data)}") from None
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        raise _NoAnswerError(f'answered without a list "results": {_text(data)}')
    if len(results) != count:
        raise _NoAnswerError(f"answered {len(results)} results for {count} rows")
    return results


def _report(result: Any) -> tuple[float, dict[str, float]] | str:
    """(score, metrics) of a row's entry, or the reason why there is none."""
    if not isinstance(result, dict):
        return checked(result)
    if "failure" in result:
        return str(result["failure"])
    metrics = result.get("metrics", {})
    if not isinstance(metrics, dict):
        return f"answered metrics {short(repr(metrics))}, expected an object with numbers"
    return checked(metrics | {key: value for key, value in result.items() if key == "score"})


def _told(status: int, data: bytes) -> str:
    return f"answered {status}: {_text(data)}" if data else f"answered {status}"


def _text(data: bytes) -> str:
    return short(data[:1000].decode(errors="replace"), 200)


def _plain(value: Any) -> Any:
    """numpy's arrays and numbers as lists and numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{short(repr(value))} is a {type(value).__name__}")
