"""Generates the tables of rules and monitors from the registries.

Run ``python -m docs._generate.rules docs/credit-assignment.md docs/algorithms.md docs/monitors.md``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docs._generate.configuration import describe_type
from lightning_core.credit.registry import (
    ADVANTAGE_RULES,
    GROUP_KEYS,
    LOSSES,
    REWARD_RULES,
    AdvantageRule,
    DeclaredRule,
    Parameter,
    RewardRule,
)
from lightning_core.observers.monitors import MONITORS

PAGES = ("credit-assignment.md", "algorithms.md", "monitors.md")
_TABLE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def update(page: str) -> str:
    """``page`` with up-to-date tables."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", page)


def rewards_table() -> str:
    """The reward rules."""
    columns: dict[str, Callable[[RewardRule], str]] = {
        "value of call t": _description,
        "arguments": _arguments,
        "default `group_by`": lambda rule: f"`[{', '.join(rule.group)}]`",
    }
    return _table("rewards", REWARD_RULES, columns)


def advantage_table() -> str:
    """The advantage rules."""
    columns: dict[str, Callable[[AdvantageRule], str]] = {
        "A": _description,
        "arguments": _arguments,
        "compares": _comparison,
    }
    return _table("advantage", ADVANTAGE_RULES, columns)


def group_by_table() -> str:
    """The group keys."""
    return _table("group_by", GROUP_KEYS, {"shared by the calls of a group": _description})


def losses_table() -> str:
    """The losses."""
    return _table("loss", LOSSES, {"loss of a token, source, use": _description, "arguments": _arguments})


def monitors_table() -> str:
    """The monitors."""
    return _table("monitor", MONITORS, {"found": _description, "arguments": _arguments})


def _table(key: str, rules: Mapping[str, Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    rows = [[f"`{rule.name}`", *(column(rule) for column in columns.values())] for rule in rules.values()]
    lines = [f"| {' | '.join(row)} |\n" for row in [[f"`{key}`", *columns], *rows]]
    lines.insert(1, f"|{'---|' * (1 + len(columns))}\n")
    return "".join(lines)


def _description(rule: DeclaredRule) -> str:
    return rule.description.replace("|", "\\|")


def _comparison(rule: AdvantageRule) -> str:
    places = ["within groups"] * (rule.compares == "group") + ["over the batch"] * rule.needs_batch
    return ", then ".join(places) or "not at all"


def _arguments(rule: DeclaredRule) -> str:
    return "; ".join(_argument(p) for p in rule.parameters.values())


def _argument(parameter: Parameter) -> str:
    default = "required" if parameter.required else f"default `{parameter.default}`"
    return f"`{parameter.name}`: {describe_type(parameter.annotation)}, {default}"


TABLES: Mapping[str, Callable[[], str]] = {
    "rewards": rewards_table,
    "advantage": advantage_table,
    "group_by": group_by_table,
    "losses": losses_table,
    "monitors": monitors_table,
}


def _update_all(paths: list[str]) -> Iterator[str]:
    for path in map(Path, paths):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
        yield str(path)


if __name__ == "__main__":
    print("\n".join(_update_all(sys.argv[1:])))
