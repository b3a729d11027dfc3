"""An endpoint with a scripted backend, clients in a rollout of it, and what they left in the trace."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from openai import OpenAI

from lightning_core import Call, rollout, trace_to_transitions, transitions_to_rows
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import ActiveRollout, current_address, scope
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.server import PolicyEndpoint, Routing

TRAINED = Routing(trained=frozenset({"writer"}), temperature=0.7, max_tokens=64)
WRITER = Routing(trained=frozenset({"writer"}))
HI: list[Any] = [{"role": "user", "content": "hi"}]


@contextmanager
def serve(
    script: Any = lambda prompt: "hello",
    *,
    upstream: UpstreamServer | str | None = None,
    upstream_key: str | None = None,
    limits: Any = None,
    **options: Any,
) -> Iterator[PolicyEndpoint]:
    """An endpoint whose model answers by ``script``. ``upstream``: a server for other models, or its URL."""
    if isinstance(upstream, str):
        upstream = UpstreamServer(base_url=upstream, api_key=upstream_key)
    with serve_backend(ScriptedBackend(script, **options), upstream=upstream, limits=limits) as endpoint:
        yield endpoint


@contextmanager
def serve_backend(backend: ScriptedBackend, **options: Any) -> Iterator[PolicyEndpoint]:
    with PolicyEndpoint(backend, Chat(backend.tokenizer), **options) as endpoint:
        yield endpoint


@contextmanager
def serve_upstream(script: Any, routing: Routing | None = None) -> Generator[tuple[ActiveRollout, UpstreamServer]]:
    """A second endpoint as an upstream, with the rollout that records there what it is asked."""
    routing = routing or Routing(frozen={"": "policy"})
    with serve(script) as far, key_in_rollout(far, routing) as (run, key):
        yield run, UpstreamServer(base_url=far.url, api_key=key)


@contextmanager
def key_in_rollout(
    endpoint: PolicyEndpoint, routing: Routing | None = None, **options: Any
) -> Generator[tuple[ActiveRollout, str]]:
    """A rollout that is open in the endpoint, and its key."""
    key = endpoint.new_key()
    with rollout({"id": "t"}) as run:
        endpoint.open(key, run.address, routing or Routing(), **options)
        try:
            yield run, key
        finally:
            endpoint.close(key)


@contextmanager
def client_in_scope(
    endpoint: PolicyEndpoint, routing: Routing = TRAINED, agent: str = "writer", **options: Any
) -> Iterator[tuple[ActiveRollout, OpenAI]]:
    """A rollout with a client in the scope of ``agent``."""
    with key_in_rollout(endpoint, routing, **options) as (run, key), scope(agent):
        address = current_address()
        assert address is not None
        with OpenAI(base_url=endpoint.url, api_key=key, max_retries=0, default_headers=address.to_headers()) as client:
            yield run, client


@contextmanager
def client_in_rollout(
    endpoint: PolicyEndpoint, routing: Routing | None = None, **options: Any
) -> Iterator[tuple[ActiveRollout, httpx.Client]]:
    """A rollout with a client for any wire format."""
    with (
        key_in_rollout(endpoint, routing, **options) as (run, key),
        httpx.Client(base_url=endpoint.url, headers={"authorization": f"Bearer {key}"}, timeout=30) as client,
    ):
        yield run, client


def answered(run: ActiveRollout) -> list[Call]:
    """The calls of ``run`` that the endpoint did not refuse."""
    return [call for call in run.trace.calls if call.refused is None]


def rows_of(run: ActiveRollout) -> list[int]:
    """Number of responses in each training row of the agent ``writer``."""
    return [len(row.segments) for row in transitions_to_rows(trace_to_transitions(run.trace, agents={"writer"}))]


def prompts_of(run: ActiveRollout) -> list[str]:
    """The prompts, without special tokens."""
    return [
        bytes(i for i in call.prompt_ids if i < 256).decode() for call in run.trace.calls if call.prompt_ids is not None
    ]
