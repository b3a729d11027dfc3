"""An OpenAI-compatible HTTP server that records every request, for tests."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(frozen=True)
class RecordedRequest:
    """One request as it arrived."""

    url: str
    headers: dict[str, str]
    body: Any
    data: bytes = b""
    """The body as it arrived."""


@dataclass
class RecordingServer:
    """The server's URL, recorded requests and settings."""

    url: str = ""
    requests: list[RecordedRequest] = field(default_factory=list[RecordedRequest])
    fail_next: int = 0
    """Number of next requests that fail."""
    failure: Response = field(default_factory=lambda: JSONResponse({"error": {"message": "try again"}}, 500))
    """The response to those."""
    refusal: Response | None = None
    """The response to every request, if set."""

    async def answer(self, request: Request) -> Response:
        """Record the request and return a response or an error."""
        data = await request.body()
        plain = gzip.decompress(data) if request.headers.get("content-encoding") == "gzip" else data
        body = json.loads(plain or b"null")
        url = request.url.replace(path=request.scope["raw_path"].decode())  # as it was encoded
        self.requests.append(RecordedRequest(str(url), dict(request.headers), body, data))
        if self.refusal is not None:
            return self.refusal
        if self.fail_next > 0:
            self.fail_next -= 1
            return self.failure
        head = {"id": "1", "created": 0, "model": "recorded"}
        if body and body.get("stream"):
            return StreamingResponse(_events(head), media_type="text/event-stream")
        if request.url.path.endswith("/embeddings"):
            data = [{"object": "embedding", "index": 0, "embedding": [0.1, 1e-7, -2.0]}]
            usage = {"prompt_tokens": 3, "total_tokens": 3}
            return JSONResponse({"object": "list", "data": data, "model": "recorded", "usage": usage})
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice]})


async def _events(head: dict[str, Any]) -> AsyncGenerator[str]:
    for delta, finish in (({"role": "assistant", "content": "o"}, None), ({"content": "k"}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        yield f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


@contextmanager
def recording_server(*, refusal: Response | None = None) -> Generator[RecordingServer]:
    """Serve on a free local port; ``refusal``, if set, is the response to every request."""
    server = RecordingServer(refusal=refusal)
    with serve_app(Starlette(routes=[Route("/{path:path}", server.answer, methods=["GET", "POST"])])) as server.url:
        yield server


@contextmanager
def serve_app(app: Starlette) -> Generator[str]:
    """Serve ``app`` on a free local port; yields its URL."""
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
