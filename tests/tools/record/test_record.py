"""`record`: production calls pass unchanged, and are traces afterwards."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import anthropic
import httpx
import openai
import pytest
import requests
import urllib3
from starlette.responses import StreamingResponse

from lightning_core import Trace, record, reward, rollout, trainable
from lightning_core import trace as tr
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import outside_rollout
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.errors import ConfigError
from lightning_core.otel import read_traces
from lightning_core.otel.otlp import spans_from_otlp
from lightning_core.otel.reading import NO_CALL
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.tools.cli.main import main
from lightning_core.tools.record.counts import (
    CONTINUED,
    FOLDER_FULL,
    REDACTED,
    REDACTION_FAILED,
    SHARE,
    TOO_LARGE,
    UNREAD_RESPONSE,
    UNWRITTEN,
)
from lightning_core.tools.record.served import ServedCalls
from lightning_core.tools.serving import ServingEndpoint
from lightning_core.tools.sft.examples import Selection, read_examples
from tests.tools.record.apps import user


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A provider that speaks the APIs of OpenAI and Anthropic, over HTTP."""
    backend = ScriptedBackend(lambda prompt: "hello")
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing()) as endpoint:
        yield endpoint.url


def read(folder: Path) -> list[Trace]:
    return read_traces(folder) if any(folder.glob("*.jsonl")) else []


def ask(url: str, text: str = "hi", **more: Any) -> Any:
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client:
        return client.chat.completions.create(model="policy", messages=user(text), **more)


def test_a_program_runs_unchanged_and_its_calls_are_traces_by_agent(url: str, tmp_path: Path):
    program = [sys.executable, str(Path(__file__).with_name("apps.py")), url]
    command = [sys.executable, "-m", "lightning_core.tools.cli.main", "record", "--to", str(tmp_path / "traces"), "--"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "hello hello\n"), done.stderr
    # With the calls of the child process.
    line = f"lightning-rl record: 4 calls recorded in {tmp_path / 'traces'}, none left out"
    assert done.stderr.splitlines() == ["to stderr", line]
    conversation, team = sorted(read(tmp_path / "traces"), key=lambda trace: len(trace.events))
    assert [(call.agent, call.model) for call in team.calls] == [("planner", "policy"), ("writer", "policy")]
    assert [(call.messages[-1]["content"], (call.response or {})["content"]) for call in team.calls] == [
        ("plan", "hello"),
        ("write", "hello"),
    ]
    assert team.calls[0].tools is not None
    assert [(r.value, r.call) for r in team.rewards] == [(0.5, None), (2.0, team.calls[0].id)]
    names = {event.id: event.name for event in team.events}
    assert [names[call.parent or ""] for call in team.calls] == ["planner", "writer"]
    assert [len(call.messages) for call in conversation.calls] == [1, 3]
    assert {call.agent for call in conversation.calls} == {None}


def test_the_command_refuses_what_it_cannot_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, expected in (
        (["--share", "2", "--", "python"], "--share 2: expected a number from 0 to 1"),
        (["--redact", "module", "--", "python"], "expected MODULE:FUNCTION"),
        (["--", "python", "-I", "app.py"], "python -I ignores the variables that start the recording"),
        (["--", "no-such-program"], "is not a program"),
    ):
        assert main(["record", "--to", str(tmp_path), *arguments]) == 2
        assert expected in capsys.readouterr().err


BODY = {"model": "policy", "messages": user("hi")}
STREAMED = {**BODY, "stream": True}


async def ask_httpx(url: str) -> bytes:
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=STREAMED) as response:
        return b"".join([part async for part in response.aiter_bytes()])


async def ask_aiohttp(url: str, body: Any, *, by_line: bool = False) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return b"".join([line async for line in response.content]) if by_line else await response.read()


CLIENTS: dict[str, Callable[[str], bytes]] = {
    "httpx": lambda url: httpx.post(url, json=BODY).content,
    "httpx async stream": lambda url: asyncio.run(ask_httpx(url)),
    "requests": lambda url: requests.post(url, json=BODY, timeout=5).content,
    "requests stream": lambda url: b"".join(requests.post(url, json=STREAMED, stream=True, timeout=5).iter_content(7)),
    "aiohttp": lambda url: asyncio.run(ask_aiohttp(url, BODY)),
    "aiohttp stream": lambda url: asyncio.run(ask_aiohttp(url, STREAMED, by_line=True)),
    "urllib3": lambda url: urllib3.PoolManager().request("POST", url, json=BODY).data,
}


def test_anthropic_streams_are_recorded_with_their_system_prompt(url: str, tmp_path: Path):
    with (
        record(tmp_path),
        anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="k") as client,
        client.messages.stream(model="policy", max_tokens=20, system="brief", messages=user("hi")) as stream,
    ):
        assert "".join(stream.text_stream) == "hello"
    ((call,),) = (trace.calls for trace in read(tmp_path))
    assert call.messages == ({"role": "system", "content": "brief"}, *user("hi"))
    assert ((call.response or {})["content"], call.finish_reason, call.max_tokens) == ("hello", "stop", 20)


def test_every_client_is_recorded_once_with_what_it_read(url: str, tmp_path: Path):
    with record(tmp_path) as recording:
        for ask_with in CLIENTS.values():
            assert b"assistant" in ask_with(f"{url}/chat/completions")
    assert recording.counts.as_dict() == {"recorded": len(CLIENTS), "rewards": 0}
    calls = [call for trace in read(tmp_path) for call in trace.calls]
    assert [(call.messages, (call.response or {}).get("content"), call.finish_reason) for call in calls] == [
        (tuple(user("hi")), "hello", "stop")
    ] * len(CLIENTS)
    unread = urllib3.PoolManager()
    with record(tmp_path) as recording:
        response = unread.request("POST", f"{url}/chat/completions", json=BODY, preload_content=False)
        assert b"hello" in response.read()
    assert recording.counts.left_out == {UNREAD_RESPONSE: 1}


def refused(url: str) -> tuple[int, str]:
    with pytest.raises(openai.NotFoundError) as caught, openai.OpenAI(base_url=url, api_key="k") as client:
        client.chat.completions.create(model="unknown", messages=user("hi"))
    return caught.value.status_code, caught.value.message


def unreachable(url: str) -> str:
    with pytest.raises(openai.APIConnectionError) as caught:
        ask("http://127.0.0.1:9/v1")
    return str(caught.value)


@pytest.mark.parametrize("app", [refused, unreachable])
def test_calls_that_fail_do_so_unchanged_and_are_recorded_with_the_error(
    app: Callable[[str], Any], url: str, tmp_path: Path
):
    before = app(url)
    with record(tmp_path):
        assert app(url) == before
    ((call,),) = [trace.calls for trace in read(tmp_path)]
    assert call.response is None
    assert call.error is not None
    assert call.error.startswith("HTTP 404: " if app is refused else "ConnectError: "), call.error


async def slow_events() -> AsyncIterator[str]:
    for _ in range(20):
        yield 'data: {"choices": [{"index": 0, "delta": {"content": "o"}, "finish_reason": null}]}\n\n'
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_that_the_app_leaves_is_closed_as_ever_and_recorded_as_unfinished(
    is_async: bool, server: RecordingServer, tmp_path: Path
):
    async def leave() -> str | None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="k") as client:
            stream = await client.chat.completions.create(model="m", messages=user("hi"), stream=True)
            async with stream:
                return (await anext(aiter(stream))).choices[0].delta.content

    def leave_sync() -> str | None:
        with (
            openai.OpenAI(base_url=server.url, api_key="k") as client,
            client.chat.completions.create(model="m", messages=user("hi"), stream=True) as stream,
        ):
            return next(iter(stream)).choices[0].delta.content

    server.failure, server.fail_next = StreamingResponse(slow_events(), media_type="text/event-stream"), 1
    with record(tmp_path):
        assert (asyncio.run(leave()) if is_async else leave_sync()) == "o"
    ((call,),) = [trace.calls for trace in read(tmp_path)]
    assert (call.response, call.error) == (None, "the client closed the stream before its end")


def test_a_stream_that_the_server_cuts_or_the_app_never_closes_is_recorded_as_that(
    server: RecordingServer, tmp_path: Path
):
    body = {"model": "m", "messages": user("hi"), "stream": True}
    event = 'data: {"choices": [{"index": 0, "delta": {"content": "o"}, "finish_reason": null}]}\n\n'
    kept = []
    with record(tmp_path) as recording, httpx.Client() as client:
        server.failure, server.fail_next = StreamingResponse(iter([event]), media_type="text/event-stream"), 1
        assert b"content" in client.post(f"{server.url}/chat/completions", json=body).content
        server.failure, server.fail_next = StreamingResponse(slow_events(), media_type="text/event-stream"), 1
        kept.append(client.send(client.build_request("POST", f"{server.url}/chat/completions", json=body), stream=True))
        recording.close()
    calls = [call for trace in read(tmp_path) for call in trace.calls]
    assert [call.error for call in calls] == [
        "the stream ended before the response was complete",
        "it was in progress when the recording ended",
    ]


@pytest.mark.parametrize("dropped", [0, 1])
def test_the_tokens_of_a_response_with_two_choices_are_counted_once(dropped: int, url: str, tmp_path: Path):
    seen: list[dict[str, Any]] = []

    def redact(call: dict[str, Any]) -> dict[str, Any] | None:
        seen.append(call)
        return call if len(seen) > dropped else None

    with record(tmp_path, redact=redact):
        usage = ask(url, n=2).usage
    assert [len(trace.calls) for trace in read(tmp_path)] == [2 - dropped]
    (line,) = (line for file in tmp_path.iterdir() for line in file.read_text().splitlines())
    spans = spans_from_otlp(json.loads(line))
    assert sum(span.attributes.get(tr.OUTPUT_TOKENS, 0) for span in spans) == usage.completion_tokens


def test_an_error_of_the_provider_reaches_the_app_and_its_retry_is_another_call(
    server: RecordingServer, tmp_path: Path
):
    server.fail_next = 1
    with record(tmp_path), openai.OpenAI(base_url=server.url, api_key="k", max_retries=1) as client:
        assert client.chat.completions.create(model="m", messages=user("hi")).choices[0].message.content == "ok"
    calls = [call for trace in read(tmp_path) for call in trace.calls]
    assert [(call.error or "")[:9] for call in calls] == ["HTTP 500:", ""]
    assert len(server.requests) == 2
    assert "traceparent" not in server.requests[0].headers, "requests are not stamped"


def test_no_failure_of_the_recording_reaches_the_app(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")

    def fail(call: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("a bug in the redaction")

    for folder, redact, reason in (
        (tmp_path / "file", None, UNWRITTEN),
        (tmp_path / "a", fail, REDACTION_FAILED),
        (tmp_path / "b", "no_such_module:function", REDACTION_FAILED),
        (tmp_path / "c", lambda call: {"prompt": ""}, REDACTION_FAILED),
    ):
        caplog.clear()
        with record(folder, redact=redact) as recording:
            assert [ask(url).choices[0].message.content for _ in range(2)] == ["hello", "hello"]
        assert recording.counts.as_dict() == {reason: 2, "recorded": 0, "rewards": 0}
        assert len(caplog.records) == 1, "one warning"


def test_a_full_disk_leaves_whole_lines(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write

    def write_half(file: int, data: bytes) -> int:
        """As a file system with little space: a part is written, then there is an error."""
        if b"lightning-record" not in data[:300]:
            if data.startswith(b"{") or len(data) < 200:
                return write(file, data)
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2])

    with record(tmp_path) as recording:
        ask(url)
        recording.flush()
        monkeypatch.setattr(os, "write", write_half)
        assert ask(url).choices[0].message.content == "hello"
        recording.flush()
        monkeypatch.undo()
        ask(url)
    assert (recording.counts.recorded, dict(recording.counts.left_out)) == (2, {UNWRITTEN: 1})
    assert len(read(tmp_path)) == 2


def test_a_redaction_changes_or_drops_calls_and_hides_tools(url: str, tmp_path: Path):
    def redact(call: dict[str, Any]) -> dict[str, Any] | None:
        if call["messages"][0]["content"] == "private":
            return None
        return {**call, "messages": json.loads(json.dumps(call["messages"]).replace("secret", "***"))}

    @trainable("clerk")
    def clerk() -> None:
        ask(url, "a secret")
        ask(url, "private")
        raise ValueError("secret")

    with record(tmp_path, redact=redact) as recording, pytest.raises(ValueError, match="secret"):
        clerk()
    assert recording.counts.left_out == {REDACTED: 1}
    (trace,) = read(tmp_path)
    assert [call.messages[0]["content"] for call in trace.calls] == ["a ***"]
    assert all("secret" not in file.read_text() for file in tmp_path.iterdir())
    assert trace.error == "ValueError"


def test_a_redaction_gets_messages_of_its_own(url: str, tmp_path: Path):
    def redact(call: dict[str, Any]) -> dict[str, Any]:
        for message in call["messages"]:
            message["length"] = len(message.pop("content"))
        return call

    with record(tmp_path, redact=redact) as recording, openai.OpenAI(base_url=url, api_key="k") as client:
        ask(url, n=2)
        first = client.responses.create(model="policy", input="hi")
        client.responses.create(model="policy", previous_response_id=first.id, input="more")
    assert recording.counts.as_dict() == {"recorded": 4, "rewards": 0}


def test_a_continued_response_is_in_the_trace_of_one_that_is_not_recorded(url: str, tmp_path: Path):
    """Each turn has other instructions, so that only the id of the response names the conversation."""

    def redact(call: dict[str, Any]) -> dict[str, Any] | None:
        return None if call["messages"][-1]["content"] == "private" else call

    def ask_twice(client: openai.OpenAI, text: str) -> None:
        first = client.responses.create(model="policy", instructions="It is one.", input=text)
        for hour in ("two", "three"):
            client.responses.create(
                model="policy", instructions=f"It is {hour}.", input="more", previous_response_id=first.id
            )

    with openai.OpenAI(base_url=url, api_key="k") as client:
        with record(tmp_path / "share", share=0.5) as recording:
            for _ in range(12):
                ask_twice(client, "hi")
        with record(tmp_path / "redacted", redact=redact):
            ask_twice(client, "private")
    traces = read(tmp_path / "share")
    assert [len(trace.calls) for trace in traces] == [3] * len(traces)
    assert recording.counts.left_out.total() == 36 - 3 * len(traces)
    assert [len(trace.calls) for trace in read(tmp_path / "redacted")] == [2]


def test_continued_conversations_are_kept_within_a_limit(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_core.tools.record.pipeline._MOST_HISTORY_BYTES", 40_000)
    with record(tmp_path) as recording, openai.OpenAI(base_url=url, api_key="k") as client:
        long = client.responses.create(model="policy", input="x" * 30_000)
        for previous in (long.id, client.responses.create(model="policy", input="hi").id):
            client.responses.create(model="policy", previous_response_id=previous, input="more")
    assert recording.counts.left_out == {}
    with record(tmp_path) as recording, openai.OpenAI(base_url=url, api_key="k") as client:
        long = client.responses.create(model="policy", input="x" * 50_000)
        client.responses.create(model="policy", previous_response_id=long.id, input="more")
    assert recording.counts.left_out == {CONTINUED: 1}


def test_a_share_has_whole_traces_and_the_folder_a_limit(url: str, tmp_path: Path):
    @trainable("pair")
    def pair() -> None:
        ask(url, "one")
        ask(url, "two")

    with record(tmp_path / "share", share=0.5) as recording:
        for _ in range(32):  # drawn by chance: all are kept or left out once in two billion times
            pair()
    traces = read(tmp_path / "share")
    assert 0 < len(traces) < 32
    assert {len(trace.calls) for trace in traces} == {2}
    assert recording.counts.left_out == {SHARE: 64 - 2 * len(traces)}
    with record(tmp_path / "limit", max_mb=0.006) as recording:
        for _ in range(8):
            ask(url)
            recording.flush()
    assert 0 < recording.counts.left_out[FOLDER_FULL] < 8
    assert len(read(tmp_path / "limit")) == recording.counts.recorded
    assert sum(file.stat().st_size for file in (tmp_path / "limit").iterdir()) < 6000


def test_calls_of_rollouts_and_outside_are_not_recorded(url: str, tmp_path: Path):
    with record(tmp_path) as recording, rollout({"id": "t"}):
        ask(url)
    with record(tmp_path) as recording, outside_rollout():
        ask(url)
    assert recording.counts.recorded == 0
    assert read(tmp_path) == []


def test_feedback_and_names_from_a_configuration(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "lightning.yaml").write_text(
        "policy: {model: any}\nagents: {train: [seller], named: [{name: seller, contains: You sell}]}", encoding="utf-8"
    )
    with record(tmp_path / "traces", config=tmp_path / "lightning.yaml") as recording:
        with openai.OpenAI(base_url=url, api_key="k") as client:
            first = client.responses.create(model="policy", instructions="You sell cars.", input="hi")
            client.responses.create(model="policy", previous_response_id=first.id, input="more")
        reward(1.0, call=first.id)
        reward(1.0, call="unknown")
        reward(1.0)
    assert recording.summary.endswith("none left out")
    ((first_call, second_call),) = (trace.calls for trace in read(tmp_path / "traces"))
    assert (first_call.agent, second_call.agent) == ("seller", None)
    assert [m["content"] for m in second_call.messages] == ["hi", "hello", "more"]
    rewards = [r for trace in read(tmp_path / "traces") for r in trace.rewards]
    assert [(r.value, r.call) for r in rewards] == [(1.0, first_call.id)]
    assert main(["trace", str(tmp_path / "traces")]) == 0
    assert "seller" in capsys.readouterr().out
    left_out: Counter[str] = Counter()
    assert len(read_examples([tmp_path / "traces"], Selection(), left_out)) == 1
    assert left_out == {NO_CALL: 2}


def test_a_process_is_recorded_once_at_a_time(tmp_path: Path):
    with record(tmp_path), pytest.raises(ConfigError, match="recorded already"):
        record(tmp_path)
    with pytest.raises(ConfigError, match="share is 2"):
        record(tmp_path, share=2)


def test_responses_beyond_the_limit_reach_the_app_and_are_left_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lightning_core.tools.record.observed.MOST_BYTES", 100)
    with record(tmp_path) as recording:
        assert ask(url).choices[0].message.content == "hello"
    assert recording.counts.left_out == {TOO_LARGE: 1}


def test_served_calls_are_recorded_by_conversation_and_old_files_deleted(tmp_path: Path):
    old = tmp_path / "20200101-000000-1.jsonl"
    old.write_text("")
    os.utime(old, (0, 0))
    recorded = ServedCalls(tmp_path, days=30)
    backend = ScriptedBackend(lambda prompt: "hello")
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing(), on_call=recorded.add) as endpoint:
        first = ask(endpoint.url, extra_headers={"lightning-agent": "a"})
        with openai.OpenAI(base_url=endpoint.url, api_key="k") as client:
            answer = first.choices[0].message.model_dump(exclude_none=True)
            messages: Any = [*user("hi"), answer, *user("go on")]
            client.chat.completions.create(model="policy", messages=messages, extra_headers={"lightning-agent": "a"})
        with anthropic.Anthropic(base_url=endpoint.url.removesuffix("/v1"), api_key="k") as client:
            client.messages.create(model="policy", max_tokens=9, messages=user("other"))
    assert recorded.close() == f"3 calls recorded in {tmp_path}, none left out"
    assert not old.exists()
    traces = read(tmp_path)
    assert [[len(call.messages) for call in trace.calls] for trace in traces] == [[1, 3], [1]]
    assert [call.agent for trace in traces for call in trace.calls] == ["a", "a", None]


def test_a_run_of_a_graph_and_one_of_the_agents_sdk_are_one_trace_each(server: RecordingServer, tmp_path: Path):
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    model = ChatOpenAI(base_url=server.url, api_key="k", model="m")  # pyright: ignore
    graph: Any = StateGraph(cast("Any", dict))
    graph.add_node("first", lambda state: {"text": model.invoke("hi").content})
    graph.add_node("second", lambda state: {"text": model.invoke("more").content})
    for edge in ((START, "first"), ("first", "second"), ("second", END)):
        graph.add_edge(*edge)

    async def run_both() -> None:
        await graph.compile().ainvoke({"text": ""})
        client = openai.AsyncOpenAI(base_url=server.url, api_key="k")
        agent = Agent(name="helper", model=OpenAIChatCompletionsModel(model="m", openai_client=client))
        await Runner.run(agent, "hi", run_config=RunConfig(tracing_disabled=True))

    with record(tmp_path):
        asyncio.run(run_both())
    assert [[call.agent for call in trace.calls] for trace in read(tmp_path)] == [["first", "second"], ["helper"]]
