"""CrewAI: the spans of OpenInference's instrumentor."""

from __future__ import annotations

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from lightning_core.testing import tool_call
from tests.frameworks.naming import Naming, question, request


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def crew(number: int) -> Crew:
    llm = LLM(model="openai/gpt-5-mini", api_key="none")
    calculator = Agent(role="calculator", goal="add", backstory="adds", llm=llm, tools=[add])
    writer = Agent(role="writer", goal="write", backstory="writes", llm=llm)
    tasks = [
        Task(description=question(number), expected_output="a number", agent=calculator),
        Task(description=request(number), expected_output="a text", agent=writer, context=[]),
    ]
    return Crew(agents=[calculator, writer], tasks=tasks)


def script(prompt: str) -> str:
    if "use:add" in prompt and prompt.count("<|im_start|>assistant") == 1:
        return tool_call("add", a=int(prompt.partition("rollout-")[2].partition(";")[0]), b=3)
    return "done"


class TestCrewAI(Naming):
    script = staticmethod(script)
    tool_call_ids = False

    def run(self, number: int) -> None:
        crew(number).kickoff()

    async def arun(self, number: int) -> None:
        await crew(number).kickoff_async()
