"""A program with agents over HTTP: a planner with a tool, a writer whose chat grows, and a reviewer."""

from __future__ import annotations

import json
from typing import Any

import httpx

from lightning_core import replayable, reward
from lightning_core.capture import scope
from lightning_core.trace import TOOL_CALL_ID

client = httpx.Client(base_url="http://model.invalid/v1", trust_env=False)
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}}},
}
PAGES = ["page zero is about bees", "page one is a haiku"]
Messages = list[dict[str, Any]]
Task = dict[str, Any]


def ask(messages: Messages, **fields: Any) -> dict[str, Any]:
    reply = client.post("/chat/completions", json={"model": "any", "messages": messages, **fields})
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


def text_of(message: dict[str, Any]) -> str:
    return message["content"] or ""


@replayable("read")
def read(page: int) -> str:
    return PAGES[page]


def run_tool(call: dict[str, Any]) -> str:
    """The tool ``look`` fails for pages that do not exist."""
    page = json.loads(call["function"]["arguments"])["page"]
    try:
        with scope("look", kind="tool", attributes={TOOL_CALL_ID: call["id"]}):
            return read(page)
    except IndexError:
        return "there is no such page"


def plan(prompt: str) -> str:
    """The planner looks at pages until it has a plan, at most three times. Calls of other tools are not run."""
    messages: Messages = [{"role": "user", "content": prompt}]
    with scope("planner"):
        for _ in range(3):
            message = ask(messages, tools=[LOOK])
            calls = message.get("tool_calls") or []
            if not calls:
                return text_of(message)
            messages.append(message)
            for call in calls:
                known = call["function"]["name"] == "look"
                content = run_tool(call) if known else "there is no such tool"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return "no plan"


def write(task: Task) -> list[str]:
    """What the planner, the writer (twice, in one chat) and the reviewer say."""
    said = [plan(f"write about {task['topic']}")]
    messages: Messages = [
        {"role": "system", "content": "You write."},
        {"role": "user", "content": f"{task['topic']}: {said[0]}"},
    ]
    with scope("writer"):
        for _ in range(2):
            said.append(text_of(ask(messages)))
            messages += [
                {"role": "assistant", "content": said[-1]},
                {"role": "user", "content": "again, in lower case"},
            ]
    with scope("reviewer"):
        said.append(text_of(ask([{"role": "user", "content": f"review {task['topic']}: {said[-1]}"}])))
    return said


def small(text: str) -> float:
    """The share of small letters, in eighths."""
    return round(8 * sum("a" <= c <= "z" for c in text) / max(1, len(text))) / 8


def solve(task: Task) -> float:
    """The reward is that of the writer's last response."""
    return small(write(task)[2])


def solve_per_agent(task: Task) -> float:
    """Each trained agent has a reward of its own too."""
    said = write(task)
    reward(float(said[0].startswith("plan")), agent="planner")
    reward(small(said[1]), agent="writer")
    return small(said[2])


def solve_or_not(task: Task) -> float:
    """The reward is 1 or 0, and for every second task the same in all attempts."""
    return float(small(write(task)[2]) > 0.5 or int(task["id"][1:]) % 2)


def solve_badly(task: Task) -> list[str]:
    """Raises for some responses; `judge_badly` computes the reward."""
    said = write(task)
    if "jazz" in said[1]:
        raise RuntimeError("no jazz, please")
    return said


def judge_badly(task: Task, said: list[str]) -> float:
    """Fails for some results, and returns NaN for others."""
    if "fig" in said[2]:
        raise ConnectionError("the shop is closed")
    return float("nan") if "HUB" in said[2] else small(said[2])


def with_examples(messages: Messages) -> Messages:
    """What a teacher reads."""
    example = [{"role": "user", "content": "bees: briefly"}, {"role": "assistant", "content": "bee"}]
    return [*messages[:1], *example, *messages[1:]]


def tasks(count: int = 4) -> list[Task]:
    topics = ["bees", "figs", "the sea", "noon", "ebb and flow", "jam"]
    return [{"id": f"t{i}", "topic": topics[i], "answer": topics[i][::-1]} for i in range(count)]


def held_out() -> list[Task]:
    return [{"id": f"e{i}", "topic": f"the number {i}", "split": "odd" if i % 2 else "even"} for i in range(8)]
