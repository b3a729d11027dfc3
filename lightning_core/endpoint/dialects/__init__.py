"""The wire formats of the endpoint, one module each."""

from __future__ import annotations

from lightning_core.endpoint.dialects import chat_completions, completions, gemini, messages, responses
from lightning_core.endpoint.dialects.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (chat_completions, responses, messages, completions)
"""The formats that name the model in the body."""

ALL_DIALECTS: tuple[Dialect, ...] = (*DIALECTS, gemini)
"""All formats. Google's names the model in the URL."""
