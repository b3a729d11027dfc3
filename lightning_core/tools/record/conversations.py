"""Recognizes conversations: a call whose messages begin with those of an earlier call and its response continues it.

Conversations of different agents or with different hosts are different, also if they have the same messages.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning_core.otel.unicode import write_json

_MOST = 20_000
"""Ends of conversations that are kept, as digests."""


class OpenConversations:
    """The trace of each conversation, by a digest of its messages so far."""

    def __init__(self) -> None:
        self._traces: OrderedDict[bytes, str] = OrderedDict()

    def place(
        self,
        parties: Sequence[str | None],
        messages: Sequence[Any],
        responses: Sequence[Mapping[str, Any]],
        new: str,
        *,
        known: str | None = None,
    ) -> str:
        """The trace of a call with ``messages``: that of the conversation it continues, else ``new``.

        ``parties``: the agent and, if it is known, the host. ``known``: the trace, if the request names the call it continues.
        """
        digest, trace = _digest("messages", *parties), known or new
        for message in messages:
            digest = _extend(digest, message)
            if known is None and _role(message) == "assistant":
                trace = self._traces.get(digest, trace)
        for response in responses:
            self._keep(_extend(digest, response), trace)
        return trace

    def place_named(self, agent: str | None, name: str, new: str) -> str:
        """The trace of the conversation that the program calls ``name``; ``new`` if it is the first of its calls."""
        digest = _digest("name", agent, name)
        trace = self._traces.get(digest, new)
        self._keep(digest, trace)
        return trace

    def _keep(self, digest: bytes, trace: str) -> None:
        self._traces[digest] = trace
        self._traces.move_to_end(digest)
        while len(self._traces) > _MOST:
            self._traces.popitem(last=False)


def _digest(*parts: str | None) -> bytes:
    return hashlib.blake2b(write_json(parts), digest_size=16).digest()


def _extend(digest: bytes, message: Any) -> bytes:
    # Only what clients send back: they leave out other fields of a response, and may write empty content as null.
    text = b"" if not isinstance(message, Mapping) else write_json(_kept(cast("Mapping[str, Any]", message)))
    return hashlib.blake2b(digest + text, digest_size=16).digest()


def _kept(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]  # pyright: ignore
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else parts
    calls = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return [message.get("role"), content, calls]


def _role(message: Any) -> Any:
    return cast("Mapping[str, Any]", message).get("role") if isinstance(message, Mapping) else None
