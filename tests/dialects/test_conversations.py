"""Each wire format through its provider's client, over real HTTP: the client reads the answer, and the record is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from google import genai
from google.genai import errors, types
from openai import AzureOpenAI, OpenAI

from lightning_core import reward, trace_to_transitions
from lightning_core.capture import ActiveRollout, scope
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.testing import Playground, tool_call
from tests.endpoint.serving import WRITER, client_in_scope, prompts_of, rows_of, serve, serve_upstream

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TWO_CALLS = f"both: {tool_call('add', a=1)}{tool_call('add', a=2)}"


def sum_up(prompt: str) -> str:
    return f"{prompt.count('<tool_response>')} results" if "<tool_response>" in prompt else TWO_CALLS


@dataclass(frozen=True)
class Answer:
    """An answer as a client reads it."""

    id: str
    text: str
    calls: list[tuple[str, Any]]
    end: str
    """``stop``, ``calls`` or ``length``."""
    tokens: tuple[int, int]
    turn: list[Any]
    """The answer in the next request."""
    call_ids: list[str]

    def without_ids(self) -> Answer:
        return replace(self, id="", turn=[], call_ids=[])


Turns = list[str | Answer | dict[str, str]]
"""What the user says, answers, and results by the ids of their calls. A result that begins with ``Error:`` is a failure."""


@dataclass(frozen=True)
class Wire:
    """A wire format in its provider's client."""

    name: str
    connect: Callable[[str, str, dict[str, str]], AbstractContextManager[Any]]
    """The client of an endpoint's URL, a key and headers."""
    ask: Callable[..., Answer]
    """``ask(client, turns, stream=…, model=…, system=…, limit=…, temperature=…)``, with a tool ``add``."""
    limit: str
    """The field of the number of tokens."""
    failed: type[Exception]
    """The errors of a response: of the server, in a stream, of a stranger, of a wrong request, and of a model that is not served."""
    broken: type[Exception]
    stranger: type[Exception]
    refused: type[Exception]
    absent: type[Exception]
    kind: Callable[[Any], object]
    """How an error of a wrong request names what is wrong."""


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def arguments_of(text: str) -> Any:
    """The arguments of a call, which a model may write as something else than JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def connect_openai(url: str, key: str, headers: dict[str, str]) -> OpenAI:
    return OpenAI(base_url=url, api_key=key, max_retries=0, default_headers=headers)


def ask_chat(
    client: OpenAI, turns: Turns, *, stream: bool, model: str = "m", system: str | None = None, **options: Any
) -> Answer:
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
        elif isinstance(turn, Answer):
            messages += turn.turn
        else:
            messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in turn.items()]
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    options["max_tokens"] = options.pop("limit", None)
    arguments: dict[str, Any] = {"model": model, "messages": messages, "tools": tools, **given(**options)}
    if stream:
        with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as events:
            events.until_done()
            answer: Any = events.current_completion_snapshot
    else:
        answer = client.chat.completions.create(**arguments)
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    return Answer(
        answer.id,
        choice.message.content or "",
        [(call.function.name, arguments_of(call.function.arguments)) for call in calls],
        {"stop": "stop", "tool_calls": "calls", "length": "length"}[choice.finish_reason],
        (answer.usage.prompt_tokens, answer.usage.completion_tokens),
        [choice.message.model_dump(exclude_none=True, exclude={"parsed"})],
        [call.id for call in calls],
    )


def ask_responses(
    client: OpenAI, turns: Turns, *, stream: bool, model: str = "m", system: str | None = None, **options: Any
) -> Answer:
    items: list[Any] = []
    for turn in turns:
        if isinstance(turn, str):
            items.append({"role": "user", "content": [{"type": "input_text", "text": turn}]})
        elif isinstance(turn, Answer):
            items += turn.turn
        else:
            items += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in turn.items()]
    tools: list[Any] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    options["max_output_tokens"] = options.pop("limit", None)
    answer: Any = client.responses.create(
        model=model, input=items, tools=tools, stream=stream, **given(instructions=system, **options)
    )
    text = None
    if stream:
        events = list(answer)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        answer = events[-1].response
        assert events[-1].type == f"response.{answer.status}"
        assert text == answer.output_text
    calls = [item for item in answer.output if item.type == "function_call"]
    if answer.status == "incomplete":
        assert answer.incomplete_details.reason == "max_output_tokens"
    return Answer(
        answer.id,
        answer.output_text,
        [(call.name, arguments_of(call.arguments)) for call in calls],
        "length" if answer.status == "incomplete" else "calls" if calls else "stop",
        (answer.usage.input_tokens, answer.usage.output_tokens),
        [item.model_dump(exclude_none=True) for item in answer.output],
        [call.call_id for call in calls],
    )


def connect_anthropic(url: str, key: str, headers: dict[str, str]) -> Anthropic:
    return Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0, default_headers=headers)


def ask_messages(client: Any, turns: Turns, *, stream: bool, model: str = "m", **options: Any) -> Answer:
    messages: list[Any] = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
        elif isinstance(turn, Answer):
            messages.append({"role": "assistant", "content": turn.turn})
        else:
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": id,
                    "content": [{"type": "text", "text": text.removeprefix("Error: ")}],
                    "is_error": text.startswith("Error: "),
                }
                for id, text in turn.items()
            ]
            messages.append({"role": "user", "content": results})
    system: Any = options.pop("system", None)
    arguments: dict[str, Any] = {
        "model": model,
        "max_tokens": options.pop("limit", 1000),
        "messages": messages,
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "u"},
        "extra_body": options,  # the SDK's methods have no temperature
    }
    if system:
        arguments["system"] = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    if stream:
        with client.stream(**arguments) as events:
            answer: Any = events.get_final_message()
    else:
        answer = client.create(**arguments)
    calls = [block for block in answer.content if block.type == "tool_use"]
    return Answer(
        answer.id,
        "".join(block.text for block in answer.content if block.type == "text"),
        [(call.name, call.input) for call in calls],
        {"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}[answer.stop_reason],
        (answer.usage.input_tokens, answer.usage.output_tokens),
        answer.content,
        [call.id for call in calls],
    )


def connect_gemini(url: str, key: str, headers: dict[str, str]) -> AbstractContextManager[genai.Client]:
    options = types.HttpOptions(base_url=url.removesuffix("/v1"), headers=headers)
    return closing(genai.Client(api_key=key, http_options=options))


def ask_gemini(
    client: genai.Client, turns: Turns, *, stream: bool, model: str = "m", system: str | None = None, **options: Any
) -> Answer:
    contents: list[Any] = []
    for turn in turns:
        if isinstance(turn, str):
            contents.append(types.UserContent(turn))
        elif isinstance(turn, Answer):
            contents.append(types.ModelContent(turn.turn))
        else:
            parts = [types.FunctionResponse(name="add", id=id, response={"result": text}) for id, text in turn.items()]
            contents.append(types.UserContent([types.Part(function_response=part) for part in parts]))
    settings: dict[str, Any] = {
        "tools": [{"function_declarations": [{"name": "add", "parameters_json_schema": SCHEMA}]}],
        "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "thinking_config": {"thinking_budget": 0},
        "system_instruction": system,
        "max_output_tokens": options.get("limit"),
        "temperature": options.get("temperature"),
    }
    arguments: dict[str, Any] = {"model": model, "contents": contents, "config": settings}
    if stream:
        answers: list[Any] = list(client.models.generate_content_stream(**arguments))
    else:
        answers = [client.models.generate_content(**arguments)]
    parts = [part for answer in answers for part in answer.candidates[0].content.parts or []]
    calls = [part.function_call for part in parts if part.function_call]
    usage = answers[-1].usage_metadata
    finish = answers[-1].candidates[0].finish_reason
    return Answer(
        answers[-1].response_id,
        "".join(part.text or "" for part in parts),
        [(call.name, call.args) for call in calls],
        {"STOP": "calls" if calls else "stop", "MAX_TOKENS": "length"}[finish.value],
        (usage.prompt_token_count, usage.candidates_token_count),
        parts,
        [call.id for call in calls],
    )


OF_OPENAI: Any = {
    "connect": connect_openai,
    "failed": openai.InternalServerError,
    "broken": openai.APIError,
    "stranger": openai.AuthenticationError,
    "refused": openai.BadRequestError,
    "absent": openai.NotFoundError,
    "kind": lambda error: error.param,
}
OF_ANTHROPIC: Any = {
    "connect": connect_anthropic,
    "limit": "max_tokens",
    "failed": anthropic.InternalServerError,
    "broken": anthropic.APIStatusError,
    "stranger": anthropic.AuthenticationError,
    "refused": anthropic.BadRequestError,
    "absent": anthropic.NotFoundError,
    "kind": lambda error: (error.body["type"], error.body["error"]["type"]),
}
CHAT = Wire("chat", ask=ask_chat, limit="max_tokens", **OF_OPENAI)
RESPONSES = Wire("responses", ask=ask_responses, limit="max_output_tokens", **OF_OPENAI)
MESSAGES = Wire("messages", ask=lambda client, *a, **k: ask_messages(client.messages, *a, **k), **OF_ANTHROPIC)
BETA = Wire("beta messages", ask=lambda client, *a, **k: ask_messages(client.beta.messages, *a, **k), **OF_ANTHROPIC)
GEMINI = Wire(
    "gemini",
    connect_gemini,
    ask_gemini,
    "maxOutputTokens",
    errors.ServerError,
    errors.APIError,
    errors.ClientError,
    errors.ClientError,
    errors.ClientError,
    lambda error: (error.code, error.status),
)
each_wire = pytest.mark.parametrize(
    "wire", [CHAT, RESPONSES, MESSAGES, pytest.param(BETA, marks=pytest.mark.long), GEMINI], ids=lambda wire: wire.name
)
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


@contextmanager
def talk(
    endpoint: PolicyEndpoint, wire: Wire, routing: Routing = WRITER, agent: str = "writer"
) -> Generator[tuple[ActiveRollout, Any]]:
    """A rollout with a client in the scope of ``agent``; only its key identifies the rollout."""
    with client_in_scope(endpoint, routing, agent) as (run, client):
        address = {name: str(client.default_headers[name]) for name in ("traceparent", "lightning-agent")}
        with wire.connect(endpoint.url, client.api_key, address) as talker:
            yield run, talker


@each_wire
@streamed_or_not
def test_an_answer_and_its_record(wire: Wire, stream: bool):
    with serve() as endpoint, talk(endpoint, wire) as (run, client):
        answer = wire.ask(client, ["hi"], stream=stream, system="be kind", temperature=0.3)
        reward(0.5, call=answer.id)
    assert (answer.text, answer.calls, answer.end) == ("hello", [], "stop")
    (call,) = run.trace.calls
    assert (call.agent, call.model, call.temperature, call.finish_reason) == ("writer", "policy", 0.3, "stop")
    assert call.prompt_ids is not None
    assert call.output_ids is not None
    assert call.output_ids.tolist() == [*b"hello", 257]
    assert call.response == {"role": "assistant", "content": "hello"}
    assert answer.tokens == (len(call.prompt_ids), 6)
    (prompt,) = prompts_of(run)
    assert prompt.startswith("system\nbe kind")
    assert prompt.endswith("user\nhi\nassistant\n")
    assert [given.call for given in run.trace.rewards] == [call.id]
    assert run.trace.reward is None


@each_wire
@pytest.mark.parametrize(
    "text",
    [
        "hällo wörld ✓",
        "",
        pytest.param(" spaced \n", marks=pytest.mark.long),
        pytest.param("x" * 300, marks=pytest.mark.long),
        TWO_CALLS,
        pytest.param('<tool_call>{"name": "add", "arguments": oops', marks=pytest.mark.long),
        '<tool_call>{"name": "add", "arguments": "oops"}</tool_call>',
    ],
)
def test_a_stream_adds_up_to_the_answer(wire: Wire, text: str):
    with serve(lambda p: text) as endpoint, talk(endpoint, wire) as (run, client):
        answer, streamed = (wire.ask(client, ["hi"], stream=stream) for stream in (False, True))
    assert streamed.without_ids() == answer.without_ids()
    assert streamed.id != answer.id
    first, second = (call.output_ids for call in run.trace.calls)
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()


@each_wire
@streamed_or_not
def test_parallel_calls_and_the_second_turn_continues_their_tokens(wire: Wire, stream: bool):
    with serve(sum_up) as endpoint, talk(endpoint, wire) as (run, client):
        answer = wire.ask(client, ["hi"], stream=stream)
        assert (answer.text, answer.end) == ("both:", "calls")
        assert answer.calls == [("add", {"a": 1}), ("add", {"a": 2})]
        results = dict(zip(answer.call_ids, ("3", "Error: too big"), strict=True))
        assert wire.ask(client, ["hi", answer, results, "go on"], stream=stream).text == "2 results"
    assert [call.context for call in run.trace.calls] == ["new", "clean"]
    assert rows_of(run) == [2]
    _, _, first, second, last = run.trace.calls[1].messages
    assert [message["tool_call_id"] for message in (first, second)] == answer.call_ids
    assert "Error: too big" in second["content"]
    assert last["role"] == "user"


@each_wire
@streamed_or_not
def test_an_answer_that_is_cut_says_so(wire: Wire, stream: bool):
    with serve(lambda p: "a long answer") as endpoint, talk(endpoint, wire) as (run, client):
        answer = wire.ask(client, ["hi"], stream=stream, limit=3)
    assert (answer.text, answer.end) == ("a l", "length")
    assert [(call.finish_reason, call.max_tokens) for call in run.trace.calls] == [("length", 3)]


@each_wire
@streamed_or_not
def test_a_cut_response_with_a_call_is_cut_in_the_record_and_for_the_client(wire: Wire, stream: bool):
    most = TWO_CALLS.index("</tool_call>") + 20  # the second call is cut
    with serve(lambda p: TWO_CALLS) as endpoint, talk(endpoint, wire) as (run, client):
        answer = wire.ask(client, ["hi"], stream=stream, limit=most)
    assert (answer.calls, answer.end) == ([("add", {"a": 1})], "length")
    (cut,) = trace_to_transitions(run.trace, agents={"writer"})
    assert cut.finish_reason == "length"


@each_wire
@streamed_or_not
def test_a_response_whose_end_is_cut_after_whole_calls_is_cut_in_the_record_only(wire: Wire, stream: bool):
    """SDKs refuse to run the calls of a response that is reported as cut."""
    with serve(lambda p: TWO_CALLS) as endpoint, talk(endpoint, wire) as (run, client):
        answer = wire.ask(client, ["hi"], stream=stream, limit=len(TWO_CALLS))
    assert (len(answer.calls), answer.end) == (2, "calls")
    (cut,) = trace_to_transitions(run.trace, agents={"writer"})
    assert cut.finish_reason == "length"


@each_wire
@streamed_or_not
def test_errors_are_of_the_class_that_the_client_has_for_them(wire: Wire, stream: bool):
    with serve(iter([])) as endpoint:
        with (
            wire.connect(endpoint.url, "lr-guess", {}) as stranger,
            pytest.raises(wire.stranger, match="unknown API key"),
        ):
            wire.ask(stranger, ["hi"], stream=stream)
        with talk(endpoint, wire) as (run, client):
            with pytest.raises(wire.refused, match=wire.limit) as refused:
                wire.ask(client, ["hi"], stream=stream, limit=0)
            with pytest.raises(wire.broken if stream else wire.failed, match="no more answers"):
                wire.ask(client, ["hi"], stream=stream)
        with (
            talk(endpoint, wire, agent="critic") as (_, client),
            pytest.raises(wire.absent, match="'critic' is not trained"),
        ):
            wire.ask(client, ["hi"], stream=stream)
    expected = {MESSAGES: ("error", "invalid_request_error"), GEMINI: (400, "INVALID_ARGUMENT")}
    assert wire.kind(refused.value) == expected.get(MESSAGES if wire is BETA else wire, wire.limit)
    assert len(run.infrastructure) == 1
    assert [call.refused is None for call in run.trace.calls] == [False, True]
    assert run.trace.calls[1].error is not None


@each_wire
@streamed_or_not
def test_an_untrained_agent_s_call_passes_through_unchanged_and_is_recorded(wire: Wire, stream: bool):
    """The upstream is a second endpoint; its requests and responses are not checked."""
    with (
        serve_upstream(lambda p: TWO_CALLS) as (far_run, upstream),
        serve(upstream=upstream) as near,
        talk(near, wire, agent="critic") as (run, client),
    ):
        answer = wire.ask(client, ["hi"], stream=stream)
        with pytest.raises(wire.refused, match=wire.limit):
            wire.ask(client, ["hi"], stream=stream, limit=0)
    call, refused = run.trace.calls
    assert (call.agent, call.prompt_ids, call.finish_reason, call.model) == ("critic", None, "tool_calls", "policy")
    assert call.response == far_run.trace.calls[0].response
    assert call.response is not None
    assert call.response["content"] == answer.text == "both:"
    assert [made["id"] for made in call.response["tool_calls"]] == answer.call_ids
    attributes = next(span.attributes for span in run.spans if span.span_id == call.id)
    usage = tuple(attributes[f"gen_ai.usage.{side}_tokens"] for side in ("input", "output"))
    assert usage == answer.tokens
    assert refused.error is not None
    assert refused.refused is None, "its provider refused it, not the endpoint"
    assert run.infrastructure == []


@pytest.mark.parametrize(
    ("wire", "client"),
    [
        *((wire, OpenAI(api_key="sk-own", max_retries=0)) for wire in (CHAT, RESPONSES)),
        *(
            (wire, AzureOpenAI(api_key="own", azure_endpoint="https://my.openai.azure.com", api_version="1"))
            for wire in (CHAT, RESPONSES)
        ),
        *((wire, Anthropic(api_key="sk-own", max_retries=0)) for wire in (MESSAGES, BETA)),
    ],
)
@streamed_or_not
def test_a_provider_s_client_is_redirected_with_the_address(
    playground: Playground, wire: Wire, client: Any, stream: bool
):
    """Gemini's is in ``test_gemini.py``, with its other cloud."""
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        assert wire.ask(client, ["hi"], stream=stream, model="policy").text == "answer to hi"
    assert [call.agent for call in run.trace.calls] == ["writer"]
