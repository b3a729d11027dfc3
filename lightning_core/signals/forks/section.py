"""The configuration's section ``rollouts.forks``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from lightning_core.config.command import CommandSection
from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.signal_sections import SignalSection, key_of_rule
from lightning_core.config.source import KeyPath
from lightning_core.config.types import Count, Names, Section
from lightning_core.credit import REWARD_RULES
from lightning_core.credit.registry import RewardRule

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

NEED = "forks"
"""The name that rules which use forks declare in ``needs``."""
_KEY: KeyPath = ("rollouts", "forks")


def _live_recorded_or_names(data: object) -> object:
    if isinstance(data, str) and data not in ("live", "recorded"):
        raise PydanticCustomError(INVALID_VALUE, "expected live, recorded or a list of names: [{name}]", {"name": data})
    return data


class Forks(Section):
    """Forks of a task's attempts: rollouts that repeat an attempt up to one of its calls, and sample from there on.
    docs/forks.md describes them."""

    points: Count = 1
    """Number of calls per task that are sampled anew, chosen among the calls of all its attempts."""
    samples: Count = 2
    """Number of forks at each of these calls."""
    agents: Names | None = None
    """Trained agents whose calls are sampled anew, with `*` as wildcard; null: all."""
    tools: Annotated[Literal["live", "recorded"] | Names, BeforeValidator(_live_recorded_or_names)] = "live"
    """Tools whose results are taken from the record before the forked call. `live`: none; all tools run again.
    `recorded`: the functions that are marked with `@replayable`. A list of names: these tools of LangChain, LangGraph,
    OpenAI Agents SDK and AutoGen, and these marked functions. A tool that has effects must run: leave it out."""


class ForksKeys(Section):
    """The keys of forks in the section ``rollouts``."""

    forks: Forks | None = None
    """Forks of the attempts, for credit rules that use them; null: none."""


def forks_of(rollouts: Section) -> Forks | None:
    """The settings in the section ``rollouts``."""
    assert isinstance(rollouts, ForksKeys)
    return rollouts.forks


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    forks = forks_of(c.rollouts)
    if forks is None:
        return
    if forks.tools != "live" and isinstance(c.agent, CommandSection):
        yield (*_KEY, "tools"), f"found {forks.tools!r}, but the tools of a program (agent.command) run in it; use live"


def _check_rules(c: Sections, rules: Mapping[str, RewardRule | None]) -> Iterator[tuple[KeyPath, str]]:
    is_set = forks_of(c.rollouts) is not None
    for policy, rule in rules.items():
        if rule is not None and NEED in rule.needs and not is_set:
            text = f"{rule.name!r} uses forks; set rollouts.forks, such as to {{points: 1, samples: 2}}"
            yield key_of_rule(c, policy), text
        if rule is not None and NEED not in rule.needs and is_set:
            using = [other.name for other in REWARD_RULES.values() if NEED in other.needs]
            yield (
                key_of_rule(c, policy),
                f"found {rule.name!r}, which ignores rollouts.forks; expected one of {using!r}",
            )


def _agents(c: Sections) -> Iterator[tuple[KeyPath, Names | None]]:
    forks = forks_of(c.rollouts)
    if forks is not None:
        yield (*_KEY, "agents"), forks.agents


SECTION = SignalSection(section="rollouts", keys=ForksKeys, check=_check, check_rules=_check_rules, agents=_agents)
