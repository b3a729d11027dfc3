"""Rejects constructions that are not plain English in docs, messages and comments.

The list is short: each entry has a plain replacement, and false alarms are rare.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PHRASES = {
    r"whoever": "name the actor: the caller, the client, the agent",
    r"whatever": "name the cases, or: any",
    r"somebody": "name the actor: the user, a third party",
    r"the machinery": "infrastructure failure, or the component's name",
    r"at hand": "available",
    r"by hand": "hand-written, manually",
    r"what bec(?:omes|ame|ome) of": "result of, handling of",
    r"of which there": "start a new sentence",
    r"told": "name what is passed, configured, printed or detected",
    r"tells (?:of|how|what|which|whether)": "reports, lists, states",
    r"hears? of": "receives, is notified of",
    r"(?:that|which|it|or) is (?-i:none)": "name what is missing",
    r"(?<!there\s)is no (?:agent|answer|field|key|name|new|number|one of|policy|rule|set|store|such)": "is not a …",
    r"led (?:there|here|to the|to a policy)": "routed",
    r"heed(?:s|ed|ing)?": "follow, obey, check",
    r"how many-th": "index, number",
    r"ask(?:s|ed)? for nothing": "is treated as absent, makes no request",
    r"pass(?:es|ed) on": "forwards, forwarded",
    r"seen to": "handled",
    r"alike": "both, equally",
    r"goes? without": "has no",
    r"for the eye": "for display",
    r"(?:that|as) there (?:is|are)(?=[.,;:)])": "omit it",
    r"are what they are": "state the constraint",
    r"beside one another": "together, in parallel, in one prompt",
    r"wish(?:es|ed)?": "requests, settings",
}
"""Regular expressions, ignoring case, and replacements. A space also matches a line break."""

_FINDER = re.compile(
    "|".join(rf"\b(?P<p{i}>{phrase})(?!\w)" for i, phrase in enumerate(PHRASES)).replace(" ", r"[ \t]*[ \n][ \t]*"),
    re.IGNORECASE,
)
_REPLACEMENTS = tuple(PHRASES.values())
_STRING = re.compile(r"""([a-zA-Z]*)('''|\"{3}|'|")(.*)\2""", re.DOTALL)
_IN_CODE = re.compile(r"``[^`]+``|`[^`\n]+`")
_GAP = "\0"


def files() -> list[Path]:
    """The documents and modules of this repository, except this one."""
    docs = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        ROOT / "CHANGELOG.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/README.md"),
    ]
    modules = [
        path
        for folder in ("lightning_core", "integrations", "examples", "tests", "docs", ".ci")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
    ]
    return sorted(path for path in [*docs, *modules] if path.is_file())


def prose_of_markdown(text: str) -> str:
    """``text`` with inline code blanked out."""
    return _blank(text, _IN_CODE)


def prose_of_python(source: str) -> str:
    """``source`` with everything except strings and comments blanked out, in the same positions."""
    lines = [re.sub(r"\S", _GAP, line) for line in source.splitlines(keepends=True)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = " " + token.string[1:]
        elif token.type == tokenize.STRING and (match := _STRING.fullmatch(token.string)):
            text = " " * len(match[1] + match[2]) + match[3] + " " * len(match[2])
        elif tokenize.tok_name[token.type] == "FSTRING_MIDDLE":  # Python 3.12 and later
            text = token.string
        else:
            continue
        row, column = token.start
        for offset, part in enumerate(text.split("\n")):
            line, at = lines[row - 1 + offset], column if offset == 0 else 0
            lines[row - 1 + offset] = line[:at] + part + line[at + len(part) :]
    return _blank("".join(lines), _IN_CODE)


def finds(prose: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, phrase and replacement for each construction in ``prose``."""
    for match in _FINDER.finditer(prose):
        number = next(i for i, text in enumerate(match.groups()) if text is not None)
        yield prose.count("\n", 0, match.start()) + 1, " ".join(match[0].lower().split()), _REPLACEMENTS[number]


def _blank(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda match: re.sub(r"\S", _GAP, match[0]), text)


def test_docs_messages_and_comments_are_plain_english():
    found: list[str] = []
    for path in files():
        text = path.read_text(encoding="utf-8")
        prose = prose_of_markdown(text) if path.suffix == ".md" else prose_of_python(text)
        found += [
            f"{path.relative_to(ROOT)}:{line}: {phrase!r}; write: {instead}" for line, phrase, instead in finds(prose)
        ]
    if found:
        pytest.fail(f"{len(found)} phrases to rewrite:\n" + "\n".join(found), pytrace=False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""It is led\n    to the endpoint."""\n', [(1, "led to the")]),
        ("x = 1\n# what is\n# told to it\n", [(3, "told")]),
        ('raise ValueError(\n    "whoever "\n    f"{x} asks"\n)\n', [(2, "whoever")]),
        ('"a rule that is " "none"\n', [(1, "that is none")]),
        ("# there is no key; this is\n# no key\n", [(1, "is no key")]),
        ("heed = is_told = whatever\n", []),
        ("# `whatever` is a name here\n", []),
        ("# x is None, or is None\n", []),
        ('("which is", "none")\n', []),
    ],
)
def test_only_strings_and_comments_of_a_module_are_read(source: str, expected: list[tuple[int, str]]):
    assert [(line, phrase) for line, phrase, _ in finds(prose_of_python(source))] == expected
