"""The RAG example on questions of several hops: each published format, the subset, splits, the agent over real HTTP, and real counts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from examples.rag import agent, multihop, multihop_agent
from examples.rag.multihop_formats import passages, questions
from lightning_core.config import load_config
from lightning_core.rollouts.tasks import load_tasks
from lightning_core.testing import playground
from tests.examples.data_sets import data_set

TEXTS = {
    "Green (song)": "Green is a song by Ana Lund. It was sold often.",
    "Ana Lund": "Ana Lund was born in Oslo.",
    "Elk": "Elks eat leaves.",
}
SOLVED = [cast("dict[str, str]", item)["content"] for item in multihop_agent.EXAMPLES]
QUESTION = "Where was the singer of Green born?"


def _musique(identity: str, *, answerable: bool = True) -> dict[str, Any]:
    return {
        "id": identity,
        "paragraphs": [
            {"idx": i, "title": title, "paragraph_text": text, "is_supporting": title != "Elk"}
            for i, (title, text) in enumerate(TEXTS.items())
        ],
        "question": QUESTION,
        "question_decomposition": [
            {"id": 1, "question": "Green >> performer", "answer": "Ana Lund", "paragraph_support_idx": 0},
            {"id": 2, "question": "#1 >> place of birth", "answer": "Oslo", "paragraph_support_idx": 1},
        ],
        "answer": "Oslo",
        "answer_aliases": ["Oslo, Norway"],
        "answerable": answerable,
    }


def _hotpot(identity: str) -> dict[str, Any]:
    return {
        "_id": identity,
        "type": "bridge",
        "level": "easy",
        "question": QUESTION,
        "context": [[title, text.replace(". ", ".| ").split("|")] for title, text in TEXTS.items()],
        "supporting_facts": [["Green (song)", 0], ["Ana Lund", 0], ["Green (song)", 1]],
        "answer": "Oslo",
    }


def _two_wiki(identity: str) -> dict[str, Any]:
    evidences = [["Green", "performer", "Ana Lund"], ["Ana Lund", "place of birth", "Oslo"]]
    return {**_hotpot(identity), "type": "compositional", "evidences": evidences, "answer_id": "Q585"}


def _lines(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(item) for item in items) + "\n\n")


def _write_musique(folder: Path) -> None:
    _lines(folder / "musique_ans_v1.0_train.jsonl", [_musique("2hop__1_2"), _musique("2hop__3_4", answerable=False)])
    _lines(folder / "musique_ans_v1.0_dev.jsonl", [_musique("2hop__5_6")])


def _write_two_wiki(folder: Path) -> None:
    (folder / "train.json").write_text(json.dumps([_two_wiki("2hop__1_2")]))
    (folder / "dev.json").write_text(json.dumps([_two_wiki("2hop__5_6")]))
    _lines(folder / "id_aliases.json", [{"Q_id": "Q585", "aliases": ["Oslo, Norway"], "demonyms": []}])


def _write_hotpot(folder: Path) -> None:
    (folder / "hotpot_train_v1.1.json").write_text(json.dumps([_hotpot("2hop__1_2")]))
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps([_hotpot("2hop__5_6")]))


def _write_lines(folder: Path) -> None:
    item = {
        "question": QUESTION,
        "answer": "Oslo",
        "aliases": ["Oslo, Norway"],
        "type": "2hop",
        "supporting_titles": ["Green (song)", "Ana Lund"],
        "steps": [{"question": "?", "answer": "Ana Lund"}, {"question": "?", "answer": "Oslo"}],
    }
    for part, identity in (("train", "2hop__1_2"), ("dev", "2hop__5_6")):
        _lines(folder / f"{part}.jsonl", [{"id": identity, **item}])
    _lines(folder / "corpus.jsonl", [{"id": "x", "title": title, "text": text} for title, text in TEXTS.items()])


WRITERS: list[Callable[[Path], None]] = [_write_musique, _write_two_wiki, _write_hotpot, _write_lines]


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__.removeprefix("_write_"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path)
    return tmp_path


def test_every_format_gives_the_same_question_and_corpus(folder: Path) -> None:
    (question,) = questions(folder, "train")
    hotpot = (folder / "hotpot_train_v1.1.json").exists()
    assert (question.id, question.text, question.comparison) == ("2hop__1_2", QUESTION, False)
    assert question.answers == (("Oslo",) if hotpot else ("Oslo", "Oslo, Norway"))
    assert question.titles == ("Green (song)", "Ana Lund")
    assert question.bridges == (() if hotpot else ("Ana Lund",))
    assert [question.id for question in questions(folder, "dev")] == ["2hop__5_6"]
    assert {document.title: document.text for document in passages(folder)} == TEXTS
    assert len(passages(folder)) == len(TEXTS)


def test_two_searches_answer_and_one_does_not(folder: Path) -> None:
    (task,) = multihop.test([str(folder)], subset="two-search")
    assert task["id"] == "2hop__5_6"
    assert (task["hops"], task["turns"]) == (2, 3)
    assert multihop.search([str(folder)], "Green") == f"Green (song): {TEXTS['Green (song)']}"
    assert multihop.search([str(folder)], "zebra") == "Nothing found."
    assert task["searches"] == ["Green", "Ana Lund"]
    assert multihop.test([str(folder)], subset="bridge") == []
    both = multihop.train([str(folder)]) + multihop.validation([str(folder)])
    assert [task["id"] for task in both] == ["2hop__1_2"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"answer": "Ana Lund"}, "the first search shows the answer"),
        ({"answer": "Bergen"}, "no search shows the answer"),
        ({"answer": "no"}, "the answer is yes or no"),
        ({"answer": "born in Oslo in the north of Norway"}, "the answer is long"),
        ({"type": "comparison"}, "a comparison"),
        ({"supporting_titles": ["Green (song)", "Ana Lund", "Elk"]}, "three passages"),
        (
            {"supporting_titles": ["Elk", "Ana Lund"]},
            "the first search shows neither the other title nor the intermediate answer",
        ),
        ({"question": "Where was Ana Lund born?"}, "a search for the question shows the answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_questions_are_not_in_the_subset(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    _write_lines(tmp_path)
    (item,) = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines() if line]
    _lines(tmp_path / "dev.jsonl", [item | {"aliases": []} | change])
    assert multihop.test([str(tmp_path)], subset="two-search") == [], reason
    assert len(multihop.test([str(tmp_path)])) == 1
    not_shown = ("no search shows the answer", "the answer is long")
    demonstrated = reason not in ("a comparison", "the answer is yes or no", *not_shown)
    assert len(multihop.test([str(tmp_path)], subset="bridge")) == demonstrated


@pytest.mark.parametrize(
    ("question", "titles", "searches"),
    [
        ("Who sang Green?", ["Ana Lund", "Green (song)", "Elk"], ["Green", "Ana Lund", "Elk"]),
        (
            "Who sang green and eats leaves like an elk?",
            ["Ana Lund", "Elk", "Green (song)"],
            ["Elk", "Green", "Ana Lund"],
        ),
        ("Who sang it?", ["Ana Lund", "Green (song)", "Elk"], ["Ana Lund", "Green", "Elk"]),
        ("Who sang it?", ["Green (song)", "Green (film)"], ["Green"]),
    ],
)
def test_titles_in_the_question_are_searched_first(
    tmp_path: Path, question: str, titles: list[str], searches: list[str]
) -> None:
    _write_lines(tmp_path)
    item = json.loads((tmp_path / "dev.jsonl").read_text())
    _lines(tmp_path / "dev.jsonl", [item | {"question": question, "supporting_titles": titles, "steps": []}])
    (task,) = multihop.test([str(tmp_path)])
    assert task["searches"] == searches


def test_the_order_of_two_searches_is_that_which_answers(tmp_path: Path) -> None:
    _write_lines(tmp_path)
    item = json.loads((tmp_path / "dev.jsonl").read_text())
    other = {"question": "Of which city is the singer of this song?", "supporting_titles": ["Ana Lund", "Green (song)"]}
    _lines(tmp_path / "dev.jsonl", [item | other])
    (task,) = multihop.test([str(tmp_path)], subset="two-search")
    assert task["searches"] == ["Green", "Ana Lund"]


def test_data_sets_are_mixed_over_one_corpus(tmp_path: Path) -> None:
    for name, texts in (("one", {"Fox": "Foxes hunt."}), ("two", {"Owl": "Owls fly."})):
        (tmp_path / name).mkdir()
        _write_lines(tmp_path / name)
        _lines(
            tmp_path / name / "corpus.jsonl",
            [{"title": title, "text": text} for title, text in (TEXTS | texts).items()],
        )
    folders = [str(tmp_path / name) for name in ("one", "two")]
    assert {task["split"] for task in multihop.test(folders)} == {"test, one", "test, two"}
    assert multihop.search(folders, "fox") == "Fox: Foxes hunt."
    assert multihop.search(folders, "owl") == "Owl: Owls fly."


def test_long_passages_are_cut(tmp_path: Path) -> None:
    _write_lines(tmp_path)
    _lines(tmp_path / "corpus.jsonl", [{"title": "Fox", "text": " ".join(["fox"] * 100)}])
    assert multihop.search([str(tmp_path)], "fox") == f"Fox: {' '.join(['fox'] * multihop.PASSAGE_WORDS)}"


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["Search: Green", "Search: Ana Lund", "Answer: Oslo"], 1.0),
        (["Search: Green", "Search: Ana Lund", "Answer: in Norway, Oslo"], 0.8),
        (["Answer: Oslo"], 1.0),
        (["Search: Green", "Answer: Ana Lund"], 0.0),
        (["Search: Green", "Search: Ana Lund", "Search: Oslo"], 0.0),
    ],
)
def test_the_reward_is_the_f1_of_the_answer_alone(tmp_path: Path, turns: list[str], reward: float) -> None:
    _write_musique(tmp_path)
    (task,) = multihop.test([str(tmp_path)])
    agent.researcher.cache_clear()  # its client belongs to the event loop that it was first used on
    with playground(turns, train=["researcher"], integrations=["openai-agents"]) as run:
        assert asyncio.run(multihop_agent.solve(task)) == pytest.approx(reward)
    agent.researcher.cache_clear()
    assert len(run.trace.calls) == len(turns)
    if len(turns) == 3:
        shown = [str(call.messages[-1]["content"]) for call in run.trace.calls]
        assert shown == [
            QUESTION,
            f"Green (song): {TEXTS['Green (song)']}",
            f"Ana Lund: {TEXTS['Ana Lund']}",
        ]


@pytest.mark.parametrize("examples", [True, False])
def test_the_prompt_has_solved_questions_unless_the_task_leaves_them_out(tmp_path: Path, examples: bool) -> None:
    _write_musique(tmp_path)
    (task,) = multihop.test([str(tmp_path)], examples=examples)
    agent.researcher.cache_clear()
    with playground(["Answer: Oslo"], train=["researcher"], integrations=["openai-agents"]) as run:
        assert asyncio.run(multihop_agent.solve(task)) == 1.0
    agent.researcher.cache_clear()
    shown = [message["content"] for message in run.trace.calls[0].messages[1:-1]]
    assert shown == SOLVED * examples


def test_wrong_arguments_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found none of train\.jsonl, .* in .*; set `folders` to copies"):
        multihop.train([str(tmp_path)])
    with pytest.raises(ValueError, match="subset: found 'easy', expected one of all, two-search, bridge"):
        multihop.train([str(tmp_path)], subset="easy")  # pyright: ignore[reportArgumentType]
    (tmp_path / "train.jsonl").write_text('{"id": "a", "question": "A?"}')
    with pytest.raises(ValueError, match=r"train\.jsonl, question 1: cannot be read: KeyError"):
        multihop.train([str(tmp_path)])


def test_the_configuration_fits_the_reader(tmp_path: Path) -> None:
    _write_lines(tmp_path)
    (item,) = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines() if line]
    _lines(tmp_path / "train.jsonl", [item | {"id": str(i)} for i in range(20)])
    folders = [f"tasks.{phase}.args.folders=[{tmp_path}]" for phase in ("train", "eval")]
    config = load_config(Path(agent.__file__).with_name("multihop.yaml"), folders)
    assert config.tasks.train is not None
    assert config.tasks.eval is not None
    counts = len(load_tasks(config.tasks.train)), len(load_tasks(config.tasks.eval))
    assert sum(counts) == 20
    assert min(counts) > 0


# --- the data sets themselves


@pytest.mark.long
def test_counts_of_the_data_sets() -> None:
    folders = [str(data_set("multihop") / name) for name in ("musique", "2wiki")]

    def counts(subset: multihop.Subset) -> list[Counter[str]]:
        splits = [read(folders, subset=subset) for read in (multihop.train, multihop.validation, multihop.test)]
        assert len({task["id"] for tasks in splits for task in tasks}) == sum(map(len, splits))
        return [Counter(task["form"] for task in tasks) for tasks in splits]

    assert counts("all") == [
        {"musique": 70, "2wiki": 325},
        {"musique": 30, "2wiki": 175},
        {"musique": 200, "2wiki": 164},
    ]
    assert counts("two-search") == [
        {"musique": 22, "2wiki": 91},
        {"musique": 9, "2wiki": 54},
        {"musique": 50, "2wiki": 28},
    ]
    assert counts("bridge") == [
        {"musique": 20, "2wiki": 18},
        {"musique": 7, "2wiki": 9},
        {"musique": 74, "2wiki": 9},
    ]
    chosen = {
        subset: {task["id"] for task in multihop.train(folders, subset=subset)} for subset in get_args(multihop.Subset)
    }
    assert not chosen["bridge"] & chosen["two-search"]
    assert chosen["bridge"] | chosen["two-search"] < chosen["all"]
    corpus = {(document.title, document.text) for folder in folders for document in passages(Path(folder))}
    assert len(corpus) == 14633
    shown = " ".join(SOLVED)
    for invented in ("The Glass Harbour", "Edwin Halloway", "Corvale", "Norland", "Hentzau", "Streslau"):
        assert invented in shown
        assert not any(invented in text for passage in corpus for text in passage)
