"""DSPy's agent."""

import sys
from pathlib import Path

import dspy


def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


dspy.configure(lm=dspy.LM("openai/gpt-5-mini", cache=False))
print(dspy.ReAct("question -> answer", tools=[read_note], max_iters=5)(question=sys.argv[1]).answer)
