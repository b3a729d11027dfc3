"""The shapes of requests that command-line agents and SDKs send are answered and recorded completely.

``requests/*.json``: one shape each, with contents made up: the path, headers beside the key, the body, the expected status, and what the
record has of it. A shape that a program starts to send is a new file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lightning_core import Call
from lightning_core.dialects import ALL_DIALECTS, gemini
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import UpstreamResponse
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.errors import PolicyRequestError
from tests.endpoint.fuzz_bodies import Bodies, places
from tests.endpoint.serving import WRITER, client_in_rollout, serve

FOLDER = Path(__file__).parent / "requests"
FILES = sorted(FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[PolicyEndpoint]:
    with serve() as endpoint:
        yield endpoint


def dialect_of(path: str) -> Dialect:
    if ":" in path:
        return gemini
    return next(dialect for dialect in ALL_DIALECTS if path.startswith(f"/v1{dialect.PATH}"))


def read(dialect: Dialect, answer: httpx.Response) -> list[UpstreamResponse]:
    """The responses in ``answer``, whole or streamed."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return dialect.read_response(answer.json())
    reader = dialect.stream_reader()
    for line in answer.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            reader.read(json.loads(line.removeprefix("data: ")))
    return reader.responses()


def recorded(call: Call) -> dict[str, Any]:
    """What the record has of a request, apart from the contents."""
    return {
        "roles": " ".join(message["role"] for message in call.messages or ()),
        "calls": [
            one["function"]["name"] for message in call.messages or () for one in message.get("tool_calls") or ()
        ],
        "tools": [tool["function"]["name"] for tool in call.tools or ()],
        "dropped": [note.partition(":")[0] for note in call.dropped],
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_of_another_type_are_refused(path: Path):
    """Each value in turn, and of fields of the tables, as a list and as an object, which cannot be looked up in a table."""
    shape = json.loads(path.read_text(encoding="utf-8"))
    dialect, body = dialect_of(shape["path"]), shape["body"]
    Bodies(dialect, Random(0)).decorate(body)
    for outer, key in list(places(body)):
        value = outer[key]
        for outer[key] in ([value], {"a": value}):
            for read_body in (dialect.parse_request, dialect.read_request):
                with suppress(PolicyRequestError):
                    read_body(body, conversations={})
        outer[key] = value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_requests_of_programs(endpoint: PolicyEndpoint, path: Path):
    shape = json.loads(path.read_text(encoding="utf-8"))
    target = urlsplit(shape["path"])
    base = endpoint.url.removesuffix("/v1")
    counts = target.path.endswith("/count_tokens")
    with client_in_rollout(endpoint, WRITER) as (run, client):
        headers = {**shape.get("headers", {}), "lightning-agent": "writer"}
        answer = client.post(f"{base}{shape['path']}", json=shape["body"], headers=headers)
        assert answer.status_code == shape["status"], answer.text
        again = client.post(f"{base}{shape['path']}", json=shape["body"], headers=headers)
        assert again.status_code == shape["status"]
    assert run.infrastructure == []
    if counts:
        assert answer.json().keys() == {"input_tokens"}
        assert len(run.trace.calls) == 0
        assert len([event for event in run.trace.events if event.kind == "count"]) == 2
        return
    responses = read(dialect_of(target.path), answer)
    assert [response.message["content"] for response in responses] == ["hello"] * len(responses)
    assert len(run.trace.calls) == 2 * len(responses) > 0
    assert {call.finish_reason for call in run.trace.calls} == {"stop"}
    assert recorded(run.trace.calls[0]) == shape["record"]


def test_every_wire_format_is_in_the_corpus():
    paths = [urlsplit(json.loads(path.read_text(encoding="utf-8"))["path"]).path for path in FILES]
    assert {dialect_of(path).PATH for path in paths if not path.endswith("/count_tokens")} == {
        d.PATH for d in ALL_DIALECTS
    }
