"""The ledger: where each model request of a run went, and which requests did not go through the endpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_core import trace as tr
from lightning_core.capture.elsewhere import STRAY
from lightning_core.errors import shorten
from lightning_core.trace import Call, Trace

EntryKind = Literal["call", "failed", "refused", "dropped", "other", "elsewhere"]
TRAINED = "trained"
NOT_TRAINED = "not trained"
_MAX_REASON = 120
# The end of a message may be missing. An apostrophe inside a word does not quote.
_QUOTED = re.compile(r"""(?<!\w)(?:'.*?(?:'(?!\w)|$)|".*?(?:"(?!\w)|$)|`.*?(?:`(?!\w)|$))""")
_NUMBER = re.compile(
    r"(?P<end>\bexit (?:code|status) |\bsignal |\bSystemExit\()?(?<![\w.])[-+]?\d+(?:[.,_]\d+)*(?!\w)", re.IGNORECASE
)
_OBJECT = re.compile(r"\{.*(?:\}|$)")
_REPEATED = re.compile(r"(['\"]…['\"]|\bN)(?:, \1)+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=\W?[A-Z])")
_NOT_SAMPLED = ("embeddings", tr.COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Requests of one agent with one fate."""

    kind: EntryKind
    """``call``: answered; ``failed``: by an error; ``refused``: by the endpoint, or as a stray call; ``dropped``: calls with a field that
    had no effect; ``other``: answered without sampling, such as a token count; ``elsewhere``: not through the endpoint."""
    agent: str | None
    where: str
    """The model served here, or the host."""
    detail: str
    """For calls: ``trained``, or which model was requested with whose key; else the reason, without the values in it."""
    example: str = field(default="", compare=False)
    """For refused requests: the reason of one, with its values. It does not divide them into several entries."""

    @property
    def reason(self) -> str:
        """The reason for display, with the values of one request if they are known."""
        return self.example or self.detail

    @property
    def destination(self) -> str:
        """The destination of the requests: ``api.openai.com (gpt-4o-mini, your key)``."""
        return self.where if self.detail == TRAINED else f"{self.where} ({self.detail})"


Ledger = Counter[Entry]


def trace_ledger(trace: Trace, trained: Collection[str | None] = ()) -> Ledger:
    """The number of requests of one rollout for each entry. ``trained``: agents known to be trained, for traces that lack it."""
    ledger: Ledger = Counter(
        entry for call in trace.calls if call.replays is None for entry in _call_entries(call, trained)
    )
    for event in trace.events:
        entry = event_entry(event.attributes, event.agent)
        if entry is not None:
            ledger[entry] += int(event.attributes.get(tr.REQUESTS, 1))
    return ledger


def routes(ledger: Iterable[Entry]) -> list[str]:
    """One text for each agent and destination: ``reply → api.openai.com (gpt-4o-mini, your key)``."""
    return [f"{e.agent or '(no agent)'} → {e.destination}" for e in ledger if e.kind in ("call", "failed")]


class NewRoutes:
    """The routes of a run as its rollouts end."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, trace: Trace) -> str:
        """``routing: `` and the `routes` of ``trace`` that no earlier trace had; empty if there are none."""
        new = [route for route in routes(trace_ledger(trace)) if route not in self._known]
        self._known.update(new)
        return f"routing: {'; '.join(new)}" if new else ""


def selectable_names(ledger: Iterable[Entry]) -> list[str]:
    """Names of agents that made model calls, in the form of ``agents.train``."""
    calls = (e for e in ledger if e.kind in ("call", "failed", "refused"))
    return sorted({e.agent for e in calls if e.agent is not None and not _is_reserved(e)})


def _is_reserved(entry: Entry) -> bool:
    """Whether the endpoint gave the name: the reward function's, or ``AGENT/RULE`` of an auxiliary call."""
    agent = entry.agent or ""
    return agent == tr.REWARD_FUNCTION or ("/" in agent and entry.detail == NOT_TRAINED)


def call_entries(
    attributes: Mapping[str, Any], agent: str | None, *, failed: bool, trained: Collection[str | None] = ()
) -> list[Entry]:
    """The entry of a model call from its span's attributes, and its fields that had no effect."""
    model = str(attributes.get(tr.RESPONSE_MODEL) or attributes.get(tr.REQUEST_MODEL) or "")
    dropped = [Entry(kind="dropped", agent=agent, where=model, detail=text) for text in attributes.get(tr.DROPPED, ())]
    return [_call_entry(attributes, agent, failed=failed, trained=trained), *dropped]


def _call_entry(
    attributes: Mapping[str, Any], agent: str | None, *, failed: bool, trained: Collection[str | None] = ()
) -> Entry:
    a = attributes
    model = str(a.get(tr.RESPONSE_MODEL) or a.get(tr.REQUEST_MODEL) or "")
    if a.get(tr.REFUSED) is not None:
        return _refused(str(a[tr.REFUSED]), agent, model)
    if a.get(tr.HOST) is not None:
        where, detail = str(a[tr.HOST]), ", ".join(filter(None, (model, a.get(tr.CREDENTIALS))))
    else:
        is_trained = a.get(tr.TRAINED) or agent in trained
        where, detail = model, TRAINED if is_trained else NOT_TRAINED
    return Entry(kind="failed" if failed else "call", agent=agent, where=where, detail=detail)


def event_entry(attributes: Mapping[str, Any], agent: str | None) -> Entry | None:
    """The entry of any other span; None if it is not a request."""
    a = attributes
    operation = a.get(tr.OPERATION)
    if operation == tr.ELSEWHERE:
        host, reason = str(a.get(tr.HOST, "")), str(a.get(tr.REASON, ""))
        kind = "refused" if reason.startswith(STRAY) else "elsewhere"
        return Entry(kind=kind, agent=agent, where=host, detail=reason.removeprefix(STRAY))
    if operation not in _NOT_SAMPLED:
        return None
    where = str(a.get(tr.HOST) or a.get(tr.RESPONSE_MODEL) or a.get(tr.REQUEST_MODEL) or "")
    refused = a.get(tr.REFUSED)
    if refused is None:
        return Entry(kind="other", agent=agent, where=where, detail=operation)
    return _refused(str(refused), agent, where)


def _refused(message: str, agent: str | None, where: str) -> Entry:
    example = shorten(_first_sentence(" ".join(message.split())), _MAX_REASON)
    return Entry(kind="refused", agent=agent, where=where, detail=general_reason(message), example=example)


def _first_sentence(line: str) -> str:
    return _SENTENCE_END.split(line, maxsplit=1)[0]


def general_reason(message: str) -> str:
    """The first sentence of ``message``, shortened, with a placeholder for each quoted value and number: equal reasons are one entry.

    Exit codes and signals are kept: they are the reason.
    """
    text = _QUOTED.sub(lambda match: f"{match[0][0]}…{match[0][0]}", " ".join(message.split()))
    text = _OBJECT.sub("{…}", _NUMBER.sub(lambda match: match[0] if match["end"] else "N", _first_sentence(text)))
    text = _REPEATED.sub(r"\1", text)
    return shorten(text, _MAX_REASON)


def _call_entries(call: Call, trained: Collection[str | None]) -> list[Entry]:
    host, credentials = call.target or (None, None)
    attributes = {
        tr.RESPONSE_MODEL: call.model,
        tr.REFUSED: call.refused,
        tr.DROPPED: call.dropped,
        tr.HOST: host,
        tr.CREDENTIALS: credentials,
        tr.TRAINED: call.trained,
    }
    return call_entries(attributes, call.agent, failed=call.error is not None, trained=trained)
