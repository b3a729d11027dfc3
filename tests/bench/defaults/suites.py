"""The two suites, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.bench.defaults.suite.agent import Agent

SUITES = ("first", "second")


def agents_of(suite: str) -> Mapping[str, Agent]:
    """The agents of ``suite``, by name. The frameworks they use are imported."""
    if suite == "second":
        from tests.bench.defaults.second import registry
    else:
        from tests.bench.defaults.suite import registry
    return registry.AGENTS
