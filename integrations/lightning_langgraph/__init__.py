"""Lightning for LangGraph: every node a scope, marks on graphs and their nodes, agents chosen by node name.

Importing this loads no framework and patches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.patching import Patches

__all__ = ["INTEGRATION"]


class LangGraph:
    """The integration that the entry point ``langgraph`` names."""

    name = "langgraph"
    hosts = frozenset({"langgraph"})
    # LangGraph's nodes are LangChain's Runnables and its tools LangChain's tools: these patches include the other integration's.
    deactivates = frozenset({"langchain"})

    def install(self, patches: Patches) -> None:
        from lightning_langgraph._patches import install

        install(patches)

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        from lightning_langgraph._trainable import mark

        return mark(obj, spec)

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        from lightning_langgraph._trainable import mark_members

        return mark_members(obj, specs)


INTEGRATION = LangGraph()
