"""A crew of CrewAI: one agent with one task."""

import sys
from pathlib import Path

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("read_note")
def read_note(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


llm = LLM(model="openai/gpt-5-mini")
agent = Agent(role="reader", goal="read", backstory="reads", llm=llm, tools=[read_note], max_iter=5)
task = Task(description=sys.argv[1], expected_output="a sentence", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
