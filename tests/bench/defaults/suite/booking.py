"""A typed output of the OpenAI Agents SDK: all fields of a booking."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from agents import Agent as SdkAgent
from agents import ModelBehaviorError, ModelSettings, OpenAIProvider, RunConfig, Runner
from pydantic import BaseModel

from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import messages
from tests.bench.defaults.suite.words import NAMES


class Booking(BaseModel):
    """What the agent returns."""

    name: str
    guests: int
    time: str


_SHOTS = (
    ("A table for Pia at 18:30, three people.", '{"name": "Pia", "guests": 3, "time": "18:30"}'),
    ("Jon comes with 5 others at 20:00.", '{"name": "Jon", "guests": 6, "time": "20:00"}'),
)
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight")


@cache
def _booker() -> SdkAgent[Any]:
    return SdkAgent(
        name="booker",
        instructions="Write the booking as JSON.",
        model="gpt-4o-mini",
        model_settings=ModelSettings(max_tokens=40),
        output_type=Booking,
    )


@cache
def _provider() -> OpenAIProvider:
    return OpenAIProvider(api_key="none")


async def solve(task: Task) -> str:
    settings = RunConfig(model_provider=_provider(), tracing_disabled=True)
    conversation: Any = messages("", _SHOTS, task["text"])[1:]
    try:
        result = await Runner.run(_booker(), conversation, run_config=settings)
    except ModelBehaviorError:
        return ""
    return result.final_output.model_dump_json()


def score(task: Task, answer: str) -> float:
    return float(answer == _json(task))


def _json(task: Task) -> str:
    return Booking(name=task["name"], guests=task["guests"], time=task["time"]).model_dump_json()


def draw(rng: random.Random) -> Task:
    name, guests = rng.choice(NAMES), rng.randint(2, 8)
    time = f"{rng.randint(17, 22)}:{rng.choice(('00', '15', '30', '45'))}"
    form = rng.choice(
        (
            "A table for {n} at {t}, {w} people.",
            "{n} comes with {o} others at {t}.",
            "At {t}, {w} guests, the name is {n}.",
            "{n} books for {w} at {t}.",
        )
    )
    text = form.format(n=name, t=time, w=_NUMBERS[guests - 2], o=guests - 1)
    return {"text": text, "name": name, "guests": guests, "time": time}


BOOKING = Agent(
    name="booking",
    kind="typed output (OpenAI Agents SDK)",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [_json(task)],
    train=("booker",),
)
