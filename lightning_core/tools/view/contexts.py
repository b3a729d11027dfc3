"""The meanings of the kinds of a call's context; see `lightning_core.chat.chat`."""

from __future__ import annotations

CONTEXTS = {
    "new": "The prompt starts a new sequence: it does not begin with tokens of an earlier call.",
    "clean": "The prompt continues an earlier call: it begins with exactly the recorded tokens of that prompt and response, so both "
    "are trained as one sequence.",
    "realigned": "The prompt continues an earlier call. The client sent the earlier response back in another form, so the recorded "
    "tokens were used in place of the text; both calls are trained as one sequence.",
    "forked": "The prompt continues an earlier conversation, but the chat template now renders its earlier turns differently. "
    "The whole prompt was encoded again, and the call is trained as a separate sequence.",
}
"""An explanation by kind."""
