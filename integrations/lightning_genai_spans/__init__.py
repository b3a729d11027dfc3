"""Agents and tools of any framework that opens OpenTelemetry spans for them, by the spans' GenAI or OpenInference attributes.

There is no host package: which frameworks need a switch is in ``_switches``, which need a patch in ``_selectors``. Importing this
package loads no framework and patches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.patching import Patches
from lightning_core.errors import ConfigError

__all__ = ["INTEGRATION"]


class GenAISpans:
    """The integration registered as the entry point ``genai-spans``."""

    name = "genai-spans"
    hosts: frozenset[str] = frozenset()
    deactivates: frozenset[str] = frozenset()

    def install(self, patches: Patches) -> None:
        from lightning_genai_spans._patches import install

        install(patches)

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        raise ConfigError(f"found {obj!r}; mark the function that runs it as {spec.name!r}, or select it by its name")

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        raise ConfigError(f"found {obj!r}; select its agents by name: agents.train: {[spec.name for spec in specs]}")


INTEGRATION = GenAISpans()
