"""Agents of Python packages. Each class is one script in ``programs``."""

from __future__ import annotations

import json
from typing import ClassVar

from lightning_core.testing import tool_call
from tests.agents.harness import ANSWER, QUESTION
from tests.agents.program import Program

OWN = ".agents/python"
FIRST = ".venv-frameworks/first"
SECOND = ".venv-frameworks/second"


class TestLangChain(Program):
    agent = package = "langchain"
    program = "langchain_agent"


class TestLangGraph(Program):
    agent = package = "langgraph"
    program = "langgraph_agent"


class Handoff(Program):
    """The first agent has a tool that hands over to the one that reads."""

    environment = OWN
    rows = 2

    def answer(self, prompt: str) -> str:
        if "Read a file." in prompt:
            return super().answer(prompt)
        return ANSWER if ANSWER in prompt else tool_call("transfer_to_reader")


class TestLangGraphSupervisor(Handoff):
    agent = package = "langgraph-supervisor"
    program = "langgraph_supervisor"
    calls = 5


class TestLangGraphSwarm(Handoff):
    agent = package = "langgraph-swarm"
    program = "langgraph_swarm"
    calls = 4


class TestDeepAgents(Program):
    agent = package = "deepagents"
    program = "deep_agent"
    environment = OWN


class TestOpenAIAgents(Program):
    agent = package = "openai-agents"
    program = "openai_agents"


class TestAutoGen(Program):
    agent = package = "autogen-agentchat"
    program = "autogen_assistant"


class TestMagenticOne(Program):
    agent = "MagenticOne"
    package = "autogen-agentchat"
    program = "magentic_one"
    questions = (QUESTION,)
    calls = 8
    rows = 5  # facts and plan, a ledger, the agent's three calls, a ledger, the answer

    def answer(self, prompt: str) -> str:
        if "is_request_satisfied" in prompt:
            said = {
                "is_request_satisfied": ANSWER in prompt,
                "is_in_loop": False,
                "is_progress_being_made": True,
                "instruction_or_question": QUESTION,
                "next_speaker": "reader",
            }
            return json.dumps({key: {"reason": "", "answer": value} for key, value in said.items()})
        if "Read a file." in prompt:
            return super().answer(prompt)
        return "Nothing yet." if "pre-survey" in prompt else ANSWER


class TestSmolagents(Program):
    agent = package = "smolagents"
    program = "smolagents_agent"
    environment = FIRST
    rows = 4  # it shows the model's tool calls as another text than the model wrote

    def final(self) -> str:
        return tool_call("final_answer", answer=ANSWER)


class TestPydanticAI(Program):
    agent = "pydantic-ai"
    package = "pydantic-ai-slim"
    program = "pydantic_ai_agent"
    environment = FIRST


class TestCrewAI(Program):
    agent = package = "crewai"
    program = "crewai_crew"
    environment = FIRST
    questions = (QUESTION,)


class TestAgentFramework(Program):
    agent = "agent-framework"
    package = "agent-framework-core"
    program = "agent_framework_agent"
    environment = FIRST


class TestLlamaIndex(Program):
    agent = "llama-index"
    package = "llama-index-core"
    program = "llama_index_agent"
    environment = FIRST


class TestHaystack(Program):
    agent = "haystack"
    package = "haystack-ai"
    program = "haystack_agent"
    environment = FIRST


class TestAgno(Program):
    agent = package = "agno"
    program = "agno_agent"
    environment = FIRST


class TestStrands(Program):
    agent = "strands"
    package = "strands-agents"
    program = "strands_agent"
    environment = FIRST


class TestSemanticKernel(Program):
    agent = package = "semantic-kernel"
    program = "semantic_kernel_agent"
    environment = FIRST
    tool = "Files-read_note"


class TestAG2(Program):
    agent = package = "ag2"
    program = "ag2_agent"
    environment = SECOND


class TestInstructor(Program):
    agent = package = "instructor"
    program = "instructor_loop"
    environment = SECOND
    tool = "Step"
    arguments: ClassVar = {"read_note": "note.txt"}

    def final(self) -> str:
        return tool_call("Step", answer=ANSWER)


class TestLiteLLM(Program):
    agent = package = "litellm"
    program = "litellm_loop"
    environment = SECOND
    given = ("openai/gpt-5-mini",)


class TestLiteLLMOpenRouter(TestLiteLLM):
    agent = "litellm, openrouter"
    given = ("openrouter/openai/gpt-5-mini",)

    def variables(self, endpoint: dict[str, str]) -> dict[str, str]:
        # The rollout sets those of the provider's own clients, and OpenRouter has none.
        names = {"OPENROUTER_API_BASE": "LIGHTNING_BASE_URL", "OPENROUTER_API_KEY": "LIGHTNING_API_KEY"}
        return {name: endpoint[source] for name, source in names.items()}


class TestDSPy(Program):
    agent = package = "dspy"
    program = "dspy_react"
    environment = SECOND
    questions = (QUESTION,)
    calls = 4  # two reads, the end of the loop, the answer
    rows = 4  # each prompt is one message with all that happened

    def answer(self, prompt: str) -> str:
        if "next_tool_name" not in prompt:
            return f"[[ ## reasoning ## ]]\nIt is there.\n\n[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]"
        name, arguments = (self.tool, self.arguments) if self.reads(prompt) < 2 else ("finish", {})
        fields = {"next_thought": "Go on.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
        return "\n\n".join(f"[[ ## {key} ## ]]\n{value}" for key, value in fields.items()) + "\n\n[[ ## completed ## ]]"


class TestGoogleADK(Program):
    agent = package = "google-adk"
    program = "google_adk"
    environment = SECOND
