"""The table of rules and signals in docs/evidence.md: complete, and its figures are those of the sections it links to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from lightning_core.config.algorithm import CLIPS, Algorithm
from lightning_core.config.sections import Tasks
from lightning_core.config.types import Section
from lightning_core.credit.registry import ADVANTAGE_RULES, GROUP_KEYS, LOSSES, REWARD_RULES
from lightning_core.signals.air.keys import Air

DOCS = Path(__file__).parents[2] / "docs"
REGISTRIES = {"rewards": REWARD_RULES, "advantage": ADVANTAGE_RULES, "group_by": GROUP_KEYS, "loss": LOSSES}
ARGUMENTS = {"loss", "loss_args", *CLIPS}
"""Keys of ``algorithm`` that name a loss of the registry, or are its arguments."""
CAUSES = {"algorithm.updates_per_step", "algorithm.mini_batches", "algorithm.truncated: mask", "credit.judge"}
"""Settings that a message names because the run has them."""
OTHERS = {"judge", "judge.rubric", "rollouts.refill", "lightning-rl sft"}


def table() -> list[list[str]]:
    """The cells of each row, without the header."""
    _, section = (DOCS / "evidence.md").read_text(encoding="utf-8").split("\n## Rules and signals\n")
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def parts(annotation: Any) -> Iterator[Any]:
    """``annotation`` and all types in it."""
    yield annotation
    for part in () if get_origin(annotation) is Literal else get_args(annotation):
        yield from parts(part)


def choices(section: type[Section], key: str) -> list[str]:
    """The values of a key, if they are names."""
    found = [part for part in parts(section.model_fields[key].annotation) if get_origin(part) is Literal]
    return [value for part in found for value in get_args(part)]


def variants(section: type[Section], prefix: str = "") -> Iterator[str]:
    """``key: value`` for the keys that have names as values, in sections too; else the key itself, if it has no section."""
    for key, field in section.model_fields.items():
        values = choices(section, key)
        inner = [part for part in parts(field.annotation) if isinstance(part, type) and issubclass(part, Section)]
        nested = [name for part in inner for name in variants(part, f"{prefix}{key}.")]
        if key in ARGUMENTS:
            continue
        yield from nested
        if len(values) > 1:
            yield from (f"{prefix}{key}: {value}" for value in values)
        elif not prefix and not nested:
            yield key


def expected() -> set[str]:
    rules = {f"{key}: {rule.name}" for key, rules in REGISTRIES.items() for rule in rules.values() if rule.is_builtin}
    sampling = {f"tasks.sampling: {name}" for name in choices(Tasks, "sampling")}
    return {*rules, *variants(Algorithm), *sampling, *(f"air.{key}" for key in Air.model_fields), *OTHERS}


def test_every_rule_and_every_variant_of_the_loss_has_one_row() -> None:
    found = Counter(name for row in table() for name in re.findall("`([^`]+)`", row[0]))
    assert {"loss: cispo", "sequence: call", "kl.estimator: k1", "ce.tokens: tool", "entropy_weight"} <= expected()
    assert sorted(found) == sorted(expected())
    assert max(found.values()) == 1


def linked(page: Path, anchor: str) -> str:
    """The page, or its section with that anchor, with the sections below it."""
    text = page.read_text(encoding="utf-8")
    if not anchor:
        return text
    for heading in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE):
        if re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            rest = text[heading.end() :]
            return re.split(rf"^#{{1,{len(heading[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    raise AssertionError(f"{page.name} has no section #{anchor}")


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0].replace("`", ""))
def test_a_row_has_a_figure_of_a_page_or_is_untested(row: list[str]) -> None:
    _, use, figure = row
    assert use
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", figure)
    assert links or figure.startswith("untested")
    text = "\n".join(linked(DOCS / path, anchor) for path, anchor in links)
    for number in re.findall(r"\d+\.\d+|\d+(?=%)", re.sub(r"\]\([^)]*\)|`[^`]*`", "", figure)):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text), f"{number} is in none of the linked sections"


def test_what_is_not_measured_is_not_advised() -> None:
    """Monitors, doctor and summaries name no setting whose row says that it is untested, or that it gained nothing."""
    unsupported = [
        name
        for names, *_, figure in table()
        if figure.startswith(("untested", "no gain"))
        for name in re.findall(r"`([^`]+)`", names)
    ]
    assert {"entropy_weight", "importance.kind: mask"} <= {*unsupported}
    core = Path(__file__).parents[2] / "lightning_core"
    advisers = [
        *(core / "observers/monitors").glob("*.py"),
        *(core / "tools/doctor").glob("*.py"),
        core / "tools/cli/summary.py",
    ]
    texts = {path.name: " ".join(re.sub(r'"\s+f?"', "", path.read_text(encoding="utf-8")).split()) for path in advisers}
    spelled = [f"{section}.{name}" for name in unsupported for section in ("algorithm", "credit", "trainer")]
    found = {
        (file, name)
        for file, text in texts.items()
        for name in spelled
        if re.search(rf"{re.escape(name)}(?![\w.])", text)
    }
    assert found - {(file, name) for file, name in found if name in CAUSES} == set()
