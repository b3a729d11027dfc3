"""Six small agents for a model of 135M parameters, to judge defaults: each begins between 5% and 60% and can be learnt.

They are written with the OpenAI client. Tasks are generated; those of training and evaluation have no text in common.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from openai import OpenAI

from examples.calculator.agent import evaluate
from lightning_core import trainable

Task = dict[str, Any]


@cache
def _client() -> OpenAI:
    return OpenAI(api_key="none", timeout=120)


def ask(system: str, shots: Sequence[tuple[str, str]], question: str, *, tokens: int) -> str:
    """The model's answer after a few examples."""
    examples = [message for user, answer in shots for message in (_said("user", user), _said("assistant", answer))]
    messages: Any = [_said("system", system), *examples, _said("user", question)]
    answer = _client().chat.completions.create(model="gpt-4o-mini", messages=messages, max_tokens=tokens)
    return (answer.choices[0].message.content or "").strip()


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Lea", "Max", "Zoe", "Eva", "Leo", "Kim", "Ida")
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Tokyo", "Quito", "Riga", "Bern")


@trainable("extractor")
def extract(task: Task) -> float:
    """Fields of a sentence as JSON; a third of the reward for each."""
    shots = [
        ("Pia is 31 years old and lives in Rome.", '{"name": "Pia", "age": 31, "city": "Rome"}'),
        ("From Oslo comes Jon, who turned 58.", '{"name": "Jon", "age": 58, "city": "Oslo"}'),
    ]
    text = ask("Write the person as JSON.", shots, task["text"], tokens=28)
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    return sum(found.get(key) == task[key] for key in ("name", "age", "city")) / 3 if isinstance(found, dict) else 0.0


def extract_tasks(rng: random.Random) -> Task:
    task = {"name": rng.choice(NAMES), "age": rng.randint(18, 90), "city": rng.choice(CITIES)}
    form = rng.choice(
        (
            "{name} is {age} years old and lives in {city}.",
            "From {city} comes {name}, who turned {age}.",
            "At {age}, {name} moved to {city}.",
            "In {city} we met {name}, aged {age}.",
        )
    )
    return {**task, "text": form.format(**task)}


QUEUES = {
    "billing": ("I was charged twice for {x}.", "The invoice for {x} is wrong.", "Please refund my {x}."),
    "technical": ("My {x} does not start.", "The {x} shows an error.", "I cannot log in to the {x}."),
    "shipping": ("Where is the {x} that I ordered?", "My {x} arrived broken.", "The {x} went to a wrong address."),
    "sales": ("What does a {x} cost?", "Do you have a {x} in blue?", "Can I get a discount on ten {x}s?"),
}
THINGS = (
    "phone",
    "camera",
    "router",
    "printer",
    "tablet",
    "watch",
    "speaker",
    "monitor",
    "keyboard",
    "lamp",
    "drone",
    "scale",
)


@trainable("router")
def route(task: Task) -> float:
    """One of four queues for a message."""
    shots = [("My laptop gets very hot.", "technical"), ("I paid, but my card was charged again.", "billing")]
    answer = ask(f"Answer with one word: {', '.join(QUEUES)}.", shots, task["text"], tokens=6)
    return float(answer.lower().strip(".") == task["queue"])


def route_tasks(rng: random.Random) -> Task:
    queue = rng.choice(list(QUEUES))
    return {"queue": queue, "text": rng.choice(QUEUES[queue]).format(x=rng.choice(THINGS))}


UNITS = {("km", "m"): 1000, ("m", "cm"): 100, ("kg", "g"): 1000, ("h", "min"): 60, ("min", "s"): 60, ("l", "ml"): 1000}
WORDS = {"km": "kilometres", "m": "metres", "cm": "centimetres", "kg": "kilograms", "g": "grams", "h": "hours", "min": "minutes",
         "s": "seconds", "l": "litres", "ml": "millilitres"}  # fmt: skip


@trainable("converter")
def convert(task: Task) -> float:
    """A tool call with a number and two units, then the number that the tool returned."""
    shots = [("How many grams are 3 kilograms?", "convert(3, kg, g)"), ("7 hours in minutes?", "convert(7, h, min)")]
    call = re.fullmatch(r"convert\((\d+), (\w+), (\w+)\)", ask("Call the tool.", shots, task["text"], tokens=14))
    factor = call and UNITS.get((call[2], call[3]))
    if not call or not factor:
        return 0.0
    result = str(int(call[1]) * factor)
    said = ask(
        "Give the result.",
        [("Tool: 3000 g. How many grams?", "3000")],
        f"Tool: {result} {call[3]}. {task['text']}",
        tokens=10,
    )
    return float(said.rstrip(".") == str(task["answer"]))


def convert_tasks(rng: random.Random) -> Task:
    (small, large), number = rng.choice(list(UNITS.items())), rng.randint(2, 40)
    form = rng.choice(("How many {to} are {n} {of}?", "{n} {of} in {to}?", "Convert {n} {of} to {to}."))
    text = form.format(n=number, of=WORDS[small[0]], to=WORDS[small[1]])
    return {"text": text, "answer": number * large}


ROWS = [(name, 20 + 3 * place, CITIES[place % 5]) for place, name in enumerate(NAMES)]


@trainable("analyst")
def query(task: Task) -> float:
    """A query for one table, judged by its result."""
    shots = [
        ("Who lives in Rome?", "SELECT name FROM people WHERE city = 'Rome'"),
        ("How many people are there?", "SELECT COUNT(*) FROM people"),
    ]
    sql = ask("Write SQL for the table people(name, age, city).", shots, task["text"], tokens=28)
    return float(_result(sql) == _result(task["sql"]))


def _result(sql: str) -> Any:
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE people (name TEXT, age INTEGER, city TEXT)")
        database.executemany("INSERT INTO people VALUES (?, ?, ?)", ROWS)
        database.set_progress_handler(lambda: 1, 10_000)
        try:
            return sorted(database.execute(sql.splitlines()[0]).fetchall())
        except (sqlite3.Error, IndexError, TypeError):
            return None


def query_tasks(rng: random.Random) -> Task:
    name, city, age = rng.choice(NAMES), rng.choice(CITIES[:5]), rng.randint(21, 52)
    return rng.choice(
        (
            {"text": f"How old is {name}?", "sql": f"SELECT age FROM people WHERE name = '{name}'"},
            {"text": f"How many people live in {city}?", "sql": f"SELECT COUNT(*) FROM people WHERE city = '{city}'"},
            {"text": f"Who is older than {age}?", "sql": f"SELECT name FROM people WHERE age > {age}"},
            {"text": f"Who is {age} or younger?", "sql": f"SELECT name FROM people WHERE age <= {age}"},
            {"text": f"Where does {name} live?", "sql": f"SELECT city FROM people WHERE name = '{name}'"},
        )
    )


FACTS = {
    f"{thing} {city}": 10 + (7 * i + 13 * j) % 90 for i, thing in enumerate(THINGS) for j, city in enumerate(CITIES)
}


@trainable("searcher")
def search(task: Task) -> float:
    """A query for a price list, then the price."""
    words = ask("Write a search query.", [("What does a fan cost in Bonn?", "fan Bonn")], task["text"], tokens=8)
    wanted = set(re.findall(r"\w+", words.lower()))
    found = max(FACTS, key=lambda key: len(wanted & set(key.lower().split())))
    thing, city = found.split()
    passage = f"Price list: a {thing} in {city} costs {FACTS[found]} euros."
    said = ask("Answer with the number.", [("Price list: a fan in Bonn costs 12 euros. What does a fan cost?", "12")],
               f"{passage} {task['text']}", tokens=6)  # fmt: skip
    return float(said.rstrip(".") == str(task["answer"]) and found == task["key"])


def search_tasks(rng: random.Random) -> Task:
    key = rng.choice(list(FACTS))
    thing, city = key.split()
    form = rng.choice(
        ("What does a {t} cost in {c}?", "How much is a {t} in {c}?", "In {c}, what is the price of a {t}?")
    )
    return {"key": key, "text": form.format(t=thing, c=city), "answer": FACTS[key]}


@trainable("planner")
def _plan(text: str) -> str:
    shots = [
        ("A box has 4 pens. How many are in 3 boxes?", "multiply"),
        ("Ann had 9 pens and lost 2. How many now?", "subtract"),
    ]
    return ask("Answer with add, subtract or multiply.", shots, text, tokens=5).lower().strip(".")


@trainable("worker")
def _work(operation: str, text: str) -> str:
    shots = [
        ("multiply: A box has 4 pens. How many are in 3 boxes?", "4*3"),
        ("subtract: Ann had 9 pens and lost 2.", "9-2"),
    ]
    return ask("Write the calculation.", shots, f"{operation}: {text}", tokens=10)


def calculate(task: Task) -> float:
    """Two agents: one names the operation, the other writes it with the numbers."""
    operation = _plan(task["text"])
    if operation not in ("add", "subtract", "multiply"):
        return 0.0
    return float(evaluate(_work(operation, task["text"])) == str(task["answer"]))


def calculate_tasks(rng: random.Random) -> Task:
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(11, 40), rng.randint(2, 10)
    text, answer = rng.choice(
        (
            (f"{name} had {a} {thing}s and got {b} more. How many now?", a + b),
            (f"{name} had {a} {thing}s and sold {b}. How many are left?", a - b),
            (f"A crate holds {a} {thing}s. How many are in {b} crates?", a * b),
            (f"There are {a} {thing}s here and {b} there. How many together?", a + b),
        )
    )
    return {"text": text, "answer": answer}


class Small(NamedTuple):
    """An agent, its tasks and the names that are trained."""

    solve: Callable[[Task], float]
    draw: Callable[[random.Random], Task]
    train: tuple[str, ...]


AGENTS = {
    "extract": Small(extract, extract_tasks, ("extractor",)),
    "route": Small(route, route_tasks, ("router",)),
    "convert": Small(convert, convert_tasks, ("converter",)),
    "query": Small(query, query_tasks, ("analyst",)),
    "search": Small(search, search_tasks, ("searcher",)),
    "calculate": Small(calculate, calculate_tasks, ("planner", "worker")),
}


def split(agent: str, *, train: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """Tasks to train on and to evaluate with, without a common text."""
    rng = random.Random(agent)
    found: dict[str, Task] = {}
    for _ in range(100 * (train + held_out)):
        task = AGENTS[agent].draw(rng)
        found.setdefault(task["text"], {**task, "id": str(len(found))})
    tasks = list(found.values())[: train + held_out]
    return tasks[:-held_out], tasks[-held_out:]
