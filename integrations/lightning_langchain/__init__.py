"""LangChain: marks Runnables, records tools, and selects agents by ``run_name``.

Importing this package loads no framework and patches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.patching import Patches

if TYPE_CHECKING:
    from lightning_langchain._events import LightningCallbackHandler

__all__ = ["INTEGRATION", "LightningCallbackHandler"]


class LangChain:
    """The integration registered as the entry point ``langchain``."""

    name = "langchain"
    hosts = frozenset({"langchain_core", "langchain"})
    deactivates = frozenset[str]()

    def install(self, patches: Patches) -> None:
        from lightning_langchain._patches import install

        install(patches)

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        from lightning_langchain._trainable import mark

        return mark(obj, spec)

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        from lightning_langchain._trainable import mark_members

        return mark_members(obj, specs)


INTEGRATION = LangChain()


def __getattr__(name: str) -> Any:
    if name == "LightningCallbackHandler":
        from lightning_langchain._events import LightningCallbackHandler

        return LightningCallbackHandler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
