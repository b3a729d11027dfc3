"""Records what belongs to no span: rewards, declared agents, requests elsewhere, and errors of recording."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, SupportsFloat

from lightning_core import trace as tr
from lightning_core.capture.context import find_scope, inherited_scope
from lightning_core.capture.scope import current_address, current_rollout
from lightning_core.capture.spans import start_span
from lightning_core.errors import Repeats, RewardError, StrayCallError, describe, show
from lightning_core.trace import check_reward

logger = logging.getLogger(__name__)

_late = Repeats()
"""Rewards of rollouts that have ended."""

_CALL_ID = re.compile(r"(?:^|[-_])([0-9a-f]{16})$")


def reward(value: SupportsFloat, *, call: str | None = None, agent: str | None = None, name: str | None = None) -> None:
    """Attach a scalar reward to the current episode, to ``agent``, or to one ``call``.

    ``call`` is the call's id or the id of its response. ``agent`` is named as in the configuration: by its name, or by a path such as
    ``team/writer``. Rewards of the same episode add up. Does nothing outside a rollout; logs a warning if the rollout has ended.
    Raises `RewardError` if ``value`` is not a finite number, or ``agent`` no text: a wrong reward is an error in the agent's code.
    """
    number = check_reward(value)
    address = current_address()
    if address is None:
        _warn_if_late(number)
        return
    if agent is not None:
        agent = _name(agent)
    attributes: dict[str, Any] = {tr.REWARD_VALUE: number}
    call = None if call is None else call_id(call) or call
    for key, item in ((tr.REWARD_CALL, call), (tr.REWARD_AGENT, agent), (tr.REWARD_NAME, name)):
        if item is not None:
            attributes[key] = item
    start_span(address, name or "", "reward", agent=None, attributes=attributes).end()


def _name(agent: object) -> str:
    if not isinstance(agent, str):
        raise RewardError(f"reward(…, agent={show(agent)}): expected the name of an agent")
    return str.__str__(agent)  # an Enum's value


def _warn_if_late(value: float) -> None:
    scope = inherited_scope()
    if scope is not None and scope.run.ended and (times := _late.count("reward")) is not None:
        logger.warning(
            "a reward of %g is lost: its rollout has ended%s, because the agent had returned, or was stopped. Wait for the threads and "
            "tasks that give rewards",
            *(value, times),
        )


def call_id(response_id: str) -> str | None:
    """The call id at the end of a response id of any wire format; None without one."""
    found = _CALL_ID.search(response_id)
    return None if found is None else found[1]


@contextmanager
def record(what: str) -> Generator[None]:
    """Catch errors of Lightning's own code before they reach the host.

    An error is counted on the rollout as ``what``, and logged the first time. The one exception to this is StrayCallError: the client
    layer raises it to refuse a model call that cannot be routed, or a request that may be one, because sending it would be worse.
    """
    try:
        yield
    except StrayCallError:
        raise
    except Exception as error:
        run = current_rollout()
        first = run is None or run.counters[what] == 0
        if run is not None:
            run.count(what, detail=describe(error))
        if first:
            logger.exception("%s: could not be recorded; the agent continues", what)


def declare_agents(names: Iterable[str]) -> None:
    """Declare the agents and nodes of the program that is running, whether or not they make calls in this rollout.

    A selected agent that was declared but made no call is reported as not reached, any other as unknown.
    """
    scope = find_scope()
    if scope is not None:
        scope.run.declare(names)


def note_elsewhere(host: str, why: str) -> None:
    """Count a request of the current agent to ``host`` that does not go through the endpoint, for the reason ``why``."""
    scope = find_scope()
    if scope is not None:
        scope.run.note_elsewhere(scope.address.agent, host, why)
