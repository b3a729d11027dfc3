"""AutoGen AgentChat: marks agents and teams, and records their runs, tools and handoffs.

Importing this package loads no framework and patches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.patching import Patches

__all__ = ["INTEGRATION"]


class AutoGenAgentChat:
    """The integration registered as the entry point ``autogen-agentchat``."""

    name = "autogen-agentchat"
    # Programs of autogen_core alone never import autogen_agentchat, and their agents have names too.
    hosts = frozenset({"autogen_agentchat", "autogen_core"})
    deactivates = frozenset[str]()

    def install(self, patches: Patches) -> None:
        from lightning_autogen_agentchat._patches import install

        install(patches)

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        from lightning_autogen_agentchat._trainable import mark

        return mark(obj, spec)

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        from lightning_autogen_agentchat._trainable import mark_members

        return mark_members(obj, specs)


INTEGRATION = AutoGenAgentChat()
