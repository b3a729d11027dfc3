"""Runs agents against a scripted model, and the contract suite for integrations.

`playground` opens one rollout, `open_playground` allows several. Neither requires a model, a GPU or a network. The suite is in
`lightning_core.testing.contract`, which requires pytest.
"""

from __future__ import annotations

from lightning_core.testing.playground import Playground, Script, open_playground, playground, tool_call

__all__ = ["Playground", "Script", "open_playground", "playground", "tool_call"]
