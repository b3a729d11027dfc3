"""OpenAI's Responses API: the openai client over real HTTP, against a scripted backend."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from openai import AzureOpenAI, OpenAI
from pydantic import BaseModel

from lightning_core.capture import ActiveRollout, reward, rollout, scope
from lightning_core.endpoint.server import Routing
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.testing import Playground
from lightning_core.transitions import trace_to_transitions, transitions_to_rows
from tests.endpoint.test_endpoint import client_in_scope, serve

TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "a + b", "parameters": {"type": "object"}, "strict": True}
]
TWO_CALLS = (
    'both: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
)
WRITER = Routing(trained=frozenset({"writer"}))


def sum_up(prompt: str) -> str:
    return f"{prompt.count('<tool_response>')} results" if "<tool_response>" in prompt else TWO_CALLS


def rows_of(run: ActiveRollout) -> list[int]:
    """Number of responses in each training row."""
    return [len(row.segments) for row in transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))]


def prompts_of(run: ActiveRollout) -> list[str]:
    return [bytes(i for i in call.prompt_ids if i < 256).decode() for call in run.trace.calls if call.prompt_ids is not None]  # fmt: skip


def test_an_answer_and_its_record():
    with serve() as endpoint, client_in_scope(endpoint) as (run, client):
        answer = client.responses.create(
            model="gpt-x", instructions="be kind", input="hi", include=["message.output_text.logprobs"]
        )
        reward(0.5, call=answer.id)
    assert answer.output_text == "hello"
    assert answer.status == "completed"
    assert answer.usage is not None
    (call,) = run.trace.calls
    assert call.agent == "writer"
    assert call.output_ids is not None
    assert call.output_ids.tolist() == [*b"hello", 257]
    assert call.prompt_ids is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(call.prompt_ids), 6)
    assert prompts_of(run) == ["system\nbe kind\nuser\nhi\nassistant\n"]
    (message,) = answer.output
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert [entry.logprob for entry in part.logprobs or ()] == [-0.5] * 6
    assert run.trace.rewards[0].call == call.id


def test_streamed_logprobs_go_with_their_text():
    with serve(lambda p: "hello world!") as endpoint, client_in_scope(endpoint) as (_, client):
        events = list(
            client.responses.create(model="m", input="hi", include=["message.output_text.logprobs"], stream=True)
        )
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) == 3
    assert ["".join(entry.token for entry in delta.logprobs) for delta in deltas] == [delta.delta for delta in deltas]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.logprob for entry in done.logprobs] == [-0.5] * 13


def test_truncation_is_reported():
    with serve(lambda p: "a long answer") as endpoint, client_in_scope(endpoint) as (_, client):
        answer = client.responses.create(model="m", input="hi", max_output_tokens=3)
        *_, last = client.responses.create(model="m", input="hi", max_output_tokens=3, stream=True)
    assert (answer.status, answer.output_text) == ("incomplete", "a l")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"


@pytest.mark.parametrize("text", ["hällo wörld ✓", "", " spaced \n", TWO_CALLS, 'no text <tool_call>{"name": oops'])
def test_a_stream_adds_up_to_the_answer(text: str):
    with serve(lambda p: text) as endpoint, client_in_scope(endpoint, WRITER) as (run, client):
        answer = client.responses.create(model="m", input="hi", tools=TOOLS)
        with client.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert streamed.output_text == answer.output_text
    written = [[(i.name, i.arguments) for i in a.output if i.type == "function_call"] for a in (answer, streamed)]
    assert written[0] == written[1]
    added = [(e.output_index, e.item.type) for e in events if e.type == "response.output_item.added"]
    assert added == list(enumerate(item.type for item in answer.output))
    assert len([e for e in events if e.type == "response.output_item.done"]) == len(added)
    assert events[-1].type == "response.completed"
    first, second = run.trace.calls
    assert first.output_ids is not None
    assert second.output_ids is not None
    assert first.output_ids.tolist() == second.output_ids.tolist()
    assert streamed.usage == answer.usage


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_and_the_second_turn_continues_their_tokens(stream: bool):
    with serve(sum_up) as endpoint, client_in_scope(endpoint, WRITER) as (run, client):

        def ask(items: list[Any]) -> Any:
            if not stream:
                return client.responses.create(model="m", instructions="add up", input=items, tools=TOOLS)
            with client.responses.stream(model="m", instructions="add up", input=items, tools=TOOLS) as events:
                return events.get_final_response()

        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        answer = ask(items)
        assert answer.output_text == "both:"
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
        assert ask(items).output_text == "2 results"
    assert [c.context for c in run.trace.calls] == ["new", "clean"]
    assert rows_of(run) == [2]
    recorded = (run.trace.calls[0].response or {})["tool_calls"]
    assert [call["id"] for call in recorded] == [call.call_id for call in calls]


def test_a_named_response_is_continued_without_its_instructions():
    with serve(sum_up) as endpoint, client_in_scope(endpoint, WRITER) as (run, client):
        answer = client.responses.create(model="m", instructions="kindly", input="hi", tools=TOOLS)
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": [{"type": "input_text", "text": "3"}]}
            for item in answer.output
            if item.type == "function_call"
        ]
        more = client.responses.create(
            model="m", instructions="kindly", input=outputs, tools=TOOLS, previous_response_id=answer.id
        )
        last = client.responses.create(model="m", input="so?", tools=TOOLS, previous_response_id=more.id)
        with pytest.raises(
            openai.BadRequestError, match="is 'resp_1'; expected the id of an earlier response of this rollout"
        ) as caught:
            client.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    assert more.output_text == last.output_text == "2 results"
    assert [c.context for c in run.trace.calls] == ["new", "clean", "new", None]
    assert [m["role"] for m in run.trace.calls[2].messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    assert "kindly" not in prompts_of(run)[2]


class Verdict(BaseModel):
    good: bool


def test_a_schema_is_requested_and_parsed_by_the_client():
    with (
        serve(lambda p: '{"good": true}' if '"good"' in p else "?") as endpoint,
        client_in_scope(endpoint) as (run, client),
    ):
        answer = client.responses.parse(model="m", input="hi", text_format=Verdict)
    assert answer.output_parsed == Verdict(good=True)
    assert "satisfies this JSON schema" in prompts_of(run)[0]


def test_a_forced_call_is_an_instruction_and_an_unknown_tool_is_refused():
    with serve(lambda p: TWO_CALLS) as endpoint, client_in_scope(endpoint) as (run, client):
        client.responses.create(model="m", input="hi", tools=TOOLS, tool_choice="required")
        client.responses.create(model="m", input="hi", tools=TOOLS, tool_choice={"type": "function", "name": "add"})
        with pytest.raises(openai.BadRequestError, match=r"requires a call of 'sub'.*are \['add'\]"):
            client.responses.create(model="m", input="hi", tools=TOOLS, tool_choice={"type": "function", "name": "sub"})
    first, second = prompts_of(run)
    assert "Answer by calling a function." in first
    assert "Answer by calling the function add." in second


def test_what_has_no_influence_is_accepted():
    with serve() as endpoint, client_in_scope(endpoint) as (_, client):
        answer = client.responses.create(
            model="m",
            input=[
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": "hi"},
            ],
            reasoning={"effort": "low"},
            text={"verbosity": "low"},
            store=True,
            truncation="disabled",
            metadata={"a": "b"},
        )
    assert answer.output_text == "hello"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": 3}, "input"),
        ({"input": []}, "messages"),
    ],
)
def test_unsupported_fields_are_refused_by_name(extra: dict[str, Any], param: str):
    with (
        serve() as endpoint,
        client_in_scope(endpoint) as (run, client),
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.responses.create(**{"model": "m", "input": "hi", **extra})
    assert caught.value.param == param
    assert run.infrastructure == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_backend_that_fails_raises_in_the_client(stream: bool):
    with (
        serve(iter([])) as endpoint,
        client_in_scope(endpoint) as (run, client),
        pytest.raises(openai.APIError, match="no more answers") as caught,
    ):
        list(client.responses.create(model="m", input="hi", stream=stream))
    assert isinstance(caught.value, openai.InternalServerError) is not stream
    assert len(run.infrastructure) == 1
    assert run.trace.calls[0].error is not None


@pytest.mark.parametrize(
    "client",
    [
        OpenAI(api_key="sk-own", max_retries=0),
        AzureOpenAI(api_key="own", azure_endpoint="https://my.openai.azure.com", api_version="1", max_retries=0),
    ],
    ids=["openai", "azure"],
)
def test_a_provider_s_client_is_redirected_with_the_address(playground: Playground, client: OpenAI):
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        answer = client.responses.create(model="policy", input="hi")
        streamed = list(client.responses.create(model="policy", input="hi", stream=True))
    assert answer.output_text == "answer to hi"
    assert streamed[-1].type == "response.completed"
    assert [call.agent for call in run.trace.calls] == ["writer"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_untrained_agent_s_call_passes_through_unchanged_and_is_recorded(stream: bool):
    """The upstream is a second endpoint; its requests and responses are not checked."""
    with serve(lambda p: TWO_CALLS) as far, rollout({"id": "far"}) as far_run:
        key = far.new_key()
        far.open(key, far_run.address, Routing(frozen={"": "policy"}))
        upstream = UpstreamServer(base_url=far.url, api_key=key)
        with serve(upstream=upstream) as near, client_in_scope(near, agent="critic") as (run, client):
            answer: Any = client.responses.create(model="gpt", input="hi", tools=TOOLS, stream=stream)
            if stream:
                answer = list(answer)[-1].response
            with pytest.raises(openai.BadRequestError, match="web_search"):
                list(client.responses.create(model="gpt", input="hi", tools=[{"type": "web_search"}], stream=stream))
    call, refused = run.trace.calls
    assert call.agent == "critic"
    assert call.prompt_ids is None
    assert call.finish_reason == "tool_calls"
    assert call.response is not None
    assert call.response["content"] == answer.output_text == "both:"
    assert [c["id"] for c in call.response["tool_calls"]] == [
        c.call_id for c in answer.output if c.type == "function_call"
    ]
    attributes = next(span.attributes for span in run.spans if span.span_id == call.id)
    assert attributes["gen_ai.usage.output_tokens"] == answer.usage.output_tokens
    assert refused.error is not None
    assert far_run.trace.calls[0].model == "policy"


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_over_responses(playground: Playground, stream: bool):
    model = ChatOpenAI(model="policy", api_key="sk-own", use_responses_api=True, max_retries=0)  # pyright: ignore
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        if stream:
            message = None
            for chunk in model.stream("hi"):
                message = chunk if message is None else message + chunk
        else:
            message = model.invoke("hi")
    assert message is not None
    assert message.text == "answer to hi"
    assert message.usage_metadata is not None
    (call,) = run.trace.calls
    assert call.output_ids is not None
    assert message.usage_metadata["output_tokens"] == len(call.output_ids)
