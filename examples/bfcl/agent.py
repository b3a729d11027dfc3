"""An OpenAI Agents SDK agent that gets a user's turns one after another, and calls functions until it answers each.

Nothing in this file is specific to training, except the rewards. ``lightning.yaml`` selects the agent to train by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolExecutionConfig,
    TResponseInputItem,
)
from agents.tool_context import ToolContext
from openai import AsyncOpenAI

from examples.bfcl.schemas import schemas
from examples.bfcl.world import World
from lightning_core import reward

NAME = "assistant"
INSTRUCTIONS = "Call functions until the user's request is fulfilled. Then answer in one sentence."
# The functions have side effects, so they run in the order in which the model calls them. BFCL answers a call of an unknown function, too.
RUN = RunConfig(
    tracing_disabled=True,
    tool_execution=ToolExecutionConfig(max_function_tool_concurrency=1),
    tool_not_found_behavior="return_error_to_model",
)
REMINDER = "Call a function."
EXAMPLES: tuple[tuple[str, str, dict[str, Any], dict[str, Any], str], ...] = (
    ("Could you water the roses for 5 minutes?", "water", {"plants": "roses", "minutes": 5}, {"ok": True}, "Done."),
    ("I wonder how warm it is in the cellar.", "get_room", {"room": "cellar"}, {"celsius": 12}, "It is 12 °C there."),
    ("Which lamps are on?", "list_lamps", {}, {"lamps": ["hall"]}, "The lamp in the hall is on."),
    ("Please play 'Blue' at volume 3.", "play", {"title": "Blue", "volume": 3}, {"playing": "Blue"}, "It is playing."),
)
"""Solved tasks for small models: request, function, arguments, result, answer. No function of BFCL is among them."""


def examples() -> list[TResponseInputItem]:
    """`EXAMPLES` as a conversation."""
    items: list[TResponseInputItem] = []
    for index, (text, name, arguments, result, answer) in enumerate(EXAMPLES):
        call = f"call_{index}"
        solved: list[TResponseInputItem] = [
            {"role": "user", "content": f"{text} {REMINDER}"},
            {"type": "function_call", "call_id": call, "name": name, "arguments": json.dumps(arguments)},
            {"type": "function_call_output", "call_id": call, "output": json.dumps(result)},
            {"role": "assistant", "content": answer},
        ]
        items += solved
    return items


@cache
def model() -> OpenAIResponsesModel:
    """The model shared by all agents. During training any model name works."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client requires a key, even if the server does not
    return OpenAIResponsesModel("gpt-4o-mini", AsyncOpenAI(api_key=key, timeout=600))


def assistant(world: World, functions: Sequence[str]) -> Agent[None]:
    """A new agent that calls ``functions`` in ``world``."""
    tools = [_tool(world, schema) for schema in schemas(tuple(functions))]
    return Agent(name=NAME, instructions=INSTRUCTIONS, model=model(), tools=list(tools))


def _tool(world: World, schema: Mapping[str, Any]) -> FunctionTool:
    name: str = schema["name"]

    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        return world.call(name, arguments)

    return FunctionTool(
        name=name,
        description=schema["description"],
        params_json_schema=schema["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,  # strict schemas have no optional parameters
    )


async def solve(task: Mapping[str, Any]) -> float:
    """Answer the user's turns; return the reward of the whole task, after the rewards of its turns.

    A turn earns its share of ``turn_reward`` if the wheel accepts all turns up to it, and the task ``1 - turn_reward`` if it accepts
    all. After a turn that is wrong, neither can be earned, so the user leaves. As in BFCL, an agent that makes ``steps`` model calls in
    a turn without an answer has failed the task. So has one whose response reaches the token limit: the SDK raises an error for it.
    """
    world = World(task["id"], tuple(task["functions"]))
    agent = assistant(world, task["functions"])
    conversation: list[TResponseInputItem] = examples() if task["examples"] else []
    share = task["turn_reward"] / sum(task["scored"])
    for text, scored in zip(task["turns"], task["scored"], strict=True):
        conversation.append({"role": "user", "content": f"{text} {REMINDER}" if task["examples"] else text})
        world.begin_turn()
        try:
            result = await Runner.run(agent, conversation, max_turns=task["steps"], run_config=RUN)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return 0.0
        if not world.verdict()["valid"]:
            return 0.0
        if scored and share:
            reward(share, call=result.raw_responses[-1].response_id, name="turn")
        conversation = result.to_input_list()
    return 1.0 - task["turn_reward"]
