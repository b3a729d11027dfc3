"""Refuses model calls over WebSocket, which the endpoint does not answer, before the connection is opened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lightning_core.capture.caller import Speaker, speaking
from lightning_core.capture.elsewhere import STRAY, WEBSOCKET
from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches
from lightning_core.capture.run import live_runs
from lightning_core.errors import StrayCallError
from lightning_core.propagation.clients.unrouted import attempt
from lightning_core.propagation.providers import host_of, is_listed

_PATHS = ("/responses", "/realtime")
"""Paths of OpenAI's APIs that have a WebSocket form."""
_CONNECT = (("websockets.asyncio.client", "connect.__init__"), ("websockets.sync.client", "connect"))


def install_websockets(patches: Patches) -> None:
    """Refuse model calls of ``websockets``, the package that OpenAI's clients use."""
    for module, attribute in _CONNECT:
        when_imported(patches, module, partial(_wrap, patches, attribute))


def _wrap(patches: Patches, attribute: str, module: Any) -> None:
    patches.wrap(module, attribute, _connect)


def _connect(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    url = args[0] if args else kwargs.get("uri")
    if url is not None:
        attempt(None, lambda: _refuse(str(url)), reported=(ValueError,))
    return wrapped(*args, **kwargs)


def _refuse(url: str) -> None:
    target, speaker = urlsplit(url), speaking()
    if speaker is None or not target.path.rstrip("/").endswith(_PATHS):
        return
    runs = [speaker.run] if isinstance(speaker, Speaker) else live_runs()
    if all(run.endpoint is None for run in runs) or any(is_listed(target, run.ignore_hosts) for run in runs):
        return
    host = host_of(target)
    if not isinstance(speaker, Speaker):
        raise speaker.refuse(host)
    message = (
        f"a model call over WebSocket to {host} was refused: the policy endpoint answers HTTP requests. Use the client's HTTP "
        "transport; in the OpenAI Agents SDK, set_default_openai_responses_transport('http'). If the connection is not to be "
        f"trained on, list {host!r} under rollouts.ignore_hosts"
    )
    run = speaker.run
    run.count_infrastructure_failure(message, permanent=True)
    run.note_elsewhere(speaker.address.agent, host, f"{STRAY}{WEBSOCKET}")
    raise StrayCallError(message)
