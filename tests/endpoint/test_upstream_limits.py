"""The limits of `policy.upstream`: a call that waits for a connection is not refused, and a silent server is not waited for forever."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from tests.endpoint.serving import HI, client_in_rollout, serve

ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "far"}, "finish_reason": "stop"}]}
BODY = {"model": "far", "messages": HI}


@contextmanager
def upstream(before: Callable[[], object], answer: object = ANSWER) -> Generator[str]:
    """A server that calls ``before`` and then answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            before()
            with suppress(OSError):  # the client may have left
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_calls_beyond_the_connections_wait_and_the_wait_is_the_endpoints():
    lock, second = threading.Lock(), threading.Event()
    now, seen = 0, list[int]()

    def meet() -> None:
        nonlocal now
        with lock:
            now += 1
            seen.append(now)
            if now == 2:
                second.set()
        second.wait(0.3)
        with lock:
            now -= 1

    with (
        upstream(meet) as url,
        serve(upstream=UpstreamServer(base_url=url, connections=1)) as endpoint,
        client_in_rollout(endpoint, Routing(frozen={"": "far"})) as (_, client),
        ThreadPoolExecutor(2) as pool,
    ):
        responses = list(pool.map(lambda _: client.post("/chat/completions", json=BODY), range(2)))
        waited = endpoint.waited(client.headers["authorization"].removeprefix("Bearer "))
    assert [response.status_code for response in responses] == [200, 200]
    assert seen == [1, 1]
    assert waited >= 0.5


def test_a_server_that_sends_nothing_is_an_infrastructure_failure_that_names_the_setting():
    over = threading.Event()
    with upstream(lambda: over.wait(20)) as url:
        with (
            serve(upstream=UpstreamServer(base_url=url, timeout_seconds=0.05)) as endpoint,
            client_in_rollout(endpoint, Routing(frozen={"": "far"})) as (run, client),
        ):
            response = client.post("/chat/completions", json=BODY)
            assert len(run.infrastructure) == 1
        over.set()
    assert response.status_code == 502
    message = response.json()["error"]["message"]
    assert (
        "did not answer in time: ReadTimeout after 0.05 s. Lower rollouts.concurrency, or raise policy.upstream.timeout"
        in message
    )
    assert "could not reach" not in message


@pytest.mark.parametrize(("code", "status", "infrastructure"), [(500, 502, 1), (400, 400, 0)])
def test_an_error_with_the_status_200_is_an_error(code: int, status: int, infrastructure: int):
    answer = {"error": {"message": "no capacity", "code": code}}
    with (
        upstream(lambda: None, answer) as url,
        serve(upstream=url) as endpoint,
        client_in_rollout(endpoint, Routing(frozen={"": "far"})) as (run, client),
    ):
        response = client.post("/chat/completions", json=BODY)
        assert len(run.infrastructure) == infrastructure
    assert (response.status_code, response.json()) == (status, answer)
    assert "status 200: no capacity" in str([call.error or call.refused for call in run.trace.calls])
