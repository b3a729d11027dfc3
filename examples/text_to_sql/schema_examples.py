"""Example queries for a database, made from its description alone. No gold query is read, so held-out databases have them too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def schema_examples(schema: dict[str, Any], most: int) -> list[tuple[str, str]]:
    """Up to ``most`` pairs of a question and its query, for an entry of Spider's ``tables.json``.

    The tables take turns, each time with another kind of query, so the examples show all tables if there are enough.
    """
    pools = [list(_about(schema, table)) for table in range(len(schema["table_names_original"]))]
    chosen: list[tuple[str, str]] = []
    while len(chosen) < most and any(pools):
        for pool in pools:
            if pool and len(chosen) < most:
                chosen.append(pool.pop(len(chosen) % len(pool)))
    return chosen


def _about(schema: dict[str, Any], table: int) -> Iterator[tuple[str, str]]:
    """One question of each kind about a table, in its own words. Questions about keys are made only if there are no other columns."""
    name, noun = _quoted(schema["table_names_original"][table]), schema["table_names"][table]
    keys = {*schema["primary_keys"], *(key for pair in schema["foreign_keys"] for key in pair)}
    of_table = [i for i, (owner, _) in enumerate(schema["column_names_original"]) if owner == table]
    columns = [i for i in of_table if i not in keys] or of_table
    sql = {i: _quoted(schema["column_names_original"][i][1]) for i in columns}
    words = {i: schema["column_names"][i][1] for i in columns}
    texts = [i for i in columns if schema["column_types"][i] == "text"]
    numbers = [i for i in columns if schema["column_types"][i] == "number"]
    if numbers:
        first, last = numbers[0], numbers[-1]
        yield f"What is the average {words[first]} of all {noun}?", f"SELECT avg({sql[first]}) FROM {name}"
        if texts:
            text = f"Show the {words[texts[0]]} of {noun} ordered by {words[last]}."
            yield text, f"SELECT {sql[texts[0]]} FROM {name} ORDER BY {sql[last]}"
    if texts:
        group = texts[-1]
        text = f"How many {noun} are there for each {words[group]}?"
        yield text, f"SELECT {sql[group]}, count(*) FROM {name} GROUP BY {sql[group]}"
    if len(columns) > 1:
        one, other = columns[:2]
        yield f"List the {words[one]} and {words[other]} of {noun}.", f"SELECT {sql[one]}, {sql[other]} FROM {name}"


def _quoted(name: str) -> str:
    """A name as SQL, in quotes if it is not a plain word."""
    return name if name.isidentifier() else '"' + name.replace('"', '""') + '"'
