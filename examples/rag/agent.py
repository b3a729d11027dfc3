"""An ordinary program of the OpenAI Agents SDK: a researcher searches a corpus until it can answer.

Its turns are ``Search: …``, which is answered with the document found, and ``Answer: …``, which ends the program: one conversation,
carried on with the SDK's ``to_input_list``. Nothing here knows of training: lightning.yaml selects the agent by its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, TResponseInputItem
from openai import AsyncOpenAI

from examples.rag.corpus import Document, documents
from examples.rag.retrieval import Index
from examples.rag.reward import score

TURNS = 3
"""How often the researcher may speak: two searches and the answer."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a researcher came to; without an answer if it ran out of turns, or said something else."""

    answer: str
    searches: tuple[str, ...]


def _said(role: Literal["user", "assistant"], text: str) -> TResponseInputItem:
    return {"role": role, "content": text}


EXAMPLES: list[TResponseInputItem] = [
    _said("user", "What is the language of the country whose capital is Nassau?"),
    _said("assistant", "Search: Nassau"),
    _said("user", "Nassau is the capital of the Bahamas."),
    _said("assistant", "Search: language of the Bahamas"),
    _said("user", "The language of the Bahamas is English."),
    _said("assistant", "Answer: English"),
    _said("user", "What is the currency of the country where Streslau is?"),
    _said("assistant", "Search: Streslau"),
    _said("user", "Streslau is a mountain in Ruritania."),
    _said("assistant", "Search: currency of Ruritania"),
    _said("user", "The currency of Ruritania is krona."),
    _said("assistant", "Answer: krona"),
    _said("user", "What is the calling code of the country that Conch is from?"),
    _said("assistant", "Search: Conch"),
    _said("user", "Conch is a dish from the Bahamas."),
    _said("assistant", "Search: calling code of the Bahamas"),
    _said("user", "The calling code of the Bahamas is 1242."),
    _said("assistant", "Answer: 1242"),
]
"""Three conversations, about places that are not in the corpus. An engine computes such a shared beginning once."""


@cache
def researcher() -> Agent[None]:
    """The agent; its client is made once, and any model name does while training."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client wants one even where no server asks for it
    client = AsyncOpenAI(api_key=key, timeout=60)
    model = OpenAIChatCompletionsModel(model="gpt-4o-mini", openai_client=client)
    return Agent(name="researcher", instructions="Search, then answer.", model=model)


async def research(question: str, index: Index, turns: int = TURNS) -> Report:
    """Let the researcher search ``index`` and answer."""
    conversation = [*EXAMPLES, _said("user", question)]
    searches: list[str] = []
    for _ in range(turns):
        result = await Runner.run(researcher(), conversation, run_config=RunConfig(tracing_disabled=True))
        kind, _, text = str(result.final_output).strip().partition(": ")
        if kind == "Answer":
            return Report(text, tuple(searches))
        if kind != "Search":
            break
        searches.append(text)
        found = " ".join(document.text for document in index.search(text)) or "Nothing found."
        conversation = [*result.to_input_list(), _said("user", found)]
    return Report("", tuple(searches))


@lru_cache(maxsize=256)
def _index(paragraphs: tuple[tuple[str, str], ...]) -> Index:
    """Over a question's own paragraphs, or, where it has none, the shipped corpus."""
    return Index([Document(title=title, text=text) for title, text in paragraphs] or documents())


async def solve(task: Mapping[str, Any]) -> float:
    """Answer a task's question. The format is kept by an answer that follows a search."""
    index = _index(tuple((title, text) for title, text in task.get("paragraphs", ())))
    report = await research(task["question"], index, task.get("turns", TURNS))
    return score(report.answer, task["answers"], well_formed=bool(report.answer and report.searches))
