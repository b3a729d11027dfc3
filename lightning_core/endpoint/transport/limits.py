"""Limits of the policy endpoint that protect clients from each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from lightning_core.dialects.exchange import ChatRequest
from lightning_core.errors import PolicyRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A request beyond a limit gets the status in parentheses; others are not affected.

    JSON is at most 200 levels deep (400); this limit is fixed.
    """

    body_bytes: int = 32 << 20
    """Most bytes of a request body, as sent and decompressed (413)."""
    strings: int = 64 << 10
    """Most strings of a request body, with keys (400). Parsing them takes 10 ms, in which no other request is read."""
    values: int = 256 << 10
    """Most values of a request body, of which a list or an object is eight (400). Parsing them takes some tens of milliseconds."""
    body_seconds: float = 60.0
    """Longest time for a request body to arrive (408)."""
    header_seconds: float = 30.0
    """Longest time for the request line and headers to arrive (the connection is closed)."""
    header_bytes: int = 64 << 10
    """Most bytes of the request line and headers (400, or the connection is closed)."""
    requests_per_rollout: int = 256
    """Most requests of one rollout in progress, including streams (429). Requests below the limit wait for the backend."""
    requests: int = 4096
    """Most requests of all rollouts in progress (429, counted as an infrastructure failure)."""
    choices: int = 128
    """Most responses to one request: prompts times ``n`` (400)."""
    messages: int = 4096
    """Most messages of one request (400)."""
    stops: int = 64
    """Most stop strings of one request (400). Providers allow 4 or 5."""
    stop_characters: int = 8192
    """Most characters of all stop strings of one request (400)."""
    tools: int = 1024
    """Most tools of one request (400). OpenAI allows 128."""
    schema_characters: int = 128 << 10
    """Most characters of the JSON schema of a response (400). OpenAI allows 120,000."""

    def check(self, request: ChatRequest) -> None:
        """Raise `PolicyRequestError` if ``request`` has too many responses, messages, stop strings or tools, or too large a schema."""
        if request.choices > self.choices:
            raise PolicyRequestError(
                f"the request has {request.choices} responses; expected at most {self.choices}", param="n"
            )
        if len(request.messages) > self.messages:
            raise PolicyRequestError(
                f"{request.input_field} has {len(request.messages)} messages; expected at most {self.messages}",
                param=request.input_field,
            )
        self._check_stops(request)
        if len(request.functions) > self.tools:
            raise PolicyRequestError(
                f"the request has {len(request.functions)} tools; expected at most {self.tools}. Offer those that the task needs",
                param="tools",
            )
        required = request.requirements
        size = 0 if required.schema is None else len(json.dumps(required.schema))
        if size > self.schema_characters:
            raise PolicyRequestError(
                f"{required.schema_field} is a JSON schema of {size} characters; expected at most {self.schema_characters}. Leave out "
                "descriptions, or share parts by $ref",
                param=required.schema_field,
            )

    def _check_stops(self, request: ChatRequest) -> None:
        field = request.stop_field
        if len(request.stop) > self.stops:
            raise PolicyRequestError(
                f"{field} has {len(request.stop)} strings; expected at most {self.stops}. Send those that can end a response",
                param=field,
            )
        if (size := sum(map(len, request.stop))) > self.stop_characters:
            raise PolicyRequestError(
                f"{field} has {size} characters; expected at most {self.stop_characters}. Send the starts of the strings",
                param=field,
            )

    def __post_init__(self) -> None:
        """Raises ValueError for a limit that is not positive."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"Limits.{field.name} is {value!r}; expected a number above 0")
