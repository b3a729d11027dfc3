"""Agents of which some are trained: a writer before a frozen reader, and two agents after a frozen one."""

from __future__ import annotations

import random
import re

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.routing import QUEUES
from tests.bench.defaults.suite.words import CITIES, NAMES, THINGS, plain

_PICKS = (
    ("1. A fan costs 12 euros.\n2. A desk costs 80 euros.\n3. A cup costs 4 euros.\nWhat does a desk cost?", "2"),
    ("1. A mat costs 30 euros.\n2. A rug costs 9 euros.\n3. A fan costs 15 euros.\nWhat does a mat cost?", "1"),
)
_READS = (("A fan costs 12 euros.", "12"), ("A desk costs 80 euros.", "80"))


@trainable("picker")
def _pick(text: str) -> str:
    return ask("Answer with the number of the line.", _PICKS, text, tokens=3)


@trainable("reader")
def _read(line: str) -> str:
    return ask("Answer with the price.", _READS, line, tokens=5)


def pick(task: Task) -> str:
    """One agent names a line, and the frozen one reads the price in it."""
    number = plain(_pick(task["text"]))
    return _read(task["lines"][int(number) - 1]) if number in ("1", "2", "3") else ""


def pick_score(task: Task, answer: str) -> float:
    return float(plain(answer) == str(task["answer"]))


def draw_pick(rng: random.Random) -> Task:
    things, prices, place = rng.sample(THINGS, 3), rng.sample(range(3, 99), 3), rng.randrange(3)
    lines = [f"A {thing} costs {price} euros." for thing, price in zip(things, prices, strict=True)]
    numbered = "\n".join(f"{n}. {line}" for n, line in enumerate(lines, 1))
    text = f"{numbered}\nWhat does a {things[place]} cost?"
    return {"text": text, "lines": lines, "place": place, "answer": prices[place]}


@trainable("summarizer")
def _summarize(text: str) -> str:
    shots = (("From Jon in Nice: My laptop gets very hot.", "The laptop is too hot."),)
    return ask("Write a short summary.", shots, text, tokens=16)


@trainable("classifier")
def _classify(text: str, summary: str) -> str:
    shots = (
        ("From Jon in Nice: My laptop gets very hot. (The laptop is too hot.)", "technical"),
        ("From Pia in Bonn: My card was charged again. (A double charge.)", "billing"),
    )
    return ask(f"Answer with one word: {', '.join(QUEUES)}.", shots, f"{text} ({summary})", tokens=6)


@trainable("addresser")
def _address(text: str) -> str:
    shots = (
        ("From Jon in Nice: My laptop gets very hot.", "Jon, Nice"),
        ("Pia (Bonn) wrote: My card was charged again.", "Pia, Bonn"),
    )
    return ask("Write the name and the city.", shots, text, tokens=8)


def file_ticket(task: Task) -> str:
    """A frozen agent summarizes, two trained ones choose the queue and the address."""
    summary = re.sub(r"\s+", " ", _summarize(task["text"]))
    return f"{plain(_classify(task['text'], summary))}; {plain(_address(task['text']))}"


def ticket_score(task: Task, answer: str) -> float:
    """Half of the reward for the queue, half for the address."""
    queue, _, address = answer.partition("; ")
    return (queue == task["queue"]) / 2 + (address == task["address"].lower()) / 2


def draw_ticket(rng: random.Random) -> Task:
    name, city, queue = rng.choice(NAMES), rng.choice(CITIES), rng.choice(list(QUEUES))
    message = rng.choice(QUEUES[queue]).format(x=rng.choice(THINGS))
    form = rng.choice(("From {n} in {c}: {m}", "{n} ({c}) wrote: {m}", "{m} Regards, {n}, {c}"))
    return {"text": form.format(n=name, c=city, m=message), "queue": queue, "address": f"{name}, {city}"}


PICK = Agent(
    name="pick",
    kind="two agents, one trained",
    solve=pick,
    score=pick_score,
    draw=draw_pick,
    ideal=lambda task: [str(task["place"] + 1), str(task["answer"])],
    train=("picker",),
    frozen=("reader",),
)
TICKET = Agent(
    name="ticket",
    kind="three agents, two trained, partial reward",
    solve=file_ticket,
    score=ticket_score,
    draw=draw_ticket,
    ideal=lambda task: ["A message.", task["queue"], task["address"]],
    train=("classifier", "addresser"),
    frozen=("summarizer",),
    is_answer=False,
)
