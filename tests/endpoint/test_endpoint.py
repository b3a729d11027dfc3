"""The endpoint over real HTTP, with the openai client and a scripted backend."""

import asyncio
import json
import threading
import time
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from starlette.responses import JSONResponse, Response

from lightning_core import rollout, trace_to_transitions
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import current_address, scope
from lightning_core.capture.signatures import sign_origin
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.server import Routing
from lightning_core.testing.recording_server import RecordingServer, recording_server
from tests.endpoint.serving import HI, TRAINED, client_in_rollout, client_in_scope, serve, serve_backend, serve_upstream

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


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


def test_a_configured_model_replaces_the_model_of_the_upstream_request():
    routing = Routing(trained=frozenset({"writer"}), frozen={"critic": "base"})
    backend = ScriptedBackend(lambda p: "near", models=["policy"])
    with (
        serve_upstream(lambda p: "from afar", Routing()) as (far_run, upstream),
        serve_backend(backend, upstream=upstream) as near,
        client_in_scope(near, routing, "critic") as (_, client),
    ):
        answer = client.chat.completions.create(model="gpt-x", messages=HI)
    assert answer.choices[0].message.content == "from afar"
    assert [c.model for c in far_run.trace.calls] == ["base"]


def test_an_upstream_gets_the_ids_of_rollout_and_call(server: RecordingServer):
    with (
        serve(upstream=UpstreamServer(base_url=f"{server.url}/v1")) as near,
        client_in_scope(near, agent="critic") as (run, client),
    ):
        client.chat.completions.create(model="far", messages=HI)
    (call,) = run.trace.calls
    (request,) = server.requests
    assert request.headers["traceparent"] == f"00-{run.rollout}-{call.id}-01"


def test_an_upstream_on_this_machine_is_not_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with (
        serve_upstream(lambda p: "from afar") as (_, upstream),
        serve(upstream=upstream) as near,
        client_in_scope(near, agent="critic") as (_, client),
        client.with_options(http_client=httpx.Client(trust_env=False)) as direct,
    ):
        answer = direct.chat.completions.create(model="far", messages=HI)
    assert answer.choices[0].message.content == "from afar"


def test_what_an_upstream_can_do_is_for_the_upstream_to_say():
    """A frozen agent's grammar is forwarded unchanged and rejected by a server that does not support it."""
    with (
        serve_upstream(lambda p: "hello") as (_, upstream),
        serve(upstream=upstream) as near,
        client_in_scope(near, agent="critic") as (run, client),
        pytest.raises(openai.BadRequestError, match="guided_grammar") as caught,
    ):
        client.chat.completions.create(model="far", messages=HI, extra_body={"guided_grammar": "x"})
    assert caught.value.param == "guided_grammar", "the error's body is the upstream's own"
    assert run.infrastructure == [], "an error of the request is not an infrastructure failure"
    (call,) = run.trace.calls
    assert call.error is not None
    assert f"{upstream.base_url}/chat/completions returned status 400" in call.error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "blamed"), [(400, False), (422, False), (401, True), (429, True), (503, True)])
def test_an_upstream_s_error_reaches_the_agent_unchanged(status: int, blamed: bool, stream: bool):
    """The agent can handle the error itself. The status decides whether the rollout counts."""
    body = {"error": {"message": "no", "code": "context_length_exceeded"}}
    with (
        recording_server(refusal=JSONResponse(body, status, {"retry-after": "7"})) as server,
        serve(upstream=f"{server.url}/v1") as endpoint,
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
    with (
        serve(upstream="http://127.0.0.1:9/v1") as endpoint,
        client_in_scope(endpoint, agent="critic") as (run, client),
        pytest.raises(openai.APIError) as caught,
    ):
        list(client.chat.completions.create(model="gpt", messages=HI, stream=stream))
    assert "could not reach http://127.0.0.1:9" in str(caught.value)
    assert "set the agent's model to 'base' under agents.frozen, or train the agent." in str(caught.value)
    assert len(run.infrastructure) == 1
    assert run.trace.calls[0].error is not None


def test_the_advice_on_a_dead_upstream_can_be_followed_without_a_name():
    with serve(upstream="http://127.0.0.1:9/v1") as endpoint, client_in_rollout(endpoint, TRAINED) as (_, client):
        response = client.post("/chat/completions", json={"model": "gpt", "messages": HI})
    assert "give the calls a name: mark the function that makes them with @trainable('NAME')" in response.text
    assert "Then set the model of NAME to 'base' under agents.frozen, or train NAME." in response.text
    assert "the agent's model" not in response.text


def test_an_unknown_model_of_an_agent_without_a_name_is_a_404_that_says_how_to_name_it():
    with serve() as endpoint, client_in_rollout(endpoint, TRAINED) as (_, client):
        response = client.post("/chat/completions", json={"model": "gpt-x", "messages": HI})
    assert response.status_code == 404
    assert "mark the function that makes them with @trainable('NAME')" in response.text
    assert "Then train NAME, or set its model under agents.frozen" in response.text


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
    with (
        serve_upstream(lambda p: answer) as (far_run, upstream),
        serve(upstream=upstream) as endpoint,
        client_in_scope(endpoint, agent="critic") as (run, client),
    ):
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
    upstream = f"{server.url}/v1"
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
        serve(upstream=f"{server.url}/v1") as endpoint,
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
        pytest.raises(openai.BadRequestError, match=r"51 tokens.*context length of 30.*or choose another model"),
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
        with serve_backend(backend) as endpoint, client_in_scope(endpoint, seed=5) as (_, client):
            for letter in order:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": letter}])
        found: dict[str, list[int | None]] = {}
        for prompt, seed in seeds:
            found.setdefault(prompt, []).append(seed)
        return found

    first = ask("aab")
    assert first == ask("aba")
    assert len({s for values in first.values() for s in values}) == 3


def test_fifty_concurrent_rollouts_never_mix():
    async def one(endpoint: Any, number: int) -> tuple[int, list[str]]:
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

    async def ask_all(endpoint: Any) -> list[tuple[int, list[str]]]:
        return await asyncio.gather(*(one(endpoint, i) for i in range(50)))

    with serve(lambda prompt: prompt.split("user\n")[1].split("<")[0], delay=0.01) as endpoint:
        for number, contents in asyncio.run(ask_all(endpoint)):
            assert contents == [f"{number}.{turn}" for turn in range(3)]
