"""Clients without a key, broken clients and hostile ones get an error below 500, and affect no other client."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse, RemoteDisconnected
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.dialects import DIALECTS
from lightning_core.dialects import anthropic_messages as messages
from lightning_core.dialects.dialect import Dialect
from lightning_core.endpoint.server import Limits, PolicyEndpoint
from lightning_core.endpoint.transport.receive import check_values
from lightning_core.errors import PolicyRequestError
from tests.dialects.test_fields import LEAST
from tests.endpoint.serving import (
    HI,
    answered,
    client_in_rollout,
    client_in_scope,
    key_in_rollout,
    serve,
    serve_backend,
)
from tests.endpoint.test_hanging_up import Endless, connect, request_of

CHAT = "/chat/completions"
GEMINI = "/models/base:generateContent"
LARGE = {"type": "object", "properties": {f"a property {i}": {"type": "string"} for i in range(10)}}
POSTS = [*(wire.PATH for wire in DIALECTS), "/embeddings", "/no-such-api"]
GETS = ["/models", "/models/policy", "/no-such-api"]


def key_of(client: httpx.Client) -> str:
    return client.headers["authorization"].removeprefix("Bearer ")


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_it_listens_on_this_machine_only():
    with serve() as endpoint:
        assert endpoint.url.startswith("http://127.0.0.1:")
        assert endpoint._server._socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path", [*(f"POST {path}" for path in POSTS), *(f"GET {path}" for path in GETS), "DELETE /messages", "PUT /models"]
)
def test_all_wrong_keys_get_the_same_response(path: str):
    """The same message for an unknown key, a closed one and a missing one, whether or not the path exists."""
    method, _, path = path.partition(" ")
    with serve() as endpoint:
        with client_in_rollout(endpoint) as (_, client):
            closed = key_of(client)
        answers = [
            httpx.request(method, f"{endpoint.url}{path}", headers=headers)
            for headers in (
                {},
                {"authorization": "Bearer lr-guess"},
                {"authorization": f"Bearer {closed}"},
                {"authorization": f"Basic {closed}"},
                {"x-api-key": closed},
            )
        ]
    assert [answer.status_code for answer in answers] == [401] * 5
    assert len({answer.text for answer in answers}) == 1
    assert "unknown API key" in answers[0].text


def test_a_stranger_s_body_is_not_even_read():
    with serve() as endpoint, connect(endpoint) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000\r\n\r\n")
        assert status_of(connection.recv(4096)) == 401


def test_a_key_reaches_its_own_rollout_only():
    """Neither by another rollout's address nor by its responses."""
    with serve() as endpoint, client_in_rollout(endpoint) as (other, _), client_in_rollout(endpoint) as (run, client):
        answer = client.post("/responses", json=LEAST["/responses"], headers=other.address.to_headers())
        with client_in_rollout(endpoint) as (_, stranger):
            body = {**LEAST["/responses"], "previous_response_id": answer.json()["id"]}
            refused = stranger.post("/responses", json=body)
    assert refused.status_code == 400
    assert "expected the id of an earlier response of this rollout" in refused.json()["error"]["message"]
    assert (len(run.trace.calls), len(other.trace.calls)) == (1, 0)
    assert run.trace.calls[0].parent == run.address.span


@pytest.mark.parametrize("wire", DIALECTS, ids=lambda wire: wire.PATH)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_is_a_413(wire: Dialect, chunked: bool):
    limits = Limits(body_bytes=100_000)

    def padded(size: int) -> bytes:
        body = json.dumps(LEAST[wire.PATH]).encode()
        return body + b" " * (size - len(body))

    def in_pieces(data: bytes) -> Iterator[bytes]:
        yield from (data[at : at + 10_000] for at in range(0, len(data), 10_000))

    with serve(limits=limits) as endpoint, client_in_rollout(endpoint) as (run, client):
        for size, status in ((100_000, 200), (100_001, 413), (3_000_000, 413), (100_000, 200)):
            data = padded(size)
            answer = client.post(wire.PATH, content=in_pieces(data) if chunked else data)
            assert answer.status_code == status
            if status == 413:
                error = answer.json()["error"]
                assert "100000 bytes" in error["message"]
                assert error["type"] == ("request_too_large" if wire is messages else "invalid_request_error")
    assert len(answered(run)) == 2
    assert run.infrastructure == []


def silence(connection: socket.socket, _: bytes) -> None:
    pass


@pytest.mark.parametrize("piece", [1 << 16, 7001, 65_001])
def test_headers_of_more_bytes_than_allowed_are_not_read(piece: int):
    with serve() as endpoint, key_in_rollout(endpoint) as (_, key), connect(endpoint) as connection:
        host = endpoint.url.removeprefix("http://").removesuffix("/v1")

        def get(size: int) -> bytes:
            """The status line for a request with that many bytes before its body; nothing if the connection is closed."""
            head = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\nlarge: ".encode()
            sent = head + b"x" * (size - len(head)) + b"\r\n\r\n"
            try:
                for start in range(0, len(sent), piece):
                    connection.sendall(sent[start : start + piece])
                    time.sleep(0.01)
                return connection.recv(1 << 16).partition(b"\r\n")[0]
            except OSError:
                return b""

        allowed = Limits().header_bytes
        assert [get(size) for size in (500, allowed, 400, allowed)] == [b"HTTP/1.1 200 OK"] * 4
        assert get(allowed + 1) == b""


def half_the_headers(connection: socket.socket, whole: bytes) -> None:
    connection.sendall(whole[:40])


def half_the_headers_of_a_second_request(connection: socket.socket, whole: bytes) -> None:
    connection.sendall(whole)
    time.sleep(0.1)
    connection.recv(1 << 16)
    connection.sendall(whole[:40])


def headers_drop_by_drop(connection: socket.socket, whole: bytes) -> None:
    for at in range(40):
        try:
            connection.sendall(whole[at : at + 1])
        except OSError:
            return
        time.sleep(0.05)


def half_the_body(connection: socket.socket, whole: bytes) -> None:
    connection.sendall(whole[:-10])


def a_huge_body_drop_by_drop(connection: socket.socket, whole: bytes) -> None:
    connection.sendall(whole.replace(b"content-length: ", b"content-length: 99999999999"))
    for _ in range(40):
        try:
            connection.sendall(b" ")
        except OSError:
            return
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("dawdle", "status"),
    [
        (silence, None),
        (half_the_headers, None),
        (half_the_headers_of_a_second_request, None),
        (headers_drop_by_drop, None),
        (half_the_body, 408),
        (a_huge_body_drop_by_drop, 413),
    ],
)
def test_a_client_that_takes_too_long_is_cut_off(dawdle: Callable[[socket.socket, bytes], None], status: int | None):
    limits = Limits(header_seconds=0.4, body_seconds=0.4)
    with serve(limits=limits) as endpoint, client_in_rollout(endpoint) as (run, client):
        whole = request_of(endpoint, key_of(client), CHAT, LEAST[CHAT])
        with connect(endpoint) as connection:
            began = time.monotonic()
            dawdle(connection, whole)
            received = b""
            try:
                while part := connection.recv(1 << 16):
                    received += part
            except ConnectionResetError:
                pass
            assert time.monotonic() - began < 3
        assert (status_of(received) if received else None) == status
        assert client.post(CHAT, json=LEAST[CHAT]).status_code == 200
    assert run.infrastructure == []


def test_a_connection_may_rest_between_requests():
    with serve(limits=Limits(header_seconds=0.2)) as endpoint, client_in_rollout(endpoint) as (_, client):
        whole = request_of(endpoint, key_of(client), CHAT, LEAST[CHAT])
        with connect(endpoint) as connection:
            for _ in range(2):
                connection.sendall(whole)
                answer = HTTPResponse(connection)
                answer.begin()
                assert (answer.status, b"hello" in answer.read()) == (200, True)
                time.sleep(0.5)


def test_a_rollout_with_too_many_requests_gets_retry_after():
    backend = Endless()
    with (
        serve_backend(backend, limits=Limits(requests_per_rollout=2)) as endpoint,
        ThreadPoolExecutor() as pool,
        client_in_rollout(endpoint) as (run, client),
    ):
        waiting = [pool.submit(client.post, CHAT, json={**LEAST[CHAT], "stream": stream}) for stream in (True, False)]
        for _ in waiting:
            backend.wait_for(backend.begun)
        for wire in DIALECTS:
            refused = client.post(wire.PATH, json=LEAST[wire.PATH])
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
        with client_in_rollout(endpoint) as (_, other):
            admitted = pool.submit(other.post, CHAT, json=LEAST[CHAT])
            backend.wait_for(backend.begun)
            endpoint.close(key_of(other))
            assert admitted.result(5).status_code == 401
        endpoint.close(key_of(client))
        assert [future.result(5).status_code for future in waiting] == [200, 401]
        assert run.infrastructure == [], "too many requests are not an infrastructure failure"
        assert len(answered(run)) == 2


def test_clients_wait_and_ask_again():
    with (
        serve(delay=0.1, limits=Limits(requests_per_rollout=1)) as endpoint,
        client_in_scope(endpoint) as (run, client),
        ThreadPoolExecutor() as pool,
    ):
        patient = client.with_options(max_retries=5)
        work = [pool.submit(patient.chat.completions.create, model="m", messages=HI) for _ in range(2)]
        assert [future.result(20).choices[0].message.content for future in work] == ["hello"] * 2
    assert len(answered(run)) == 2


def test_too_much_of_all_together_is_the_machinery_s_failure():
    backend = Endless()
    with (
        serve_backend(backend, limits=Limits(requests=1)) as endpoint,
        ThreadPoolExecutor() as pool,
        client_in_rollout(endpoint) as (_, first),
        client_in_rollout(endpoint) as (run, second),
    ):
        waiting = pool.submit(first.post, CHAT, json=LEAST[CHAT])
        backend.wait_for(backend.begun)
        assert second.post(CHAT, json=LEAST[CHAT]).status_code == 429
        assert "requests in progress, which is the limit" in run.infrastructure[0]
        endpoint.close(key_of(first))
        waiting.result(5)


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        (CHAT, {"n": 5}, "n"),
        ("/completions", {"n": 3, "prompt": ["a", "b"]}, "n"),
        ("/completions", {"prompt": list("abcde")}, "n"),
        (CHAT, {"messages": HI * 4}, "messages"),
        ("/messages", {"messages": HI * 4}, "messages"),
        ("/responses", {"input": HI * 4}, "input"),
        (CHAT, {"stop": ["a", "b", "c"]}, "stop"),
        (CHAT, {"stop": "x" * 11}, "stop"),
        ("/completions", {"stop": ["x" * 6] * 2}, "stop"),
        ("/messages", {"stop_sequences": [str(i) for i in range(60_000)]}, "stop_sequences"),
        ("/messages", {"stop_sequences": [str(i) for i in range(200_000)]}, "200009 JSON strings"),
        ("/completions", {"prompt": list(range(300_000))}, "JSON values"),
        (CHAT, {"metadata": {"a": [[]] * 30_000}}, "JSON values"),
        (GEMINI, {"generationConfig": {"stopSequences": list("abc")}}, "generationConfig.stopSequences"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 3}, "tools"),
        ("/responses", {"tools": [{"type": "function", "name": "f", "parameters": {}}] * 3}, "tools"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": LARGE}}}, "schema"),
        (GEMINI, {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": LARGE}}, "Schema"),
    ],
)
def test_what_a_request_has_too_much_of_is_refused(path: str, more: dict[str, Any], name: str):
    limits = Limits(choices=4, messages=3, stops=2, stop_characters=10, tools=2, schema_characters=200)
    with serve(limits=limits) as endpoint, client_in_rollout(endpoint) as (run, client):
        answer = client.post(path, json={**LEAST.get(path, {"contents": [{"parts": [{"text": "x"}]}]}), **more})
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"] or answer.json()["error"].get("param") == name
        assert "expected at most" in answer.json()["error"]["message"]
    assert answered(run) == []
    assert len(run.trace.calls) == 1
    assert run.infrastructure == []


@pytest.mark.parametrize("text", ["[{a,b:", '\\"[,', "\\\\[,"])
def test_text_that_looks_like_json_has_no_values(text: str):
    check_values(json.dumps({"prompt": text * 1000, "after": [1, 2]}).encode(), 30)
    with pytest.raises(PolicyRequestError, match="has 35 JSON values"):
        check_values(json.dumps({"prompt": text * 1000, "after": [[], {}, 1]}).encode(), 34)


def test_limits_are_checked():
    with pytest.raises(ValueError, match=r"Limits.choices is 0; expected a number above 0"):
        Limits(choices=0)


NONSENSE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b'{"model": ',
    "more than JSON": b"{} {}",
    "a list": b"[]",
    "null": b"null",
    "a number": b"5",
    "NaN": b'{"model": "base", "temperature": NaN}',
    "Infinity": b'{"model": "base", "temperature": Infinity}',
    "an overflow": b'{"model": "base", "metadata": 1e999}',
    "a long overflow": b'{"model": "base", "metadata": ' + b"9" * 400 + b".0}",
    "a longer overflow": b'{"model": "base", "metadata": ' + b"9" * 299 + b"e10}",
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": '{"model": "base"}'.encode("utf-16"),
    "half a surrogate pair": b'{"model": "\\ud800"}',
    "deep": b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not quite as deep": b'{"model": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}",
    "a long integer": b'{"model": "base", "seed": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("path", [wire.PATH for wire in DIALECTS] + ["/embeddings"])
def test_nonsense_is_a_400(path: str):
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        for what, data in NONSENSE.items():
            answer = client.post(path, content=data)
            assert (what, answer.status_code) == (what, 400)
            assert answer.json()["error"]["message"]
        assert client.post(CHAT, json=LEAST[CHAT]).status_code == 200
    assert len(answered(run)) == 1
    assert run.infrastructure == []


@pytest.mark.parametrize("path", [wire.PATH for wire in DIALECTS])
def test_an_error_does_not_send_the_request_back(path: str):
    with serve() as endpoint, client_in_rollout(endpoint) as (_, client):
        answer = client.post(path, json={**LEAST[path], "model": ["y" * 1_000_000]})
        assert answer.status_code == 400
        assert len(answer.content) < 10_000


@pytest.mark.parametrize("path", [wire.PATH for wire in DIALECTS])
def test_little_is_kept_of_unknown_fields(path: str):
    unknown = {"x" * 1_000_000: 1, **{f"temprature{n}": n for n in range(30_000)}}
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        assert client.post(path, json={**LEAST[path], **unknown}).status_code == 200
    (call,) = answered(run)
    assert len(call.dropped) == 50
    assert sum(map(len, call.dropped)) < 10_000


@pytest.mark.parametrize(
    "sent",
    [
        b"NOT HTTP\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 100_000 + b"\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"DELETE /v1/messages HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n",
    ],
)
def test_what_is_hardly_http_is_refused(sent: bytes):
    with serve() as endpoint:
        with connect(endpoint) as connection:
            connection.sendall(sent)
            answer = HTTPResponse(connection)
            try:
                answer.begin()
                assert 400 <= answer.status < 500
            except (RemoteDisconnected, ConnectionResetError):
                pass  # closed without a response
        assert httpx.get(endpoint.url.replace("/v1", "/health")).status_code == 200


def test_a_good_client_is_served_while_bad_ones_do_what_they_can():
    """Slow, huge and malformed requests, floods and disconnects at the same time; a valid client gets correct, prompt responses."""
    limits = Limits(body_bytes=1 << 20, header_seconds=1, body_seconds=1, requests_per_rollout=8)
    over = threading.Event()

    def misbehave(endpoint: PolicyEndpoint, attack: Callable[[socket.socket, bytes], None]) -> int:
        times = 0
        with client_in_rollout(endpoint) as (run, client):
            whole = request_of(endpoint, key_of(client), CHAT, LEAST[CHAT])
            while not over.is_set() or not times:
                with connect(endpoint) as connection:
                    try:
                        attack(connection, whole)
                        connection.recv(1024)
                    except OSError:
                        pass
                times += 1
            assert bool(run.infrastructure) == (attack is half_the_body), (
                "a body that is late is no failure of the agent"
            )
        return times

    def huge(connection: socket.socket, whole: bytes) -> None:
        connection.sendall(whole.replace(b"content-length: ", b"content-length: 9") + b" " * (4 << 20))

    def malformed(connection: socket.socket, whole: bytes) -> None:
        connection.sendall(whole.replace(b"{", b"["))

    def flood(connection: socket.socket, whole: bytes) -> None:
        connection.sendall(whole * 50)

    def long_prompt(connection: socket.socket, whole: bytes) -> None:
        head, _, _ = whole.partition(b"content-length")
        body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "x" * 900_000}]}).encode()
        connection.sendall(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)

    attacks = [half_the_headers, half_the_body, huge, malformed, flood, long_prompt]
    with (
        serve(max_context=4096, limits=limits) as endpoint,
        ThreadPoolExecutor(len(attacks)) as pool,
        client_in_scope(endpoint) as (run, client),
    ):
        bad = [pool.submit(misbehave, endpoint, attack) for attack in attacks]
        threading.Timer(1.5, over.set).start()
        slowest, count = 0.0, 0
        while not over.is_set():
            began = time.monotonic()
            assert client.chat.completions.create(model="m", messages=HI).choices[0].message.content == "hello"
            slowest, count = max(slowest, time.monotonic() - began), count + 1
        assert all(future.result(20) for future in bad)
    assert slowest < 2
    assert len(run.trace.calls) == count


def test_the_sdk_s_raise_what_they_should():
    with serve(limits=Limits(body_bytes=1000)) as endpoint, ExitStack() as stack:
        long: list[Any] = [{"role": "user", "content": "x" * 1000}]
        _, key = stack.enter_context(key_in_rollout(endpoint))
        theirs = stack.enter_context(
            anthropic.Anthropic(base_url=endpoint.url.removesuffix("/v1"), api_key=key, max_retries=0)
        )
        ours = stack.enter_context(openai.OpenAI(base_url=endpoint.url, api_key=key, max_retries=0))
        with pytest.raises(anthropic.RequestTooLargeError, match="1000 bytes"):
            theirs.messages.create(model="base", max_tokens=9, messages=long)
        with pytest.raises(openai.APIStatusError, match="1000 bytes"):
            ours.chat.completions.create(model="base", messages=long)
        with pytest.raises(anthropic.NotFoundError, match="'gpt' is not served here"):
            theirs.models.retrieve("gpt")


def test_the_answer_to_a_slow_backend_is_not_limited_in_time():
    backend = ScriptedBackend(lambda prompt: "hello", delay=0.5)
    limits = Limits(body_seconds=0.1, header_seconds=0.1)
    with serve_backend(backend, limits=limits) as endpoint, client_in_rollout(endpoint) as (_, client):
        for stream in (False, True):
            answer = client.post(CHAT, json={**LEAST[CHAT], "stream": stream})
            assert (answer.status_code, '"finish_reason": "stop"' in answer.text.replace('":"', '": "')) == (200, True)
