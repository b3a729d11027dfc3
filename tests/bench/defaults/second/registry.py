"""The agents of the second suite, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.bench.defaults.second.loops import COMMANDS, STREETS, SURVEY
from tests.bench.defaults.second.one_call import INVOICE, PATTERN, PRIORITY, ROMAN
from tests.bench.defaults.second.team import TRIP
from tests.bench.defaults.suite.agent import Agent

_ALL = (ROMAN, PRIORITY, INVOICE, PATTERN, COMMANDS, STREETS, SURVEY, TRIP)
AGENTS: Mapping[str, Agent] = {agent.name: agent for agent in _ALL}
