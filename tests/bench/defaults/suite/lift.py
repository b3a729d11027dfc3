"""A lift is moved to a floor, one floor a call: 2 to 6 calls, and a reward for each floor that it gets nearer."""

from __future__ import annotations

import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import plain

_CALLS = 6
_SHOTS = (
    ("The lift is on floor 2. Go to floor 5.", "up"),
    ("The lift is on floor 7. Go to floor 7.", "open"),
    ("The lift is on floor 9. Go to floor 6.", "down"),
)


@trainable("operator")
def solve(task: Task) -> str:
    floor = task["start"]
    for _ in range(_CALLS):
        said = plain(ask("Answer with up, down or open.", _SHOTS, _state(floor, task), tokens=4))
        if said == "open":
            return f"{floor} open"
        floor += {"up": 1, "down": -1}.get(said, 0)
    return f"{floor} shut"


def _state(floor: int, task: Task) -> str:
    return f"The lift is on floor {floor}. Go to floor {task['goal']}.{task['note']}"


def score(task: Task, answer: str) -> float:
    """Half of the reward for the way, the other half for opening at the goal."""
    floor, _, door = answer.partition(" ")
    if not floor.lstrip("-").isdigit():
        return 0.0
    left = abs(int(floor) - task["goal"]) / abs(task["start"] - task["goal"])
    return max(0.0, (1 - left) / 2) + (0.5 if left == 0 and door == "open" else 0.0)


def draw(rng: random.Random) -> Task:
    start = rng.randint(1, 20)
    goal = start + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))
    note = rng.choice(("", " Hurry.", " Two people wait."))
    task = {"start": start, "goal": goal, "note": note}
    return {**task, "text": _state(start, task)}


LIFT = Agent(
    name="lift",
    kind="tool loop, 2-6 calls, shaped reward",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: (
        ["up" if task["goal"] > task["start"] else "down"] * abs(task["goal"] - task["start"]) + ["open"]
    ),
    train=("operator",),
    is_answer=False,
)
