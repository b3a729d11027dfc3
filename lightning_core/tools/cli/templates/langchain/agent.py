"""A LangChain agent that finds the order number in a customer's message.

Nothing in this file is for training: ``lightning.yaml`` selects the agent `finder` by its name.
"""

import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

EXAMPLES = [
    ("user", "My lamp from order 4410 came broken on 3 May."),
    ("assistant", "4410"),
    ("user", "I paid 89 euros for order 2047. Where is it?"),
    ("assistant", "2047"),
    ("user", "Please cancel 1182, invoice 9034."),
    ("assistant", "1182"),
]

# While the agent trains, the trained model answers in place of this one, and no key is needed.
model = ChatOpenAI(model="gpt-4o-mini", api_key=os.environ.get("OPENAI_API_KEY", "none"))
finder = create_agent(model, tools=[], system_prompt="Reply with the order number.", name="finder")


def solve(task: dict[str, str]) -> float:
    """Run the agent on one task. Returns the reward: 1 for the right number, else 0."""
    final = finder.invoke({"messages": [*EXAMPLES, ("user", task["message"])]})
    return float(final["messages"][-1].text.strip() == task["order"])
