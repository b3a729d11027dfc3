"""The task set: generated questions in three splits that share no question, no query and no query skeleton.

``train`` and ``test`` ask about the same ten schemas, but a test question's skeleton (its gold query without the constants) occurs
nowhere in training; ``test_schema`` asks about two schemas that training never shows. Only questions whose gold results mean
something are kept: not empty, no ties where the order counts, and different on the two fillings of the database.

With a schema come a few example queries, as the owner of a database would write them down for whoever queries it. They stand in
the prompt, so their skeletons are in no test, and they are no tasks themselves.
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
"""Of 28 questions in a row, how many are of which kind."""
EXAMPLES = ("overall", "aggregate", "order", "compare", "group", "join", "list", "count")
"""The kinds of a schema's example queries, in the order in which a prompt shows them."""
TEST_SHARE = 0.25
"""The part of each schema's skeletons, kind by kind, that only tests use."""


def train() -> list[Task]:
    """Questions to learn from."""
    return _tasks(TRAIN, "train")


def test() -> list[Task]:
    """Held-out questions, all of unseen skeletons, about the training schemas."""
    return _tasks(TRAIN, "test")


def test_schema() -> list[Task]:
    """Questions about schemas that training never shows."""
    return _tasks(HELD_OUT, "test_schema")


def held_out() -> list[Task]:
    """``test`` and ``test_schema`` together; a task's ``split`` says which, and a run's summary tells them apart."""
    return [*test(), *test_schema()]


@dataclass(frozen=True, slots=True)
class Split:
    """A schema's questions: those that prompts show, and the rest by kind."""

    examples: Sequence[Question]
    train: Sequence[Question]
    test: Sequence[Question]

    def of(self, name: str) -> Sequence[Question]:
        """The questions of a split. Of a held-out schema everything is for testing but what the examples give away."""
        if name != "test_schema":
            return self.train if name == "train" else self.test
        shown = {question.skeleton for question in self.examples}
        return [question for question in (*self.train, *self.test) if question.skeleton not in shown]


def telling(schema: Schema, question: Question) -> bool:
    """Whether the gold query's results are good to judge by."""
    names = databases.names(schema)
    results = [execute(name, question.sql) for name in names]
    if same_result(*results, ordered=False) or any(not rows or rows[0] in ((0,), (None,)) for rows in results):
        return False
    if question.kind in ("order", "superlative"):  # ties would make several orders right
        number = question.sql.split("ORDER BY ")[1].split()[0]
        everything = question.sql.replace("SELECT ", f"SELECT {number}, ", 1).replace("LIMIT 1", "LIMIT 2")
        keys = [[row[0] for row in execute(name, everything)] for name in names]
        return all(len(set(values)) == len(values) for values in keys)
    return True


@cache
def split(schema: Schema) -> Split:
    """Divide a schema's questions by skeleton, in an order of its own that no other schema depends on."""
    rng = random.Random(f"split/{schema.name}")
    asked = [question for question in questions(schema) if telling(schema, question)]
    rng.shuffle(asked)
    test: set[str] = set()
    for kind in MIX:
        skeletons = sorted({question.skeleton for question in asked if question.kind == kind})
        test |= set(rng.sample(skeletons, max(1, round(TEST_SHARE * len(skeletons)))))
    rest = [question for question in asked if question.skeleton not in test]
    examples: list[Question] = []
    for kind in EXAMPLES:
        shown = {question.skeleton for question in examples}
        examples.append(next(q for q in rest if q.kind == kind and q.skeleton not in shown))
    return Split(
        examples=examples,
        train=[question for question in rest if question not in examples],
        test=[question for question in asked if question.skeleton in test],
    )


def _mixed(pools: dict[tuple[str, str], list[Question]], seed: str) -> list[tuple[str, Question]]:
    """Questions in the proportions of `MIX`, schemas in turn, until a kind runs out: any slice has about the same mix."""
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
