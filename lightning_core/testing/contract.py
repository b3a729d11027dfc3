"""The contract suite: tests that every integration must pass. Requires pytest.

The tests run the real framework over real HTTP. An integration's test file subclasses `IntegrationContract`. It sets the name of the
distribution that announces the integration, and an adapter that builds programs in the framework's style::

    class TestRobots(IntegrationContract):
        distribution = "lightning-robots"
        adapter = RobotsAdapter()

No test of the suite may be overridden.
"""

from __future__ import annotations

try:
    import pytest
except ModuleNotFoundError:
    raise ModuleNotFoundError("lightning_core.testing.contract requires pytest: pip install pytest") from None

pytest.register_assert_rewrite("lightning_core.testing.suite")

from lightning_core.testing.programs import ADD_PROMPT, AgentSpec, HostAdapter, answer_prompt, run_async  # noqa: E402
from lightning_core.testing.suite import IntegrationContract  # noqa: E402
from lightning_core.testing.traces import ancestors, parent_of, user_message  # noqa: E402

__all__ = [
    "ADD_PROMPT",
    "AgentSpec",
    "HostAdapter",
    "IntegrationContract",
    "ancestors",
    "answer_prompt",
    "parent_of",
    "run_async",
    "user_message",
]
