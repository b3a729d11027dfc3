"""``lightning-rl docs``: every page, by the names that messages and people use, and a search."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_core.tools.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"


def test_all_pages_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]]
    titles = dict(rows)
    assert set(titles) == {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert titles["guides/baseline"] == "The score to beat"


@pytest.mark.parametrize(
    "name", ["guides/baseline", "docs/guides/baseline.md", "baseline", "docs/guides/baseline.md#cost"]
)
def test_a_page_is_printed_by_each_of_its_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", name]) == 0
    assert capsys.readouterr().out == (DOCS / "guides/baseline.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["promts"], "no page is called 'promts'; did you mean 'prompts'? List all pages with: lightning-rl docs"),
        (["langgraph"], "expected integrations/langgraph or tutorials/langgraph."),
        (["zzz"], "no page is called 'zzz'. List all pages"),
        (["--search", "qqxyz"], "no page has 'qqxyz'"),
        (["faq", "--search", "reward"], "--search looks through all pages; remove 'faq', or --search"),
    ],
)
def test_a_page_that_is_not_found(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "section"),
    [("roll back promote", "== switching: "), ("shell completion", "== command-line: Shell completion")],
)
def test_a_search_prints_the_section_about_the_words_first(
    words: str, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", "--search", *words.split()]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(section)
    assert shown.count("\n== ") == 2
