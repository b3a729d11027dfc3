"""OpenAI Agents SDK: marks agents; records runs, tools, handoffs and guardrails.

Importing this package loads no framework and patches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.patching import Patches

__all__ = ["INTEGRATION"]


class OpenAIAgents:
    """The integration registered as the entry point ``openai-agents``."""

    name = "openai-agents"
    hosts = frozenset({"agents"})
    deactivates = frozenset[str]()

    def install(self, patches: Patches) -> None:
        from lightning_openai_agents._patches import install

        install(patches)

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        from lightning_openai_agents._trainable import mark

        return mark(obj, spec)

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        from lightning_openai_agents._trainable import mark_members

        return mark_members(obj, specs)


INTEGRATION = OpenAIAgents()
