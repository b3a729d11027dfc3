"""Refuses or reports model calls of a framework whose integration does not see them.

Other instrumentations patch the same functions. One that replaces a wrap of an integration, or calls a function that it captured before,
leaves the integration active and without effect: the agents have no names, and their calls belong to nobody.
"""

from __future__ import annotations

import logging

from lightning_core.capture.elsewhere import BYPASSED, STRAY
from lightning_core.capture.integration import find_bypassed
from lightning_core.capture.run import ActiveRollout
from lightning_core.errors import COUNTED, Repeats, StrayCallError

logger = logging.getLogger(__name__)

repeats = Repeats()
"""The model calls inside bypassed integrations since the patches were installed, by integration and function."""


def check_reached(run: ActiveRollout, agent: str | None, host: str) -> None:
    """Check that the integrations of the frameworks that make this model call to ``host`` were reached.

    Raises StrayCallError, and counts a failure that no other attempt avoids, if the configuration names agents: the call may be of one of
    them. Logs a warning otherwise.
    """
    bypassed = find_bypassed()
    if bypassed is None:
        return
    integration, function = bypassed
    message = (
        f"the integration {integration!r} cannot name the agent of a model call to {host}: the call runs inside {function} and did not "
        "pass through the integration's patch of it. Initialize the other instrumentation where the agent's module is imported, before "
        "Lightning patches the framework, or switch off its part for this framework"
    )
    if (times := repeats.count((integration, function))) is not None:
        logger.warning("%s%s", message, times, extra=COUNTED)
    run.count("bypassed")
    if run.agents:
        run.count_infrastructure_failure(message, permanent=True)
        run.note_elsewhere(agent, host, f"{STRAY}{BYPASSED}")
        raise StrayCallError(message)
