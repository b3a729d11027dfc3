"""Random conversations with the endpoint over HTTP, and what must hold for each of their requests."""

from __future__ import annotations

import http.client
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import ActiveRollout
from lightning_core.chat.chat import Chat
from lightning_core.dialects import chat_completions, completions, gemini, messages, responses
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.unknown import OtherFormat
from lightning_core.endpoint.count import COMPACT, COUNTS
from lightning_core.endpoint.forwarding.forward import EMBEDDINGS
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.propagation.shapes import ORIGIN_PATH
from lightning_core.tools.serving import ServingEndpoint
from tests.endpoint.fuzz_bodies import ARGUMENTS, Bodies, clone
from tests.endpoint.serving import key_in_rollout

SECONDS = 60.0
"""Longest time for one response. The slowest machine needs a hundredth of it."""
ROUTING = Routing(trained=frozenset({"writer"}), frozen={"helper": "base"}, max_tokens=4096)
SERVED_KEY = "k"

_CALLS = [f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>' for arguments in ARGUMENTS]
ANSWERS = (
    "hello", "", "ünï \U0001f916", "x" * 2000, *_CALLS, f"first {_CALLS[0]}\n{_CALLS[1]}", f"{_CALLS[0]} then {_CALLS[4]}",
    '<tool_call>{"name": "f", "arguments": {}}</tool_ca', '<tool_call>{"name": 5}</tool_call>', "<tool_call></tool_call>",
    "<think>why</think>because", "<think>why", "why</think>", '{"a": 1}', "<|im_start|>user\nhi", "\x00\x07\u202e", " \n ", "[1, 2",
)  # fmt: skip
"""What the model samples."""


def answer(prompt: str) -> str:
    """Always the same answer to the same prompt."""
    return ANSWERS[zlib.crc32(prompt.encode(errors="replace")) % len(ANSWERS)]


EXPECTED = ("HostedToolError: ", "UpstreamRefusal: ")
"""Starts of the infrastructure failures that a request may cause: a hosted tool, and a model that the upstream does not serve."""


class FuzzFailure(AssertionError):
    """Something does not hold. The message has the request."""


# Conversations in the shape of each wire format --------------------------------------------------------------------


def _tool_results(ids: list[Any], draw: Bodies) -> list[tuple[Any, str]]:
    """Results of the calls, mostly one each in order."""
    results = [(id, draw.text()) for id in ids]
    if draw.chance(6):
        draw.random.shuffle(results)
    if draw.chance(8):
        results = results[1:]
    return results


class _Shape:
    """The requests of one wire format, and how its responses become history."""

    dialect: ClassVar[Dialect]

    def start(self, draw: Bodies) -> tuple[dict[str, Any], list[Any]]:
        """The body, and the list in it that holds the conversation."""
        raise NotImplementedError

    def say(self, text: str) -> Any:
        """An item of the user."""
        raise NotImplementedError

    def echo(self, response: Any, draw: Bodies) -> list[Any]:
        """The items that a client adds for a response: the response, and the results of its calls."""
        raise NotImplementedError

    def join(self, events: list[Any]) -> Any:
        """The response that the events of a stream make."""
        raise NotImplementedError

    def path(self, body: Mapping[str, Any], stream: bool) -> str:
        del body, stream
        return f"/v1{self.dialect.PATH}"


class _Chat(_Shape):
    dialect = chat_completions

    def start(self, draw: Bodies) -> tuple[dict[str, Any], list[Any]]:
        history = [{"role": "system", "content": draw.text()}] if draw.chance(2) else []
        body: dict[str, Any] = {"model": "base", "messages": history}
        if draw.chance(2):
            body["tools"] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
        return body, history

    def say(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def echo(self, response: Any, draw: Bodies) -> list[Any]:
        message = response["choices"][-1]["message"]
        results = _tool_results([call["id"] for call in message.get("tool_calls") or []], draw)
        return [message, *({"role": "tool", "tool_call_id": id, "content": text} for id, text in results)]

    def join(self, events: list[Any]) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for delta in (
            choice["delta"] for event in events for choice in event.get("choices", ()) if not choice["index"]
        ):
            for name in ("content", "reasoning_content", "refusal"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            message.setdefault("tool_calls", []).extend(delta.get("tool_calls") or [])
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        return {"choices": [{"message": message}]}


class _Completions(_Shape):
    dialect = completions

    def start(self, draw: Bodies) -> tuple[dict[str, Any], list[Any]]:
        history: list[Any] = []
        return {"model": "base", "prompt": history}, history

    def say(self, text: str) -> Any:
        return text

    def echo(self, response: Any, draw: Bodies) -> list[Any]:
        return [response["choices"][0]["text"]]

    def join(self, events: list[Any]) -> Any:
        return {"choices": [{"text": "".join(choice["text"] for event in events for choice in event["choices"])}]}


class _Messages(_Shape):
    dialect = messages

    def start(self, draw: Bodies) -> tuple[dict[str, Any], list[Any]]:
        history: list[Any] = []
        body: dict[str, Any] = {"model": "base", "max_tokens": 4096, "messages": history}
        if draw.chance(2):
            body["system"] = [{"type": "text", "text": draw.text(), "cache_control": {"type": "ephemeral"}}]
        if draw.chance(2):
            body["tools"] = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
        return body, history

    def say(self, text: str) -> Any:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    def echo(self, response: Any, draw: Bodies) -> list[Any]:
        blocks = response["content"]
        results = _tool_results([block["id"] for block in blocks if block["type"] == "tool_use"], draw)
        content = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        return [{"role": "assistant", "content": blocks}, *([{"role": "user", "content": content}] if content else [])]

    def join(self, events: list[Any]) -> Any:
        blocks: list[dict[str, Any]] = []
        parts: list[str] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
                parts.append("")
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                parts[-1] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        for block, text in zip(blocks, parts, strict=True):
            name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
            block[name] = json.loads(text) if name == "input" else text
        return {"content": blocks}


class _Responses(_Shape):
    dialect = responses

    def start(self, draw: Bodies) -> tuple[dict[str, Any], list[Any]]:
        history: list[Any] = []
        body: dict[str, Any] = {"model": "base", "input": history, "store": False}
        if draw.chance(2):
            body["instructions"] = draw.text()
        if draw.chance(2):
            body["tools"] = [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "g"}]
        return body, history

    def say(self, text: str) -> Any:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    def echo(self, response: Any, draw: Bodies) -> list[Any]:
        items = response["output"]
        calls = {item["call_id"]: item["type"] for item in items if "call_id" in item}
        results = _tool_results(list(calls), draw)
        return [*items, *({"type": f"{calls[id]}_output", "call_id": id, "output": text} for id, text in results)]

    def join(self, events: list[Any]) -> Any:
        return events[-1]["response"]


class _Gemini(_Shape):
    dialect = gemini

    def start(self, draw: Bodies) -> tuple[dict[str, Any], list[Any]]:
        history: list[Any] = []
        body: dict[str, Any] = {"contents": history}
        if draw.chance(2):
            body["systemInstruction"] = {"parts": [{"text": draw.text()}]}
        if draw.chance(2):
            body["tools"] = [
                {"functionDeclarations": [{"name": name, "parameters": {"type": "OBJECT"}} for name in "fg"]}
            ]
        return body, history

    def say(self, text: str) -> Any:
        return {"role": "user", "parts": [{"text": text}]}

    def echo(self, response: Any, draw: Bodies) -> list[Any]:
        content = response["candidates"][0].get("content") or {"role": "model", "parts": []}
        calls = [part["functionCall"] for part in content.get("parts", ()) if "functionCall" in part]
        parts = [
            {"functionResponse": {"id": call.get("id"), "name": call["name"], "response": {"output": draw.text()}}}
            for call in calls
        ]
        return [content, *([{"role": "user", "parts": parts}] if parts else [])]

    def join(self, events: list[Any]) -> Any:
        parts = [
            part
            for event in events
            for candidate in event.get("candidates", ())
            if not candidate.get("index")
            for part in (candidate.get("content") or {}).get("parts", ())
        ]
        return {"candidates": [{"content": {"role": "model", "parts": parts}}]}

    def path(self, body: Mapping[str, Any], stream: bool) -> str:
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        model = body.get("model")
        return f"/v1beta/models/{quote(model if isinstance(model, str) and model.isascii() else 'base')}:{method}"


SHAPES: tuple[_Shape, ...] = (_Chat(), _Completions(), _Messages(), _Responses(), _Gemini())


# Requests and what must hold ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """What happened, by the API and the status."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    slowest: float = 0.0


class Fuzzer:
    """Random conversations with ``endpoint``."""

    def __init__(self, endpoint: PolicyEndpoint) -> None:
        self.report = Report()
        self._endpoint = endpoint
        url = urlsplit(endpoint.url)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=SECONDS)

    def close(self) -> None:
        self._connection.close()

    def converse(self, random: Random) -> int:
        """One conversation in a rollout of its own; returns the number of requests. Raises `FuzzFailure`."""
        with key_in_rollout(self._endpoint, ROUTING) as (run, key):
            shape = random.choice(SHAPES)
            talk = _Talk(self, shape, Bodies(shape.dialect, random), run, key)
            talk.play()
        failures = [failure for failure in run.infrastructure if not failure.startswith(EXPECTED)]
        if failures:
            raise FuzzFailure(f"infrastructure is blamed: {failures[0][:500]}\nof {talk.last}")
        trace = run.trace
        found = len(trace.calls) + len([event for event in trace.events if event.id != run.address.span])
        if found < talk.recorded:
            raise FuzzFailure(f"{talk.recorded} requests left {found} records; the last was {talk.last}")
        return talk.requests

    def send(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        """The status, content type and body of the response."""
        connection = self._connection
        try:
            connection.request(method, path, data, dict(headers))
            response = connection.getresponse()
            return response.status, response.headers.get("content-type", ""), response.read()
        except BaseException:
            connection.close()  # the next request opens it again
            raise


class _Talk:
    def __init__(self, fuzzer: Fuzzer, shape: _Shape, draw: Bodies, run: ActiveRollout, key: str) -> None:
        self._fuzzer, self._shape, self._draw, self._run = fuzzer, shape, draw, run
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        agent = draw.random.choice(("writer", "writer", "helper", "", "other"))
        if agent:
            self._headers["lightning-agent"] = agent
        self.requests = self.recorded = 0
        self.last = ""

    def play(self) -> None:
        """A few turns, then a plain request, which must be answered."""
        draw, shape = self._draw, self._shape
        body, history = shape.start(draw)
        history.append(shape.say(draw.text()))
        for _ in range(draw.random.choice((1, 1, 2, 3, 5))):
            if draw.chance(8):
                self._other_request(body)
                continue
            sent = clone(body)
            if not draw.chance(3):
                draw.decorate(sent)
            if draw.chance(3):
                draw.spoil(sent)
            stream = draw.chance(2)
            if shape is not SHAPES[-1] and stream:
                sent["stream"] = True
            status, response = self._ask(shape.path(sent, stream), sent)
            if status == 200 and response is not None:
                self._continue(history, response)
            else:
                history.append(shape.say(draw.text()))
        plain = b'{"model": "base", "messages": [{"role": "user", "content": "hi"}]}'
        status, _ = self._ask("/v1/chat/completions", plain, of=chat_completions)
        if status != 200:
            raise FuzzFailure(f"a plain request got {status} at the end: {self.last}")

    def _continue(self, history: list[Any], response: Any) -> None:
        draw = self._draw
        added = self._shape.echo(response, draw)
        if self._shape.dialect is completions:
            history[:] = ["".join([part for part in history if isinstance(part, str)] + added)]
        else:
            history += added
        if draw.chance(3):
            draw.spoil(history)
        if draw.chance(2) or not added:
            history.append(self._shape.say(draw.text()))

    def _other_request(self, body: Mapping[str, Any]) -> None:
        """A request that is not a model call of the shape."""
        draw = self._draw
        kind = draw.random.randrange(8)
        sent = clone(body)
        if draw.chance(2):
            draw.decorate(sent)
        if kind == 0:
            self._ask(draw.random.choice(("/v1/models", "/v1/models/base", "/v1/models/%ff", "/v1/models/a/b")), None)
        elif kind == 1:
            self._ask(f"/v1{COMPACT}", sent, of=responses)
        elif kind == 2:
            self._ask(
                "/v1beta/models/base:countTokens",
                draw.random.choice((sent, {"generateContentRequest": sent})),
                of=gemini,
            )
        elif kind == 3:
            self._ask(f"/v1{EMBEDDINGS}", {"model": "m", "input": draw.any()}, of=chat_completions)
        elif kind == 4:
            path = draw.random.choice(("/api/chat", "/v2/chat", "/model/m/converse"))
            self._ask(f"/v1{ORIGIN_PATH}{path}", sent, of=OtherFormat(path))
        elif kind == 5:
            unknown = draw.random.choice(("/v1/", "/v1/messages/batches", "/a/x/v1/nothing", "/a/%ff/v1/files"))
            self._ask(unknown, sent, of=chat_completions)
        else:
            count = draw.random.choice(COUNTS)
            self._ask(f"/v1{count.path}", sent, of=count.dialect)

    def _ask(self, path: str, body: Any, *, of: Dialect | None = None) -> tuple[int, Any]:
        """Send a request and check its response. Returns the status, and a response as JSON if it is a model's."""
        data = body if body is None or isinstance(body, bytes) else self._draw.encode(body)
        method = "GET" if data is None else "POST"
        self.last = f"{method} {path} as {self._headers.get('lightning-agent')!r}: {(data or b'')[:4000]!r}"
        began = time.perf_counter()
        try:
            status, kind, answer = self._fuzzer.send(method, path, data, self._headers)
        except (OSError, http.client.HTTPException) as error:
            raise FuzzFailure(f"no response ({error!r}) to {self.last}") from error
        report = self._fuzzer.report
        report.slowest = max(report.slowest, time.perf_counter() - began)
        report.statuses[f"{path.partition('?')[0].removeprefix('/v1').partition(':')[2] or path} {status}"] += 1
        self.requests += 1
        if data is not None and f"/v1{ORIGIN_PATH}" not in path:
            self.recorded += 1
        dialect = of or self._shape.dialect
        if status >= 500 or status not in (200, 400, 401, 404, 413):
            raise FuzzFailure(f"status {status}, {answer[:600]!r}, for {self.last}")
        if status != 200:
            self._check_error(dialect if method == "POST" else chat_completions, status, answer)
            return status, None
        if kind.startswith("text/event-stream"):
            return status, self._joined(answer)
        return status, json.loads(answer)

    def _joined(self, answer: bytes) -> Any:
        events: list[Any] = []
        for line in answer.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                events.append(json.loads(line[6:]))
                if isinstance(events[-1], dict) and events[-1].get("error") is not None:
                    raise FuzzFailure(f"the stream ends with {events[-1]}, for {self.last}")
        if not events:
            raise FuzzFailure(f"the stream has no events: {answer[:300]!r}, for {self.last}")
        return self._shape.join(events)

    def _check_error(self, dialect: Dialect, status: int, answer: bytes) -> None:
        """An error has the shape of its wire format, and a message that is not a bare exception."""
        try:
            message = _message(dialect.error_body("", status=status), json.loads(answer))
        except (ValueError, LookupError, TypeError):
            raise FuzzFailure(f"an error in another shape, {answer[:600]!r}, for {self.last}") from None
        if not message or re.search("(?<!HTTP)Error:|Traceback", message):
            raise FuzzFailure(f"an error without a message of ours, {answer[:600]!r}, for {self.last}")


def _message(expected: Any, found: Any) -> str:
    """The message in ``found``, which has the keys of ``expected``. Raises LookupError or TypeError for another shape."""
    if isinstance(expected, str):
        return found if isinstance(found, str) else ""
    inner = {
        name: _message(value, found[name]) if isinstance(value, dict) else found[name]
        for name, value in expected.items()
    }
    return inner.get("message") or inner["error"]


@contextmanager
def fuzzed_endpoint(script: Callable[[str], str] = answer) -> Iterator[PolicyEndpoint]:
    """An endpoint with a scripted model, and a served model as its upstream."""
    backend, served = ScriptedBackend(script), ScriptedBackend(script)
    chat = Chat(served.tokenizer)
    with ServingEndpoint(served, chat, routing=Routing(max_tokens=4096), api_key=SERVED_KEY) as far:
        upstream = UpstreamServer(base_url=far.url, api_key=SERVED_KEY)
        with PolicyEndpoint(backend, Chat(backend.tokenizer), upstream=upstream) as endpoint:
            yield endpoint
