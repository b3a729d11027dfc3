"""Requests that are forwarded or listed, but never sampled: embeddings, and the served models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from langchain_openai import OpenAIEmbeddings

from lightning_core.capture import ActiveRollout, rollout, scope
from lightning_core.capture.signatures import sign_origin
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.trace import SpanRecord
from lightning_core.transitions import refused_calls, trace_to_transitions
from tests.endpoint.test_endpoint import TRAINED, client_in_scope, serve


def embeddings_of(run: ActiveRollout) -> list[SpanRecord]:
    return [span for span in run.spans if span.attributes.get("gen_ai.operation.name") == "embeddings"]


@pytest.mark.parametrize("agent", ["writer", "critic"])
def test_embeddings_pass_through_unchanged_and_are_recorded(server: RecordingServer, agent: str):
    """Also for a trained agent: no policy computes embeddings. A model under agents.frozen is not for embeddings."""
    upstream = UpstreamServer(base_url=f"{server.url}/v1", api_key="sk-upstream")
    routing = Routing(trained=frozenset({"writer"}), frozen={"critic": "base"})
    with serve(upstream=upstream) as endpoint, client_in_scope(endpoint, routing, agent) as (run, client):
        answer = client.embeddings.create(
            model="embed-3", input=["a", "b"], dimensions=3, encoding_format="float", user="me"
        )
        raw = client.embeddings.with_raw_response.create(model="embed-3", input="a")
    assert answer.data[0].embedding == [0.1, 1e-7, -2.0]
    assert (answer.model, answer.usage.total_tokens) == ("recorded", 3)
    first, second = server.requests
    assert first.url == f"{server.url}/v1/embeddings"
    expected = {"model": "embed-3", "input": ["a", "b"], "dimensions": 3, "encoding_format": "float", "user": "me"}
    assert first.body == expected
    assert second.body["encoding_format"] == "base64", "defaults of the client are forwarded too"
    assert first.headers["authorization"] == "Bearer sk-upstream"
    assert raw.http_response.headers["content-type"] == "application/json"
    span, _ = embeddings_of(run)
    attributes = {name: value for name, value in span.attributes.items() if name.startswith("gen_ai.")}
    assert attributes == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "lightning",
        "gen_ai.agent.name": agent,
        "gen_ai.request.model": "embed-3",
        "gen_ai.response.model": "recorded",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.embeddings.dimension.count": 3,
        "gen_ai.request.encoding_formats": ("float",),
    }
    assert span.name == "embeddings embed-3"
    assert run.trace.calls == (), "embeddings are not calls and cannot be trained on"
    assert trace_to_transitions(run.trace, agents={"writer", "critic"}) == []
    assert refused_calls(run.trace, agents={"writer"}) == []


def test_embeddings_on_their_way_to_a_provider_keep_their_credentials(server: RecordingServer):
    origin = {"lightning-origin": f"{server.url}/v1/embeddings", "lightning-origin-authorization": "Bearer sk-own"}
    with serve() as endpoint, client_in_scope(endpoint) as (run, client):
        headers = sign_origin(run.secret, run.rollout, origin)
        client.embeddings.create(model="embed-3", input="hi", extra_headers=headers)
    assert server.requests[0].headers["authorization"] == "Bearer sk-own"
    assert len(embeddings_of(run)) == 1


def test_embeddings_without_anybody_to_ask_are_a_clear_404():
    with serve() as endpoint, client_in_scope(endpoint) as (run, client), pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="embed-3", input="hi")
    assert "the models here compute no embeddings" in str(caught.value)
    assert "set policy.upstream" in str(caught.value)
    (refused,) = embeddings_of(run)
    assert "the models here compute no embeddings" in str(refused.attributes["lightning.refused"])
    assert run.infrastructure == []


def test_embeddings_that_fail_are_the_machinery_s_failure():
    dead = UpstreamServer(base_url="http://127.0.0.1:9/v1")
    with (
        serve(upstream=dead) as endpoint,
        client_in_scope(endpoint) as (run, client),
        pytest.raises(openai.APIStatusError, match=r"could not reach http://127\.0\.0\.1:9") as caught,
    ):
        client.embeddings.create(model="embed-3", input="hi")
    assert caught.value.status_code == 502
    (span,) = embeddings_of(run)
    assert span.error is not None
    assert len(run.infrastructure) == 1


def test_an_agent_s_own_client_for_embeddings_is_left_alone(playground: Playground, server: RecordingServer):
    """Inside a rollout these requests keep their original destination: not routed to the endpoint, not recorded."""
    model = OpenAIEmbeddings(
        model="embed-3",
        api_key="sk-own",  # pyright: ignore
        base_url=f"{server.url}/v1",
        check_embedding_ctx_length=False,
    )
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        assert model.embed_query("hi") == [0.1, 1e-7, -2.0]
    (noted,) = server.requests
    assert noted.headers["authorization"] == "Bearer sk-own"
    assert "traceparent" not in noted.headers
    assert embeddings_of(run) == []


def test_models_in_openais_format():
    with serve() as endpoint, client_in_scope(endpoint, TRAINED) as (_, client):
        assert [(m.id, m.object, m.owned_by) for m in client.models.list()] == [
            ("policy", "model", "lightning"),
            ("base", "model", "lightning"),
        ]
        assert client.models.retrieve("base").id == "base"
        with pytest.raises(
            openai.NotFoundError, match=r"'gpt/x' is not served here; the models are \['policy', 'base'\]"
        ):
            client.models.retrieve("gpt/x")


@contextmanager
def theirs(endpoint: PolicyEndpoint) -> Iterator[Anthropic]:
    with rollout({"id": "t"}) as run:
        key = endpoint.new_key()
        endpoint.open(key, run.address, Routing())
        with Anthropic(base_url=endpoint.url.removesuffix("/v1"), api_key=key, max_retries=0) as client:
            yield client
        endpoint.close(key)


def test_models_in_anthropics_format():
    with serve() as endpoint, theirs(endpoint) as client:
        page = client.models.list()
        assert [(m.id, m.type, m.display_name, m.lifecycle) for m in page] == [
            ("policy", "model", "policy", "active"),
            ("base", "model", "base", "active"),
        ]
        assert not page.has_more
        assert client.models.retrieve("policy").created_at.year == 1970
        with pytest.raises(anthropic.NotFoundError, match="'gpt' is not served here"):
            client.models.retrieve("gpt")


def test_health_needs_no_key():
    with serve() as endpoint:
        assert httpx.get(endpoint.url.replace("/v1", "/health")).json() == {"status": "ok"}
