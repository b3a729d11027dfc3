"""Facts of an example from its gold query: its subset, whether rows are ordered, and whether its result can be matched fairly."""

from __future__ import annotations

import re

from examples.text_to_sql.execution import QueryError, execute, same_result

_QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]")
_INNERMOST = re.compile(r"\([^()]*\)")
_FROM = re.compile(r"\bfrom\b(.*?)(?=\bwhere\b|\bgroup\b|\border\b|\blimit\b|$)", re.DOTALL)


def _unquoted(sql: str) -> str:
    """The query in lower case, with each quoted text or name replaced by ``?``."""
    return _QUOTED.sub("?", sql).lower()


def _outermost(sql: str) -> str:
    """The query without quotes and without what is in parentheses."""
    text, before = _unquoted(sql), ""
    while text != before:
        text, before = _INNERMOST.sub(" ", text), text
    return text


def is_ordered(sql: str) -> bool:
    """Whether the outermost query has an ORDER BY, so the order of its rows is part of the answer."""
    return re.search(r"\border\s+by\b", _outermost(sql)) is not None


def is_one_table(sql: str) -> bool:
    """Whether the query reads one table once: a single SELECT, without a join, a nested query or a set operation."""
    if len(re.findall(r"\bselect\b", _unquoted(sql))) != 1:
        return False
    source = _FROM.search(_outermost(sql))
    return source is not None and re.search(r"\bjoin\b|,", source[1]) is None


def defect(database: str, sql: str) -> str | None:
    """The reason wrong queries would match the gold query's result, or correct ones would not, or None.

    The checks are the gold query's own: it runs within the limits of `execute`, returns rows other than NULL and 0, and returns
    the same rows when SQLite scans tables in reverse.
    """
    try:
        rows = execute(database, sql)
        if not rows:
            return "empty result"
        if all(value is None or value == 0 for row in rows for value in row):
            return "only NULL or 0"
        reverse = execute(database, sql, reverse=True)
    except QueryError as error:
        return f"gold query fails: {error}"
    return None if same_result(rows, reverse, ordered=False) else "result depends on the scan order"
