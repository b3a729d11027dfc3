"""An AutoGen agent that finds the order number in a customer's message.

Nothing in this file is for training: ``lightning.yaml`` selects the agent `finder` by its name.
"""

import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import AssistantMessage, ModelFamily, ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

EXAMPLES = [
    UserMessage(content="My lamp from order 4410 came broken on 3 May.", source="user"),
    AssistantMessage(content="4410", source="finder"),
    UserMessage(content="I paid 89 euros for order 2047. Where is it?", source="user"),
    AssistantMessage(content="2047", source="finder"),
    UserMessage(content="Please cancel 1182, invoice 9034.", source="user"),
    AssistantMessage(content="1182", source="finder"),
]

# While the agent trains, the trained model answers, and no key is needed. With another model name AutoGen warns of each answer that
# it comes from `policy`. AutoGen has the `model_info` of OpenAI's models only.
client = OpenAIChatCompletionClient(
    model="policy",
    model_info=ModelInfo(
        vision=False, function_calling=True, json_output=False, structured_output=False, family=ModelFamily.UNKNOWN
    ),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)


async def solve(task: dict[str, str]) -> float:
    """Run the agent on one task. Returns the reward: 1 for the right number, else 0."""
    finder = AssistantAgent(  # an agent keeps its conversation, so each task gets its own
        "finder",
        client,
        system_message="Reply with the order number.",
        model_context=UnboundedChatCompletionContext(initial_messages=[*EXAMPLES]),
    )
    result = await finder.run(task=task["message"])
    last = result.messages[-1]
    return float(isinstance(last, TextMessage) and last.content.strip() == task["order"])
