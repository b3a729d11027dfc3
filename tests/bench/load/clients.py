"""Concurrent clients in several wire formats, some of which leave before their response is complete."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

import httpx

from lightning_core.dialects import DIALECTS

FORMATS = {dialect.PATH: dialect for dialect in DIALECTS if dialect.PATH != "/completions"}
TURNS = 4
"""Most turns of a conversation."""
AGENTS = ("writer", "critic")

_ID = re.compile(rb'"id": ?"(.*?)"')

Outcome = Literal["answered", "failed", "cut", "left", "left early", "not accepted"]


@dataclass(kw_only=True)
class Sent:
    """A request, and its outcome for the client."""

    number: int
    path: str
    streamed: bool
    outcome: Outcome = "not accepted"
    text: str = ""
    response: str | None = None
    seconds: float = 0.0
    reason: str = ""
    ending: bool = False
    """Whether the server was ending before the request had."""


@dataclass(kw_only=True)
class Load:
    """Clients of ``url``, the base URL of a server. ``with_feedback``: of a share of the responses."""

    url: str
    with_feedback: bool
    model: str
    sent: list[Sent] = field(default_factory=list[Sent])
    feedback: int = 0
    """Of which the server has said that it is stored."""
    ending: bool = False
    """Whether the server may refuse connections and requests."""
    ended: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, clients: int) -> None:
        """Send requests until `ended` is set."""
        await asyncio.gather(*(self._client(random.Random(place)) for place in range(clients)))

    async def _client(self, chance: random.Random) -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            while not self.ended:
                await self._conversation(http, chance)

    async def _conversation(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        path, streamed, agent = chance.choice([*FORMATS]), chance.random() < 0.5, chance.choice(AGENTS)
        messages: list[dict[str, Any]] = []
        for _ in range(chance.randint(1, TURNS)):
            if self.ended:
                return
            one = Sent(number=next(self._numbers), path=path, streamed=streamed)
            messages.append({"role": "user", "content": f"request {one.number}: say more"})
            await self._send(http, chance, one, messages, {"lightning-agent": agent})
            one.ending = self.ending
            self.sent.append(one)
            if one.outcome == "not accepted":
                await asyncio.sleep(0.05)
            if one.outcome != "answered":
                return
            messages.append({"role": "assistant", "content": one.text})
            if self.with_feedback and chance.random() < 0.3:
                await self._give_feedback(http, one)

    async def _send(
        self,
        http: httpx.AsyncClient,
        chance: random.Random,
        one: Sent,
        messages: list[dict[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        body: dict[str, Any] = {"model": self.model, "stream": one.streamed}
        if one.path == "/responses":
            body |= {"input": messages, "max_output_tokens": 8}
        else:
            body |= {"messages": messages, "max_tokens": 8}
        leaves, began = chance.random() < 0.04, monotonic()
        try:
            async with asyncio.timeout(0.02 if leaves and not one.streamed else None):
                async with http.stream("POST", f"{self.url}{one.path}", json=body, headers=headers) as response:
                    data = b""
                    async for part in response.aiter_bytes():
                        data += part
                        if leaves and one.streamed:
                            one.outcome = "left"
                            return
            one.seconds = monotonic() - began
            self._read(one, response.status_code, data)
        except TimeoutError:
            one.outcome = "left early"
        except httpx.RemoteProtocolError as error:
            one.outcome, one.reason = ("cut" if "body" in str(error) else "not accepted"), str(error)
        except httpx.TransportError as error:
            one.reason = repr(error)

    def _read(self, one: Sent, status: int, data: bytes) -> None:
        if status != 200:
            one.outcome, one.reason = "failed", f"{status} {data[:120].decode()}"
            return
        dialect = FORMATS[one.path]
        if one.streamed:
            reader = dialect.stream_reader()
            for line in data.splitlines():
                if line.startswith(b"data: {"):
                    reader.read(json.loads(line[6:]))
            responses = reader.responses()
        else:
            responses = dialect.read_response(json.loads(data))
        # The first id is that of the response.
        one.response = None if (found := _ID.search(data)) is None else found[1].decode()
        one.outcome = "answered" if responses else "cut"
        if responses:
            one.text = responses[0].message["content"] or ""

    async def _give_feedback(self, http: httpx.AsyncClient, one: Sent) -> None:
        try:
            given = await http.post(f"{self.url}/feedback", json={"response": one.response, "reward": 0.5})
        except httpx.TransportError:
            if self.ending:
                return
            raise
        assert given.status_code == 200, given.text
        self.feedback += 1
