"""A model server that costs next to nothing and answers with vLLM's fields, for the endpoint benchmark.

    python -m tests.bench.null_model

Prints its URL. ``/PROMPT/OUTPUT/v1/chat/completions`` and ``/PROMPT/OUTPUT/v1/completions`` answer any request as if its prompt had
PROMPT tokens, with OUTPUT tokens; the last one is the first of the request's stop tokens, if it has some. Completions also stream, one
event per token. Responses are built once and sent unchanged but for the prompt, which is that of the request, as vLLM repeats it, at once
or after the seconds that the last ``GET /hold/SECONDS`` set. The calls with which `VllmBackend` looks at its server are answered too.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from typing import Any

from tests.bench.processes import raise_file_limit

VOCABULARY = range(1000, 20000)
_STOP = re.compile(rb'"stop_token_ids": ?\[(\d+)')
_PROMPT = re.compile(rb'"prompt": ?(\[[\d, ]+\])')
_LENGTH = re.compile(rb"content-length: (\d+)")
_CONTROL: dict[str, Any] = {
    "v1/models": {"data": [{"id": "policy", "max_model_len": 1 << 20}]},
    "is_paused": {"is_paused": False},
    "server_info": {
        "vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": False},
        }
    },
    "resume": {},
}


def tokens(count: int, seed: int, stop: int | None = None) -> list[int]:
    ids = random.Random(seed).choices(VOCABULARY, k=count)
    return ids if stop is None else [*ids[:-1], stop]


def logprobs_of(ids: list[int]) -> list[float]:
    return [-(token % 997) / 313 for token in ids]


def _chat(prompt: list[int], output: list[int]) -> dict[str, Any]:
    entries = [
        {"token": f"w{token}", "logprob": logprob, "bytes": list(f"w{token}".encode()), "top_logprobs": []}
        for token, logprob in zip(output, logprobs_of(output), strict=True)
    ]
    message = {"role": "assistant", "content": "word " * len(output), "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": {"content": entries}, "finish_reason": "stop"}
    return {
        **_head("chat.completion"),
        "choices": [{**choice, "stop_reason": None, "token_ids": output}],
        "usage": _usage(prompt, output),
        "prompt_token_ids": prompt,
    }


def _completion(prompt: list[int], output: list[int]) -> dict[str, Any]:
    choice = {**_part(output), "finish_reason": "length", "stop_reason": None}
    return {**_head("text_completion"), "choices": [choice], "usage": _usage(prompt, output)}


def _part(ids: list[int]) -> dict[str, Any]:
    logprobs = {
        "text_offset": list(range(0, 5 * len(ids), 5)),
        "token_logprobs": logprobs_of(ids),
        "tokens": ["word "] * len(ids),
        "top_logprobs": [None] * len(ids),
    }
    return {"index": 0, "text": "word " * len(ids), "logprobs": logprobs, "token_ids": ids, "finish_reason": None}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "null-1", "object": kind, "created": 1_700_000_000, "model": "policy"}


def _usage(prompt: list[int], output: list[int]) -> dict[str, int]:
    counts = (len(prompt), len(output))
    return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def answer(path: str, stream: bool, stop: int | None, prompt: bytes | None) -> bytes:
    """The complete HTTP response. ``prompt``: the token ids of the request, as JSON."""
    start, end = _parts(path, stream, stop)
    if prompt is None:
        return start + end
    repeated = b'"prompt_token_ids":' + prompt + b","
    if not stream:
        size = len(repeated) + int(_LENGTH.findall(start)[0])
        return _LENGTH.sub(b"content-length: %d" % size, start) + repeated + end
    size, _, event = start.rpartition(b"\r\n\r\n")[2].partition(b"\r\n")
    head = start[: len(start) - len(size) - 2 - len(event)]
    return head + b"%x\r\n" % (int(size, 16) + len(repeated)) + event + repeated + end


@functools.cache
def _parts(path: str, stream: bool, stop: int | None) -> tuple[bytes, bytes]:
    """The HTTP response, before and after the place of the prompt."""
    whole = _answer(path, stream, stop)
    mark = b'"choices": [{'
    start, found, end = whole.partition(mark)
    return start + found, end


def _answer(path: str, stream: bool, stop: int | None) -> bytes:
    _, prompt_size, output_size, operation = path.partition("?")[0].split("/", 3)
    if operation in _CONTROL:
        return _complete(_CONTROL[operation])
    prompt, output = tokens(int(prompt_size), 1), tokens(int(output_size), 2, stop)
    if not stream:
        return _complete((_chat if operation == "v1/chat/completions" else _completion)(prompt, output))
    parts = [_part([token]) for token in output]
    parts[-1] |= {"finish_reason": "stop", "stop_reason": None}
    events = [json.dumps({**_head("text_completion"), "choices": [part]}) for part in parts]
    chunks = [f"data: {event}\n\n".encode() for event in [*events, "[DONE]"]]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def _complete(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class NullModel(asyncio.Protocol):
    """One connection."""

    hold = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            _, _, length = head.partition(b"content-length: ")
            size = end + 4 + int(length.split(b"\r\n", 1)[0] or b"0")
            if len(self._buffer) < size:
                return
            path = bytes(self._buffer).split(b" ", 2)[1].decode()
            body = bytes(self._buffer[end + 4 : size])
            del self._buffer[:size]
            if path.startswith("/hold/"):
                NullModel.hold = float(path.removeprefix("/hold/"))
                self._transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                continue
            stop = _STOP.search(body)
            stream = b'"stream":true' in body or b'"stream": true' in body
            prompt = _PROMPT.search(body)
            ready = answer(path, stream, None if stop is None else int(stop[1]), prompt and prompt[1])
            asyncio.get_running_loop().call_later(NullModel.hold, self._transport.write, ready)


async def main() -> None:
    raise_file_limit()
    server = await asyncio.get_running_loop().create_server(NullModel, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
