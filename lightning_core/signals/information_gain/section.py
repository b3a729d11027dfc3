"""The configuration's section ``credit.information_gain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from lightning_core.config.imports import import_callable
from lightning_core.config.rule_names import goes_with
from lightning_core.config.signal_sections import SignalSection, key_of_rule
from lightning_core.config.source import KeyPath
from lightning_core.config.types import Section, is_callable_name
from lightning_core.credit import REWARD_RULES
from lightning_core.credit.registry import RewardRule
from lightning_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

NEED = "information_gain"
"""The name that rules which use it declare in ``needs``."""
_KEY: KeyPath = ("credit", "information_gain")


class InformationGain(Section):
    """With `igpo`: the probability of the task's answer at the prompt of each call, under the policy.
    docs/information-gain.md describes it."""

    answer: Annotated[str, Field(min_length=1)]
    """Key of the task that has the answer, as the text that the agent would answer. Or `module:callable`, called with the
    task; it returns the text, or None for a task without an answer."""
    prefix: str = ""
    """Text inserted before the answer when it is scored, such as `"</think>\n<answer>"`. Special tokens in it are encoded
    as such."""


class InformationGainKeys(Section):
    """The keys of information gain in the section ``credit``."""

    information_gain: InformationGain | None = None
    """With `igpo`, or a custom rule that needs it: the answers of tasks, and how the policy gives them; null: disabled."""


def settings_of(credit: Section) -> InformationGain | None:
    """The settings in the section ``credit``."""
    assert isinstance(credit, InformationGainKeys)
    return credit.information_gain


def answer_function(settings: InformationGain) -> Callable[..., Any] | None:
    """The function that ``settings.answer`` names; None if it is a key. Raises `ConfigError` if it cannot be imported."""
    name = settings.answer
    return import_callable(name, key="credit.information_gain.answer") if is_callable_name(name) else None


def check_answers(settings: InformationGain, tasks: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if ``settings.answer`` is a key that no task has. A function is not called."""
    if is_callable_name(settings.answer) or any(settings.answer in task for task in tasks):
        return
    keys = list(dict.fromkeys(key for task in tasks for key in task))
    meant = did_you_mean(settings.answer, keys)
    raise ConfigError(
        f"credit.information_gain.answer: no task has the key {settings.answer!r}; found the keys {keys!r}{meant and f'; {meant}'}"
    )


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    if settings_of(c.credit) is not None and c.trainer.name == "verl":
        yield (
            _KEY,
            "the embedded trainer scores the answers before rows are built, which verl cannot; use 'discounted', or trainer.name: torch",
        )


def _check_rules(c: Sections, rules: Mapping[str, RewardRule | None]) -> Iterator[tuple[KeyPath, str]]:
    from lightning_core.config.resolve import policy_settings

    if settings_of(c.credit) is None:
        for policy, rule in rules.items():
            if rule is not None and NEED in rule.needs:
                text = f"{rule.name!r} needs credit.information_gain, such as {{answer: answer}}: the task's key with the answer"
                yield key_of_rule(c, policy), text
    elif all(rule is not None and NEED not in rule.needs for rule in rules.values()):
        using = [rule.name for rule in REWARD_RULES.values() if NEED in rule.needs]
        names = [settings.credit.rewards for settings in policy_settings(c).values()]
        yield _KEY, goes_with(using, " and ".join(dict.fromkeys(names)))


def _check_run(c: Sections, tasks: Sequence[Mapping[str, Any]]) -> None:
    settings = settings_of(c.credit)
    if settings is not None:
        answer_function(settings)
        check_answers(settings, tasks)


SECTION = SignalSection(
    section="credit",
    keys=InformationGainKeys,
    check=_check,
    check_rules=_check_rules,
    check_run=_check_run,
    hidden=("calls_scored",),
    means={"answer_logprob": ("answer_logprob_sum", "calls_scored")},
)
