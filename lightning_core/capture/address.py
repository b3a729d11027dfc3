"""The address of a model call: its rollout, its parent span, and the agent that makes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

AGENT_HEADER = "lightning-agent"
"""Header: the agent's name, percent-encoded."""
MARK_HEADER = "lightning-mark"
"""Header: present if the agent is marked in code; the policy that the mark names, percent-encoded, or empty."""
INHERITED_HEADER = "lightning-inherited"
"""Header: present if the agent is the one that started the program, which gave the call no name."""

_TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The current rollout and agent, and the span that new spans become children of."""

    rollout: str
    """Trace id: 32 hexadecimal digits."""
    span: str
    """Span id: 16 hexadecimal digits."""
    agent: str | None = None
    mark: str | None = None
    """The policy that the agent's mark names, empty if it names none; None if the agent is not marked in code."""
    inherited: bool = False
    """Whether the name is that of the program that makes the call, which has no name of its own."""

    def to_headers(self) -> dict[str, str]:
        """This address as headers: W3C ``traceparent``, and the agent's name and mark."""
        headers = {"traceparent": f"00-{self.rollout}-{self.span}-01"}
        for name, value in ((AGENT_HEADER, self.agent), (MARK_HEADER, self.mark)):
            if value is not None:
                headers[name] = quote(value, safe="")
        if self.inherited:
            headers[INHERITED_HEADER] = "1"
        return headers

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Address | None:
        """The address in lower-case request headers; None without a valid ``traceparent``."""
        match = _TRACEPARENT.match(headers.get("traceparent", ""))
        if match is None:
            return None
        agent, mark = (
            None if value is None else unquote(value) for value in map(headers.get, (AGENT_HEADER, MARK_HEADER))
        )
        return cls(rollout=match[1], span=match[2], agent=agent, mark=mark, inherited=INHERITED_HEADER in headers)
