"""Signatures that show that a request or a key was made by the code of a rollout, not by a program that only knows its key.

An `ActiveRollout` has one secret. Python processes that run work of the rollout have it; it is never in an environment, a key or a
header.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping

SIGNATURE = "lightning-signature"
"""Header: the signature of the other headers or of the body."""
ORIGIN = "lightning-origin"
"""Header: the URL that the agent called."""
ORIGIN_AUTHORIZATION = "lightning-origin-authorization"
"""Header: the agent's credentials (``Bearer KEY``, ``x-api-key KEY``, ``api-key KEY``, ``x-goog-api-key KEY``)."""


def new_secret() -> str:
    """A new secret of 256 random bits."""
    return secrets.token_hex(32)


def sign(secret: str, purpose: str, *parts: str | None) -> str:
    """The signature of ``parts`` for ``purpose``: 64 hexadecimal digits."""
    return hmac.new(secret.encode(), json.dumps([purpose, *parts]).encode(), "sha256").hexdigest()


def is_signed(secret: str, signature: str, purpose: str, *parts: str | None) -> bool:
    """Whether ``signature`` is the signature of ``parts``."""
    return hmac.compare_digest(sign(secret, purpose, *parts).encode(), signature.encode(errors="replace"))


def sign_origin(secret: str, rollout: str, headers: Mapping[str, str]) -> dict[str, str]:
    """``headers`` with the signature of their origin, for the rollout with that id and secret."""
    return {**headers, SIGNATURE: sign(secret, "origin", *_origin_parts(rollout, headers))}


def is_origin_signed(secret: str, rollout: str, headers: Mapping[str, str]) -> bool:
    """Whether ``headers`` have a valid signature of their origin."""
    return is_signed(secret, headers.get(SIGNATURE, ""), "origin", *_origin_parts(rollout, headers))


def _origin_parts(rollout: str, headers: Mapping[str, str]) -> list[str | None]:
    return [rollout, *(_sent(headers.get(name)) for name in (ORIGIN, ORIGIN_AUTHORIZATION))]


def _sent(value: str | None) -> str | None:
    """``value`` as far as every client sends it unchanged: they strip spaces, and encode other than ASCII differently."""
    return None if value is None else value.encode("ascii", "ignore").decode().strip()


def sign_record(secret: str, rollout: str, body: bytes) -> str:
    """The signature of a record of a child process."""
    return sign(secret, "record", rollout, hashlib.sha256(body).hexdigest())


def is_record_signed(secret: str, rollout: str, body: bytes, signature: str) -> bool:
    """Whether a record was signed with `sign_record`."""
    return is_signed(secret, signature, "record", rollout, hashlib.sha256(body).hexdigest())
