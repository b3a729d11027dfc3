"""The endpoint over real HTTP, with the openai client and a scripted backend."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from starlette.responses import JSONResponse, Response

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import ActiveRollout, current_address, reward, rollout, scope
from lightning_core.capture.signatures import sign_origin
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Limits, PolicyEndpoint, Routing
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.testing.recording_server import RecordingServer, recording_server
from lightning_core.trace import Call
from lightning_core.transitions import trace_to_transitions, transitions_to_rows

TRAINED = Routing(trained=frozenset({"writer"}), temperature=0.7, max_tokens=64)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HI: list[Any] = [{"role": "user", "content": "hi"}]


@contextmanager
def serve(
    script: Any = lambda prompt: "hello",
    *,
    upstream: UpstreamServer | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[PolicyEndpoint]:
    with serve_backend(ScriptedBackend(script, **options), upstream=upstream, limits=limits) as endpoint:
        yield endpoint


@contextmanager
def serve_backend(backend: ScriptedBackend, **options: Any) -> Iterator[PolicyEndpoint]:
    with PolicyEndpoint(backend, Chat(backend.tokenizer), **options) as endpoint:
        yield endpoint


@contextmanager
def client_in_scope(
    endpoint: PolicyEndpoint, routing: Routing = TRAINED, agent: str = "writer", **options: Any
) -> Iterator[tuple[ActiveRollout, OpenAI]]:
    """A rollout with a client in the scope of ``agent``."""
    key = endpoint.new_key()
    with rollout({"id": "t"}) as run:
        endpoint.open(key, run.address, routing, **options)
        try:
            with scope(agent):
                address = current_address()
                assert address is not None
                with OpenAI(
                    base_url=endpoint.url, api_key=key, max_retries=0, default_headers=address.to_headers()
                ) as client:
                    yield run, client
        finally:
            endpoint.close(key)


def answered(run: ActiveRollout) -> list[Call]:
    """The calls of ``run`` that the endpoint did not refuse."""
    return [call for call in run.trace.calls if call.refused is None]


def test_a_call_is_answered_and_recorded_with_its_tokens():
    with serve() as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.chat.completions.create(model="gpt-x", messages=HI, temperature=0.1, logprobs=True)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].logprobs is not None
    assert [t.logprob for t in answer.choices[0].logprobs.content or ()] == [-0.5] * 6
    (call,) = run.trace.calls
    assert call.agent == "writer"
    assert call.model == "policy"
    assert call.temperature == 0.7, "a trained agent samples at the run's temperature"
    assert call.prompt_ids is not None
    assert bytes(i for i in call.prompt_ids if i < 256).decode() == "user\nhi\nassistant\n"
    assert call.output_ids is not None
    assert call.output_ids.tolist() == [*b"hello", 257]
    assert call.logprobs is not None
    assert call.logprobs.tolist() == [-0.5] * 6
    assert call.finish_reason == "stop"
    assert answer.id == f"chatcmpl-{call.id}"
    assert call.parent == next(e.id for e in run.trace.events if e.name == "writer")
    span = next(s for s in run.spans if s.span_id == call.id)
    assert {k: v for k, v in span.attributes.items() if "replaced" in k} == {"lightning.replaced.temperature": 0.1}


def test_streaming_gives_the_same_text_and_the_same_record():
    with serve(lambda p: "hällo wörld ✓") as endpoint, client_in_scope(endpoint) as (run, client):
        chunks = list(
            client.chat.completions.create(model="m", messages=HI, stream=True, stream_options={"include_usage": True})
        )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hällo wörld ✓"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    (call,) = run.trace.calls
    assert call.output_ids is not None
    assert usage is not None
    assert usage.completion_tokens == len(call.output_ids) == len("hällo wörld ✓".encode()) + 1
    assert call.response == {"role": "assistant", "content": "hällo wörld ✓"}


def test_tool_calls_streamed_and_not_and_the_second_turn_continues_the_row():
    def script(prompt: str) -> str:
        return (
            "the sum is 3"
            if "tool_response" in prompt
            else 'let me <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        )

    with serve(script) as endpoint, client_in_scope(endpoint, Routing(trained=frozenset({"writer"}))) as (run, client):
        message = client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        turn = [*HI, message.model_dump(exclude_none=True), result]
        assert (
            client.chat.completions.create(model="m", messages=turn, tools=TOOLS).choices[0].message.content
            == "the sum is 3"
        )
        with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.content == "let me"
    assert streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == '{"a": 1}'
    rows = transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))
    assert [len(r.segments) for r in rows] == [2, 1]
    assert run.trace.calls[1].context == "clean"


def test_every_choice_is_a_separate_call():
    with serve(iter(["one", "two", "three"])) as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.chat.completions.create(model="m", messages=HI, n=3)
    assert sorted(c.message.content or "" for c in answer.choices) == ["one", "three", "two"]
    assert len(trace_to_transitions(run.trace, agents={"writer"})) == 3


def test_stop_strings_cut_the_text_but_not_the_record():
    with serve(lambda p: "a; b; c") as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.chat.completions.create(model="m", messages=HI, stop=";")
        streamed = list(client.chat.completions.create(model="m", messages=HI, stop=[";"], stream=True))
    assert answer.choices[0].message.content == "a"
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == "a"
    for call in run.trace.calls:
        assert call.output_ids is not None
        assert bytes(call.output_ids.astype("u1")).startswith(b"a;"), (
            "all sampled tokens are recorded, also after the cut"
        )


def test_max_tokens_truncates_and_reports_it():
    with serve(lambda p: "a long answer") as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.chat.completions.create(model="m", messages=HI, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "a l"
    assert run.trace.calls[0].finish_reason == "length"
    assert run.trace.calls[0].max_tokens == 3


def test_agents_that_are_not_trained_keep_their_model_and_settings():
    routing = Routing(trained=frozenset({"writer"}), frozen={"checker": "base"}, temperature=0.7)
    with serve() as endpoint, client_in_scope(endpoint, routing, "checker") as (run, client):
        client.chat.completions.create(model="gpt-x", messages=HI, temperature=0.0)
        client.chat.completions.create(model="base", messages=HI, temperature=0.2)
    assert [(c.model, c.temperature, c.policy_version) for c in run.trace.calls] == [
        ("base", 0.0, None),
        ("base", 0.2, None),
    ]
    assert trace_to_transitions(run.trace, agents={"writer"}) == []


def test_each_agent_is_answered_by_its_policy():
    routing = Routing(
        trained=frozenset({"writer", "checker"}), policies={"writer": "sql", "checker": "critic"}, temperature=0.7
    )
    with serve(models=("sql", "critic", "base"), version=3) as endpoint:
        for agent, policy in routing.policies.items():
            with client_in_scope(endpoint, routing, agent) as (run, client):
                assert client.chat.completions.create(model="gpt-x", messages=HI).model == policy
            (transition,) = trace_to_transitions(run.trace, agents={"writer", "checker"})
            assert (transition.agent, transition.policy, transition.version) == (agent, policy, 3)
        with client_in_scope(endpoint, routing, "reader") as (run, client):
            client.chat.completions.create(model="critic", messages=HI)
            client.chat.completions.create(model="base", messages=HI)
    assert [(c.model, c.policy_version) for c in run.trace.calls] == [("critic", 3), ("base", None)]
    assert trace_to_transitions(run.trace, agents=routing.trained) == []


def test_an_unknown_model_of_an_untrained_agent_is_a_clear_404():
    with (
        serve() as endpoint,
        client_in_scope(endpoint, agent="checker") as (_, client),
        pytest.raises(openai.NotFoundError) as caught,
    ):
        client.chat.completions.create(model="gpt-x", messages=HI)
    assert "agent 'checker' is not trained, and model 'gpt-x' is not served here" in str(caught.value)


def test_calls_of_untrained_agents_go_upstream_and_are_recorded():
    """The upstream is a second endpoint, over real HTTP."""
    with serve(lambda p: "from afar") as far, rollout({"id": "far"}) as far_run:
        key = far.new_key()
        far.open(key, far_run.address, Routing(frozen={"": "policy"}))
        target = UpstreamServer(base_url=far.url, api_key=key)
        with serve(upstream=target) as near, client_in_scope(near, agent="critic") as (run, client):
            answer = client.chat.completions.create(model="policy-afar", messages=HI)
            streamed = list(client.chat.completions.create(model="policy-afar", messages=HI, stream=True))
    assert answer.choices[0].message.content == "from afar"
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == "from afar"
    assert [(c.agent, c.prompt_ids, (c.response or {}).get("content")) for c in run.trace.calls] == [
        ("critic", None, "from afar")
    ] * 2
    assert [c.context for c in far_run.trace.calls] == ["new", "new"]


def test_a_configured_model_replaces_the_model_of_the_upstream_request():
    routing = Routing(trained=frozenset({"writer"}), frozen={"critic": "base"})
    backend = ScriptedBackend(lambda p: "near", models=["policy"])
    with serve(lambda p: "from afar") as far, rollout({"id": "far"}) as far_run:
        key = far.new_key()
        far.open(key, far_run.address, Routing())
        target = UpstreamServer(base_url=far.url, api_key=key)
        near = PolicyEndpoint(backend, Chat(backend.tokenizer), upstream=target)
        with near, client_in_scope(near, routing, "critic") as (_, client):
            answer = client.chat.completions.create(model="gpt-x", messages=HI)
    assert answer.choices[0].message.content == "from afar"
    assert [c.model for c in far_run.trace.calls] == ["base"]


def test_what_an_upstream_can_do_is_for_the_upstream_to_say():
    """A frozen agent's grammar is forwarded unchanged and rejected by a server that does not support it."""
    with serve() as far, rollout({"id": "far"}) as far_run:
        key = far.new_key()
        far.open(key, far_run.address, Routing(frozen={"": "policy"}))
        target = UpstreamServer(base_url=far.url, api_key=key)
        with (
            serve(upstream=target) as near,
            client_in_scope(near, agent="critic") as (run, client),
            pytest.raises(openai.BadRequestError, match="guided_grammar") as caught,
        ):
            client.chat.completions.create(model="far", messages=HI, extra_body={"guided_grammar": "x"})
    assert caught.value.param == "guided_grammar", "the error's body is the upstream's own"
    assert run.infrastructure == [], "an error of the request is not an infrastructure failure"
    (call,) = run.trace.calls
    assert call.error is not None
    assert f"{far.url}/chat/completions returned status 400" in call.error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "blamed"), [(400, False), (422, False), (401, True), (429, True), (503, True)])
def test_an_upstream_s_error_reaches_the_agent_unchanged(status: int, blamed: bool, stream: bool):
    """The agent can handle the error itself. The status decides whether the rollout counts."""
    body = {"error": {"message": "no", "code": "context_length_exceeded"}}
    with (
        recording_server(refusal=JSONResponse(body, status, {"retry-after": "7"})) as server,
        serve(upstream=UpstreamServer(base_url=f"{server.url}/v1")) as endpoint,
        client_in_scope(endpoint, agent="critic") as (run, client),
        pytest.raises(openai.APIStatusError) as caught,
    ):
        list(client.with_options(max_retries=0).chat.completions.create(model="gpt", messages=HI, stream=stream))
    assert caught.value.status_code == status
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.response.headers["retry-after"] == "7"
    assert bool(run.infrastructure) == blamed
    assert run.trace.calls[0].error is not None


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_upstream_is_an_infrastructure_failure_with_a_clear_error(stream: bool):
    dead = UpstreamServer(base_url="http://127.0.0.1:9/v1")
    with (
        serve(upstream=dead) as endpoint,
        client_in_scope(endpoint, agent="critic") as (run, client),
        pytest.raises(openai.APIError) as caught,
    ):
        list(client.chat.completions.create(model="gpt", messages=HI, stream=stream))
    assert "could not reach http://127.0.0.1:9" in str(caught.value)
    assert len(run.infrastructure) == 1
    assert run.trace.calls[0].error is not None


def test_a_backend_that_fails_is_an_infrastructure_failure():
    with (
        serve(iter([])) as endpoint,
        client_in_scope(endpoint) as (run, client),
        pytest.raises(openai.InternalServerError, match="no more answers"),
    ):
        client.chat.completions.create(model="m", messages=HI)
    assert "no more answers" in run.infrastructure[0]
    assert run.trace.calls[0].error is not None


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ],
)
def test_unsupported_fields_are_refused_by_name(extra: dict[str, Any], param: str):
    with (
        serve() as endpoint,
        client_in_scope(endpoint) as (run, client),
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(model="m", messages=HI, **extra)
    assert caught.value.param == param
    assert run.infrastructure == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HI, "tools": ["add"]}),
        ("/chat/completions", {"messages": HI, "stop": 5}),
        ("/responses", {"input": "hi", "text": "json"}),
        ("/responses", {"input": [None]}),
        ("/messages", {"messages": HI, "max_tokens": 9, "output_config": "json"}),
        ("/messages", {"messages": [{"role": "user", "content": 5}], "max_tokens": 9}),
    ],
)
def test_a_malformed_request_is_the_agents_failure_and_not_the_machinerys(path: str, body: dict[str, Any]):
    with serve() as endpoint, client_in_scope(endpoint) as (run, client):
        response = httpx.post(
            f"{endpoint.url}{path}", json={"model": "policy", **body}, headers={"x-api-key": client.api_key}
        )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert run.infrastructure == []


def test_json_and_a_tool_call_are_instructions_in_the_prompt():
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "title": "Verdict"}}}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": schema},
        {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "parallel_tool_calls": False,
        },
    ]
    with serve() as endpoint, client_in_scope(endpoint) as (run, client):
        for form in forms:
            client.chat.completions.create(model="m", messages=[{"role": "system", "content": "be kind"}, *HI], **form)
    systems: list[str] = []
    for call in run.trace.calls:
        assert call.prompt_ids is not None
        systems.append(bytes(i for i in call.prompt_ids if i < 256).decode().partition("\nuser\n")[0])
    assert systems[0].startswith("system\nbe kind\n\nWrite your final answer as JSON")
    assert '"title": "Verdict"' in systems[1]
    assert "Answer by calling the function add.\nCall at most one function in an answer." in systems[2]
    assert [list(call.messages) for call in run.trace.calls] == [[{"role": "system", "content": "be kind"}, *HI]] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_the_complete_response_of_an_upstream_is_recorded(stream: bool):
    answer = 'so: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    with serve(lambda p: answer) as far, rollout({"id": "far"}) as far_run:
        key = far.new_key()
        far.open(key, far_run.address, Routing(frozen={"": "policy"}))
        near = serve(upstream=UpstreamServer(base_url=far.url, api_key=key))
        with near as endpoint, client_in_scope(endpoint, agent="critic") as (run, client):
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            given = client.chat.completions.create(model="gpt", messages=HI, tools=TOOLS, n=2, **options)
            if stream:
                list(given)
    theirs = {call.response["tool_calls"][0]["id"]: call for call in far_run.trace.calls if call.response}
    assert len(run.trace.calls) == 2
    for call in run.trace.calls:
        assert call.response is not None
        assert (call.response["content"], call.finish_reason, call.model) == ("so:", "tool_calls", "policy")
        (tool_call,) = call.response["tool_calls"]
        assert theirs.pop(tool_call["id"]).response == call.response
    sampled = sum(span.attributes.get("gen_ai.usage.output_tokens", 0) for span in run.spans)
    assert sampled == sum(len(c.output_ids) for c in far_run.trace.calls if c.output_ids is not None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_answer_that_cannot_be_recorded_fails_the_call(server: RecordingServer, stream: bool):
    """A server that returns something else for a request of the Responses API."""
    upstream = UpstreamServer(base_url=f"{server.url}/v1")
    with serve(upstream=upstream) as endpoint, client_in_scope(endpoint, agent="critic") as (run, client):
        with pytest.raises(openai.APIError, match="returned 0 complete responses; expected 1"):
            list(client.responses.create(model="gpt", input="hi", stream=stream))
        with pytest.raises(openai.APIError, match="returned 1 complete responses; expected 2"):
            list(client.chat.completions.create(model="gpt", messages=HI, n=2, stream=stream))
    assert len(run.infrastructure) == 2
    assert all(call.error is not None for call in run.trace.calls)


def test_an_upstream_s_events_reach_the_agent_byte_for_byte():
    """Comments, other line ends, data of several lines, and an unterminated last event."""
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "far"}
    chunks = [
        json.dumps({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}, ensure_ascii=False)
        for delta, finish in (
            ({"role": "assistant", "content": "s\u2028o"}, None),
            ({"content": "!"}, None),
            ({}, "stop"),
        )
    ]
    lines = chunks[1].replace("{", "{\r\ndata: ", 1)
    stream = (
        f": ping\r\n\r\nevent: message\r\nid: 7\r\ndata: {chunks[0]}\r\n\r\n"
        f"data: {lines}\r\n\r\ndata:{chunks[2]}\r\rdata: [DONE]"
    ).encode()
    with (
        recording_server(refusal=Response(stream, media_type="text/event-stream")) as server,
        serve(upstream=UpstreamServer(base_url=f"{server.url}/v1")) as endpoint,
        client_in_scope(endpoint, agent="critic") as (run, client),
    ):
        request = client.chat.completions.with_streaming_response.create(model="gpt", messages=HI, stream=True)
        with request as response:
            assert b"".join(response.iter_bytes()) == stream
    (call,) = run.trace.calls
    assert (call.response, call.finish_reason) == ({"role": "assistant", "content": "s\u2028o!"}, "stop")


def test_a_call_passed_on_to_its_origin_keeps_its_credentials(server: RecordingServer):
    """An untrained agent's redirected request, unchanged except for its original address."""
    origin = f"{server.url}/v1/chat/completions"
    headers = {"lightning-origin": origin, "lightning-origin-authorization": "Bearer sk-own", "OpenAI-Project": "p"}
    with serve() as endpoint, client_in_scope(endpoint, agent="critic") as (run, client):
        headers = sign_origin(run.secret, run.rollout, headers)
        client.with_options(default_headers=headers).chat.completions.create(model="gpt", messages=HI, temperature=0.5)
    (noted,) = server.requests
    assert noted.url == origin
    assert noted.body == {"model": "gpt", "messages": HI, "temperature": 0.5}
    assert (noted.headers["authorization"], noted.headers["openai-project"]) == ("Bearer sk-own", "p")
    assert not [name for name in noted.headers if name.startswith("lightning") or name == "traceparent"]
    assert (run.trace.calls[0].response or {})["content"] == "ok"


def test_an_idle_connection_outlives_what_clients_keep():
    with serve() as endpoint:
        connection = HTTPConnection(endpoint.url.removeprefix("http://").removesuffix("/v1"))
        connection.request("GET", "/health")
        connection.getresponse().read()
        time.sleep(5.5)  # httpx drops its own connections after 5
        connection.sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")  # a request() would reconnect
        assert connection.sock.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()


def test_an_api_that_is_not_spoken_is_a_clear_404():
    with (
        serve() as endpoint,
        client_in_scope(endpoint) as (_, client),
        pytest.raises(openai.NotFoundError, match="has no POST /v1/moderations; it supports POST"),
    ):
        client.moderations.create(input="hi")


def test_a_prompt_too_long_for_the_context_is_refused_with_both_numbers():
    with (
        serve(max_context=30) as endpoint,
        client_in_scope(endpoint) as (_, client),
        pytest.raises(openai.BadRequestError, match=r"51 tokens; expected fewer than the context length of 30"),
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 32}])


def test_keys_admit_one_live_rollout_each():
    with serve() as endpoint:
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=endpoint.url, api_key="lr-guess", max_retries=0).chat.completions.create(
                model="m", messages=HI
            )
        with client_in_scope(endpoint) as (_, client):
            assert [m.id for m in client.models.list()] == ["policy", "base"]
            key = client.api_key
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=endpoint.url, api_key=key, max_retries=0).chat.completions.create(model="m", messages=HI)


def test_a_request_without_address_belongs_to_the_keys_rollout():
    with serve() as endpoint, rollout({"id": "t"}) as run:
        key = endpoint.new_key()
        endpoint.open(key, run.address, Routing())
        OpenAI(base_url=endpoint.url, api_key=key).chat.completions.create(model="policy", messages=HI)
        foreign = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
        OpenAI(base_url=endpoint.url, api_key=key, default_headers=foreign).chat.completions.create(
            model="policy", messages=HI
        )
    assert [(c.agent, c.parent) for c in run.trace.calls] == [(None, run.address.span)] * 2


def test_closing_a_rollout_aborts_its_calls_and_closes_their_spans():
    with serve(delay=30) as endpoint:
        key = endpoint.new_key()
        with rollout({"id": "t"}) as run:
            endpoint.open(key, run.address, Routing())
            failures: list[Exception] = []

            def ask() -> None:
                try:
                    httpx.post(
                        f"{endpoint.url}/chat/completions",
                        json={"model": "policy", "messages": HI},
                        headers={"authorization": f"Bearer {key}"},
                    )
                except httpx.HTTPError as error:
                    failures.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            while not endpoint._sessions._by_key[key].work:
                time.sleep(0.01)
            time.sleep(0.1)
            began = time.monotonic()
            endpoint.close(key)
            assert time.monotonic() - began < 5
            thread.join()
        (call,) = run.trace.calls
        assert call.error is not None
        assert call.output_ids is None


def test_seeds_depend_on_the_prompt_and_not_on_the_order():
    seeds: list[tuple[str, int | None]] = []

    class Spy(ScriptedBackend):
        async def generate(self, prompt_ids: Any, params: Any, **options: Any):
            seeds.append((bytes(i for i in prompt_ids if i < 256).decode(), params.seed))
            async for delta in super().generate(prompt_ids, params, **options):
                yield delta

    def ask(order: str) -> dict[str, list[int | None]]:
        seeds.clear()
        backend = Spy(lambda p: "x")
        with (
            PolicyEndpoint(backend, Chat(backend.tokenizer)) as endpoint,
            client_in_scope(endpoint, seed=5) as (_, client),
        ):
            for letter in order:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": letter}])
        found: dict[str, list[int | None]] = {}
        for prompt, seed in seeds:
            found.setdefault(prompt, []).append(seed)
        return found

    first = ask("aab")
    assert first == ask("aba")
    assert len({s for values in first.values() for s in values}) == 3


def test_a_reward_can_name_the_response_it_is_for():
    with serve() as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.chat.completions.create(model="m", messages=HI)
        reward(0.5, call=answer.id)
    assert run.trace.rewards[0].call == run.trace.calls[0].id
    assert run.trace.reward is None


def test_fifty_concurrent_rollouts_never_mix():
    async def one(endpoint: PolicyEndpoint, number: int) -> tuple[int, list[str]]:
        key = endpoint.new_key()
        async with rollout({"id": str(number)}) as run:
            endpoint.open(key, run.address, TRAINED)
            with scope("writer"):
                address = current_address()
                assert address is not None
                headers = {**address.to_headers(), "authorization": f"Bearer {key}"}
                async with httpx.AsyncClient() as client:
                    for turn in range(3):
                        body = {"model": "m", "messages": [{"role": "user", "content": f"{number}.{turn}"}]}
                        response = await client.post(
                            f"{endpoint.url}/chat/completions", json=body, headers=headers, timeout=30
                        )
                        assert response.json()["choices"][0]["message"]["content"] == f"{number}.{turn}"
            endpoint.close(key)
        return number, [c.messages[0]["content"] for c in run.trace.calls]

    async def ask_all(endpoint: PolicyEndpoint) -> list[tuple[int, list[str]]]:
        return await asyncio.gather(*(one(endpoint, i) for i in range(50)))

    with serve(lambda prompt: prompt.split("user\n")[1].split("<")[0], delay=0.01) as endpoint:
        for number, contents in asyncio.run(ask_all(endpoint)):
            assert contents == [f"{number}.{turn}" for turn in range(3)]
