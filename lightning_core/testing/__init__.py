"""For tests and documentation: agents run against a scripted model, and the contract suite of integrations.

`playground` opens one rollout, `open_playground` several. Neither needs a model, a GPU or a network. The suite is in
`lightning_core.testing.contract`, which needs pytest.
"""

from __future__ import annotations

from lightning_core.testing.playground import Playground, Script, open_playground, playground, tool_call

__all__ = ["Playground", "Script", "open_playground", "playground", "tool_call"]
