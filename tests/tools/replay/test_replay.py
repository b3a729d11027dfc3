"""Recorded responses in every wire format, through its provider's client, over real HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from lightning_core import trace as tr
from lightning_core.config import Config
from lightning_core.dialects import ALL_DIALECTS, chat_completions, gemini
from lightning_core.dialects.dialect import Dialect, event_data
from lightning_core.dialects.exchange import UpstreamResponse
from lightning_core.tools.replay.responses import ResponsePool, conversation_key
from lightning_core.tools.replay.server import replaying
from lightning_core.trace import SpanRecord
from tests.dialects.test_conversations import Wire, each_wire, serve, streamed_or_not, sum_up, talk

CONFIG = Config.model_validate({"policy": {"model": "m"}})
HI = [{"role": "user", "content": "hi"}]
COUNTS = {tr.INPUT_TOKENS: 50, tr.OUTPUT_TOKENS: 7, tr.CACHED_TOKENS: 20}


def answered(
    text: str, messages: Sequence[Any], *, number: int = 0, seconds: float = 0.0, tool_calls: Any = None, **more: Any
) -> SpanRecord:
    """A call of the model ``m``."""
    message = {"role": "assistant", "content": text, **({"tool_calls": tool_calls} if tool_calls else {})}
    return SpanRecord(
        name="chat",
        trace_id="1" * 32,
        span_id=f"{number:016x}",
        parent_id=None,
        start_ns=0,
        end_ns=int(seconds * 1e9),
        attributes={
            tr.OPERATION: "chat",
            tr.REQUEST_MODEL: "m",
            tr.RESPONSE_MODEL: "m-2026",
            tr.INPUT_MESSAGES: json.dumps(messages),
            tr.OUTPUT_MESSAGES: json.dumps([message]),
            **more,
        },
    )


def recorded(*texts: str, seconds: float = 0.0, **attributes: Any) -> ResponsePool:
    """Responses of the model ``m`` to ``HI``."""
    pool = ResponsePool()
    pool.add(answered(text, HI, number=number, seconds=seconds, **attributes) for number, text in enumerate(texts))
    return pool


@contextmanager
def served(responses: ResponsePool) -> Generator[str]:
    """The URL of a server of ``responses``."""
    with replaying(CONFIG, responses) as config:
        assert config.policy.upstream is not None
        yield config.policy.upstream.base_url


@each_wire
@streamed_or_not
def test_a_conversation_with_tools_is_the_recorded_one(wire: Wire, stream: bool) -> None:
    with serve(sum_up) as endpoint, talk(endpoint, wire) as (run, client):
        asked = wire.ask(client, ["hi"], stream=not stream, system="be kind")
        results = dict(zip(asked.call_ids, ("3", "Error: too big"), strict=True))
        last = wire.ask(client, ["hi", asked, results, "go on"], stream=not stream, system="be kind")
    responses = ResponsePool()
    responses.add(run.spans)
    with served(responses) as url, wire.connect(url, "no key", {}) as client:
        answer = wire.ask(client, ["hi"], stream=stream, system="be kind")
        assert answer.without_ids() == asked.without_ids()
        assert answer.call_ids == asked.call_ids
        again = wire.ask(client, ["hi", answer, results, "go on"], stream=stream, system="be kind")
        assert again.without_ids() == last.without_ids()
        with pytest.raises(
            Exception, match=r"no response of 'm' to this conversation is recorded: 2 messages, .*'hello'"
        ):
            wire.ask(client, ["hello"], stream=stream, system="be kind")
    assert responses.describe_use() == ["answered from 2 recorded responses, of 2"]


BODIES: Mapping[str, Mapping[str, Any]] = {
    "/chat/completions": {"messages": HI, "stream_options": {"include_usage": True}},
    "/responses": {"input": "hi"},
    "/messages": {"messages": HI, "max_tokens": 9},
    "/completions": {"prompt": "hi", "stream_options": {"include_usage": True}},
    gemini.PATH: {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
each_dialect = pytest.mark.parametrize("dialect", ALL_DIALECTS, ids=lambda dialect: dialect.PATH)


def call(url: str, dialect: Dialect, *, stream: bool, **more: Any) -> Sequence[UpstreamResponse]:
    """What the policy endpoint reads of the response to ``HI``."""
    body, path = {**BODIES[dialect.PATH], **more}, dialect.PATH
    if dialect is gemini:
        path = f"/models/m:{gemini.STREAM}?alt=sse" if stream else "/models/m:generateContent"
    else:
        body |= {"model": "m", "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    answer = httpx.post(f"{url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return dialect.read_response(answer.json())
    reader = dialect.stream_reader()
    for event in answer.content.split(b"\n\n"):
        if (data := event_data(event)) not in (b"", b"[DONE]"):
            reader.read(json.loads(data))
    return reader.responses()


@pytest.fixture(scope="module")
def counted() -> Generator[str]:
    with served(recorded("hello", **COUNTS)) as url:
        yield url


@each_dialect
@streamed_or_not
def test_model_and_tokens_are_the_recorded_ones(counted: str, dialect: Dialect, stream: bool) -> None:
    (found,) = call(counted, dialect, stream=stream)
    assert (found.message["content"], found.model) == ("hello", "m-2026")
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (50, 7, 20)


@streamed_or_not
def test_tokens_that_are_not_recorded_are_not_made_up(stream: bool) -> None:
    responses = recorded("hello")
    with served(responses) as url:
        counts = {dialect.PATH: call(url, dialect, stream=stream)[0] for dialect in ALL_DIALECTS}
    zeros = {path for path, found in counts.items() if (found.input_tokens, found.output_tokens) == (0, 0)}
    assert zeros == {"/responses", "/messages"}, "these have no response without counts"
    others = {(found.input_tokens, found.output_tokens) for path, found in counts.items() if path not in zeros}
    assert others == {(None, None)}
    assert any(line.startswith("2 answers counted as 0 tokens") for line in responses.describe_use())


def test_equal_requests_get_all_responses_before_one_is_repeated() -> None:
    responses = recorded("a", "b", "c")
    with served(responses) as url, OpenAI(base_url=url, api_key="no key") as client:
        messages: Any = HI
        several = client.chat.completions.create(model="m", messages=messages, n=2)
        ones = [client.chat.completions.create(model="m", messages=messages) for _ in range(3)]
    assert [choice.message.content for choice in several.choices] == ["a", "b"]
    assert [one.choices[0].message.content for one in ones] == ["c", "a", "b"]
    lines = responses.describe_use()
    assert lines[0] == "answered from 3 recorded responses, of 3"
    assert lines[1].startswith("2 answers repeated an earlier one")


def test_a_conversation_that_the_server_keeps() -> None:
    """As a forwarded conversation is recorded: the next request has it by the id of the response alone."""
    history = [*HI, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
    pool = recorded("hello")
    pool.add([answered("more", history, number=9)])
    with served(pool) as url, OpenAI(base_url=url, api_key="no key", max_retries=0) as client:
        system = {"instructions": "be kind"}
        with pytest.raises(APIStatusError, match="not the id of a response that was answered here"):
            client.responses.create(model="m", input="and?", previous_response_id="resp_other")
        one = client.responses.create(model="m", input="hi")
        two = client.responses.create(model="m", input="and?", previous_response_id=one.id)
        with pytest.raises(APIStatusError, match="no response of 'm' to this conversation"):
            client.responses.create(model="m", input="and?", previous_response_id=one.id, **system)  # type: ignore[call-overload]
    assert (one.output_text, two.output_text) == ("hello", "more")


def test_calls_are_identified_by_their_place_and_not_by_their_ids() -> None:
    """Google's API gives no ids: those of each response begin anew, those of a request count on."""

    def turn(number: int, identifier: str) -> list[dict[str, Any]]:
        function = {"name": "add", "arguments": json.dumps({"a": number})}
        call = {"id": identifier, "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": identifier, "content": str(number)}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]

    in_request = [*HI, *turn(1, "call00000"), *turn(2, "call00001")]
    sent = [*HI, *turn(1, "call00000"), *turn(2, "call00000")]
    assert conversation_key(in_request) == conversation_key(sent)
    assert conversation_key(sent) != conversation_key([*HI, *turn(2, "call00000"), *turn(1, "call00000")])


def test_the_texts_of_one_turn_may_be_divided() -> None:
    parts = [{"role": "assistant", "content": "one "}, {"role": "assistant", "content": "two"}]
    whole = [{"role": "assistant", "content": "one two"}]
    assert conversation_key([*HI, *parts]) == conversation_key([*HI, *whole])
    picture = {"type": "image_url", "image_url": {"url": "data:,a"}}
    other = {"type": "image_url", "image_url": {"url": "data:,b"}}
    shown = [[{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}] for part in (picture, other)]
    assert len({conversation_key(messages) for messages in (HI, *shown)}) == 3


@streamed_or_not
def test_a_free_form_tool(stream: bool) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
    tools: Any = [{"type": "custom", "custom": {"name": "sql"}}]
    pool = ResponsePool()
    pool.add([answered("", HI, tool_calls=[call])])
    with served(pool) as url:
        body = {"model": "m", "messages": HI, "tools": tools, "stream": stream}
        data = httpx.post(f"{url}/chat/completions", json=body)
    assert data.status_code == 200
    assert "SELECT 1" in data.text
    if stream:
        reader = chat_completions.stream_reader()
        for event in data.content.split(b"\n\n"):
            if (text := event_data(event)) not in (b"", b"[DONE]"):
                reader.read(json.loads(text))
        (found,) = reader.responses()
    else:
        (found,) = chat_completions.read_response(data.json())
    (read,) = found.message["tool_calls"]
    assert read["custom"] == {"name": "sql", "input": "SELECT 1"}


def test_a_rollout_keeps_to_one_trace() -> None:
    """Two independent calls and one that has both answers: a combination that never was has no response."""
    pool = ResponsePool()
    for trace, (plan, answer) in enumerate((("p0", "a0"), ("p1", "a1"))):
        both = [{"role": "user", "content": f"{plan} {answer}"}]
        calls = [("plan", plan), ("answer", answer)]
        spans = [
            answered(text, [{"role": "user", "content": asked}], number=n) for n, (asked, text) in enumerate(calls)
        ]
        spans.append(answered(f"done {trace}", both, number=9))
        pool.add([replace(span, trace_id=f"{trace:032x}") for span in spans])
    with served(pool) as url:

        def ask(rollout: int, text: str) -> str:
            headers = {"traceparent": f"00-{rollout:032x}-{rollout:016x}-01"}
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            found = httpx.post(f"{url}/chat/completions", json=body, headers=headers)
            assert found.status_code == 200, found.text
            return found.json()["choices"][0]["message"]["content"]

        first = {rollout: [ask(rollout, "plan")] for rollout in (1, 2, 3)}
        for rollout in (3, 2, 1):
            first[rollout].append(ask(rollout, "answer"))
        assert first == {1: ["p0", "a0"], 2: ["p1", "a1"], 3: ["p0", "a0"]}
        assert [ask(rollout, " ".join(said)) for rollout, said in first.items()] == ["done 0", "done 1", "done 0"]


def test_a_rollout_gets_each_response_of_its_trace_once() -> None:
    """Equal requests of one rollout, whose calls are in traces of their own, as those of a program without marks."""
    pool = ResponsePool()
    for number in range(4):
        pool.add([replace(answered(f"a{number}", HI), trace_id=f"{number:032x}")])
    key = [conversation_key(HI)]
    taken = [pool.take("m", key, rollout) for rollout in ("1", "1", "2", "2", "1")]
    assert [found[0].message["content"] for found in taken if found] == ["a0", "a1", "a2", "a3", "a0"]


@pytest.mark.parametrize(
    "error",
    [
        'HTTP 400: {"error": {"message": "not allowed here"}}',
        'UpstreamRefusal: http://far/v1/chat/completions returned status 400: {"error": {"message": "not allowed here"}}',
        "HTTP 422: not allowed here",
    ],
)
def test_a_refusal_that_an_agent_may_handle_is_recorded_too(error: str) -> None:
    pool = ResponsePool()
    refused = replace(answered("", HI), error=error)
    passing = replace(answered("", HI, number=1), error="HTTP 503: busy")
    pool.add([refused, passing, answered("hello", HI, number=2)])
    with served(pool) as url, OpenAI(base_url=url, api_key="no key", max_retries=0) as client:
        messages: Any = HI
        with pytest.raises(APIStatusError, match="not allowed here") as caught:
            client.chat.completions.create(model="m", messages=messages)
        assert client.chat.completions.create(model="m", messages=messages).choices[0].message.content == "hello"
    assert caught.value.status_code == int(error.partition("4")[2][:2]) + 400
    assert pool.describe_use()[0] == "answered from 2 recorded responses, of 2"


@each_wire
def test_a_slow_stream_is_read(wire: Wire) -> None:
    with serve(lambda prompt: "hello") as endpoint, talk(endpoint, wire) as (run, client):
        wire.ask(client, ["hi"], stream=True)
    pool = ResponsePool()
    pool.add(replace(span, end_ns=span.start_ns + 700_000_000) for span in run.spans)
    with served(pool) as url, wire.connect(url, "no key", {}) as client:
        began = time.monotonic()
        assert wire.ask(client, ["hi"], stream=True).text == "hello"
        assert time.monotonic() - began >= 0.7


def test_a_slow_stream_is_no_silence() -> None:
    """A client's time-out of reading is that between two parts."""
    with served(recorded("hello", seconds=1.5)) as url:
        body = {"model": "m", "messages": HI, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=1.0) as found:
            assert "hello" in "".join(found.iter_text())


def test_a_request_that_waits_does_not_hold_up_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with served(recorded("hello", seconds=60.0)) as url, suppress(httpx.TimeoutException):
        httpx.post(f"{url}/chat/completions", json={"model": "m", "messages": HI}, timeout=0.3)
    assert "Traceback" not in capfd.readouterr().err


def test_several_prompts_of_one_request() -> None:
    pool = recorded("hello")
    pool.add([answered("bye", [{"role": "user", "content": "so long"}], number=9)])
    with served(pool) as url:
        answer = httpx.post(f"{url}/completions", json={"model": "m", "prompt": ["so long", "hi"]})
    assert [choice["text"] for choice in answer.json()["choices"]] == ["bye", "hello"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/chat/completions",
            {"messages": HI, "logprobs": True},
            "the request sets logprobs, but no tokens are recorded",
        ),
        ("/completions", {"prompt": "hi", "logprobs": 0}, "the request sets logprobs"),
        ("/completions", {"prompt": ["hi", "hi"], "return_token_ids": True}, "the request sets return_token_ids"),
        (
            "/responses",
            {"input": "hi", "include": ["message.output_text.logprobs"]},
            "sets message.output_text.logprobs",
        ),
        ("/embeddings", {"input": "hi"}, "POST /embeddings cannot be answered from recorded responses"),
        ("/messages/count_tokens", {"messages": HI}, "POST /messages/count_tokens cannot be answered"),
        ("/chat/completions", {"model": "other", "messages": HI}, "no response of 'other' is recorded"),
    ],
)
def test_what_is_not_recorded_is_refused(path: str, body: Mapping[str, Any], expected: str) -> None:
    with served(recorded("hello")) as url:
        answer = httpx.post(f"{url}{path}", json={"model": "m", **body})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (501, "false")
    assert expected in answer.json()["error"]["message"]


def test_a_response_takes_as_long_as_it_took() -> None:
    with served(recorded("hello", seconds=0.3)) as url:
        began = time.monotonic()
        httpx.post(f"{url}/chat/completions", json={"model": "m", "messages": HI})
    assert time.monotonic() - began >= 0.3


def test_other_ways_to_write_a_request_are_the_same_request() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    earlier = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    spaced = {**call, "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    parts = [{"type": "text", "text": "hi"}]
    later = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [spaced]}]
    with served(recorded("hello", **{tr.INPUT_MESSAGES: json.dumps(earlier)})) as url:
        answer = httpx.post(f"{url}/chat/completions", json={"model": "m", "messages": later})
        other = {**spaced, "function": {"name": "add", "arguments": '{"a": 2}'}}
        changed = [later[0], {**later[1], "tool_calls": [other]}]
        refused = httpx.post(f"{url}/chat/completions", json={"model": "m", "messages": changed})
    assert (answer.status_code, refused.status_code) == (200, 501)
