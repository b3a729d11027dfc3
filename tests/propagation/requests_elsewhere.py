"""Reads from a closed rollout which requests did not go through the endpoint."""

from __future__ import annotations

from lightning_core import trace as tr
from lightning_core.capture import ActiveRollout


def elsewhere(run: ActiveRollout) -> dict[tuple[str | None, str, str], int]:
    """The number of requests by agent, host and reason."""
    found = (span.attributes for span in run.spans if span.attributes.get(tr.OPERATION) == tr.ELSEWHERE)
    return {(a.get(tr.AGENT), a[tr.HOST], a[tr.REASON]): a[tr.REQUESTS] for a in found}
