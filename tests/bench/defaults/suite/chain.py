"""A chain of managers is followed with a tool: 3 to 4 calls."""

from __future__ import annotations

import random
import re

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import complete, messages
from tests.bench.defaults.suite.words import NAMES, plain

_CALLS = 5
_SHOTS = (
    ("Who is 2 levels above Pia? Start with Pia.", "look(Pia)"),
    ("Pia reports to Jon. That is level 1 of 2.", "look(Jon)"),
    ("Jon reports to Uma. That is level 2 of 2.", "answer(Uma)"),
)


@trainable("climber")
def solve(task: Task) -> str:
    turns = [task["text"]]
    for level in range(1, _CALLS + 1):
        said = complete(messages("Use look(NAME), then answer(NAME).", _SHOTS, *turns), 10)
        if found := re.match(r"answer\((\w+)\)", said):
            return found[1]
        found = re.match(r"look\((\w+)\)", said)
        if not found or found[1] not in task["managers"]:
            return ""
        turns += [
            said,
            f"{found[1]} reports to {task['managers'][found[1]]}. That is level {level} of {task['levels']}.",
        ]
    return ""


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == task["chain"][-1].lower())


def draw(rng: random.Random) -> Task:
    names = rng.sample(NAMES, 8)
    levels = rng.choice((2, 3))
    managers = dict(zip(names, [*names[1:], names[0]], strict=True))
    form = rng.choice(("Who is {n} levels above {x}? Start with {x}.", "Go {n} levels up from {x}. Who is there?"))
    chain = names[: levels + 1]
    text = f"{form.format(n=levels, x=names[0])} (Staff: {', '.join(sorted(names))}.)"
    return {"text": text, "levels": levels, "managers": managers, "chain": chain}


CHAIN = Agent(
    name="chain",
    kind="tool loop, 3-4 calls",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [*(f"look({name})" for name in task["chain"][:-1]), f"answer({task['chain'][-1]})"],
    train=("climber",),
    is_answer=False,
)
