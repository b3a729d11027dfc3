"""Generated questions in three splits without common questions, queries or skeletons.

``train`` and ``test`` ask about the same ten schemas, but the skeletons of test questions (gold queries without constants) do not
occur in training. ``test_schema`` asks about two schemas that do not occur in training. A question is kept only if its gold results
are not empty, have no ties where order matters, and differ between the two fillings of the database.

Each schema has a few example queries, like those in a database's documentation. They are part of the prompt, so they are not tasks
and their skeletons are in no test.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from examples.text_to_sql import databases
from examples.text_to_sql.execution import execute, same_result
from examples.text_to_sql.questions import Question, questions
from examples.text_to_sql.schemas import HELD_OUT, TRAIN, Schema

Task = dict[str, Any]

MIX = {
    "count": 4,
    "compare": 4,
    "aggregate": 4,
    "list": 4,
    "overall": 2,
    "order": 2,
    "superlative": 1,
    "group": 3,
    "join": 4,
}
"""The number of questions of each kind in every 28 consecutive questions."""
EXAMPLES = ("overall", "aggregate", "order", "compare", "group", "join", "list", "join", "count")
"""The kinds of a schema's example queries, in the order of the prompt."""
TEST_SHARE = 0.25
"""The share of each schema's and kind's skeletons reserved for tests."""


def train() -> list[Task]:
    """Training questions."""
    return _tasks(TRAIN, "train")


def test() -> list[Task]:
    """Held-out questions with unseen skeletons about the training schemas."""
    return _tasks(TRAIN, "test")


def test_schema() -> list[Task]:
    """Held-out questions about schemas not in training."""
    return _tasks(HELD_OUT, "test_schema")


def held_out() -> list[Task]:
    """``test`` and ``test_schema`` together. A run's summary reports each separately."""
    return [*test(), *test_schema()]


@dataclass(frozen=True, slots=True)
class Split:
    """A schema's questions: the prompt's examples, and those for training and test."""

    examples: Sequence[Question]
    train: Sequence[Question]
    test: Sequence[Question]

    def of(self, name: str) -> Sequence[Question]:
        """The questions of split ``name``.

        For ``test_schema`` these are all questions whose skeleton no example has.
        """
        if name != "test_schema":
            return self.train if name == "train" else self.test
        shown = {question.skeleton for question in self.examples}
        return [question for question in (*self.train, *self.test) if question.skeleton not in shown]


def is_decisive(schema: Schema, question: Question) -> bool:
    """Whether the gold query's results distinguish correct from wrong queries."""
    names = databases.names(schema)
    results = [execute(name, question.sql) for name in names]
    if same_result(*results, ordered=False) or any(not rows or rows[0] in ((0,), (None,)) for rows in results):
        return False
    if question.kind in ("order", "superlative"):  # with ties, several orders would be correct
        number = question.sql.split("ORDER BY ")[1].split()[0]
        everything = question.sql.replace("SELECT ", f"SELECT {number}, ", 1).replace("LIMIT 1", "LIMIT 2")
        keys = [[row[0] for row in execute(name, everything)] for name in names]
        return all(len(set(values)) == len(values) for values in keys)
    return True


@cache
def split(schema: Schema) -> Split:
    """Split a schema's questions by skeleton. The result depends only on the schema."""
    rng = random.Random(f"split/{schema.name}")
    usable = [question for question in questions(schema) if is_decisive(schema, question)]
    rng.shuffle(usable)
    test: set[str] = set()
    for kind in MIX:
        skeletons = sorted({question.skeleton for question in usable if question.kind == kind})
        test |= set(rng.sample(skeletons, max(1, round(TEST_SHARE * len(skeletons)))))
    rest = [question for question in usable if question.skeleton not in test]
    examples: list[Question] = []
    for kind in EXAMPLES:
        shown = {question.skeleton for question in examples}
        examples.append(next(q for q in rest if q.kind == kind and q.skeleton not in shown))
    return Split(
        examples=examples,
        train=[question for question in rest if question not in examples],
        test=[question for question in usable if question.skeleton in test],
    )


def _mixed(pools: dict[tuple[str, str], list[Question]], seed: str) -> list[tuple[str, Question]]:
    """Questions in the proportions of `MIX`, alternating schemas, until a kind runs out."""
    rng = random.Random(seed)
    used = Counter(dict.fromkeys((name for name, _ in pools), 0))
    chosen: list[tuple[str, Question]] = []
    while True:
        kinds = [kind for kind, times in MIX.items() for _ in range(times)]
        rng.shuffle(kinds)
        for kind in kinds:
            options = [name for name in used if pools.get((name, kind))]
            if not options:
                return chosen
            name = min(options, key=lambda name: (used[name], rng.random()))
            used[name] += 1
            chosen.append((name, pools[name, kind].pop()))


def _tasks(schemas: Sequence[Schema], name: str) -> list[Task]:
    pools: dict[tuple[str, str], list[Question]] = {}
    for schema in schemas:
        for question in split(schema).of(name):
            pools.setdefault((schema.name, question.kind), []).append(question)
    by_name = {schema.name: schema for schema in schemas}
    return [_task(by_name[schema], question, name) for schema, question in _mixed(pools, f"mix/{name}")]


def _task(schema: Schema, question: Question, split_name: str) -> Task:
    digest = hashlib.sha256(question.text.encode()).hexdigest()[:8]
    return {
        "id": f"{schema.name}-{question.kind}-{digest}",
        "split": split_name,
        "kind": question.kind,
        "question": question.text,
        "schema": schema.text,
        "examples": [[example.text, example.sql] for example in split(schema).examples],
        "databases": databases.names(schema),
        "sql": question.sql,
        "ordered": question.ordered,
    }
