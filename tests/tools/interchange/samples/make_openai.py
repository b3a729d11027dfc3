"""Stored chat completions of OpenAI, as ``GET /v1/chat/completions`` and ``…/{id}/messages`` return them, by its own types.

The server that keeps completions is OpenAI's; the completions are of the sample agent.
"""

import json
import sys
from pathlib import Path
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionStoreMessage
from program import TOOLS, calculate, model_server, save

folder = Path(sys.argv[1])
completions: list[dict[str, Any]] = []
messages: list[dict[str, Any]] = []


class _Storing:
    """A client that keeps what ``store=True`` keeps."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.chat = self.completions = self
        self._client = client

    def create(self, **request: Any) -> ChatCompletion:
        reply = self._client.chat.completions.create(**request)
        stored = json.loads(reply.model_dump_json(exclude_none=True))
        stored |= {
            "metadata": {"agent": "calculator", "session": "1"},
            "tools": TOOLS,
            "temperature": request["temperature"],
        }
        completions.append(stored)
        messages.extend({"id": f"{reply.id}-{i}", **message} for i, message in enumerate(request["messages"]))
        return reply


with model_server() as url:
    calculate(_Storing(openai.OpenAI(base_url=url, api_key="none")), "What is 2 + 3?")
for message in messages:
    ChatCompletionStoreMessage.model_construct(**message)
page = {
    "object": "list",
    "data": completions,
    "first_id": completions[0]["id"],
    "last_id": completions[-1]["id"],
    "has_more": False,
}
save(folder / "openai_completions.json", json.dumps(page))
pages = [
    {"object": "list", "data": [m for m in messages if m["id"].rpartition("-")[0] == c["id"]], "has_more": False}
    for c in completions
]
save(folder / "openai_messages.jsonl", "\n".join(map(json.dumps, pages)))
