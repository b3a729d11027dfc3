"""An ordinary program of the OpenAI Agents SDK: a researcher searches a corpus until it can answer.

Its turns are ``Search: …``, which is answered with what was found, and ``Answer: …``, which ends the program. That is one
conversation, carried on with the SDK's ``to_input_list``. Nothing here knows of training but the mark; without Lightning it does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, TResponseInputItem
from openai import AsyncOpenAI

from examples.rag.corpus import Document, documents
from examples.rag.retrieval import Index
from examples.rag.reward import score
from lightning_core import trainable

TURNS = 3
"""How often the researcher may speak: two searches and the answer."""
EXAMPLES: list[TResponseInputItem] = [
    {"role": role, "content": content}
    for role, content in [
        ("user", "What is the language of the country whose capital is Nassau?"),
        ("assistant", "Search: Nassau"),
        ("user", "Nassau is the capital of the Bahamas."),
        ("assistant", "Search: language of the Bahamas"),
        ("user", "The language of the Bahamas is English."),
        ("assistant", "Answer: English"),
        ("user", "What is the currency of the country where Streslau is?"),
        ("assistant", "Search: Streslau"),
        ("user", "Streslau is a mountain in Ruritania."),
        ("assistant", "Search: currency of Ruritania"),
        ("user", "The currency of Ruritania is krona."),
        ("assistant", "Answer: krona"),
        ("user", "What is the calling code of the country that Conch is from?"),
        ("assistant", "Search: Conch"),
        ("user", "Conch is a dish from the Bahamas."),
        ("assistant", "Search: calling code of the Bahamas"),
        ("user", "The calling code of the Bahamas is 1242."),
        ("assistant", "Answer: 1242"),
    ]
]
"""Three conversations, about places that are not in the corpus. Engines compute such a shared beginning once."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a researcher came to; without an answer if it ran out of turns, or said something else."""

    answer: str
    searches: tuple[str, ...]


@cache
def researcher() -> Agent[None]:
    """The agent; its client is made once, and any model name does while training."""
    key = os.environ.get("OPENAI_API_KEY", "none")  # the client wants one even where no server asks for it
    client = AsyncOpenAI(api_key=key, timeout=60, max_retries=0)
    return Agent(
        name="researcher",
        instructions="Search, then answer.",
        model=OpenAIChatCompletionsModel(model="gpt-4o-mini", openai_client=client),
    )


@trainable("researcher")
async def research(question: str, index: Index, turns: int = TURNS) -> Report:
    """Let the researcher search ``index`` and answer."""
    conversation = [*EXAMPLES, _user(question)]
    searches: list[str] = []
    for _ in range(turns):
        result = await Runner.run(researcher(), conversation, run_config=RunConfig(tracing_disabled=True))
        kind, _, text = str(result.final_output).strip().partition(": ")
        if kind == "Answer":
            return Report(text, tuple(searches))
        if kind != "Search":
            break
        searches.append(text)
        passages = " ".join(document.text for document in index.search(text))
        conversation = [*result.to_input_list(), _user(passages or "Nothing found.")]
    return Report("", tuple(searches))


def _user(text: str) -> TResponseInputItem:
    return {"role": "user", "content": text}


@lru_cache(maxsize=256)
def _index(paragraphs: tuple[tuple[str, str], ...]) -> Index:
    """The question's own paragraphs, or, where it has none, the shipped corpus."""
    return Index([Document(title=title, text=text) for title, text in paragraphs] or documents())


async def solve(task: Mapping[str, Any]) -> float:
    """Answer a task's question. The format is kept by an answer that follows a search."""
    index = _index(tuple((title, text) for title, text in task.get("paragraphs", ())))
    report = await research(task["question"], index, task.get("turns", TURNS))
    return score(report.answer, task["answers"], well_formed=bool(report.answer and report.searches))
