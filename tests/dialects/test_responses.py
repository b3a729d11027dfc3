"""OpenAI's Responses API: the openai client over real HTTP, against a scripted backend."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from lightning_core.capture import scope
from lightning_core.testing import Playground
from tests.dialects.test_conversations import TWO_CALLS, sum_up
from tests.endpoint.serving import WRITER, client_in_scope, prompts_of, serve, serve_upstream

TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "a + b", "parameters": {"type": "object"}, "strict": True}
]


def test_logprobs_go_with_their_text():
    arguments: Any = {"model": "m", "input": "hi", "include": ["message.output_text.logprobs"]}
    with serve(lambda p: "hello world!") as endpoint, client_in_scope(endpoint) as (_, client):
        answer = client.responses.create(**arguments)
        events = list(client.responses.create(**arguments, stream=True))
    assert [entry.logprob for entry in answer.output[0].content[0].logprobs] == [-0.5] * 13
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) == 3
    assert ["".join(entry.token for entry in delta.logprobs) for delta in deltas] == [delta.delta for delta in deltas]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.logprob for entry in done.logprobs] == [-0.5] * 13


@pytest.mark.parametrize("text", ["hällo wörld ✓", "", TWO_CALLS, 'no text <tool_call>{"name": oops'])
def test_the_events_of_a_stream_are_numbered_and_complete(text: str):
    with serve(lambda p: text) as endpoint, client_in_scope(endpoint, WRITER) as (_, client):
        answer = client.responses.create(model="m", input="hi", tools=TOOLS)
        events = list(client.responses.create(model="m", input="hi", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [(e.output_index, e.item.type) for e in events if e.type == "response.output_item.added"]
    assert added == list(enumerate(item.type for item in answer.output))
    assert len([e for e in events if e.type == "response.output_item.done"]) == len(added)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_forwarded_conversation_that_the_provider_keeps_is_recorded_as_a_whole(stream: bool):
    """The second request has only what is new."""
    with (
        serve_upstream(lambda p: "hello") as (_, upstream),
        serve(upstream=upstream) as near,
        client_in_scope(near, agent="critic") as (run, client),
    ):
        options: Any = {"model": "m", "instructions": "be kind", "stream": stream}
        answer: Any = client.responses.create(input="hi", **options)
        first = list(answer)[-1].response if stream else answer
        again: Any = client.responses.create(input="and?", previous_response_id=first.id, **options)
        list(again)
    conversation = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"},
    ]
    assert [list(call.messages) for call in run.trace.calls] == [conversation[:2], conversation]
