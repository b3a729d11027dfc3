"""An agent that finds the order number in a customer's message, with the OpenAI client and no framework.

The mark on `find_order` is the only line for training. Outside training it has no effect.
"""

import os

from openai import OpenAI

from lightning_core import trainable

PROMPT = [
    {"role": "system", "content": "Reply with the order number."},
    {"role": "user", "content": "My lamp from order 4410 came broken on 3 May."},
    {"role": "assistant", "content": "4410"},
    {"role": "user", "content": "I paid 89 euros for order 2047. Where is it?"},
    {"role": "assistant", "content": "2047"},
    {"role": "user", "content": "Please cancel 1182, invoice 9034."},
    {"role": "assistant", "content": "1182"},
]

# While the agent trains, the trained model answers in place of this one, and no key is needed.
client = OpenAI(api_key=os.environ.get("OPENAI_API_KEY", "none"))


@trainable("finder")
def find_order(message: str) -> str:
    """Return the order number in ``message``."""
    messages = [*PROMPT, {"role": "user", "content": message}]
    response = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    return (response.choices[0].message.content or "").strip()


def solve(task: dict[str, str]) -> float:
    """Run the agent on one task. Returns the reward: 1 for the right number, else 0."""
    return float(find_order(task["message"]) == task["order"])
