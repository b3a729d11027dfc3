"""A server that stands in for a provider, as a process of its own: ``python -m tests.bench.load.provider`` prints its URL.

A request names itself by a number in its last message. Some numbers get an error, or a stream that is cut.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_core.testing.recording_server import serve_app

SECONDS = 0.05
"""Of a whole response, and of a stream."""
PARTS = 5
"""Of a stream."""
_NUMBER = re.compile(r"request (\d+)")


def number_of(text: object) -> int:
    """The number of a request; -1 for one that is answered at once."""
    found = _NUMBER.search(str(text))
    return int(found[1]) if found else -1


def refuses(number: int) -> bool:
    """Whether the request is refused with status 400."""
    return number % 103 == 0


def cuts(number: int) -> bool:
    """Whether a stream for the request is cut."""
    return number % 101 == 0


async def answer(request: Request) -> Response:
    body = await request.json()
    asked = body["input"] if "input" in body else body["messages"]
    number, kind = number_of(asked[-1]["content"]), request.url.path.rpartition("/")[2]
    if refuses(number):
        return JSONResponse({"error": {"message": "refused"}}, status_code=400)
    if number % 47 == 0 and body["model"] == "new":  # the fallback answers
        return JSONResponse({"error": {"message": "overloaded"}}, status_code=503)
    words, identity = [f"answer {number}", *(f" word {i}" for i in range(1, PARTS))], f"{number}-{body['model']}"
    if body.get("stream"):
        events = stream(kind, identity, words, cut=cuts(number))
        return StreamingResponse(events, media_type="text/event-stream")
    if number >= 0:
        await asyncio.sleep(SECONDS)
    return JSONResponse(whole(kind, identity, "".join(words)))


def whole(kind: str, identity: str, text: str) -> dict[str, Any]:
    """A response, by the last part of the path."""
    usage = {"input_tokens": 5, "output_tokens": 3}
    if kind == "messages":
        content = [{"type": "text", "text": text}]
        head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": "m"}
        return {**head, "content": content, "stop_reason": "end_turn", "usage": usage}
    if kind == "responses":
        content = [{"type": "output_text", "text": text, "annotations": []}]
        output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}]
        head = {"id": f"resp_{identity}", "object": "response", "model": "m", "status": "completed"}
        return {**head, "output": output, "usage": usage}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {
        "id": f"chatcmpl-{identity}",
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


async def stream(kind: str, identity: str, words: list[str], *, cut: bool) -> AsyncGenerator[str]:
    events = [*_events(kind, identity, words)]
    for event in events[: len(events) // 2] if cut else events:
        yield (
            f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
            if "type" in event
            else f"data: {json.dumps(event)}\n\n"
        )
        await asyncio.sleep(SECONDS / len(events))
    if kind == "completions" and not cut:
        yield "data: [DONE]\n\n"


def _events(kind: str, identity: str, words: list[str]) -> Iterator[dict[str, Any]]:
    done = whole(kind, identity, "".join(words))
    if kind == "messages":
        yield {"type": "message_start", "message": {**done, "content": [], "stop_reason": None}}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for word in words:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}
        yield {"type": "message_stop"}
    elif kind == "responses":
        yield {"type": "response.created", "response": {**done, "status": "in_progress", "output": []}}
        for word in words:
            yield {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": word}
        yield {"type": "response.completed", "response": done}
    else:
        for word in (*words, None):
            delta = {} if word is None else {"role": "assistant", "content": word}
            choice = {"index": 0, "delta": delta, "finish_reason": None if word is not None else "stop"}
            yield {"id": done["id"], "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


if __name__ == "__main__":
    with serve_app(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        print(url, flush=True)
        input()
