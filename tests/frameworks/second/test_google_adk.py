"""Google ADK: its own spans, which need no switch, and its own client of Gemini. It is asynchronous only."""

from __future__ import annotations

import asyncio

import pytest
from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner

from tests.frameworks.naming import Naming, question, request


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class TestGoogleADK(Naming):
    @pytest.fixture(autouse=True)
    def contents(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Arguments and results of tools are off by default."""
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")

    def run(self, number: int) -> None:
        asyncio.run(self.arun(number))

    async def arun(self, number: int) -> None:
        calculator = LlmAgent(name="calculator", model="gemini-2.5-flash", tools=[add])
        writer = LlmAgent(name="writer", model="gemini-2.5-flash")
        await InMemoryRunner(calculator).run_debug(question(number), quiet=True)
        await InMemoryRunner(writer).run_debug(request(number), quiet=True)
