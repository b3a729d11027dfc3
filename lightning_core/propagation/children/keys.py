"""API keys that name their agent: ``<key of the rollout>.<base64url of a JSON object>.<signature>``.

A program in another process sends its key with every request, with any client. A key made here also names the program's agent,
which span its calls are children of, and where calls go that the endpoint does not answer. The signature is made with the secret of the
rollout, so a program cannot change its key.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from lightning_core.capture.signatures import is_signed, sign
from lightning_core.propagation.providers import KEY_HEADERS

_SPAN = re.compile(r"[0-9a-f]{16}")
_BEARER = re.compile(r"(?i)(bearer\s+)(\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAddress:
    """The facts that a key carries about the program that sends it."""

    agent: str | None = None
    mark: str | None = None
    """See `Address.mark`."""
    span: str | None = None
    """The span that the program's calls are children of: 16 hexadecimal digits."""
    origin: str | None = None
    """The destination of calls that the endpoint does not answer; see `ActiveRollout.keep_origin`."""


_FIELDS = frozenset(field.name for field in fields(KeyAddress))

Verify = Callable[[str, str, str], bool]
"""Whether the third argument is the signature of the second, the text of an address, for the key of a rollout."""


def bind_key(key: str, address: KeyAddress, *, secret: str) -> str:
    """The key of a rollout, bound to ``address`` and signed. A key that is bound already is bound anew."""
    said = {name: value for name in sorted(_FIELDS) if (value := getattr(address, name)) is not None}
    text = base64.urlsafe_b64encode(json.dumps(said, separators=(",", ":")).encode()).decode().rstrip("=")
    bare = key.partition(".")[0]
    return f"{bare}.{text}.{sign(secret, 'key', bare, text)}"


def is_signed_with(secret: str, bare: str, text: str, signature: str) -> bool:
    """Whether a key was bound with ``secret``."""
    return is_signed(secret, signature, "key", bare, text)


def read_key(key: str, verify: Verify) -> tuple[str, KeyAddress] | None:
    """The key of the rollout and the address in a bound key; None for any other key, and for one that was not made here."""
    bare, _, rest = key.partition(".")
    suffix, dot, signature = rest.partition(".")
    if not dot or not verify(bare, suffix, signature):
        return None
    try:
        said = json.loads(base64.b64decode(suffix + "=" * (-len(suffix) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        return None
    if not isinstance(said, dict) or not said.keys() <= _FIELDS:
        return None
    if not all(isinstance(value, str) for value in said.values()) or not _SPAN.fullmatch(said.get("span", "0" * 16)):
        return None
    return bare, KeyAddress(**said)


def is_key_of(key: str, rollout_key: str) -> bool:
    """Whether ``key`` is the key of that rollout, bound or not."""
    return key.partition(".")[0] == rollout_key.partition(".")[0]


def unbind_headers(headers: Mapping[str, str], verify: Verify) -> tuple[dict[str, str], KeyAddress | None]:
    """Request headers with the key of the rollout in place of a bound one, and the bound address, if any."""
    found: list[KeyAddress] = []

    def bare(key: str) -> str:
        if (read := read_key(key, verify)) is None:
            return key
        found.append(read[1])
        return read[0]

    unbound = dict(headers)
    for name in ("authorization", *KEY_HEADERS):
        if name in unbound:
            unbound[name] = _map_key(name, unbound[name], bare)
    return unbound, found[0] if found else None


def _map_key(header: str, value: str, change: Callable[[str], str]) -> str:
    if header != "authorization":
        return change(value)
    match = _BEARER.fullmatch(value)
    return value if match is None else f"{match[1]}{change(match[2])}"
