"""Small programs with one fault each, and a healthy one."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, Field

from lightning_core import trainable
from lightning_core.errors import InfrastructureError

PROVIDER = "http://model.example/v1"
"""The URL of the program's provider, to which nothing is sent: requests are routed."""
BYPASSED = "DOCTOR_TEST_PROVIDER"
"""The variable with the URL that `bypass` sends to."""


def ask(messages: list[dict[str, Any]], **settings: Any) -> str:
    body = {"model": "gpt", "messages": messages, **settings}
    response = httpx.post(f"{PROVIDER}/chat/completions", json=body, timeout=60)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


@trainable("doctored")
def talk(messages: list[dict[str, Any]], **settings: Any) -> str:
    return ask(messages, **settings)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tasks(count: int = 4, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"say {i}"} for i in range(start, start + count)]


def held_out() -> list[dict[str, Any]]:
    return tasks(40, start=100)


def copied() -> list[dict[str, Any]]:
    """The training tasks under other ids."""
    return [{**task, "id": f"eval-{task['id']}"} for task in tasks()]


class Verdict(BaseModel):
    """The typed output of `typed`."""

    right: bool
    points: int = Field(ge=1, le=5)
    reasons: list[str] = Field(min_length=1)


def typed(task: dict[str, Any]) -> float:
    """Reads its answer as a typed output, as SDKs do."""
    schema = {"name": "verdict", "schema": Verdict.model_json_schema()}
    answer = talk([user(task["prompt"])], response_format={"type": "json_schema", "json_schema": schema})
    return Verdict.model_validate_json(answer).points / 5


def healthy(task: dict[str, Any]) -> float:
    """The share of lower-case letters."""
    text = talk([user(task["prompt"])])
    return sum("a" <= c <= "z" for c in text) / max(1, len(text))


def constant(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    return 1.0


def constant_part(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    return 0.5


def not_a_number(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    return math.nan


def answer(task: dict[str, Any]) -> str:
    return talk([user(task["prompt"])])


def score(task: dict[str, Any], result: Any) -> float:
    return sum("a" <= c <= "z" for c in str(result))


def score_that_raises(task: dict[str, Any], result: Any) -> float:
    raise KeyError("expected")


def slow_score(task: dict[str, Any], result: Any) -> float:
    time.sleep(0.8)
    return score(task, result)


def raises(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    raise RuntimeError("no tool for this")


_turns = count()
"""Half of the rollouts fail, whichever tasks are picked."""


def raises_sometimes(task: dict[str, Any]) -> float:
    """Never returns 0."""
    talk([user(task["prompt"])])
    if next(_turns) % 2:
        raise ValueError("boom")
    return 0.5


def raises_mostly(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    if next(_turns) % 4:
        raise ValueError("boom")
    return 0.0


_prompts: dict[str, float] = {}


def pays_by_task(task: dict[str, Any]) -> float:
    """All attempts at a task earn the same, other tasks earn another reward."""
    talk([user(task["prompt"])])
    return _prompts.setdefault(task["prompt"], float(len(_prompts)))


def pays_by_length(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    return 20.0 + next(_turns)


def costs_by_length(task: dict[str, Any]) -> float:
    return -pays_by_length(task)


def earns_a_part(task: dict[str, Any]) -> float:
    return pays_by_length(task) / 1000


def left_out_sometimes(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    if next(_turns) % 2:
        raise InfrastructureError("no search engine")
    return 0.5


def fruitless(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    return 0.0


def raises_at_once(task: dict[str, Any]) -> float:
    raise RuntimeError("no database")


def exits(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    sys.exit("no tool for this")


def asks(task: dict[str, Any]) -> float:
    talk([user(task["prompt"])])
    return float(input("the reward: "))


def needs_a_plan(task: dict[str, Any]) -> float:
    """An agent that is not trained plans first; a script's answer is no plan."""
    plan = reviewer([user("plan")])
    if plan == "ok":
        raise ValueError(f"no plan: {plan}")
    return healthy(task)


def prints(task: dict[str, Any]) -> float:
    sys.stdout.write("printed by the agent\n")
    return healthy(task)


def hangs(task: dict[str, Any]) -> float:
    sys.stderr.write("hanging\n")
    sys.stderr.flush()
    time.sleep(600)
    return 0.0


def rewrites(task: dict[str, Any]) -> float:
    """Two turns; the second one shortens the history."""
    first = talk([user(task["prompt"])])
    talk([user("so far"), {"role": "assistant", "content": f"I said: {first}"}, user("go on")])
    return healthy(task)


def clock(task: dict[str, Any]) -> float:
    """Two turns; each prompt has the time."""
    asked = [user(task["prompt"])]
    for _ in range(2):
        asked.append(
            {"role": "assistant", "content": talk([{"role": "system", "content": f"now: {time.time_ns()}"}, *asked])}
        )
        asked.append(user("go on"))
    return 1.0


@trainable("doctored")
def bypass(task: dict[str, Any]) -> float:
    """A client of its own that opens a socket."""
    url = urlsplit(os.environ[BYPASSED])
    body = json.dumps({"model": "gpt", "messages": [user(task["prompt"])]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((url.hostname or "", url.port or 80)) as connection:
        connection.sendall(head.encode() + body)
        while connection.recv(4096):
            pass
    return 0.0


def refused(task: dict[str, Any]) -> float:
    """One request that the endpoint refuses, and one that it answers."""
    _refused([user(task["prompt"])])
    return healthy(task)


@trainable("doctored")
def _refused(messages: list[dict[str, Any]]) -> None:
    body = json.dumps({"model": "gpt", "messages": messages, "functions": [{"name": "f"}]}).encode()
    request = urllib.request.Request(f"{PROVIDER}/chat/completions", body, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        error.close()


def two_agents(task: dict[str, Any]) -> float:
    """Another agent speaks too; its calls go to a provider."""
    return healthy(task) + len(reviewer([user("review")])) * 0


@trainable("reviewer")
def reviewer(messages: list[dict[str, Any]]) -> str:
    return ask(messages)


history: list[dict[str, Any]] = []


def never_forgets(task: dict[str, Any]) -> float:
    """Its history is an object of the module."""
    history.append(user(task["prompt"]))
    history.append({"role": "assistant", "content": talk(history)})
    return 1.0
