"""The calls and events of a rollout as its page shows them, in order of time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core import trace as tr
from lightning_core.credit.explain import Explanation
from lightning_core.records.store import CallCredit
from lightning_core.tools.view.contexts import CONTEXTS
from lightning_core.tools.view.conversation import (
    LIMIT,
    ShownMessage,
    indented,
    repeated_messages,
    show_message,
)
from lightning_core.tools.view.why import Why
from lightning_core.trace import Call, Event, Reward, SpanRecord, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCard:
    """One call: its messages, response, settings, rewards and credit."""

    call: Call
    number: int
    """Its place among the rollout's calls, from 1."""
    messages: Sequence[ShownMessage]
    """The messages that are not repeated, or all messages."""
    repeated: int
    """Number of its first messages that an earlier call of its agent had."""
    response: ShownMessage | None
    settings: Sequence[tuple[str, str]]
    tools: Sequence[str]
    """Names of the tools that the model was offered."""
    context: str | None
    """The meaning of its kind of context."""
    rewards: Sequence[Reward]
    credit: CallCredit | None
    explanation: Explanation | None
    differs: bool
    """Whether the explanation contradicts the stored credit."""

    @property
    def is_call(self) -> bool:
        return True

    @property
    def id(self) -> str:
        return self.call.id

    @property
    def anchor(self) -> str:
        """The id of its element."""
        return f"call-{self.call.id}"

    @property
    def length(self) -> int | None:
        """Number of sampled tokens; None if they are not known."""
        return None if self.call.output_ids is None else len(self.call.output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCard:
    """A tool call, requests that went elsewhere, or an event that failed."""

    event: Event
    details: Sequence[tuple[str, str]]
    """Titles and texts."""

    @property
    def is_call(self) -> bool:
        return False

    @property
    def id(self) -> str:
        return self.event.id

    @property
    def anchor(self) -> str:
        """The id of its element."""
        return f"event-{self.event.id}"


def make_cards(
    trace: Trace, spans: Iterable[SpanRecord], credit: Sequence[CallCredit], why: Why
) -> list[CallCard | EventCard]:
    """The cards of all calls, and of the events that have something to read."""
    attributes = {span.span_id: span.attributes for span in spans}
    repeated, rows = repeated_messages(trace.calls), {row.call: row for row in credit}
    cards: list[CallCard | EventCard] = []
    for number, call in enumerate(trace.calls, 1):
        cards.append(
            make_call_card(
                call,
                number=number,
                repeated=repeated[call.id],
                attributes=attributes.get(call.id, {}),
                rewards=[r for r in trace.rewards if r.call == call.id],
                credit=rows.get(call.id),
                why=why,
            )
        )
    cards += [EventCard(event=event, details=_details(event)) for event in trace.events if _is_shown(event)]
    return sorted(cards, key=_start)


def _start(card: CallCard | EventCard) -> int:
    return card.call.start_ns if isinstance(card, CallCard) else card.event.start_ns


def make_call_card(
    call: Call,
    *,
    number: int,
    repeated: int,
    attributes: Mapping[str, Any],
    rewards: Sequence[Reward],
    credit: CallCredit | None,
    why: Why,
    full: bool = False,
) -> CallCard:
    """The card of ``call``. ``full``: with all of its messages, in full length."""
    limit = None if full else LIMIT
    messages = call.messages if full else call.messages[repeated:]
    return CallCard(
        call=call,
        number=number,
        messages=[show_message(message, limit=limit) for message in messages],
        repeated=repeated,
        response=None if call.response is None else show_message(call.response, limit=limit),
        settings=_settings(call, attributes),
        tools=_tool_names(attributes.get(tr.TOOL_DEFINITIONS)),
        context=CONTEXTS.get(call.context or ""),
        rewards=rewards,
        credit=credit,
        explanation=None if credit is None else why.of(credit),
        differs=credit is not None and why.differs(credit),
    )


def _settings(call: Call, attributes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Sampling parameters and other properties that are set, as names and texts."""
    top_p, versions = attributes.get(tr.TOP_P), [call.first_version, call.policy_version]
    values: list[tuple[str, object]] = [
        ("policy version", "–".join(str(v) for v in versions if v is not None) or None),
        ("temperature", None if call.output_ids is None else f"{call.temperature:g}"),
        ("top p", f"{top_p:g}" if isinstance(top_p, int | float) and top_p < 1 else None),
        ("max tokens", call.max_tokens),
        ("finish reason", call.finish_reason),
        ("constraint", call.constraint),
        ("sent to", None if call.target is None else f"{call.target[0]} with {call.target[1] or 'no key'}"),
    ]
    for name in ("temperature", "top_p"):
        requested = attributes.get(f"lightning.replaced.{name}")
        values.append((f"requested {name.replace('_', ' ')}", requested))
    values += [("ignored field", text) for text in call.dropped]
    return [(name, str(value)) for name, value in values if value is not None]


def _tool_names(definitions: Any) -> list[str]:
    if not isinstance(definitions, str):
        return []
    try:
        parsed = json.loads(definitions)
    except ValueError:
        return []
    tools = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in parsed]
    return [str(tool.get("name", "?")) if isinstance(tool, dict) else str(tool) for tool in tools]


def _is_shown(event: Event) -> bool:
    return event.kind in ("tool", "elsewhere") or (event.error is not None and event.kind != "rollout")


def _details(event: Event) -> list[tuple[str, str]]:
    a = event.attributes
    named = [("arguments", a.get(tr.TOOL_ARGUMENTS)), ("result", a.get(tr.TOOL_RESULT))]
    if event.kind == "elsewhere":
        named = [("requests", a.get(tr.REQUESTS)), ("reason", a.get(tr.REASON))]
    return [(title, indented(value)) for title, value in named if value is not None]
