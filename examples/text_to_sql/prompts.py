"""The prompts of the three agents. Constant parts come first, for prefix caching."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

_WRITER = SystemMessage("Write one SQLite query that answers the question.")
_CHECKER: list[BaseMessage] = [
    SystemMessage("Say in a few words what is wrong with the SQL query."),
    HumanMessage("SELECT COUNT(*) FROM lakes WHERE depth > 30\nno such table: lakes"),
    AIMessage("The table name is wrong."),
    HumanMessage("SELECT name FROM lake WHERE size = 'deep'\nno rows"),
    AIMessage("The condition is wrong."),
    HumanMessage("SELECT MAX(deep) FROM lake\nno such column: deep"),
    AIMessage("The column name is wrong."),
    HumanMessage("SELECT name FROM lake WHERE country = 'Peru' AND\nincomplete input"),
    AIMessage("The query is too long."),
]

Examples = tuple[tuple[str, ...], ...]


@lru_cache(maxsize=256)
def _before(schema: str, examples: Examples) -> list[BaseMessage]:
    """The messages before the question."""
    messages: list[BaseMessage] = [_WRITER]
    shown = None
    for question, sql, *own in examples:
        about = own[0] if own else schema
        messages += [HumanMessage(_question(question, about, shown)), AIMessage(f"{sql};")]
        shown = about
    return messages


def _question(question: str, schema: str, shown: str | None) -> str:
    """The question, with its schema unless the message before was about the same."""
    return question if schema == shown else f"Tables: {schema}\n{question}"


def writer(schema: str, examples: Sequence[Sequence[str]], question: str) -> list[BaseMessage]:
    """The writer's prompt: instruction, schema, examples, question.

    An example is a question, its query and, if it is about another database, that schema.
    """
    shown = examples[-1][2] if examples and len(examples[-1]) > 2 else schema if examples else None
    before = _before(schema, tuple(map(tuple, examples)))
    return [*before, HumanMessage(_question(question, schema, shown))]


def checker(sql: str, problem: str) -> list[BaseMessage]:
    """The checker's prompt: a query and the database's error or result."""
    return [*_CHECKER, HumanMessage(f"{sql}\n{problem}")]


def rewriter(
    schema: str, examples: Sequence[Sequence[str]], question: str, problem: str, critique: str
) -> list[BaseMessage]:
    """The rewriter's prompt: the writer's, with the problem and critique before the question.

    It omits the failed query, because a small model repeats a query that it sees.
    """
    return writer(schema, examples, f"{problem}. {critique}\n{question}")
