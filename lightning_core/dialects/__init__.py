"""The wire formats of the endpoint, one module each."""

from __future__ import annotations

from lightning_core.dialects import anthropic_messages as messages
from lightning_core.dialects import gemini
from lightning_core.dialects import openai_chat as chat_completions
from lightning_core.dialects import openai_completions as completions
from lightning_core.dialects import openai_responses as responses
from lightning_core.dialects.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (chat_completions, responses, messages, completions)
"""The formats that name the model in the body."""

ALL_DIALECTS: tuple[Dialect, ...] = (*DIALECTS, gemini)
"""All formats. Google's names the model in the URL."""
