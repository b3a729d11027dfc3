"""Token counts: of the prompt that the model would get, by the clients' own methods. Counting leaves no call and no row."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from google import genai
from google.genai import types
from openai import NotFoundError, OpenAI
from starlette.responses import JSONResponse

from lightning_core.capture import ActiveRollout, scope
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer, recording_server
from lightning_core.trace import Event
from lightning_core.transitions import trace_to_transitions, transitions_to_rows
from tests.dialects.test_fields import client_in_rollout
from tests.dialects.test_gemini import BASE, HI
from tests.endpoint.test_endpoint import client_in_scope, serve

WRITER = Routing(trained=frozenset({"writer"}))
KEY: Any = "sk-own"
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"name": "add", "description": "a + b", "parameters": {"type": "object"}}


def counts_of(run: ActiveRollout) -> list[Event]:
    return [event for event in run.trace.events if event.kind == "count"]


def openai_counts(url: str) -> tuple[int, Callable[[], Any]]:
    client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
    tools: list[Any] = [{"type": "function", "strict": False, **TOOL}]
    question: dict[str, Any] = {"model": "policy", "input": "hi", "instructions": "be kind", "tools": tools}
    return client.responses.input_tokens.count(**question).input_tokens, lambda: client.responses.create(**question)


def anthropic_counts(url: str) -> tuple[int, Callable[[], Any]]:
    client = Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0)
    tools: list[Any] = [{"name": "add", "description": "a + b", "input_schema": {"type": "object"}}]
    question: dict[str, Any] = {"model": "policy", "messages": USER, "system": "be kind", "tools": tools}
    return (
        client.messages.count_tokens(**question).input_tokens,
        lambda: client.messages.create(max_tokens=9, **question),
    )


def google_counts(url: str) -> tuple[int, Callable[[], Any]]:
    client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=url.removesuffix("/v1")))
    counted = client.models.count_tokens(model="policy", contents="hi").total_tokens
    assert counted is not None
    return counted, lambda: client.models.generate_content(model="policy", contents="hi")


@pytest.mark.parametrize("count", [openai_counts, anthropic_counts, google_counts])
def test_a_count_is_that_of_the_call(playground: Playground, count: Callable[[str], Any]):
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        assert run.endpoint is not None
        tokens, ask = count(run.endpoint)
        ask()
    (call,) = run.trace.calls
    assert call.prompt_ids is not None
    assert len(call.prompt_ids) == tokens
    (counted,) = counts_of(run)
    assert (counted.agent, counted.error) == ("writer", None)
    assert counted.attributes["gen_ai.operation.name"] == "count_tokens"
    assert counted.attributes["gen_ai.usage.input_tokens"] == tokens
    assert counted.attributes["gen_ai.response.model"] == "policy"
    assert len(transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))) == 1


@pytest.mark.parametrize("count", [openai_counts, anthropic_counts, google_counts])
def test_a_provider_s_client_counts_here(playground: Playground, count: Callable[[str], Any]):
    """The client has its provider's URL; the request goes to the endpoint."""
    urls = {openai_counts: "https://api.openai.com/v1", anthropic_counts: "https://api.anthropic.com/v1"}
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        tokens, _ = count(urls.get(count, "https://generativelanguage.googleapis.com/v1"))
    assert tokens > 0
    assert len(counts_of(run)) == 1
    assert run.trace.calls == ()


def test_counting_does_not_disturb_the_row():
    """A conversation is counted before each turn, with the recorded tokens of earlier ones."""
    with serve(iter(["one ✓", "two"])) as endpoint, client_in_scope(endpoint, WRITER) as (run, client):
        turns: list[Any] = [{"role": "user", "content": "a"}]
        counted: list[int] = []
        for _ in range(2):
            counted.append(client.responses.input_tokens.count(model="m", input=turns).input_tokens)
            answer = client.responses.create(model="m", input=turns)
            turns += [{"role": "assistant", "content": answer.output_text}, {"role": "user", "content": "b"}]
    assert counted == [len(call.prompt_ids) for call in run.trace.calls if call.prompt_ids is not None]
    assert [call.context for call in run.trace.calls] == ["new", "clean"]


def test_google_s_other_form_of_the_request():
    inner = {"model": "models/base", **HI, "systemInstruction": {"parts": [{"text": "be kind"}]}}
    path = BASE.replace("generateContent", "countTokens")
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        whole = client.post(path, json={"generateContentRequest": inner}).json()["totalTokens"]
        client.post(BASE, json={**HI, "systemInstruction": inner["systemInstruction"]})
        wrong = client.post(path, json={"generate_content_request": "hi"})
    (call,) = run.trace.calls
    assert call.prompt_ids is not None
    assert len(call.prompt_ids) == whole
    assert (wrong.status_code, wrong.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert [event.error is None for event in counts_of(run)] == [True, False]


@contextmanager
def upstream_of(answer: dict[str, Any], status: int = 200) -> Generator[tuple[RecordingServer, PolicyEndpoint]]:
    with (
        recording_server(refusal=JSONResponse(answer, status)) as server,
        serve(upstream=UpstreamServer(base_url=f"{server.url}/v1", api_key="sk-upstream")) as endpoint,
    ):
        yield server, endpoint


FORWARDED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("/responses/input_tokens", "/responses/input_tokens", {"model": "gpt-x", "input": "hi"}, {"input_tokens": 7}),
    ("/messages/count_tokens", "/messages/count_tokens", {"model": "claude-x", "messages": USER}, {"input_tokens": 7}),
    ("/models/gemini-x:countTokens", "/models/gemini-x:countTokens", HI, {"totalTokens": 7}),
    ("/responses/compact", "/responses/compact", {"model": "gpt-x", "input": "hi"}, {"usage": {"input_tokens": 7}}),
]


@pytest.mark.parametrize(("path", "sent", "body", "answer"), FORWARDED)
def test_an_untrained_agent_s_count_is_that_of_its_provider(path: str, sent: str, body: Any, answer: Any):
    with upstream_of(answer) as (server, endpoint), client_in_rollout(endpoint) as (run, client):
        assert client.post(path, json=body).json() == answer
    (noted,) = server.requests
    assert noted.url == f"{server.url}/v1{sent}"
    assert noted.body == body
    assert run.trace.calls == ()
    (span,) = [s for s in run.spans if s.attributes.get("gen_ai.operation.name") in ("count_tokens", "compact")]
    assert (span.attributes["gen_ai.usage.input_tokens"], span.error) == (7, None)


@pytest.mark.parametrize("path", [path for path, *_ in FORWARDED])
def test_a_provider_without_counting_is_no_infrastructure_failure(path: str):
    body = next(body for known, _, body, _ in FORWARDED if known == path)
    with upstream_of({"error": "no such path"}, 404) as (_, endpoint), client_in_rollout(endpoint) as (run, client):
        assert client.post(path, json=body).status_code == 404
    assert run.infrastructure == []


def test_a_count_with_a_wrong_field_is_refused_and_recorded():
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        answer = client.post("/messages/count_tokens", json={"model": "base", "messages": USER, "output_format": {}})
    assert answer.status_code == 400
    assert run.trace.calls == ()
    (refused,) = counts_of(run)
    assert "output_format" in str(refused.attributes["lightning.refused"])


def test_compaction_is_refused_and_the_message_names_what_works():
    with (
        serve() as endpoint,
        client_in_scope(endpoint, WRITER) as (run, client),
        pytest.raises(NotFoundError, match="previous_response_id"),
    ):
        client.responses.compact(model="gpt-x", input="hi")
    (call,) = run.trace.calls
    assert call.agent == "writer"
    assert "cannot compact" in (call.refused or "")
    assert trace_to_transitions(run.trace, agents={"writer"}) == []


def test_a_stranger_cannot_count():
    with serve() as endpoint:
        for path, _, body, _ in FORWARDED:
            assert httpx.post(f"{endpoint.url}{path}", json=body).status_code == 401
