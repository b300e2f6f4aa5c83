"""Rewards over HTTP, against real servers on this machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from conftest import REVERSE, Outcome, with_keys

from hybridflow.config import resolved, validate
from hybridflow.core.errors import RewardError, UserError
from hybridflow.rollout.reward_server import RewardServer
from hybridflow.rollout.rewards import RewardPool, RewardResult, RewardSpec

FUNCTIONS = """
import time
def right(response, answer): return {"score": response == answer, "length": len(response)}
def odd(response, answer):
    if response == "odd": raise ValueError("is odd")
    return 0.5
def slow(response): time.sleep(0.4); return 1.0
def pair(response, x): return sum(x)
"""
Reply = Callable[[list[dict[str, Any]]], tuple[int, bytes]]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "f.py"
    path.write_text(FUNCTIONS)
    return path


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(*specs: str) -> Iterator[str]:
    with RewardPool([RewardSpec(spec) for spec in specs], workers=1) as pool, running(RewardServer(pool)) as url:
        yield url


class Scripted(ThreadingHTTPServer):
    """Answers POST as told, one reply after the other; the last one goes on. Counts the requests and their rows."""

    def __init__(self, *replies: Reply, head: int = 200) -> None:
        self.replies, self.head = list(replies), head
        self.rows: list[int] = []
        super().__init__(("127.0.0.1", 0), ScriptedHandler)


class ScriptedHandler(BaseHTTPRequestHandler):
    server: Scripted

    def do_HEAD(self) -> None:
        self.send_response(self.server.head)
        self.end_headers()

    def do_POST(self) -> None:
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
        self.server.rows.append(len(rows))
        replies = self.server.replies
        status, data = (replies.pop(0) if len(replies) > 1 else replies[0])(rows)
        if status == 0:  # half of an answer
            self.wfile.write(data)
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def results(*entries: Any) -> Reply:
    return lambda rows: (200, json.dumps({"results": list(entries) * (len(rows) // len(entries))}).encode())


GOOD = results({"score": 1.0})


def score(url: str, rows: int = 1, **options: Any) -> list[RewardResult]:
    with RewardPool([RewardSpec(url)], **options) as pool:
        return pool.score(["p"] * rows, ["r"] * rows, [{}] * rows)


def test_a_served_function_gives_what_it_gives_in_process(functions: Path) -> None:
    responses = [str(i % 3) for i in range(150)]
    fields = [{"answer": str(i % 2), "also": None} for i in range(150)]
    with serving(f"{functions}:right") as url, RewardPool([RewardSpec(url, 2.0)]) as there:
        over_http = there.score(["p"] * 150, responses, fields)
    with RewardPool([RewardSpec(f"{functions}:right", 2.0)], workers=1) as here:
        assert over_http == here.score(["p"] * 150, responses, fields)
    assert {result.score for result in over_http} == {0.0, 2.0}


def test_functions_and_services_in_one_sum(functions: Path) -> None:
    with serving(f"{functions}:right", f"{functions}:odd") as url:
        specs = [RewardSpec(url, 10.0), RewardSpec(f"{functions}:right"), RewardSpec(f"{functions}:odd", -1.0)]
        with RewardPool(specs, workers=1) as pool:
            good, odd = pool.score(["p"] * 2, ["7", "odd"], [{"answer": "7"}] * 2)
    host = url.split("/")[2]
    assert good.score == 10 * 1.5 + 1 - 0.5
    assert good.metrics[host] == 1.5 and good.metrics[f"{host}/odd"] == 0.5 == good.metrics["odd"]
    assert odd.failure == f"reward '{url}': reward '{functions}:odd': raised ValueError: is odd"


def test_requests_carry_many_rows() -> None:
    with running(server := Scripted(GOOD)) as url:
        assert [result.score for result in score(url, 200)] == [1.0] * 200
    assert sorted(server.rows) == [8, 64, 64, 64]


def test_a_slow_service_times_out_and_only_its_rows_fail() -> None:
    def late(rows: list[dict[str, Any]]) -> tuple[int, bytes]:
        time.sleep(0.8)
        return GOOD(rows)

    with running(Scripted(late, GOOD)) as url:
        got = score(url, 65, timeout_s=0.3)
    failed = [result.failure for result in got if result.score is None]
    assert len(failed) in (1, 64) and set(failed) == {f"reward '{url}': timed out after 0.3 s"}


def test_the_deadline_holds_for_a_service_that_sends_byte_by_byte() -> None:
    class Dripping(ScriptedHandler):
        def do_POST(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            for _ in range(20):
                time.sleep(0.1)
                self.wfile.write(b" ")

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True

    server = Scripted(GOOD)
    server.RequestHandlerClass = Dripping
    with running(server) as url, RewardPool([RewardSpec(url)], timeout_s=0.35) as pool:
        start = time.monotonic()
        [result] = pool.score(["p"], ["r"], [{}])
        assert time.monotonic() - start < 1.5
    assert result.failure == f"reward '{url}': timed out after 0.35 s"


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (lambda rows: (500, b"out of\nmemory"), "answered 500: out of memory"),
        (lambda rows: (0, b""), "no answer: Remote end closed connection without response"),
        (lambda rows: (0, b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{"), r"no answer: IncompleteRead\(1 bytes read"),
        (lambda rows: (0, b"what\r\n"), "no answer: what"),
    ],
)
def test_what_may_pass_is_tried_again(first: Reply, reason: str) -> None:
    with running(server := Scripted(first, GOOD)) as url:
        assert score(url, retries=1)[0].score == 1.0
    assert server.rows == [1, 1]
    with running(server := Scripted(first, first, GOOD)) as url:
        [result] = score(url)
    assert server.rows == [1]
    assert result.score is None and re.fullmatch(f"reward '{url}': {reason}.*", str(result.failure))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (results({"score": 1.0}, {"score": 1.0}, {"score": 1.0}), None),
        (lambda rows: (200, b'{"results": [{"score": 1}]}'), "answered 1 results for 3 rows"),
        (lambda rows: (200, b"<html>"), "answered what is not JSON: <html>"),
        (lambda rows: (200, b"[1, 2, 3]"), 'answered without a list "results": [1, 2, 3]'),
        (lambda rows: (404, b""), "answered 404"),
        (lambda rows: (422, b'{"error": "no"}'), 'answered 422: {"error": "no"}'),
        (results({"score": float("nan")}), "returned nan, expected a finite number"),
        (results({"score": None}), "returned None (NoneType), expected a finite number or a dict with 'score'"),
        (results({"score": "1"}), "returned '1' (str), expected a finite number or a dict with 'score'"),
        (results({"reward": 1}), "returned a dict without 'score', with no entries"),
        (results({"score": 1, "metrics": [2]}), "answered metrics [2], expected an object with numbers"),
        (results({"failure": "too long"}), "too long"),
        (results("x"), "returned 'x' (str), expected a finite number or a dict with 'score'"),
    ],
)
def test_a_bad_answer_is_a_failure_and_is_not_asked_for_again(reply: Reply, reason: str | None) -> None:
    with running(server := Scripted(reply)) as url:
        got = score(url, 3, retries=2)
    assert server.rows == [3]
    expected = RewardResult(1.0, None, {}) if reason is None else RewardResult(None, f"reward '{url}': {reason}", {})
    assert got == [expected] * 3


def test_one_bad_row_leaves_the_others() -> None:
    with running(Scripted(results({"score": 1, "metrics": {"a": 2, "b": None}}, {"failure": "no"}))) as url:
        good, bad = score(url, 2)
    assert good == RewardResult(1.0, None, {"a": 2.0}) and bad.failure == f"reward '{url}': no"


def test_too_many_failures_stop_the_services_and_the_processes(functions: Path) -> None:
    with running(server := Scripted(lambda rows: (500, b"no"))) as url:
        specs = [RewardSpec(f"{functions}:slow"), RewardSpec(url)]
        with RewardPool(specs, retries=0, workers=1) as pool:
            start = time.monotonic()
            with pytest.raises(RewardError, match=f"rows failed, 5 may; the first: reward '{url}': answered 500: no"):
                pool.score(["p"] * 300, ["r"] * 300, [{}] * 300, max_failures=5)
            assert time.monotonic() - start < 5.0  # of 120 s for all calls of slow
            server.replies = [GOOD]
            assert [result.score for result in pool.score(["p"], ["r"], [{}])] == [2.0]


def test_nothing_is_tried_again_once_a_batch_is_lost(functions: Path) -> None:
    with running(server := Scripted(lambda rows: (500, b"no"))) as url:
        specs = [RewardSpec(url), RewardSpec(f"{functions}:odd")]
        with RewardPool(specs, retries=30, workers=1) as pool:
            with pytest.raises(RewardError, match=r"f\.py:odd': raised ValueError: is odd"):
                pool.score(["p"] * 300, ["odd"] * 300, [{"answer": ""}] * 300, max_failures=5)
            time.sleep(0.5)  # what was on its way has come; a second try would come after 0.2 s
            asked = len(server.rows)
            time.sleep(0.5)
            assert len(server.rows) == asked <= 8


def test_numpy_fields_are_sent_and_what_json_lacks_is_told(functions: Path) -> None:
    with serving(f"{functions}:pair") as url, RewardPool([RewardSpec(url)]) as pool:
        assert pool.score(["p"], ["r"], [{"x": np.array([1, np.int64(2)])}])[0].score == 3.0
        for value in (b"bytes", float("nan")):
            with pytest.raises(RewardError, match=r"a row can't be sent as JSON: .*; leave that field out"):
                pool.score(["p"], ["r"], [{"x": value}])


def test_the_fields_that_a_service_needs_are_checked_before_anything_runs(functions: Path) -> None:
    with serving(f"{functions}:right") as url, RewardPool([RewardSpec(url)]) as pool:
        assert set(pool.fields) == {"answer"}
        pool.check({"answer"})
        with pytest.raises(RewardError, match=f"{url}': requires a parameter 'answer', but there are prompt, response"):
            pool.check(())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/score", r"no answer: \[Errno \d+\] Connection refused; is the service running\?$"),
        ("{url}s", "answered 404; is the path right"),
        ("http:///score", "it names no host; expected a URL like"),
        ("http://127.0.0.1:port/score", "Port could not be cast .*; expected a URL like"),
    ],
)
def test_a_wrong_url_is_one_line(functions: Path, url: str, message: str) -> None:
    with serving(f"{functions}:right") as there, pytest.raises(RewardError, match=message) as caught:
        RewardPool([RewardSpec(url.format(url=there))])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head", "fine"), [(204, True), (405, True), (501, True), (404, False), (500, False), (401, False)]
)
def test_a_service_needs_to_know_post_alone(head: int, fine: bool) -> None:
    with running(Scripted(GOOD, head=head)) as url:
        if fine:
            assert score(url)[0].score == 1.0
        else:
            with pytest.raises(RewardError, match=str(head)):
                RewardPool([RewardSpec(url)])


def post(url: str, body: bytes) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_server_says_what_is_wrong_with_a_request(functions: Path) -> None:
    spec = f"{functions}:right"
    with serving(spec) as url:
        assert post(url, b"no")[0] == 400
        assert post(url, b"[]") == (
            400,
            {"error": 'expected {"rows": [{"prompt": "...", "response": "...", fields}, ...]}'},
        )
        assert post(url, b'{"rows": [{"prompt": "p"}]}') == (
            400,
            {"error": "row 0 is no object with texts prompt and response"},
        )
        status, content = post(url, b'{"rows": [{"prompt": "p", "response": "r"}]}')
        assert status == 422 and "requires a parameter 'answer'" in content["error"]
        assert post(url, b'{"rows": []}') == (200, {"results": []})
        assert post(url + "x", b"{}") == (404, {"error": "there are GET /health and POST /score"})
        with urllib.request.urlopen(url.replace("score", "health"), timeout=10) as response:
            assert json.load(response) == {"functions": [spec], "fields": ["answer"]}
        gone = HTTPConnection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        gone.request("POST", "/score", b'{"rows": []}')
        gone.close()  # who doesn't wait for the answer disturbs nobody
        assert post(url, b'{"rows": []}')[0] == 200


def test_a_taken_port_is_one_line(functions: Path) -> None:
    with RewardPool([RewardSpec(f"{functions}:right")], workers=1) as pool, running(RewardServer(pool)) as url:
        port = int(url.split(":")[2].split("/")[0])
        with pytest.raises(UserError, match=f"serve-rewards: 127.0.0.1:{port}: .*in use; give another"):
            RewardServer(pool, port=port)


@contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [sys.executable, "-m", "hybridflow.cli", "serve-rewards", *arguments, "--port", "0", "--workers", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+/score", process.stdout.readline())
        assert found
        yield process, found.group()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_program_serves_a_run_and_its_end_is_a_failure(
    functions: Path, hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with program("hybridflow.data.task_rewards:positions") as (process, url):
        served, local = (Path(name) for name in ("served.toml", "local.toml"))
        served.write_text(resolved(validate(with_keys(REVERSE, reward__functions=[url], run_dir="served"), "test")))
        local.write_text(resolved(validate(with_keys(REVERSE, run_dir="local"), "test")))
        assert hybridflow("train", served).code == hybridflow("train", local).code == 0
        scores = [
            [
                json.loads(line)["eval/score"]
                for line in Path(name, "metrics.jsonl").read_text().splitlines()
                if "eval" in line
            ]
            for name in ("served", "local")
        ]
        assert scores[0] == scores[1] and len(scores[0]) > 1
        with RewardPool([RewardSpec(url)], timeout_s=2.0) as pool:
            assert pool.score(["p"], ["7"], [{"answer": "7"}])[0].score == 1.0
            process.kill()
            process.wait()
            [result] = pool.score(["p"], ["7"], [{"answer": "7"}])
            assert result.score is None and "Connection refused" in str(result.failure)
    told = hybridflow("train", served, "--run_dir", "again")
    assert told.code == 2 and told.err.startswith(f"error: reward '{url}': no answer: ") and told.err.count("\n") == 1


def test_a_service_that_is_killed_while_it_scores_fails_those_rows(functions: Path) -> None:
    with program(f"{functions}:slow") as (process, url), RewardPool([RewardSpec(url)], timeout_s=10.0) as pool:
        threading.Timer(0.5, process.kill).start()
        start = time.monotonic()
        got = pool.score(["p"] * 10, ["r"] * 10, [{}] * 10)
        assert time.monotonic() - start < 3.5
    assert {result.score for result in got} == {None} and "no answer" in str(got[0].failure)


def test_ctrl_c_ends_the_program(functions: Path) -> None:
    with program(f"{functions}:right") as (process, url):
        assert score(url, 0) == []
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
