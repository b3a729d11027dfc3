"""All questions that the templates generate for a schema, with their gold queries.

A kind is a family of questions. A skeleton is a gold query without its constants. Splits are by skeleton (see `tasks`), so no
test question is a training question with a different number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from examples.text_to_sql import databases
from examples.text_to_sql.execution import execute
from examples.text_to_sql.schemas import Schema, Table

AGGREGATES = {"average": "AVG", "maximum": "MAX", "minimum": "MIN"}
SUMS = {"average": "AVG", "total": "SUM"}
"""Aggregates of all rows. An unneeded ``WHERE price > 9`` may not change a maximum."""
COMPARISONS = {"above": ">", "below": "<"}
ORDERS = {"ascending": "", "descending": " DESC"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its kind, and its gold query."""

    kind: str
    text: str
    sql: str
    skeleton: str
    ordered: bool = False


def _thresholds(schema: Schema, table: Table, number: str, rng: random.Random) -> list[int]:
    """Values that occur in rows, so > and >= differ, excluding the extremes."""
    values = sorted({row[0] for row in execute(databases.names(schema)[0], f"SELECT {number} FROM {table.name}")})
    inner = values[len(values) // 6 : -len(values) // 6]
    return sorted(rng.sample(inner, min(6, len(inner))))


def _categories(table: Table) -> Iterator[tuple[str, str, str]]:
    """Each column, value, and phrase for the rows with that value."""
    for column, values in table.categories.items():
        for value in values:
            yield column, value, f"with {column} {value}"


def _filters(table: Table, schema: Schema, rng: random.Random) -> Iterator[Question]:
    """Questions about one table with one condition."""
    name, many, label = table.name, table.plural, table.label
    for column, value, which in _categories(table):
        rest = f"FROM {name} WHERE {column} = "
        sql = f"SELECT COUNT(*) {rest}"
        yield Question("count", f"How many {many} {which} are there?", f"{sql}'{value}'", sql)
        sql = f"SELECT {label} {rest}"
        yield Question("list", f"List the {label} of {many} {which}.", f"{sql}'{value}'", sql)
        for number, (word, function) in product(table.numbers, AGGREGATES.items()):
            sql = f"SELECT {function}({number}) {rest}"
            yield Question("aggregate", f"What is the {word} {number} of {many} {which}?", f"{sql}'{value}'", sql)
    for number, (word, comparison) in product(table.numbers, COMPARISONS.items()):
        rest = f"FROM {name} WHERE {number} {comparison} "
        for threshold in _thresholds(schema, table, number, rng):
            sql = f"SELECT COUNT(*) {rest}"
            yield Question("compare", f"How many {many} have {number} {word} {threshold}?", f"{sql}{threshold}", sql)
            sql = f"SELECT {label} {rest}"
            yield Question(
                "list", f"List the {label} of {many} with {number} {word} {threshold}.", f"{sql}{threshold}", sql
            )


def _whole_table(table: Table) -> Iterator[Question]:
    """Questions about all rows of one table. Without constants, the query is its skeleton."""
    name, many, label = table.name, table.plural, table.label
    for number, (word, function) in product(table.numbers, SUMS.items()):
        sql = f"SELECT {function}({number}) FROM {name}"
        yield Question("overall", f"What is the {word} {number} of all {many}?", sql, sql)
    for number, (word, direction) in product(table.numbers, ORDERS.items()):
        sql = f"SELECT {label} FROM {name} ORDER BY {number}{direction}"
        yield Question("order", f"List the {label} of {many} ordered by {word} {number}.", sql, sql, ordered=True)
        text = f"List the {label} of the first {name} ordered by {word} {number}."
        yield Question("superlative", text, f"{sql} LIMIT 1", f"{sql} LIMIT 1")
    for column in table.categories:
        sql = f"SELECT {column}, COUNT(*) FROM {name} GROUP BY {column}"
        yield Question("group", f"List each {column} and the number of {many}.", sql, sql)
        for number, (word, function) in product(table.numbers, AGGREGATES.items()):
            sql = f"SELECT {column}, {function}({number}) FROM {name} GROUP BY {column}"
            yield Question("group", f"List each {column} and the {word} {number} of {many}.", sql, sql)


def _joins(child: Table, parent: Table) -> Iterator[Question]:
    """Questions about rows of one table, with a condition on the table they refer to."""
    many, of = child.plural, f"{child.relation} {parent.plural}"
    for column, value, which in _categories(parent):
        rest = f"FROM {child.name} JOIN {parent.name} USING ({parent.name}_id) WHERE {column} = "
        sql = f"SELECT COUNT(*) {rest}"
        yield Question("join", f"How many {many} {of} {which} are there?", f"{sql}'{value}'", sql)
        sql = f"SELECT {child.label} {rest}"
        yield Question("join", f"List the {child.label} of {many} {of} {which}.", f"{sql}'{value}'", sql)
        for number, (word, function) in product(child.numbers, AGGREGATES.items()):
            sql = f"SELECT {function}({number}) {rest}"
            yield Question("join", f"What is the {word} {number} of {many} {of} {which}?", f"{sql}'{value}'", sql)


def questions(schema: Schema) -> list[Question]:
    """All questions about a schema, in a deterministic order."""
    rng = random.Random(f"questions/{schema.name}")
    questions = [
        question for table in schema.tables for question in (*_filters(table, schema, rng), *_whole_table(table))
    ]
    for table in schema.tables:
        if table.parent:
            questions += _joins(table, schema.table(table.parent))
    return questions
