"""A request that meets the end of an idle connection is sent again; other errors reach the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.transport import server_client
from lightning_core.endpoint.transport.server_client import ServerClient
from tests.endpoint.closing_server import Behaviour, closing_server
from tests.endpoint.serving import HI, client_in_rollout, serve


def ask(times: int, behave: Callable[[int, int], Behaviour]) -> tuple[list[str], list[tuple[int, int]]]:
    """What one client gets from ``times`` requests, one after the other, and what the server saw."""

    async def run(url: str) -> list[str]:
        found: list[str] = []
        async with ServerClient(connections=None, idle=1, trust_env=False) as client:
            for _ in range(times):
                try:
                    response = await client.post(f"{url}/chat/completions", json={"messages": HI})
                    found.append(response.json()["choices"][0]["message"]["content"])
                except httpx.TransportError:
                    found.append("error")
        return found

    with closing_server(behave) as (url, seen):
        return asyncio.run(run(url)), seen


@pytest.mark.parametrize("closing", ["close", "reset"])
def test_a_closed_idle_connection_costs_no_request(closing: Behaviour):
    found, seen = ask(3, lambda *place: closing if place == (0, 1) else "answer")
    assert found == ["far"] * 3
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_connection_is_not_used_after_a_pause_in_which_servers_close_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_client, "_IDLE_SECONDS", 0.0)
    assert ask(2, lambda *_: "answer")[1] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("closing", ["late", "odd"])
def test_a_request_that_the_server_works_on_is_not_sent_again(closing: Behaviour, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_client, "_CLOSED_SECONDS", 0.2)
    found, seen = ask(2, lambda *place: closing if place == (0, 1) else "answer")
    assert (found, seen) == (["far", "error"], [(0, 0), (0, 1)])


@pytest.mark.parametrize("closing", ["close", "reset", "break"])
def test_other_ends_of_a_connection_are_errors(closing: Behaviour):
    """Of a new connection, after the begin of a response, and of a server that closes each time."""
    found, seen = ask(2, lambda connection, _: closing if connection == 0 else "answer")
    assert (found, seen) == (["error", "far"], [(0, 0), (1, 0)])
    found, seen = ask(2, lambda _, number: "break" if number else "answer")
    assert (found, seen) == (["far", "error"], [(0, 0), (0, 1)])
    found, seen = ask(2, lambda *place: closing if any(place) else "answer")
    again = [] if closing == "break" else [(1, 0)]
    assert (found, seen) == (["far", "error"], [(0, 0), (0, 1), *again])


def test_a_forwarded_call_survives_the_end_of_an_idle_connection():
    with (
        closing_server(lambda *place: "reset" if place == (0, 1) else "answer") as (url, seen),
        serve(upstream=url) as endpoint,
        client_in_rollout(endpoint, Routing(frozen={"": "far"})) as (run, client),
    ):
        for _ in range(2):
            client.post("/chat/completions", json={"model": "far", "messages": HI}).raise_for_status()
        assert not run.infrastructure
    assert seen == [(0, 0), (0, 1), (1, 0)]
