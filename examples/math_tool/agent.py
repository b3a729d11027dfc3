"""An AutoGen agent that calls a calculator tool and then gives the number.

Nothing in this file is specific to training. ``lightning.yaml`` selects the agent to train by its name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import FunctionCall
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.math_tool.calculator import calculator

NAME = "calc_agent"
_SIGNS = str.maketrans("", "", "$,%")
TURNS = 3
"""Maximum model calls. A conversation whose last one calls the tool has no answer."""
Shown = Literal["templates", "one-operation", "two-operations", "none"]
EXAMPLES: dict[Shown, tuple[tuple[str, str, str], ...]] = {
    "templates": (
        ("Joe had 20 hats and sold 8. How many hats are left?", "20-8", "12"),
        ("Joe has 3 rows of 6 hats. How many hats are there?", "3*6", "18"),
        ("Joe has 4 hats, Amy has 9. How many hats do they have together?", "4+9", "13"),
        ("Joe puts 24 hats into 4 rows equally. How many hats are in each?", "24/4", "6"),
        ("Joe buys 7 hats a week. How many hats is that in 5 weeks?", "7*5", "35"),
        ("Joe has 14 hats and gets 9 more. How many hats are there now?", "14+9", "23"),
    ),
    "one-operation": (
        ("Nora baked 36 cookies and ate 9 of them. How many cookies does she have left?", "36-9", "27"),
        ("A theatre has 12 rows with 8 seats in each row. How many seats does it have?", "12*8", "96"),
        ("Omar paid $4.25 for lunch and $2.50 for a drink. How much did he spend in all?", "4.25+2.50", "6.75"),
        ("A baker has 72 rolls and puts 6 rolls in each bag. How many bags does she fill?", "72/6", "12"),
        ("rita ran 5 miles and carl ran 14 miles. how much farther did carl run than rita?", "14-5", "9"),
        ("On Monday 154 people came to the fair. On Tuesday 237 came. How many came in total?", "154+237", "391"),
        ("Some birds sat in a tree. 7 flew away and 15 are left. How many were there before?", "7+15", "22"),
        ("Lena shared 45 grapes equally among 9 friends. How many grapes did each friend get?", "45/9", "5"),
    ),
    "two-operations": (
        ("Nora baked 36 cookies and ate 9. She puts the rest on 3 plates. How many are on each?", "(36-9)/3", "9"),
        ("A theatre has 12 rows of 8 seats and 5 seats in a box. How many seats does it have?", "12*8+5", "101"),
        ("Omar bought 4 cakes for $3 each. He paid with a $20 bill. How much change did he get?", "20-4*3", "8"),
        ("Rita ran 14 miles and Carl ran half as many. How many miles did they run together?", "14+14/2", "21"),
        ("On Monday 154 people came, on Tuesday 237 and on Friday 50. How many in total?", "154+237+50", "441"),
        ("Lena reads 6 pages a day. How many pages is that in 4 weeks of 7 days?", "6*4*7", "168"),
        ("A baker sold 20% of her 80 rolls. How many rolls did she sell?", "80*20/100", "16"),
        ("Two shirts and a hat cost $50. The hat costs $10. How much does a shirt cost?", "(50-10)/2", "20"),
    ),
    "none": (),
}
"""Solved problems at the start of each conversation: question, calculation, answer."""


def user_message(question: str) -> str:
    """The user's message. A small model calls the tool only with the reminder at its end."""
    return f"{question} Use the calculator."


def examples(shown: Shown) -> list[LLMMessage]:
    """The `EXAMPLES` of a kind as messages of earlier conversations."""
    messages: list[LLMMessage] = []
    for question, expression, result in EXAMPLES[shown]:
        call = FunctionCall(id="call_0", name="calculator", arguments=f'{{"expression": "{expression}"}}')
        executed = FunctionExecutionResult(call_id=call.id, name=call.name, content=result, is_error=False)
        messages += [
            UserMessage(content=user_message(question), source="user"),
            AssistantMessage(content=[call], source=NAME),
            FunctionExecutionResultMessage(content=[executed]),
            AssistantMessage(content=result, source=NAME),
        ]
    return messages


@cache
def client() -> OpenAIChatCompletionClient:
    """The client shared by all agents. AutoGen warns if another model than the named one answers."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client requires a key, even if the server does not
    info = ModelInfo(
        vision=False, function_calling=True, json_output=False, structured_output=False, family=ModelFamily.UNKNOWN
    )
    return OpenAIChatCompletionClient(model="policy", model_info=info, api_key=key)


def build(shown: Shown = "templates") -> AssistantAgent:
    """A new agent. It keeps its conversation, so each problem needs its own."""
    return AssistantAgent(
        NAME,
        client(),
        tools=[FunctionTool(calculator, description="Calculates + - * / on numbers.")],
        system_message="Use the calculator, then give the number.",
        model_context=UnboundedChatCompletionContext(initial_messages=examples(shown)),
        max_tool_iterations=TURNS,
    )


def parse_answer(text: str) -> float | None:
    """The number that ``text`` consists of, without ``$``, ``,``, ``%`` and a full stop at its end; None if there is more."""
    try:
        return float(text.translate(_SIGNS).strip().removesuffix("."))
    except ValueError:
        return None


def is_right(answer: str, expected: float, tolerance: float = 0.0) -> bool:
    """Whether ``answer`` is only the number, up to ``tolerance`` or rounding errors."""
    number = parse_answer(answer)
    return number is not None and math.isclose(number, expected, rel_tol=1e-6, abs_tol=tolerance)


async def solve(task: Mapping[str, Any]) -> float:
    """Solve a task; return 1 if the agent's last message is the correct number, else 0."""
    agent = build(task.get("examples", "templates"))
    result = await agent.run(task=user_message(task["question"]))
    last = result.messages[-1]
    right = isinstance(last, TextMessage) and is_right(last.content, task["answer"], task.get("tolerance", 0.0))
    return float(right)
