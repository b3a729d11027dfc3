"""Programs from LangChain's and LangGraph's documentation, unchanged: every call has its agent.

The scripted model plays each role by its system prompt. Names and numbers of calls are those that a reader of each program expects.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import openai
import pytest
from langchain.agents import AgentState, create_agent
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode
from langgraph.types import Command

from lightning_core import Trace
from lightning_core.testing import Playground, open_playground, tool_call
from lightning_core.testing.contract import ancestors, parent_of
from tests.integrations.runnables import run_runnable

llm = ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0)


@contextmanager
def played_by(script: Callable[[str], str]) -> Iterator[Playground]:
    with open_playground(script, integrations=["langgraph"]) as opened:
        yield opened


def agents_of(trace: Trace) -> list[str | None]:
    return [call.agent for call in trace.calls]


def test_plain_client() -> None:
    with played_by(lambda prompt: "Paris") as playground, playground.rollout() as run:
        client = openai.OpenAI(api_key="sk-of-the-agent")
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Capital of France?"}])
    assert agents_of(run.trace) == [None]


def test_prompt_and_model() -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You translate."), ("user", "{text}")])
    with played_by(lambda prompt: "hallo") as playground, playground.rollout() as run:
        (prompt | llm).invoke({"text": "hello"})
    assert len(run.trace.calls) == 1


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
def test_tool_agent(how: str) -> None:
    agent = create_agent(llm, tools=[multiply], system_prompt="You compute.", name="calculator")

    def script(prompt: str) -> str:
        return "It is 42." if "<tool_response>" in prompt else tool_call("multiply", a=6, b=7)

    with played_by(script) as playground, playground.rollout() as run:
        run_runnable(agent, how, {"messages": [{"role": "user", "content": "What is 6 times 7?"}]})
    assert agents_of(run.trace) == ["calculator", "calculator"]
    (event,) = [event for event in run.trace.events if event.kind == "tool"]
    assert (event.name, event.agent, event.attributes["gen_ai.tool.call.result"]) == ("multiply", "calculator", "42.0")
    assert ancestors(run.trace, event) == ["multiply", "calculator", "rollout"]


# A SQL agent: list tables, request a schema, write a query, check it, run it, answer.


def sql_agent(database: sqlite3.Connection) -> Any:
    @tool
    def list_tables() -> str:
        """Names of the tables."""
        return ", ".join(name for (name,) in database.execute("SELECT name FROM sqlite_master ORDER BY name"))

    @tool
    def get_schema(table: str) -> str:
        """How a table was created."""
        return database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]

    @tool
    def query_database(query: str) -> str:
        """Run a query."""
        return str(database.execute(query).fetchall())

    def find_tables(state: MessagesState) -> Any:
        request = {"name": "list_tables", "args": {}, "id": "tables", "type": "tool_call"}
        return {"messages": [AIMessage("", tool_calls=[request]), list_tables.invoke(request)]}

    def call_get_schema(state: MessagesState) -> Any:
        system = {"role": "system", "content": "Ask for the schema that you need."}
        return {"messages": [llm.bind_tools([get_schema], tool_choice="any").invoke([system, *state["messages"]])]}

    def generate_query(state: MessagesState) -> Any:
        system = {"role": "system", "content": "Write a SQL query, then answer."}
        return {"messages": [llm.bind_tools([query_database]).invoke([system, *state["messages"]])]}

    def check_query(state: MessagesState) -> Any:
        last = state["messages"][-1]
        system = {"role": "system", "content": "Check this SQL query."}
        user = {"role": "user", "content": last.tool_calls[0]["args"]["query"]}
        checked = llm.bind_tools([query_database], tool_choice="any").invoke([system, user])
        checked.id = last.id
        return {"messages": [checked]}

    def should_continue(state: MessagesState) -> Literal["check_query", "__end__"]:
        return "check_query" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node(find_tables)
    graph.add_node(call_get_schema)
    graph.add_node("get_schema", ToolNode([get_schema], name="get_schema"))
    graph.add_node(generate_query)
    graph.add_node(check_query)
    graph.add_node("run_query", ToolNode([query_database], name="run_query"))
    graph.add_edge(START, "find_tables")
    graph.add_edge("find_tables", "call_get_schema")
    graph.add_edge("call_get_schema", "get_schema")
    graph.add_edge("get_schema", "generate_query")
    graph.add_conditional_edges("generate_query", should_continue)
    graph.add_edge("check_query", "run_query")
    graph.add_edge("run_query", "generate_query")
    return graph.compile()


def play_sql(prompt: str) -> str:
    query = "SELECT name FROM artist WHERE born = 1810"
    if "Ask for the schema" in prompt:
        return tool_call("get_schema", table="artist")
    if "Check this SQL" in prompt:
        return tool_call("query_database", query=query)
    return "Chopin." if "Chopin" in prompt else tool_call("query_database", query=query)


@pytest.mark.parametrize("how", ["invoke", "stream"])
def test_sql_agent(how: str) -> None:
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.executescript("CREATE TABLE artist (name TEXT, born INT); INSERT INTO artist VALUES ('Chopin', 1810)")
    agent = sql_agent(database)
    with played_by(play_sql) as playground, playground.rollout(train=["generate_query", "check_query"]) as run:
        run_runnable(agent, how, {"messages": [{"role": "user", "content": "Who was born in 1810?"}]})
    database.close()
    assert agents_of(run.trace) == ["call_get_schema", "generate_query", "check_query", "generate_query"]
    tools = [event for event in run.trace.events if event.kind == "tool"]
    assert [ancestors(run.trace, event)[:2] for event in tools] == [
        ["list_tables", "find_tables"],
        ["get_schema", "get_schema"],
        ["query_database", "run_query"],
    ]
    assert tools[-1].attributes["gen_ai.tool.call.result"] == "[('Chopin',)]"


# A supervisor that delegates to a researcher and a mathematician.


def handoff_to(name: str) -> Any:
    @tool(f"transfer_to_{name}", description=f"Hand the work to {name}.")
    def handoff(
        state: Annotated[AgentState[Any], InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]
    ) -> Command[Any]:
        done = {"role": "tool", "content": f"{name} takes over", "name": f"transfer_to_{name}"}
        return Command(
            goto=name,
            graph=Command.PARENT,
            update={"messages": [*state["messages"], {**done, "tool_call_id": tool_call_id}]},
        )

    return handoff


@tool
def search(query: str) -> str:
    """Search the web."""
    return "New York had a GDP of 2.3 trillion, the USA of 29.2 trillion."


@tool
def divide(a: float, b: float) -> float:
    """Divide two numbers."""
    return a / b


def supervised_team() -> Any:
    researcher = create_agent(llm, [search], system_prompt="You are a researcher.", name="research_agent")
    mathematician = create_agent(llm, [divide], system_prompt="You are a mathematician.", name="math_agent")
    supervisor = create_agent(
        llm,
        [handoff_to("research_agent"), handoff_to("math_agent")],
        system_prompt="You are a supervisor.",
        name="supervisor",
    )
    graph = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor, destinations=("research_agent", "math_agent", END))
    graph.add_node("research_agent", researcher)
    graph.add_node("math_agent", mathematician)
    graph.add_edge(START, "supervisor")
    graph.add_edge("research_agent", "supervisor")
    graph.add_edge("math_agent", "supervisor")
    return graph.compile()


def play_team(prompt: str) -> str:
    if "You are a researcher" in prompt:
        return "The figures are here." if "2.3 trillion" in prompt else tool_call("search", query="GDP")
    if "You are a mathematician" in prompt:
        return "It is 7.9 %." if "0.07" in prompt else tool_call("divide", a=2.3, b=29.2)
    if "The figures are here." not in prompt:
        return tool_call("transfer_to_research_agent")
    return "Done: 7.9 %." if "It is 7.9 %." in prompt else tool_call("transfer_to_math_agent")


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
@pytest.mark.parametrize("train", [["math_agent"], ["supervisor", "research_agent"]])
def test_supervisor(how: str, train: list[str]) -> None:
    team = supervised_team()
    question = {"role": "user", "content": "What share of the GDP of the USA was New York's?"}
    with played_by(play_team) as playground, playground.rollout(train=train) as run:
        run_runnable(team, how, {"messages": [question]})
    trace = run.trace
    assert agents_of(trace) == [
        "supervisor",
        "research_agent",
        "research_agent",
        "supervisor",
        "math_agent",
        "math_agent",
        "supervisor",
    ]
    assert all(ancestors(trace, parent_of(trace, call))[0] == call.agent for call in trace.calls)
    tools = [(event.name, event.agent, event.error) for event in trace.events if event.kind == "tool"]
    assert tools == [
        ("transfer_to_research_agent", "supervisor", None),
        ("search", "research_agent", None),
        ("transfer_to_math_agent", "supervisor", None),
        ("divide", "math_agent", None),
    ]
