"""The agents of the first suite, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.bench.defaults.suite.agent import Agent
from tests.bench.defaults.suite.arithmetic import CALCULATE
from tests.bench.defaults.suite.booking import BOOKING
from tests.bench.defaults.suite.chain import CHAIN
from tests.bench.defaults.suite.code import CODE
from tests.bench.defaults.suite.conversion import CONVERT
from tests.bench.defaults.suite.dates import DATES
from tests.bench.defaults.suite.extraction import EXTRACT
from tests.bench.defaults.suite.facts import FACTS
from tests.bench.defaults.suite.handbook import HANDBOOK
from tests.bench.defaults.suite.handoff import HANDOFF
from tests.bench.defaults.suite.letters import LETTERS
from tests.bench.defaults.suite.lift import LIFT
from tests.bench.defaults.suite.reviews import REVIEWS
from tests.bench.defaults.suite.routing import ROUTE
from tests.bench.defaults.suite.search import SEARCH
from tests.bench.defaults.suite.selection import PICK, TICKET
from tests.bench.defaults.suite.sql import QUERY
from tests.bench.defaults.suite.waiter import WAITER

_ALL = (
    *(EXTRACT, ROUTE, CONVERT, QUERY, SEARCH, CALCULATE, CHAIN, LIFT, WAITER, PICK),
    *(TICKET, HANDOFF, CODE, HANDBOOK, BOOKING, DATES, REVIEWS, LETTERS, FACTS),
)
AGENTS: Mapping[str, Agent] = {agent.name: agent for agent in _ALL}
