"""``lightning-rl docs``: the documentation's pages, which are in the package, and a search in them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_core.errors import ConfigError, did_you_mean
from lightning_core.tools import exits

_PACKAGE = Path(__file__).parents[2]
_FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""In a wheel, in a checkout; see the wheel's `sources` in pyproject.toml."""
_HEADING = re.compile(r"^#{1,4} (.+)$")
_BEST = 3
"""Sections that a search prints."""
_MOST_LINES = 24
"""Of each of them."""
_RECORDS = ("decisions/", "evidence", "benchmarks", "tried", "pages")
"""Pages of how something was decided or measured, which a search puts last."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "page",
        metavar="PAGE",
        nargs="?",
        help="print this page, such as prompts or docs/prompts.md (default: list all)",
    )
    parser.add_argument("--search", metavar="WORD", nargs="+", help="print the sections that fit these words best")


def docs(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from lightning_core.tools.cli.console import Column, make_table, show

    pages = page_files()
    if options.page is not None:
        if options.search is not None:
            raise ConfigError(f"--search looks through all pages; remove {options.page!r}, or --search")
        print(pages[_find(options.page, pages)].read_text(encoding="utf-8"), end="")
    elif options.search is not None:
        if not " ".join(options.search).strip():
            raise ConfigError("--search: found no word; expected words of the sections to find")
        for section in _search(" ".join(options.search).lower().split(), pages):
            cut = ["…"] if len(section.lines) > _MOST_LINES else []
            print("\n".join([f"== {section.page}: {section.title}", *section.lines[:_MOST_LINES], *cut, ""]))
    else:
        titles = ((name, next(_sections(name, path)).title) for name, path in pages.items())
        show(make_table([Column("page"), Column("title", cut=True)], list(titles)))
    return exits.OK


def page_files() -> Mapping[str, Path]:
    """The files of all pages, by names such as ``guides/baseline``; those of folders come after the others.

    Raises `ConfigError` if the package has no pages.
    """
    for folder in _FOLDERS:
        found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")}
        if found:
            return dict(sorted(found.items(), key=lambda item: (item[0].count("/"), item[0])))
    raise ConfigError(
        f"{str(_FOLDERS[0])!r} has no pages; install lightning-rl from its wheel, or run it in its checkout"
    )


def _find(text: str, pages: Mapping[str, Path]) -> str:
    name = text.partition("#")[0].removesuffix(".md").strip("/")
    name = {page.lower(): page for page in pages}.get(name.lower(), name)
    name = name if name in pages else name.removeprefix("docs/")
    found = [name] if name in pages else [page for page in pages if page.endswith(f"/{name}")]
    if len(found) == 1:
        return found[0]
    near = did_you_mean(name, pages)
    found = found or [page for page in pages if page.startswith(f"{name}/")]
    advice = f"; expected {' or '.join(found)}." if found else f"; {near}" if near else "."
    raise ConfigError(f"no page is called {text!r}{advice} List all pages with: lightning-rl docs")


@dataclass(frozen=True, slots=True)
class _Section:
    """A heading with what follows until the next one."""

    page: str
    title: str
    lines: Sequence[str]

    def score(self, word: str) -> float:
        """How much the section is about ``word``: its occurrences, of which further ones add less."""
        times = "\n".join(self.lines).lower().count(word) + 3 * self.title.lower().count(word)
        return times / (times + 1 + len(self.lines) / 40)


def _sections(page: str, path: Path) -> Iterator[_Section]:
    title, lines, is_code = page, list[str](), False
    for line in path.read_text(encoding="utf-8").splitlines():
        is_code ^= line.startswith("```")
        if (heading := _HEADING.match(line)) and not is_code:
            if any(map(str.strip, lines)):
                yield _Section(page, title, lines)
            title, lines = heading[1], []
        else:
            lines.append(line)
    yield _Section(page, title, lines)


def _search(words: Sequence[str], pages: Mapping[str, Path]) -> Sequence[_Section]:
    """The best sections for ``words``, in which rare words count more. Raises `ConfigError` if no page has one of them."""
    sections = [section for name, path in pages.items() for section in _sections(name, path)]
    scores = [0.0] * len(sections)
    for word in words:
        each = [section.score(word) for section in sections]
        rare = math.log((len(sections) + 1) / (sum(score > 0 for score in each) + 1))
        scores = [total + rare * score for total, score in zip(scores, each, strict=True)]
    ranked = [
        (score * (0.3 if section.page.startswith(_RECORDS) else 1), section)
        for score, section in zip(scores, sections, strict=True)
        if score > 0
    ]
    if not ranked:
        raise ConfigError(f"no page has {' or '.join(map(repr, words))}. List all pages with: lightning-rl docs")
    return [section for _, section in sorted(ranked, key=lambda item: -item[0])[:_BEST]]
