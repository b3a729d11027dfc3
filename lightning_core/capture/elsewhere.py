"""The requests that did not go through the endpoint, by agent, host and reason; and the reasons."""

from __future__ import annotations

from collections import Counter

IGNORED = "ignored"
"""Its host is under `rollouts.ignore_hosts`."""
NO_MODEL_CALL = "not a model call"
"""It has not the shape of a model call."""
NO_MODEL_NAMED = "names no model"
"""It would have the shape of a model call if it named a model."""
UNREAD = "body not readable"
"""It is not on the path of a known API, and its body cannot be read without consuming it."""
CONNECTION = "connection by other code"
"""It was not made by a patched client."""
IN_PROCESS = "answered by its own transport"
"""It has the shape of a model call, but its client did not send it over the network that the patches see: its transport or adapter
calls an app in this process, is a mock, or has a network of its own."""
STRAY = "refused: "
"""Beginning of the reason of a call that was refused, because it belongs to no live rollout, or not to exactly one agent."""
BYPASSED = "its integration was bypassed"
"""After `STRAY`: other code replaced the patches that name the agents of its framework."""
WEBSOCKET = "over WebSocket"
"""After `STRAY`: a model call that the endpoint cannot answer."""
_MAX_HOSTS = 100
"""Hosts of a rollout with a separate span; a crawler's requests go to thousands."""
OTHER_HOSTS = "others"
"""The host of the requests of all hosts beyond these."""


def most_frequent(counted: Counter[tuple[str | None, str, str]]) -> Counter[tuple[str | None, str, str]]:
    """The requests by agent, host and reason, with all but the most frequent hosts summed up as `OTHER_HOSTS`."""
    hosts: Counter[str] = Counter()
    for (_, host, _), number in sorted(counted.items(), key=repr):
        hosts[host] += number
    kept = {host for host, _ in hosts.most_common(_MAX_HOSTS)}
    summed: Counter[tuple[str | None, str, str]] = Counter()
    for (agent, host, why), number in counted.items():
        summed[agent, host if host in kept else OTHER_HOSTS, why] += number
    return summed
