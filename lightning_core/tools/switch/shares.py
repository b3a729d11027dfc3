"""The shares of the models of an agent. They choose the arm of a conversation: the same one in each of its turns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic_core import PydanticCustomError

from lightning_core.chat.json_text import show_json
from lightning_core.endpoint.request_body import conversation, system_prompt, text_of_message
from lightning_core.errors import PolicyRequestError
from lightning_core.tools.switch.plan import check_shares
from lightning_core.tools.switch.store import ShareChange

CONVERSATION_HEADER = "lightning-conversation"
"""Header: names the conversation of a request, such as a session or a user, whose requests have one arm."""

FROM_FILE = "file"
"""The reason of a change of shares that was made in the plan's file."""
ROLLBACK = "rollback"

_NAMES = ("prompt_cache_key", "safety_identifier", "user")
"""Fields of OpenAI's requests that name a conversation or a user."""
_LONGEST = 200
"""Characters of a name that is kept; of a longer one, a digest is."""


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


class ShareHistory:
    """The changes of the shares of each agent, oldest first."""

    def __init__(self, changes: Iterable[ShareChange]) -> None:
        self.latest: dict[str, dict[str, float]] = {}
        """The shares of each agent now."""
        self.in_file: dict[str, dict[str, float]] = {}
        """Those that the plan's file had last."""
        self._earlier: dict[str, list[dict[str, float]]] = {}
        for change in changes:
            self.add(change)

    def add(self, change: ShareChange) -> None:
        """Note a change."""
        last, earlier = self.latest.get(change.agent), self._earlier.setdefault(change.agent, [])
        if change.why == ROLLBACK:
            while earlier and earlier.pop() != change.arms:
                pass
        elif last is not None and last != change.arms:
            earlier.append(last)
        self.latest[change.agent] = change.arms
        if change.why == FROM_FILE:
            self.in_file[change.agent] = change.arms

    def previous(self, agent: str, models: Collection[str]) -> dict[str, float] | None:
        """The shares to roll back to: the last ones before, all of whose models are among ``models``."""
        earlier = self._earlier.get(agent, ())
        return next((arms for arms in reversed(earlier) if set(arms) <= set(models)), None)


def wanted_shares(name: str, body: Mapping[str, Any], models: Collection[str]) -> tuple[dict[str, float] | None, str]:
    """The shares of the agent ``name`` that ``body`` asks for (None: the previous ones), and the reason to record.

    Raises `PolicyRequestError` for anything but shares of ``models``.
    """
    keys = [key for key in ("arms", "promote", "rollback") if body.get(key)]
    if len(keys) != 1:
        raise PolicyRequestError(
            f"found {show_json(dict(body))}; expected one of "
            '{"arms": {MODEL: SHARE, …}}, {"promote": MODEL} and {"rollback": true}'
        )
    if keys == ["rollback"]:
        return None, ROLLBACK
    if keys == ["promote"]:
        arms: Any = {str(body["promote"]): 1.0}
    else:
        arms = body["arms"]
    if not isinstance(arms, dict) or not all(
        isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        for share in arms.values()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    ):
        raise PolicyRequestError(f"{keys[0]} is {show_json(body[keys[0]])}; expected shares by model", param=keys[0])
    shares = {str(model): float(share) for model, share in cast("dict[Any, Any]", arms).items()}
    if unknown := [model for model in shares if model not in models]:
        raise PolicyRequestError(
            f"there is no model {show_json(unknown[0])}; expected one of {', '.join(models)}",
            status=404,
            param=keys[0],
        )
    try:
        check_shares(shares)
    except PydanticCustomError as error:
        raise PolicyRequestError(f"agent {show_json(name)}: {error.message()}", param=keys[0]) from None
    return shares, keys[0]


def conversation_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """A key that the turns of one conversation share, as far as a request shows it.

    By precedence: the header `CONVERSATION_HEADER`, a field with the conversation's or the user's name, and the system prompt with
    the first message. ``headers`` have lower-case names.
    """
    found = _named(headers, body)
    if found is None:
        found = json.dumps([system_prompt(body), *map(text_of_message, conversation(body)[:1])])
    elif len(found) <= _LONGEST:
        return found
    return hashlib.blake2b(found.encode(), digest_size=16).hexdigest()


def _named(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
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
    return None
