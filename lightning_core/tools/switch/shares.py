"""Chooses the arm of a conversation: the same one in each of its turns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from lightning_core.endpoint.request_body import conversation, system_prompt, text_of_message

CONVERSATION_HEADER = "lightning-conversation"
"""Header: names the conversation of a request, such as a session or a user, whose requests have one arm."""

_NAMES = ("prompt_cache_key", "safety_identifier", "user")
"""Fields of OpenAI's requests that name a conversation or a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The models that answer one agent."""

    arms: Mapping[str, float]
    """The share of conversations of each model, 1 in all."""
    shadow: str | None = None
    fallback: str | None = None

    def choose(self, agent: str | None, conversation: str) -> str:
        """The arm of ``conversation``: that of its point in [0, 1), in which arms follow each other by name."""
        digest = hashlib.blake2b(f"{agent or ''}\0{conversation}".encode(), digest_size=8).digest()
        point, end = int.from_bytes(digest) / (1 << 64), 0.0
        chosen = ""
        for name, share in sorted(self.arms.items()):
            end += share
            if share > 0:
                chosen = name
            if point < end:
                break
        return chosen


def conversation_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """A key that the turns of one conversation share, as far as a request shows it.

    By precedence: the header `CONVERSATION_HEADER`, a field with the conversation's or the user's name, and the system prompt with
    the first message. ``headers`` have lower-case names.
    """
    if name := headers.get(CONVERSATION_HEADER):
        return f"header {name}"
    for field in _NAMES:
        if isinstance(value := body.get(field), str) and value:
            return f"{field} {value}"
    named: Any = body.get("conversation")  # of OpenAI's Responses: its id, or an object with it
    if isinstance(named, Mapping):
        named = cast("Mapping[str, Any]", named).get("id")
    if isinstance(named, str) and named:
        return f"conversation {named}"
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(user := metadata.get("user_id"), str):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return f"user {user}"
    opening = [system_prompt(body), *map(text_of_message, conversation(body)[:1])]
    return hashlib.blake2b(json.dumps(opening).encode(), digest_size=16).hexdigest()
