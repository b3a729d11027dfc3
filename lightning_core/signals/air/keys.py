"""The keys of the section ``credit.air``, and the functions that they name."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lightning_core.config.imports import import_callable, user_code
from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.types import CallableName, CountOrZero, Names, NotNegative, Section
from lightning_core.errors import ConfigError
from lightning_core.signals.air.tool_outcomes import ToolOutcome
from lightning_core.trace import Call

CallReward = Callable[[Call, Sequence[ToolOutcome]], float]
"""A custom rule: takes a call and the outcomes of its tool calls, returns the call's reward."""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError(
            INVALID_VALUE, "expected a regular expression: {error}", {"error": str(error)}
        ) from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class Format(Section):
    """A reward for responses of a given form."""

    pattern: Pattern
    """Regular expression to search for in the response's text. `.` also matches newlines."""
    weight: float
    """Reward of a call whose response matches."""
    agents: Names | None = None
    """Agents that the format applies to, with `*` as wildcard; null: all trained agents."""


class Rule(Section):
    """A custom rule."""

    function: CallableName
    """`module:callable`, called as `function(call, tools)` with a `Call` and the `ToolOutcome`s of its tool calls. It
    returns a number."""
    weight: float = 1.0
    """Coefficient of the function's result."""


class Air(Section):
    """Automatic intermediate rewards of calls, from tool outcomes, response formats and lengths."""

    tool_ok: float = 0.0
    """Reward per tool call that succeeded."""
    tool_error: float = 0.0
    """Reward per tool call that failed."""
    tool_unused: float = 0.0
    """Reward per tool call that did not run: unknown tool, or unreadable arguments."""
    tool_errors: dict[Pattern, float] = {}
    """Rewards by regular expression over the tool's error. The first match replaces `tool_error`."""
    truncated: float = 0.0
    """Reward of a response that reached its token limit."""
    truncated_ramp: CountOrZero = 0
    """Number of tokens before the limit over which `truncated` grows linearly from 0: DAPO's soft overlong penalty
    (2503.14476). 0: only responses that reached the limit get it."""
    token_cost: NotNegative = 0.0
    """Subtracted from the call's reward per sampled token of the call, such as 0.0001."""
    call_cost: NotNegative = 0.0
    """Subtracted from the call's reward, such as 0.01: the cost of a turn."""
    formats: Annotated[tuple[Format, ...], Field(strict=False)] = ()
    """Rewards for responses of a given form."""
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = ()
    """Custom rules."""
    gate: bool = True
    """Whether `truncated`, `token_cost`, `call_cost` and `formats` count only if an attempt at the task succeeds:
    the sum of the rewards that it has without `credit.air` and `credit.judge` reaches `eval.solved`, or exceeds that of
    another attempt at the task, up to rounding. A single attempt succeeds by `eval.solved` alone. Otherwise, among
    attempts that all fail, the one that fails fastest has an advantage."""

    @property
    def has_rewards(self) -> bool:
        """Whether a call can get a reward other than 0."""
        tools = (self.tool_ok, self.tool_error, self.tool_unused, *self.tool_errors.values())
        weights = (rule.weight for rule in (*self.formats, *self.rules))
        return any((*tools, self.truncated, self.token_cost, self.call_cost, *weights))


class AirKeys(Section):
    """The keys of intermediate rewards in the section ``credit``."""

    air: Air | None = None
    """Automatic intermediate rewards; null: disabled."""


def air_of(credit: Section) -> Air | None:
    """The settings in the section ``credit``."""
    assert isinstance(credit, AirKeys)
    return credit.air


def import_rules(air: Air) -> Sequence[CallReward]:
    """The functions of ``air.rules``. Raises `ConfigError` if one cannot be imported or called so; later, if it fails."""
    return [_call_reward(rule.function, f"credit.air.rules[{i}].function") for i, rule in enumerate(air.rules)]


def _call_reward(name: str, key: str) -> CallReward:
    function: CallReward = import_callable(name, key=key)
    try:
        inspect.signature(function).bind("call", "tools")
    except TypeError:
        found = f"{name}{inspect.signature(function)}"
        raise ConfigError(f"{key}: {found} cannot be called as function(call, tools)") from None
    except ValueError:  # some builtins have no signature
        pass

    @functools.wraps(function)
    def reward(call: Call, tools: Sequence[ToolOutcome]) -> float:
        with user_code(f"{key}: {name} failed"):
            return function(call, tools)

    return reward
