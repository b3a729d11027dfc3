"""Requests that a web page may have made are refused, and clients that send too many."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Routing
from lightning_core.endpoint.transport.guard import RateLimit, Tls
from lightning_core.errors import ConfigError
from lightning_core.tools.serving import ServingEndpoint
from tests.dialects.test_fields import LEAST
from tests.endpoint.serving import client_in_rollout, serve, serve_backend

CHAT = "/chat/completions"
GOOGLE = "beta/models/base:generateContent"
SAY_HI = {"contents": [{"parts": [{"text": "hi"}]}]}


@contextmanager
def serving(**options: Any) -> Iterator[tuple[ServingEndpoint, httpx.Client]]:
    backend = ScriptedBackend(lambda prompt: "hello")
    with (
        ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing(max_tokens=9), **options) as endpoint,
        httpx.Client(base_url=endpoint.url) as client,
    ):
        yield endpoint, client


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST.:80", 200),
        ("agent.localhost:1", 200),
        ("127.0.0.1", 200),
        ("10.1.2.3:9", 200),  # an address cannot be made to resolve to this machine
        ("[::1]:80", 200),
        ("", 200),  # a browser always sends a name
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("localhost.evil.example", 403),
        ("evil.example:x", 403),
    ],
)
def test_a_server_without_a_key_answers_under_its_own_names_only(host: str, status: int):
    with serving() as (_, client):
        answer = client.post(CHAT, json=LEAST[CHAT], headers={"host": host})
        assert answer.status_code == status, answer.text
        if status == 403:
            assert "which is not a name of this server" in answer.json()["error"]["message"]
            assert "serve with an API key" in answer.json()["error"]["message"]
            assert client.get(client.base_url.join("/health"), headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://6.6.6.6", "http://127.0.0.1:1", "null"])
def test_a_page_of_another_origin_makes_no_calls(origin: str):
    """A page may send a text to any address without the consent of the server there."""
    body = '{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
    with serving() as (endpoint, client):
        headers = {"origin": origin, "content-type": "text/plain"}
        assert client.post(CHAT, content=body, headers=headers).status_code == 403
        assert client.post(CHAT, content=body, headers={"origin": endpoint.url.removesuffix("/v1")}).status_code == 200


def test_a_key_is_valid_under_any_name_and_from_any_page():
    """Containers, tunnels and proxies have their own names, and a page that knows the key is no stranger."""
    away = {"host": "host.docker.internal:8100", "origin": "app://editor"}
    with serving(api_key="k") as (_, client):
        assert client.post(CHAT, json=LEAST[CHAT], headers={**away, "authorization": "Bearer k"}).status_code == 200
        assert client.post(CHAT, json=LEAST[CHAT], headers={**away, "authorization": "Bearer j"}).status_code == 403
        assert client.post(CHAT, json=LEAST[CHAT]).status_code == 401
    backend = ScriptedBackend(lambda prompt: "hello")
    with (
        serve_backend(backend, public_url="http://Tunnel.example:80") as endpoint,
        client_in_rollout(endpoint) as (run, client),
    ):
        assert client.post(CHAT, json=LEAST[CHAT], headers=away).status_code == 200
        no_key = {"authorization": "Bearer other"}
        assert client.post(CHAT, json=LEAST[CHAT], headers={**away, **no_key}).status_code == 403
        assert client.post(CHAT, json=LEAST[CHAT], headers={"host": "tunnel.example", **no_key}).status_code == 401
        # It knows a live rollout, which learns why its call was refused.
        named = {**away, **no_key, **run.address.to_headers()}
        assert client.post(CHAT, json=LEAST[CHAT], headers=named).status_code == 401
        assert "has another key" in run.infrastructure[0]


def test_a_refusal_has_the_shape_of_its_wire_format():
    with serving() as (endpoint, client):
        client.headers["host"] = "evil.example"
        assert client.post("/messages", json=LEAST["/messages"]).json()["error"]["type"] == "permission_error"
        url = f"{endpoint.url}{GOOGLE}"
        assert client.post(url, json=SAY_HI).json()["error"]["status"] == "PERMISSION_DENIED"
        assert set(client.post(CHAT, json=LEAST[CHAT]).json()["error"]) == {"message", "type", "param", "code"}


def test_a_client_beyond_its_rate_gets_retry_after():
    with serving(requests_per_minute=3) as (endpoint, client):
        assert [client.post(CHAT, json=LEAST[CHAT]).status_code for _ in range(3)] == [200] * 3
        url = f"{endpoint.url}{GOOGLE}"
        for refused, kind in (
            (client.post(CHAT, json=LEAST[CHAT]), ("type", "rate_limit_error")),
            (client.post("/messages", json=LEAST["/messages"]), ("type", "rate_limit_error")),
            (client.post(url, json=SAY_HI), ("status", "RESOURCE_EXHAUSTED")),
        ):
            assert (refused.status_code, refused.json()["error"][kind[0]]) == (429, kind[1])
            assert 1 <= int(refused.headers["retry-after"]) <= 20
            assert "more than 3 requests a minute" in refused.json()["error"]["message"]
        theirs = anthropic.Anthropic(base_url=endpoint.url.removesuffix("/v1"), api_key="k", max_retries=0)
        with pytest.raises(anthropic.RateLimitError):
            theirs.messages.create(model="policy", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        assert client.get(client.base_url.join("/health")).status_code == 200


def test_a_client_does_not_choose_its_address():
    with serving(requests_per_minute=1) as (_, client):
        sent = [client.post(CHAT, json=LEAST[CHAT], headers={"x-forwarded-for": f"10.0.0.{i}"}) for i in range(2)]
        assert [response.status_code for response in sent] == [200, 429]


def test_clients_do_not_share_a_rate_and_regain_it():
    rate = RateLimit(60)
    assert [rate.seconds_left("a", 100.0) for _ in range(60)] == [0.0] * 60
    assert rate.seconds_left("a", 100.25) == pytest.approx(0.75)
    assert rate.seconds_left("b", 100.25) == 0
    assert rate.seconds_left("a", 101.0) == 0
    assert rate.seconds_left("a", 101.0) == pytest.approx(1)
    for number in range(20_000):
        rate.seconds_left(str(number), 102.0)
    assert len(rate._clients) == 10_000


def certificate(folder: Path, password: bytes | None = None) -> Tls:
    """A certificate for 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    tls = Tls(certificate=folder / "cert.pem", key=folder / "key.pem")
    tls.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    tls.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return tls


def test_tls(tmp_path: Path):
    tls = certificate(tmp_path)
    with serving(tls=tls, api_key="k") as (endpoint, _):
        assert endpoint.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(tls.certificate))
        with httpx.Client(base_url=endpoint.url, verify=trusting, headers={"authorization": "Bearer k"}) as client:
            assert client.post(CHAT, json=LEAST[CHAT]).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(endpoint.url.replace("https", "http"))


def test_files_that_are_no_certificate_are_errors(tmp_path: Path):
    tls = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = certificate(tmp_path / "other", password=b"secret")
    for wrong, message in (
        (Tls(certificate=tls.certificate, key=tmp_path / "none.pem"), r"cannot read '.*none.pem': No such file"),
        (Tls(certificate=tls.key, key=tls.key), "expected PEM files that belong together"),
        (Tls(certificate=tls.certificate, key=other.key), "a key without a password"),
    ):
        with pytest.raises(ConfigError, match=message), serving(tls=wrong, api_key="k"):
            pass


@pytest.mark.parametrize(("options", "message"), [({"host": "0.0.0.0"}, "--api-key"), ({"api_key": ""}, "is empty")])
def test_other_machines_need_a_key(options: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message), serving(**options):
        pass


def test_a_wrong_name_is_logged_once(caplog: pytest.LogCaptureFixture):
    with serve() as endpoint, httpx.Client(base_url=endpoint.url, headers={"host": "evil.example"}) as client:
        for _ in range(3):
            assert client.get("/models").status_code == 403
    (record,) = (record for record in caplog.records if "evil.example" in record.message)
    assert "a request to /v1/models was refused: its Host is 'evil.example'" in record.message


def test_several_hosts_are_an_error_that_names_them():
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "host: evil.example", "connection: close"]
    with serving() as (_, client), socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in [*lines, "content-length: 2", "", "{}"]).encode())
        answer = connection.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 400 ")
    assert "has 2 Host headers: ['localhost', 'evil.example']; expected one" in answer


@pytest.mark.parametrize(
    ("path", "advice"),
    [("/images/generations", "Use one of these in the client"), ("/embeddings", "Give the embeddings client the URL")],
)
def test_a_server_without_rollouts_advises_no_setting_of_theirs(path: str, advice: str):
    with serving() as (_, client):
        answer = client.post(path, json={"model": "base", "input": "hi"})
    said = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert advice in said
    assert not [setting for setting in ("rollouts.", "policy.upstream", "agents.frozen") if setting in said]
