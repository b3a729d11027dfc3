"""LangGraph: records nodes, marks graphs and nodes, and selects agents by node name.

Importing this package loads no framework and patches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.patching import Patches

__all__ = ["INTEGRATION"]


class LangGraph:
    """The integration registered as the entry point ``langgraph``."""

    name = "langgraph"
    hosts = frozenset({"langgraph"})
    # LangGraph's nodes are LangChain Runnables and its tools LangChain tools, so these patches include LangChain's.
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
