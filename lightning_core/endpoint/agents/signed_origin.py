"""Origins of requests that code of the rollout signed; only these are believed.

A program that only has a key must not choose where the endpoint sends requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_core.capture.signatures import ORIGIN, ORIGIN_AUTHORIZATION, SIGNATURE, is_origin_signed
from lightning_core.endpoint.sessions import Session
from lightning_core.errors import PolicyRequestError


def trusted_headers(headers: Mapping[str, str], session: Session) -> Mapping[str, str]:
    """``headers``, whose origin can be used; in a session without a secret, without their origin.

    Raises `PolicyRequestError` (403) for an origin without a valid signature.
    """
    if ORIGIN not in headers and ORIGIN_AUTHORIZATION not in headers:
        return headers
    if session.secret is None:
        return {name: value for name, value in headers.items() if name not in (ORIGIN, ORIGIN_AUTHORIZATION, SIGNATURE)}
    if is_origin_signed(session.secret, session.root.rollout, headers):
        return headers
    raise PolicyRequestError(
        f"the header {ORIGIN} has no valid signature: it is accepted from patched clients of this rollout only. Do not set or copy "
        "lightning-* headers; set policy.upstream to forward requests of other clients",
        status=403,
    )
