"""An OpenAI Agents SDK program: a researcher searches a corpus until it can answer.

Each turn of the agent is ``Search: …``, to which the program replies with the document found, or ``Answer: …``, which ends the
program. The turns form one conversation, continued with the SDK's ``to_input_list``. Nothing in this file is specific to training:
``lightning.yaml`` selects the agent to train by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, TResponseInputItem
from openai import AsyncOpenAI

from examples.rag.corpus import documents
from examples.rag.retrieval import Index
from examples.rag.reward import score

TURNS = 3
"""Maximum model calls: two searches and the answer."""


@dataclass(frozen=True, slots=True)
class Report:
    """The researcher's result; ``answer`` is empty if there was none or the format was wrong."""

    answer: str
    searches: tuple[str, ...]


def message(role: Literal["user", "assistant"], text: str) -> TResponseInputItem:
    return {"role": role, "content": text}


EXAMPLES: list[TResponseInputItem] = [
    message("user", "What is the language of the country whose capital is Nassau?"),
    message("assistant", "Search: Nassau"),
    message("user", "Nassau is the capital of the Bahamas."),
    message("assistant", "Search: language of the Bahamas"),
    message("user", "The language of the Bahamas is English."),
    message("assistant", "Answer: English"),
    message("user", "What is the currency of the country where Streslau is?"),
    message("assistant", "Search: Streslau"),
    message("user", "Streslau is a mountain in Ruritania."),
    message("assistant", "Search: currency of Ruritania"),
    message("user", "The currency of Ruritania is krona."),
    message("assistant", "Answer: krona"),
    message("user", "What is the calling code of the country that Conch is from?"),
    message("assistant", "Search: Conch"),
    message("user", "Conch is a dish from the Bahamas."),
    message("assistant", "Search: calling code of the Bahamas"),
    message("user", "The calling code of the Bahamas is 1242."),
    message("assistant", "Answer: 1242"),
]
"""Three conversations about places not in the corpus; engines cache a shared prefix."""


@cache
def researcher() -> Agent[None]:
    """The agent; its client is created once. During training any model name works."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client requires a key, even if the server does not
    client = AsyncOpenAI(api_key=key)
    model = OpenAIChatCompletionsModel(model="gpt-4o-mini", openai_client=client)
    return Agent(name="researcher", instructions="Search, then answer.", model=model)


async def research(
    question: str,
    search: Callable[[str], str],
    examples: Sequence[TResponseInputItem] = EXAMPLES,
    turns: int = TURNS,
) -> Report:
    """Run the researcher on ``question``. ``search`` returns the text that is shown for a query."""
    conversation = [*examples, message("user", question)]
    searches: list[str] = []
    for _ in range(turns):
        result = await Runner.run(researcher(), conversation, run_config=RunConfig(tracing_disabled=True))
        kind, _, text = str(result.final_output).strip().partition(": ")
        if kind == "Answer":
            return Report(text, tuple(searches))
        if kind != "Search":
            break
        searches.append(text)
        conversation = [*result.to_input_list(), message("user", search(text))]
    return Report("", tuple(searches))


@cache
def _index() -> Index:
    return Index(documents())


def search(query: str) -> str:
    """The document of the shipped corpus that matches best."""
    return " ".join(document.text for document in _index().search(query)) or "Nothing found."


async def solve(task: Mapping[str, Any]) -> float:
    """Answer a task's question and score it. An answer without a search breaks the format."""
    report = await research(task["question"], search)
    return score(report.answer, task["answers"], well_formed=bool(report.answer and report.searches))
