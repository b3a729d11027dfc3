"""A query for one table, scored by its result."""

from __future__ import annotations

import random
import sqlite3
from functools import lru_cache
from typing import Any

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import CITIES, NAMES

_ROWS = [(name, 20 + 3 * place, CITIES[place % 5]) for place, name in enumerate(NAMES)]
_SHOTS = (
    ("Who lives in Rome?", "SELECT name FROM people WHERE city = 'Rome'"),
    ("How many people are there?", "SELECT COUNT(*) FROM people"),
    ("Who is older than 60?", "SELECT name FROM people WHERE age > 60"),
    ("How old is Pia?", "SELECT age FROM people WHERE name = 'Pia'"),
)


@trainable("analyst")
def solve(task: Task) -> str:
    return ask("Write SQL for the table people(name, age, city).", _SHOTS, task["text"], tokens=28)


def score(task: Task, answer: str) -> float:
    return float(_result(answer) == _result(task["sql"]))


@lru_cache(10_000)
def _result(sql: str) -> Any:
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE people (name TEXT, age INTEGER, city TEXT)")
        database.executemany("INSERT INTO people VALUES (?, ?, ?)", _ROWS)
        database.set_progress_handler(lambda: 1, 10_000)
        try:
            return sorted(database.execute(sql.splitlines()[0]).fetchall())
        except (sqlite3.Error, IndexError, TypeError):
            return None


def draw(rng: random.Random) -> Task:
    name, city, age = rng.choice(NAMES), rng.choice(CITIES[:5]), rng.randint(21, 52)
    text, sql = rng.choice(
        (
            (f"How old is {name}?", f"SELECT age FROM people WHERE name = '{name}'"),
            (f"How many people live in {city}?", f"SELECT COUNT(*) FROM people WHERE city = '{city}'"),
            (f"Who is older than {age}?", f"SELECT name FROM people WHERE age > {age}"),
            (f"Who is {age} or younger?", f"SELECT name FROM people WHERE age <= {age}"),
            (f"Where does {name} live?", f"SELECT city FROM people WHERE name = '{name}'"),
            (
                f"Who lives in {city} and is older than {age}?",
                f"SELECT name FROM people WHERE city = '{city}' AND age > {age}",
            ),
        )
    )
    return {"text": text, "sql": sql}


QUERY = Agent(
    name="query",
    kind="text-to-SQL",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["sql"]],
    train=("analyst",),
)
