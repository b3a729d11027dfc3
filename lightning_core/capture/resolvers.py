"""Resolvers: functions that find the active agent where no scope was opened.

A resolver gets the current scope (`context.opened_scope`) and returns it, or a scope inside it that it opened with
`scope.open_scope`: the scope of the agent or tool that the host runs now. Model requests, new scopes and
threads then belong to the returned scope. A resolver is called for each of them, so it must be fast, and it must return
the same object for the same agent run. It must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Resolver = Callable[[Any], Any]

_resolvers: tuple[Resolver, ...] = ()


def resolve(scope: Any) -> Any:
    """The active agent's scope inside ``scope``."""
    for resolver in _resolvers:
        scope = resolver(scope)
    return scope


def register_resolver(resolver: Resolver) -> None:
    """Register a function that maps the current scope to the active agent's, until `unregister_resolver`."""
    global _resolvers
    _resolvers = (*_resolvers, resolver)


def unregister_resolver(resolver: Resolver) -> None:
    """Undo `register_resolver`."""
    global _resolvers
    _resolvers = tuple(known for known in _resolvers if known is not resolver)
