"""Counts connections that leave a rollout without a patched HTTP client.

Python's audit events report them. The hook cannot be removed; it does nothing while no patches are installed, outside rollouts, and while a
patched client sends. Code that opens sockets without Python's ``socket`` (gRPC, libcurl, uvloop) is not seen.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from lightning_core.capture.elsewhere import CONNECTION
from lightning_core.capture.patching import Patches
from lightning_core.capture.recording import note_elsewhere, record
from lightning_core.capture.scope import current_rollout
from lightning_core.propagation.clients.stamping import is_sending
from lightning_core.propagation.providers import port_of

_MAX_HOSTS = 4096
_WEB_PORTS = (80, 443)
_hosts: OrderedDict[str, str] = OrderedDict()
"""The host names that addresses were last resolved from."""

_installs = 0
_is_hooked = False


def install_sockets(patches: Patches) -> None:
    """Count connections of rollouts until ``patches`` are undone."""
    global _installs, _is_hooked
    if not _is_hooked:
        _is_hooked = True
        sys.addaudithook(_hook)
    _installs += 1
    patches.on_undo(_uninstall)
    patches.wrap(socket, "getaddrinfo", _resolve)


def _uninstall() -> None:
    global _installs
    _installs -= 1


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect" and _installs and not is_sending() and current_rollout() is not None:
        # An exception would end what the agent does.
        with suppress(Exception), record("audit"):
            _note_connection(*args)


def _resolve(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remember which name an address belongs to: connections have only the address."""
    found = wrapped(*args, **kwargs)
    with record("audit"):
        name = args[0] if args else kwargs.get("host")
        if isinstance(name, bytes):
            name = name.decode("ascii", "replace")
        for *_, address in found:
            if name and address[0] != name:
                _hosts[address[0]] = name
                _hosts.move_to_end(address[0])
        while len(_hosts) > _MAX_HOSTS:
            _hosts.popitem(last=False)
    return found


def _note_connection(sock: Any, address: Any) -> None:
    kind = sock.type & ~(getattr(socket, "SOCK_NONBLOCK", 0) | getattr(socket, "SOCK_CLOEXEC", 0))
    if kind != socket.SOCK_STREAM:
        return  # datagrams: name servers, and the usual way to find the own address
    name = _name_of(address)
    if name is not None and not _is_endpoint(address):
        note_elsewhere(name, CONNECTION)


def _name_of(address: Any) -> str | None:
    if isinstance(address, tuple):
        host = _hosts.get(str(address[0]), str(address[0]))
        return host if address[1] in _WEB_PORTS else f"{host}:{address[1]}"
    path = os.fsdecode(address)
    # multiprocessing's own listeners
    return None if "pymp-" in path or path.startswith("\0listener-") else f"unix:{path}"


def _is_endpoint(address: Any) -> bool:
    run = current_rollout()
    if run is None or run.endpoint is None or not isinstance(address, tuple):
        return False
    endpoint = urlsplit(run.endpoint)
    names = {address[0], _hosts.get(address[0])} | ({"localhost"} if address[0] in ("127.0.0.1", "::1") else set())
    return endpoint.hostname in names and address[1] == port_of(endpoint)
