"""LangChain: the contract, and what only Runnables have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnableSequence
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI

from lightning_core.trainable import trainable
from tests.integrations.contract import Adapter, Contract, Part


@tool
def add(a: int, b: int) -> int:
    """Add two numbers that are not negative."""
    if b < 0:
        raise ToolException("b is negative")
    return a + b


add.handle_tool_error = True


def chat_model(base_url: str | None = None) -> ChatOpenAI:
    return ChatOpenAI(model="policy", api_key="sk-of-the-agent", base_url=base_url, max_retries=0)


class LangChainAdapter(Adapter):
    """Every part a chain of its own, prompt | model | the rest; a program is a sequence of them, or a RunnableParallel."""

    integration = "langchain"
    host = "langchain_core"

    def build(self, parts: Sequence[Part], *, parallel: bool = False, base_url: str | None = None) -> Any:
        chains = {part.name: self.make_chain(part, base_url) for part in parts}
        if parallel:
            return RunnableParallel(chains)
        return RunnableSequence(RunnableLambda(lambda x: x), *chains.values())

    def make_chain(self, part: Part, base_url: str | None) -> Runnable[Any, Any]:
        model: Any = chat_model(base_url)
        messages = [HumanMessage(part.text)]
        if part.tool:
            model = create_agent(model, [add])
        inner = self.build([part.inner], base_url=base_url) if part.inner else None

        def rest(said: Any) -> Any:
            if inner is not None:
                inner.invoke(said)
            if part.error is not None:
                raise part.error
            return said

        async def arest(said: Any) -> Any:
            if inner is not None:
                await inner.ainvoke(said)
            if part.error is not None:
                raise part.error
            return said

        prompt = RunnableLambda(lambda _: {"messages": messages} if part.tool else messages)
        chain = prompt | model | RunnableLambda(rest, arest)
        return trainable(chain, name=part.name) if part.marked else chain.with_config(run_name=part.name)

    def run(self, program: Any) -> None:
        program.invoke("start")

    async def arun(self, program: Any) -> None:
        await program.ainvoke("start")

    def stream(self, program: Any) -> None:
        assert list(program.stream("start"))

    async def astream(self, program: Any) -> None:
        assert [chunk async for chunk in program.astream("start")]

    def patched_call(self) -> tuple[Any, str]:
        return RunnableSequence, "invoke"


class TestLangChain(Contract):
    adapter = LangChainAdapter()
