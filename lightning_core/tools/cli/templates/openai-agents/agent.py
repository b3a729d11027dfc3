"""An OpenAI Agents SDK agent that finds the order number in a customer's message.

Nothing in this file is for training: ``lightning.yaml`` selects the agent `finder` by its name.
"""

import os

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from openai import AsyncOpenAI

EXAMPLES = [
    {"role": "user", "content": "My lamp from order 4410 came broken on 3 May."},
    {"role": "assistant", "content": "4410"},
    {"role": "user", "content": "I paid 89 euros for order 2047. Where is it?"},
    {"role": "assistant", "content": "2047"},
    {"role": "user", "content": "Please cancel 1182, invoice 9034."},
    {"role": "assistant", "content": "1182"},
]

# While the agent trains, the trained model answers in place of this one, and no key is needed.
client = AsyncOpenAI(api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = OpenAIChatCompletionsModel(model="gpt-4o-mini", openai_client=client)
finder = Agent(name="finder", instructions="Reply with the order number.", model=model)


async def solve(task: dict[str, str]) -> float:
    """Run the agent on one task. Returns the reward: 1 for the right number, else 0."""
    messages = [*EXAMPLES, {"role": "user", "content": task["message"]}]
    result = await Runner.run(finder, messages, run_config=RunConfig(tracing_disabled=True))
    return float(str(result.final_output).strip() == task["order"])
