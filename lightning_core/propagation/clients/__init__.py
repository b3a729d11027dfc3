"""Patches of the HTTP client libraries: inside a rollout, model calls go to the endpoint.

This happens in the HTTP client when the request is sent, so any SDK and any client object works unchanged, whenever it was created.
`stamping` decides, from the request and the current scope; each other module applies that to one library. Bodies are not changed, and
not read if that would consume them. The stamp of a request is not on a request that follows an HTTP redirect, so its key does not leave
the endpoint. It bypasses proxies if the endpoint is on this machine.
"""

from __future__ import annotations

import importlib
import importlib.util

from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.propagation.clients import (
    aiohttp_client,
    http_connections,
    httpx_clients,
    requests_client,
    urllib3_pools,
    websockets_client,
)

__all__ = ["install_client"]

_CLIENTS: tuple[tuple[str, tuple[tuple[str, Wrapper], ...]], ...] = (
    ("httpx", httpx_clients.WRAPS),
    ("httpx2", httpx_clients.WRAPS),  # the successor of httpx; the openai package uses it from 3.0 on
    ("httpcore", httpx_clients.POOL_WRAPS),
    ("httpcore2", httpx_clients.POOL_WRAPS),
    ("requests", requests_client.WRAPS),
    ("aiohttp", aiohttp_client.WRAPS),
    ("urllib3", urllib3_pools.WRAPS),
    ("http.client", http_connections.WRAPS),
)


def install_client(patches: Patches) -> None:
    """Make every installed HTTP client library stamp requests."""
    for module, wraps in _CLIENTS:
        if importlib.util.find_spec(module) is not None:
            for attribute, wrapper in wraps:
                patches.wrap(importlib.import_module(module), attribute, wrapper)
    websockets_client.install_websockets(patches)
