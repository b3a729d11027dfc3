"""A small agent with a tool, and a server that plays its model: what the samples record."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "gpt-4o-mini"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


class _Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = body["messages"][-1]
        if "fail" in str(last.get("content")):
            self._send(400, {"error": {"message": "the model refuses to fail", "type": "invalid_request_error"}})
            return
        if last["role"] == "tool":
            message: dict[str, Any] = {"role": "assistant", "content": f"The sum is {last['content']}."}
        else:
            function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
            calls = [{"id": "call_1", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69}
        identity = f"chatcmpl-{len(body['messages'])}"
        answer = {"id": identity, "object": "chat.completion", "created": 1764000000, "model": "gpt-4o-mini-2024-07-18"}
        self._send(200, {**answer, "choices": [choice], "usage": usage})

    def _send(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def model_server() -> Iterator[str]:
    """The URL of a model that calls the tool ``add`` once, and then says the sum."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def add(a: int, b: int) -> int:
    """The tool."""
    return a + b


def calculate(client: Any, question: str, tool: Callable[..., Any] = add) -> str:
    """The agent: model call, tool call, model call."""
    messages: list[Any] = [
        {"role": "system", "content": "You calculate with tools."},
        {"role": "user", "content": question},
    ]
    while True:
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0.5)
        message = reply.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = tool(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def save(path: Path, text: str) -> None:
    """Write ``text``, which is JSON on one line or JSON lines, without the paths of this machine and without tracebacks."""
    lines = [json.dumps(_scrubbed(json.loads(line)), ensure_ascii=False) for line in text.splitlines()]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_scrubbed(item) for item in value]
    if not isinstance(value, str):
        return value
    if value[:1] in ("{", "["):
        try:
            return json.dumps(_scrubbed(json.loads(value)))
        except ValueError:
            pass
    value = re.sub(r"Traceback \(most recent call last\)(.|\n)*", "Traceback (left out)", value)
    return re.sub(r"/(?:work|tmp|root|usr)/[\w./-]*", "/home/user/app.py", value)
