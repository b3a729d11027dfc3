"""The wire formats of the endpoint, one module each."""

from __future__ import annotations

from lightning_core.endpoint.dialects import chat_completions, completions, messages, responses
from lightning_core.endpoint.dialects.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (chat_completions, responses, messages, completions)
