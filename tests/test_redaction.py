"""Credentials in URLs are in no message, and in nothing that is reported elsewhere."""

from __future__ import annotations

import pickle
from pathlib import Path

import httpx
import pytest

from lightning_core.backends.vllm.api import VllmApi
from lightning_core.errors import ConfigError, InfrastructureError, UpstreamRefusal, describe, explain, redact_urls
from lightning_core.observers.trackers.values import artifacts, without_credentials
from lightning_core.tools.runs.config_rows import settings


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pa@ss@host:1/v1 failed", "http://***@host:1/v1 failed"),
        ("https://token@host", "https://***@host"),
        ("https://g.example/v1beta/m:generateContent?alt=sse&key=AIza-1#x", "https://g.example/v1beta/m:generateContent?alt=sse&key=***#x"),
        ("see 'https://b.example/a?X-Amz-Signature=ab%2Fc&n=1'.", "see 'https://b.example/a?X-Amz-Signature=***&n=1'."),
        ("/traces?api_key=a&apikey=b&access_token=c&sig=d", "/traces?api_key=***&apikey=***&access_token=***&sig=***"),
        ("http://host/?max_tokens=3&monkey_island=4", "http://host/?max_tokens=3&monkey_island=4"),
        ("mail me@example.org, a=b, temperature=0.5", "mail me@example.org, a=b, temperature=0.5"),
        ("http://host/@user/repo?q=me@x", "http://host/@user/repo?q=me@x"),
    ],
)  # fmt: skip
def test_what_is_hidden(text: str, shown: str):
    assert redact_urls(text) == shown
    assert redact_urls(shown) == shown


def test_errors_do_not_show_credentials():
    secret = "http://u:secret@127.0.0.1:9/v1?key=secret"
    ours = [ConfigError(f"cannot use {secret}"), UpstreamRefusal(f"{secret} failed", status=500)]
    for error in (*ours, *(pickle.loads(pickle.dumps(one)) for one in ours), ValueError(secret)):
        assert "secret" not in describe(error) + explain(error)
        assert "127.0.0.1:9/v1" in describe(error)
    assert all("secret" not in str(error) for error in ours)
    with pytest.raises(InfrastructureError) as unreachable:
        VllmApi("http://u:secret@127.0.0.1:9").abort()
    assert "http://***@127.0.0.1:9" in str(unreachable.value)
    with pytest.raises(httpx.HTTPStatusError) as refused:
        httpx.Response(401, request=httpx.Request("GET", secret)).raise_for_status()
    assert "secret" not in describe(refused.value)


def test_nothing_that_is_reported_has_credentials(tmp_path: Path):
    config = {
        "policy": {"upstream": {"base_url": "https://u:secret@host/v1"}},
        "otlp": [{"endpoint": "http://h/?token=secret"}],
    }
    assert "secret" not in str(without_credentials(config))
    assert "secret" not in str(settings(config))
    assert settings(config)[0].value == "https://***@host/v1"
    for name in ("config.yaml", "summary.json"):
        (tmp_path / name).write_text("url: https://u:secret@host/v1")
    assert [path.name for path in artifacts(tmp_path)] == ["summary.json"]
    (tmp_path / "config.yaml").write_text("url: https://host/v1")
    assert len(artifacts(tmp_path)) == 2
