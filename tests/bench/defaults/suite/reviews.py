"""The sentiment of a review, with the client of Anthropic."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from anthropic import Anthropic

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import messages
from tests.bench.defaults.suite.words import CITIES, THINGS, plain

_SHOTS = (
    ("The fan from Bonn is awful.", "negative"),
    ("I love the fan from Bonn.", "positive"),
    ("The desk from Nice broke at once.", "negative"),
    ("What a great desk from Nice.", "positive"),
)
_FORMS = {
    "positive": (
        *("The {x} from {c} works very well.", "I would buy the {x} from {c} again."),
        *("My {x} from {c} is not bad at all.", "The {x} from {c} never failed me."),
    ),
    "negative": (
        *("The {x} from {c} is a waste of money.", "I would not buy the {x} from {c} again."),
        *("My {x} from {c} is not good at all.", "The {x} from {c} never worked well."),
    ),
}


@cache
def _client() -> Anthropic:
    return Anthropic(api_key="none", timeout=120)


@trainable("critic")
def solve(task: Task) -> str:
    system, *rest = messages("Answer with positive or negative.", _SHOTS, task["text"])
    prompt: Any = rest
    answer = _client().messages.create(
        model="claude-sonnet-4-5", max_tokens=4, system=system["content"], messages=prompt
    )
    return "".join(block.text for block in answer.content if block.type == "text")


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == task["label"])


def draw(rng: random.Random) -> Task:
    label = rng.choice(list(_FORMS))
    return {"text": rng.choice(_FORMS[label]).format(x=rng.choice(THINGS), c=rng.choice(CITIES)), "label": label}


REVIEWS = Agent(
    name="reviews",
    kind="classification, 2 classes (Anthropic client)",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["label"]],
    train=("critic",),
)
