"""Agents with several calls: commands in a folder, a way through streets with a shaped reward, and a survey of a simulated user."""

from __future__ import annotations

import random
import re

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask, complete, messages
from tests.bench.defaults.suite.words import CITIES, NAMES, THINGS, plain

_COMMANDS = (
    ("Which file is about the fan? Print it.", "ls"),
    ("desk.txt fan.txt mat.txt", "cat fan.txt"),
    ("The fan is in room 12.", "room 12"),
)


@trainable("shell")
def look_around(task: Task) -> str:
    """Lists files, prints one and answers: 3 calls."""
    turns = [task["text"]]
    for _ in range(3):
        said = complete(messages("Use ls, cat FILE, then give the room.", _COMMANDS, *turns), 10)
        if said.startswith("room"):
            return said
        turns += [said, _output(task, said)]
    return ""


def _output(task: Task, said: str) -> str:
    if said == "ls":
        return " ".join(f"{thing}.txt" for thing in task["rooms"])
    found = re.fullmatch(r"cat (\w+)\.txt", said)
    room = task["rooms"].get(found[1]) if found else None
    return "error" if found is None or room is None else f"The {found[1]} is in room {room}."


def room_score(task: Task, answer: str) -> float:
    return float(plain(answer) == f"room {task['rooms'][task['thing']]}")


def draw_rooms(rng: random.Random) -> Task:
    things = rng.sample(THINGS, 3)
    rooms = {thing: rng.randint(10, 99) for thing in things}
    name = rng.choice(NAMES)
    form = rng.choice(
        ("{n} needs the {x}. Which room?", "Which file is about the {x} of {n}?", "Find the room of {n}'s {x}.")
    )
    return {"text": form.format(n=name, x=things[0]), "thing": things[0], "rooms": dict(sorted(rooms.items()))}


_STREETS = (
    ("Car at 2,5. Goal 4,5.", "east"),
    ("Car at 7,3. Goal 7,1.", "south"),
    ("Car at 6,6. Goal 6,8.", "north"),
    ("Car at 3,9. Goal 1,9.", "west"),
)
_STEPS = {"east": (1, 0), "west": (-1, 0), "north": (0, 1), "south": (0, -1)}


@trainable("driver")
def drive(task: Task) -> str:
    """Drives to a crossing: as many calls as streets, and 1 more."""
    (x, y), (to_x, to_y) = task["start"], task["goal"]
    for _ in range(abs(x - to_x) + abs(y - to_y)):
        said = plain(
            ask("Answer with north, south, east or west.", _STREETS, f"Car at {x},{y}. Goal {to_x},{to_y}.", tokens=4)
        )
        step = _STEPS.get(said, (0, 0))
        x, y = x + step[0], y + step[1]
    return f"{x},{y}"


def drive_score(task: Task, answer: str) -> float:
    """The share of the distance that was covered."""
    found = re.fullmatch(r"(-?\d+),(-?\d+)", answer)
    if not found:
        return 0.0
    (x, y), (to_x, to_y) = task["start"], task["goal"]
    left = abs(int(found[1]) - to_x) + abs(int(found[2]) - to_y)
    return max(0.0, 1 - left / (abs(x - to_x) + abs(y - to_y)))


def draw_drive(rng: random.Random) -> Task:
    x, y = rng.randint(3, 12), rng.randint(3, 12)
    east, north = rng.choice([(a, b) for a in range(-2, 3) for b in range(-2, 3) if 2 <= abs(a) + abs(b) <= 3])
    goal = (x + east, y + north)
    return {"text": f"Car at {x},{y}. Goal {goal[0]},{goal[1]}.", "start": (x, y), "goal": goal}


def ideal_drive(task: Task) -> list[str]:
    east, north = task["goal"][0] - task["start"][0], task["goal"][1] - task["start"][1]
    return ["east" if east > 0 else "west"] * abs(east) + ["north" if north > 0 else "south"] * abs(north)


_SURVEY = (
    ("Hello?", "name?"),
    ("It is Pia.", "city?"),
    ("I am from Bonn.", "Pia, Bonn"),
    ("Hi, Jon here.", "city?"),
    ("From Nice.", "Jon, Nice"),
)


@trainable("interviewer")
def interview(task: Task) -> str:
    """Asks a simulated user for what is missing, and writes name and city: 2 to 3 calls."""
    turns = [task["text"]]
    for _ in range(4):
        said = complete(messages("Ask name? and city? if missing, then write both.", _SURVEY, *turns), 8)
        if "," in said:
            return said
        turns += [said, task["replies"].get(plain(said).rstrip("?"), "What?")]
    return ""


def interview_score(task: Task, answer: str) -> float:
    """Half of the reward for the name, half for the city."""
    name, _, city = plain(answer).partition(", ")
    return (name == task["name"].lower()) / 2 + (city == task["city"].lower()) / 2


def draw_interview(rng: random.Random) -> Task:
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    hello = rng.choice(("Hello", "Hi", "Good day", "Hey", "Hi there", "Good evening"))
    known = rng.choice(("name", "city"))
    text = {"name": f"{hello}, {name} here.", "city": f"{hello}, I call from {city}."}[known]
    return {
        "text": f"{text} {rng.choice(('', 'I have time.', 'Be quick.', 'Is this the survey?'))}".strip(),
        "name": name,
        "city": city,
        "known": known,
        "replies": {"name": f"It is {name}.", "city": f"From {city}."},
    }


def ideal_interview(task: Task) -> list[str]:
    return ["city?" if task["known"] == "name" else "name?", f"{task['name']}, {task['city']}"]


COMMANDS = Agent(
    name="commands",
    kind="tool loop, 3 calls",
    solve=look_around,
    score=room_score,
    draw=draw_rooms,
    ideal=lambda task: ["ls", f"cat {task['thing']}.txt", f"room {task['rooms'][task['thing']]}"],
    train=("shell",),
)
STREETS = Agent(
    name="streets",
    kind="tool loop, 2-3 calls, shaped reward",
    solve=drive,
    score=drive_score,
    draw=draw_drive,
    ideal=ideal_drive,
    train=("driver",),
    is_answer=False,
)
SURVEY = Agent(
    name="survey",
    kind="simulated user, 2-4 calls",
    solve=interview,
    score=interview_score,
    draw=draw_interview,
    ideal=ideal_interview,
    train=("interviewer",),
)
