"""The RAG example without a model: rewards, held-out splits, real retrieval, and the program over real HTTP."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from examples.rag import agent, tasks
from examples.rag.corpus import Document, countries, documents, things
from examples.rag.retrieval import Index
from examples.rag.reward import f1, normalize, score
from lightning_core import trace_to_transitions, transitions_to_rows
from lightning_core.capture import ActiveRollout
from lightning_core.testing import playground

ROOT = Path(__file__).parents[2]
SPLITS = {"train": tasks.train(), "test": tasks.test(), "test_form": tasks.test_form()}


# --- the reward


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("euro", "euro", 1.0),
        ("The Euro.", "euro", 1.0),
        ("pa'anga", "Paanga", 1.0),
        ("Haitian", "Haitian Creole", 2 / 3),
        ("the Peruvian sol", "sol", 2 / 3),
        ("dollar dollar", "dollar", 2 / 3),
        ("The currency of Peru is the sol, the language is Spanish, the calling code 51.", "sol", 2 / 12),
        ("peso", "euro", 0.0),
        ("", "euro", 0.0),
        ("the", "the", 0.0),
    ],
)
def test_f1_against_computed_numbers(answer: str, gold: str, expected: float) -> None:
    assert f1(answer, gold) == pytest.approx(expected)


def test_the_reward_is_the_best_f1_and_a_tenth_for_the_format() -> None:
    assert normalize("An A.B.C. of the  Theatre") == ["abc", "of", "theatre"]
    assert score("CFA franc", ["franc", "CFA franc"], well_formed=True) == pytest.approx(1.0)
    assert score("CFA franc", ["franc"], well_formed=True) == pytest.approx(0.9 * 2 / 3 + 0.1)
    assert score("euro", ["franc"], well_formed=True) == pytest.approx(0.1)
    assert score("franc", ["franc"], well_formed=False) == pytest.approx(0.9)
    assert score("", ["franc"], well_formed=False) == 0.0


# --- the corpus and the questions


def test_the_corpus_is_consistent() -> None:
    assert len(documents()) > 500
    assert len({document.title for document in documents()}) == len(documents())
    assert {thing.country for thing in things()} <= set(countries())
    assert {thing.kind for thing in things()} == {"landmark", "mountain", "dish", "person"}
    assert len({country.capital for country in countries().values()}) == len(countries())
    assert all(value for country in countries().values() for value in (country.currency, country.language))
    assert all(re.fullmatch(r"\d{1,4}", country.code) for country in countries().values())


def test_two_hops_take_two_documents() -> None:
    by_title = {document.title.lower(): document.text for document in documents()}
    for task in (task for split in SPLITS.values() for task in split if task["hops"] == 2):
        start = next(title for title in by_title if task["id"].startswith(title.replace(" ", "-") + "-"))
        assert not set(normalize(task["answers"][0])) <= set(normalize(by_title[start])), task["question"]


def test_splits_share_no_question_and_no_country() -> None:
    for one, other in combinations(SPLITS, 2):
        assert not {t["question"] for t in SPLITS[one]} & {t["question"] for t in SPLITS[other]}
        assert not {t["id"] for t in SPLITS[one]} & {t["id"] for t in SPLITS[other]}
    train_text = " ".join(task["question"] for task in SPLITS["train"])
    for name in tasks.test_countries():
        country = countries()[name]
        for entity in (name, country.capital, *(thing.name for thing in things() if thing.country == name)):
            assert not re.search(rf"\b{re.escape(entity)}\b", train_text), entity


def test_the_mix_of_forms_is_the_stated_one_in_any_slice() -> None:
    assert (len(SPLITS["train"]), len(SPLITS["test"]), len(SPLITS["test_form"])) >= (570, 300, 60)
    for name in ("train", "test"):
        for start in range(0, 300, 60):
            forms = Counter(task["form"] for task in SPLITS[name][start : start + 60])
            assert forms == {"country": 20, "capital": 10, "landmark": 10, "mountain": 10, "dish": 10}
    assert {task["form"] for task in SPLITS["test_form"]} == {"person"}
    assert tasks.train() == SPLITS["train"]


def test_nothing_of_the_prompt_is_in_the_corpus() -> None:
    shown = " ".join(str(item["content"]) for item in agent.EXAMPLES)
    for invented in ("Ruritania", "Nassau", "Bahamas", "Streslau", "Conch"):
        assert invented in shown
        assert not any(invented in document.title + document.text for document in documents())


# --- retrieval


def test_gold_queries_find_the_gold_document() -> None:
    index = Index(documents())
    found = [index.search(document.title)[0] == document for document in documents()]
    assert sum(found) / len(found) > 0.98


def test_an_unchanged_question_finds_the_first_document_only() -> None:
    index = Index(documents())
    hits = Counter[int]()
    totals = Counter[int]()
    for task in SPLITS["test"]:
        totals[task["hops"]] += 1
        hits[task["hops"]] += set(normalize(task["answers"][0])) <= set(
            normalize(index.search(task["question"])[0].text)
        )
    assert hits[1] / totals[1] > 0.9
    assert hits[2] / totals[2] < 0.1


def test_a_search_without_a_known_word_finds_nothing() -> None:
    index = Index([Document(title="Cat", text="Cats purr."), Document(title="Dog", text="Dogs bark.")])
    assert index.search("dogs") == [Document(title="Dog", text="Dogs bark.")]
    assert [document.title for document in index.search("cat dog", 3)] == ["Cat", "Dog"]
    assert index.search("elephant") == index.search("") == index.search("the") == []


# --- the program, over real HTTP


@contextmanager
def scripted(*answers: str) -> Iterator[tuple[ActiveRollout, list[str]]]:
    """A rollout whose researcher responds with ``answers``, and the prompts that it received."""
    prompts: list[str] = []
    rest = iter(answers)

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return next(rest)

    agent.researcher.cache_clear()  # its client belongs to the event loop that it was first used on
    with playground(script, train=["researcher"], integrations=["openai-agents"]) as run:
        yield run, prompts
    agent.researcher.cache_clear()


def _question(text: str, answer: str) -> Mapping[str, Any]:
    return {"id": "one", "question": text, "answers": [answer]}


def test_two_hops_are_one_conversation_and_one_row() -> None:
    task = _question("What is the language of the country where Elbrus is?", "Russian")
    with scripted("Search: Elbrus", "Search: language of Russia", "Answer: Russian") as (run, prompts):
        assert asyncio.run(agent.solve(task)) == pytest.approx(1.0)
    assert [call.agent for call in run.trace.calls] == ["researcher"] * 3
    assert "Elbrus is a mountain in Russia." in prompts[1]
    assert "The language of Russia is Russian." in prompts[2]
    assert all(later.startswith(earlier) for earlier, later in pairwise(prompts))
    (row,) = transitions_to_rows(trace_to_transitions(run.trace, agents={"researcher"}))
    assert row.mask.sum() == sum(len(call.output_ids) for call in run.trace.calls)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["Search: Madrid", "Search: language of Spain", "Answer: Spanish"], 1.0),
        pytest.param(
            ["Search: nowhere at all", "Search: language of Spain", "Answer: the Spanish"], 1.0, marks=pytest.mark.long
        ),
        (["Search: Spain", "Answer: euro"], 0.1),
        pytest.param(["Answer: Spanish"], 0.9, marks=pytest.mark.long),
        pytest.param(["Answer: French"], 0.0, marks=pytest.mark.long),
        (["Spanish"], 0.0),
        pytest.param(["Search: Madrid", "Spanish"], 0.0, marks=pytest.mark.long),
        (["Search: Madrid", "Search: language of Spain", "Search: Spain"], 0.0),
        (["Search: Spain", "Answer: the currency is the euro, the language is Spanish"], 0.9 * 2 / 7 + 0.1),
    ],
)
def test_rewards_of_whole_conversations(answers: list[str], reward: float) -> None:
    task = _question("What is the language of the country whose capital is Madrid?", "Spanish")
    with scripted(*answers) as (run, _):
        assert asyncio.run(agent.solve(task)) == pytest.approx(reward)
    assert len(run.trace.calls) == len(answers)
