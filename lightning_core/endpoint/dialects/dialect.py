"""What the endpoint needs of a wire format. Each module beside this one is a `Dialect`; all else is the same for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning_core.endpoint.dialects.exchange import Answer, ChatRequest, Choice, Message, Reply
from lightning_core.endpoint.dialects.fields import Fields


class StreamWriter(Protocol):
    """Writes one streamed answer: each method gives the server-sent events to send now, perhaps none."""

    def begin(self, index: int) -> bytes:
        """Choice ``index`` is about to be sampled."""
        ...

    def think(self, index: int, reasoning: str) -> bytes:
        """All that choice ``index`` thought, said once and before any of its text."""
        ...

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        """``token_ids`` were sampled; ``text``, perhaps empty, may be said already."""
        ...

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        """Choice ``index`` is complete; ``rest`` is what remains of its text."""
        ...

    def end(self, choices: Sequence[Choice]) -> bytes:
        """All is said."""
        ...


class StreamReader(Protocol):
    """Reads the streamed answer of somebody else's server."""

    over: bool
    """Whether the last event has come; False for ever where a closing mark says so."""

    def read(self, event: Mapping[str, Any]) -> None:
        """Take in the JSON of one event."""
        ...

    def answers(self) -> list[Answer]:
        """All responses, once the stream is at its end; empty if it broke off."""
        ...


class Dialect(Protocol):
    """One wire format."""

    @property
    def PATH(self) -> str:
        """Where it is served, below the base URL."""
        ...

    @property
    def KEY_HEADER(self) -> str:
        """The header that holds an API key; in ``authorization`` after the word Bearer."""
        ...

    @property
    def PASSED_HEADERS(self) -> Sequence[str]:
        """Headers of a request that change what it means, for whoever it is passed on to."""
        ...

    @property
    def FIELDS(self) -> Fields:
        """What becomes of each field of a request."""
        ...

    def parse_request(self, body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request that is answered here; ``said`` is what each earlier answer of the rollout carries on, by its call.

        Raises `PolicyRequestError` naming the field that cannot be honoured.
        """
        ...

    def read_request(self, body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request that somebody else answers, as far as its record goes: what they can do is for them to say.

        Raises `PolicyRequestError` where not even that can be read.
        """
        ...

    def write_answer(self, reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer to a request without streaming."""
        ...

    def stream_writer(self, reply: Reply) -> StreamWriter:
        """For the answer to a request with streaming."""
        ...

    def read_answer(self, body: Mapping[str, Any]) -> list[Answer]:
        """Somebody else's answer; empty if ``body`` is none."""
        ...

    def stream_reader(self) -> StreamReader:
        """For somebody else's streamed answer."""
        ...

    def error_body(self, message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
        """An error as this format's clients expect it."""
        ...

    def error_event(self, message: str) -> bytes:
        """The end of a stream that broke off."""
        ...


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{name}data: {text}\n\n".encode()
