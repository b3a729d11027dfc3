"""Keys and URLs that name their agent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from lightning_core.capture import ActiveRollout, outside_rollout
from lightning_core.capture.signatures import sign
from lightning_core.endpoint.agents.agent_urls import name_agent, split_path
from lightning_core.propagation.children.keys import (
    KeyAddress,
    bind_key,
    is_key_of,
    is_signed_with,
    read_key,
    unbind_headers,
)
from lightning_core.testing import Playground, open_playground

ROLLOUT, SPAN = "a" * 32, "b" * 16
SECRET = "secret"
BODY = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


def suffix(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def signed(text: str, *, secret: str = SECRET) -> str:
    """A key with any ``text`` where that of its address is."""
    return f"lr-key.{text}.{sign(secret, 'key', 'lr-key', text)}"


def verify(key: str, text: str, signature: str) -> bool:
    return is_signed_with(SECRET, key, text, signature)


def bound(run: ActiveRollout, address: KeyAddress) -> str:
    assert run.api_key is not None
    return bind_key(run.api_key, address, secret=run.secret)


@pytest.fixture(scope="module")
def playground() -> Iterator[Playground]:
    with open_playground(lambda prompt: "yes", integrations=()) as opened:
        yield opened


@pytest.mark.parametrize(
    "address",
    [
        KeyAddress(),
        KeyAddress(agent="writer"),
        KeyAddress(agent="Schreiber/ärger ☂", mark="", span=SPAN, origin="1f"),
        KeyAddress(agent='"', mark="small"),
    ],
)
def test_a_bound_key_has_its_address(address: KeyAddress) -> None:
    key = bind_key("lr-key", address, secret=SECRET)
    assert read_key(key, verify) == ("lr-key", address)
    again = bind_key(key, KeyAddress(agent="x"), secret=SECRET)
    assert read_key(again, verify) == ("lr-key", KeyAddress(agent="x"))
    assert key.isascii()
    assert is_key_of(key, "lr-key")
    assert not is_key_of(key, "lr-other")


@pytest.mark.parametrize(
    "key",
    [
        "lr-key",
        "lr-key.",
        "lr-key.!",
        "lr-key.e3",
        "lr-key.e30",
        "lr-key.e30.",
        "lr-key.e30.e30",
        signed("e3"),
        signed("!"),
        signed(suffix([])),
        signed(suffix({"agent": 1})),
        signed(suffix({"span": "b" * 15})),
        signed(suffix({"other": "x"})),
        signed(suffix({})) + "0",
        signed(suffix({}), secret="other"),
        signed(suffix({})).replace("lr-key", "lr-other"),
        signed(suffix({})).replace(suffix({}), suffix({"agent": "other"})),
    ],
)
def test_any_other_key_has_none(key: str) -> None:
    assert read_key(signed(suffix({})), verify) == ("lr-key", KeyAddress())
    assert read_key(key, verify) is None


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key", "x-goog-api-key"])
def test_every_key_header(header: str) -> None:
    key, scheme = bind_key("lr-key", KeyAddress(agent="writer"), secret=SECRET), "Bearer " * (header == "authorization")
    headers, said = unbind_headers({header: scheme + key, "other": "1"}, verify)
    assert headers == {header: f"{scheme}lr-key", "other": "1"}
    assert said == KeyAddress(agent="writer")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", (None, "/v1/messages")),
        ("/a/writer/v1/messages", ("writer", "/v1/messages")),
        (
            "/a/team%2Fwriter%20%C3%A4/v1beta/models/m:generateContent",
            ("team/writer ä", "/v1beta/models/m:generateContent"),
        ),
        ("/a/a/a/b/v1", ("a", "/a/b/v1")),
        ("/a/writer", (None, "/a/writer")),
    ],
)
def test_the_name_in_a_path(path: str, expected: tuple[str | None, str]) -> None:
    assert split_path(path) == expected


def test_header_url_and_key_in_this_order() -> None:
    key = KeyAddress(agent="by key", mark="policy", span=SPAN)
    inside = {"traceparent": f"00-{ROLLOUT}-{'c' * 16}-01"}
    outside = {"traceparent": f"00-{'d' * 32}-{'c' * 16}-01"}
    own = f"00-{ROLLOUT}-{SPAN}-01"

    def named(headers: dict[str, str], name: str | None) -> tuple[str | None, ...]:
        given = name_agent(headers, name, key, ROLLOUT)
        return tuple(map(given.get, ("lightning-agent", "lightning-mark", "traceparent")))

    assert named({}, None) == ("by%20key", "policy", own)
    assert named({}, "by url") == ("by%20url", None, own)
    assert named({}, "by key") == ("by%20key", "policy", own)
    assert named(inside, None) == ("by%20key", "policy", inside["traceparent"])
    assert named(outside, None) == ("by%20key", "policy", own)
    assert named(inside | {"lightning-agent": "x"}, "by url") == ("x", None, inside["traceparent"])


@pytest.mark.parametrize(
    ("header", "path"),
    [
        ("authorization", "chat/completions"),
        ("x-api-key", "messages"),
        ("api-key", "responses"),
        ("x-goog-api-key", "completions"),
        *(
            pytest.param(header, path, marks=pytest.mark.long)
            for header, others in {
                "authorization": ("messages", "responses", "completions"),
                "x-api-key": ("chat/completions", "responses", "completions"),
                "api-key": ("chat/completions", "messages", "completions"),
                "x-goog-api-key": ("chat/completions", "messages", "responses"),
            }.items()
            for path in others
        ),
    ],
)
def test_the_endpoint_admits_bound_keys_and_names_in_the_url(playground: Playground, path: str, header: str) -> None:
    body = {"model": "m", "max_tokens": 8, "prompt": "hi"} if path == "completions" else BODY
    body = {"model": "m", "input": "hi"} if path == "responses" else body
    scheme = "Bearer " if header == "authorization" else ""
    with playground.rollout() as run:
        assert run.api_key is not None
        key = bound(run, KeyAddress(agent="by key"))
        named = f"{playground.url.removesuffix('/v1')}/a/by%2Furl/v1"
        for url, used in ((playground.url, key), (named, run.api_key), (named, key)):
            response = _post(f"{url}/{path}", body, {header: scheme + used})
            assert response.status_code == 200, response.text
    assert [call.agent for call in run.trace.calls] == ["by key", "by/url", "by/url"]


def test_other_routes_under_a_name(playground: Playground) -> None:
    with playground.rollout() as run:
        headers = {"authorization": f"Bearer {run.api_key}"}
        root = playground.url.removesuffix("/v1")
        assert _get(f"{root}/a/writer/health", {}).status_code == 200
        assert _get(f"{root}/a/writer/v1/nothing", headers).status_code == 404
        headers = {"authorization": f"Bearer {bound(run, KeyAddress(agent='writer'))}"}
        assert _get(f"{root}/v1/models", headers).status_code == 200
        assert _post(f"{root}/v1/traces", {"resourceSpans": []}, headers).status_code == 200


def test_a_broken_or_expired_key_is_unknown(playground: Playground) -> None:
    with playground.rollout() as run:
        assert run.api_key is not None
        key = bound(run, KeyAddress(agent="writer"))
        other = bind_key("lr-other", KeyAddress(agent="writer"), secret=run.secret)
        keys = [f"{run.api_key}.broken", f"{run.api_key}.{suffix({})}", f"{key}x", other]
        responses = [_post(f"{playground.url}/messages", BODY, {"x-api-key": key}) for key in keys]
    responses.append(_post(f"{playground.url}/messages", BODY, {"x-api-key": key}))
    assert [response.status_code for response in responses] == [401] * 5
    assert len({response.text for response in responses}) == 1
    assert run.trace.calls == ()


def _post(url: str, body: Any, headers: dict[str, str]) -> httpx2.Response:
    with outside_rollout():
        return httpx2.post(url, json=body, headers=headers, trust_env=False)


def _get(url: str, headers: dict[str, str]) -> httpx2.Response:
    with outside_rollout():
        return httpx2.get(url, headers=headers, trust_env=False)
