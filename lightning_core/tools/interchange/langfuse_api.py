"""Observations and scores from the API of a Langfuse server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx

from lightning_core.errors import ConfigError, redact_urls
from lightning_core.tools.interchange.messages import mapping, sequence
from lightning_core.tools.interchange.retries import NoAnswer, request_object
from lightning_core.tools.interchange.source_format import Document

KEYS = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
"""The environment variables with the keys of a project."""
_SECONDS = 60.0
"""The time limit of a request."""


def fetch_documents(url: str, since: str | None = None) -> Iterator[Document]:
    """The observations and scores of a project on the server ``url``, page by page.

    ``since``: only those from this time on, in ISO 8601. Raises `ConfigError` without keys, and if the server cannot be read.
    """
    missing = [key for key in KEYS if not os.environ.get(key)]
    if missing:
        raise ConfigError(
            f"--url needs the keys of a project of Langfuse: set the environment variables {', '.join(missing)}"
        )
    keys = (os.environ[KEYS[0]], os.environ[KEYS[1]])
    time_key: dict[str, str] = {} if since is None else {"fromStartTime": since}
    score_key: dict[str, str] = {} if since is None else {"fromTimestamp": since}
    # Other values of metadata are cut after 200 characters.
    observations = {"fields": "core,basic,io,metadata,model,usage", "expandMetadata": "tools", "limit": "1000"}
    with httpx.Client(base_url=url.rstrip("/"), auth=keys, timeout=_SECONDS) as client:
        yield from _pages(client, "/api/public/v2/observations", {**observations, **time_key})
        yield from _pages(client, "/api/public/v3/scores", {"fields": "subject", "limit": "100", **score_key})


def _pages(client: httpx.Client, path: str, query: dict[str, str]) -> Iterator[Document]:
    cursor: str | None = None
    while True:
        page = _get(client, path, query if cursor is None else {**query, "cursor": cursor})
        yield from (mapping(item) for item in sequence(page.get("data")))
        following = mapping(page.get("meta")).get("cursor")
        if not following or following == cursor:
            return
        cursor = str(following)


def _get(client: httpx.Client, path: str, query: dict[str, str]) -> Document:
    """One page."""
    try:
        return request_object(lambda: client.get(path, params=query))
    except NoAnswer as error:
        url = redact_urls(str(client.base_url))
        raise ConfigError(f"{url}: {path} could not be read: {error}. Check --url") from None
