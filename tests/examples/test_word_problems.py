"""The math example's reader of MAWPS, ASDiv-A, SVAMP and GSM8K: each published format, splits, and the counts of the real data sets."""

from __future__ import annotations

import json
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.math_tool import agent, word_problems
from examples.math_tool.calculator import calculator
from lightning_core.config import load_config
from lightning_core.rollouts.tasks import load_tasks
from tests.examples.data_sets import data_set

SOLUTION = "Ana sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=1,272>>1,272 clips.\n#### 1,272"
CSV = """Question,Numbers,Equation,Answer,group_nums,Body
"john has number0 shirts . later he bought number1 more shirts , did n't he ? how many has he ?",12 4.5,+ number0 number1,16.5,"[1, 2]",x
julia had $ number0 . she paid $ number1 for each of number2 pens . what is left ?,20 3 2,- number0 * number1 number2,14.0,[],x
"john has number0 shirts . later he bought number1 more shirts , did n't he ? how many has he ?",12 4.5,+ number0 number1,16.5,"[1, 2]",x
"""
SVAMP = [
    {
        "ID": "chal-2",
        "Body": "Dan had $ 3 left after he bought a bar. If he had $ 4 at the start",
        "Question": "How much did the bar cost?",
        "Equation": "( 4.0 - 3.0 )",
        "Answer": 1.0,
        "Type": "Subtraction",
    },
    {
        "ID": "chal-4",
        "Body": "Ed had 9 pens and 4 hats. He lost -1 of them.",
        "Question": "How many has he?",
        "Equation": "( ( 9.0 + 4.0 ) - -1.0 )",
        "Answer": 14.0,
        "Type": "Subtraction",
    },
]


def _lines(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(item) for item in items) + "\n\n")


def _all(folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """The training and validation problems by question."""
    tasks = word_problems.train(str(folder), **arguments) + word_problems.validation(str(folder), **arguments)
    return sorted(tasks, key=lambda task: task["question"])


def _check(task: dict[str, Any]) -> None:
    """The last calculation of a task gives its answer."""
    assert float(calculator(task["expressions"][-1])) == pytest.approx(task["answer"], abs=task["tolerance"])


def _read(tasks: list[dict[str, Any]]) -> list[tuple[str, str, float, int]]:
    return [(task["id"], task["question"], task["answer"], task["operations"]) for task in tasks]


def test_gsm8k_as_published(tmp_path: Path) -> None:
    items = [{"question": "How many?", "answer": SOLUTION}, {"question": "Why?", "answer": "By reading.\n#### -3"}]
    _lines(tmp_path / "train.jsonl", items)
    _lines(tmp_path / "test.jsonl", items[:1])
    assert _read(_all(tmp_path)) == [("train-0000", "How many?", 1272.0, 2), ("train-0001", "Why?", -3.0, 0)]
    assert _read(word_problems.test(str(tmp_path))) == [("test-0000", "How many?", 1272.0, 2)]


def test_mawps_and_svamp_as_published(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(CSV)
    (tmp_path / "SVAMP.json").write_text(json.dumps(SVAMP))
    assert _read(_all(tmp_path)) == [
        ("train-0000", "john has 12 shirts. later he bought 4.5 more shirts, didn't he? how many has he?", 16.5, 1),
        ("train-0001", "julia had $20. she paid $3 for each of 2 pens. what is left?", 14.0, 2),
    ]
    svamp = {task["id"]: task for task in word_problems.test(str(tmp_path))}
    assert {name: task["answer"] for name, task in svamp.items()} == {"chal-2": 1.0, "chal-4": 14.0}
    assert svamp["chal-2"]["question"].endswith("If he had $4 at the start, How much did the bar cost?")
    assert svamp["chal-4"]["question"].endswith("He lost -1 of them. How many has he?")
    assert [svamp[name]["operations"] for name in ("chal-2", "chal-4")] == [1, 2]
    (tmp_path / "dev.csv").write_text(CSV.replace("john", "jane"))  # as in the repository, where both are
    assert len(word_problems.test(str(tmp_path))) == 2
    assert "jane has 12 shirts" in str(word_problems.test(str(tmp_path)))


def test_lines_with_operations_or_solutions(tmp_path: Path) -> None:
    items = [
        {"id": "a", "question": "A?", "answer": "6.625", "equation": "53 / 8", "operations": 1},
        {"id": "b", "question": "B?", "answer": "9", "solution": "(3+42)/5 = <<(3+42)/5=9>>9, or <<-3*-3=9>>9"},
    ]
    _lines(tmp_path / "train.jsonl", items)
    assert _read(_all(tmp_path)) == [("a", "A?", 6.625, 1), ("b", "B?", 9.0, 3)]
    assert _read(_all(tmp_path, operations=3)) == [("b", "B?", 9.0, 3)]
    (task,) = _all(tmp_path, operations=1, examples="two-operations")
    assert (task["tolerance"], task["examples"]) == (1e-3, "two-operations")


@pytest.mark.parametrize(
    ("numbers", "equation", "expression"),
    [
        ("3 4 2", "* + number0 number1 number2", "(3+4)*2"),
        ("3 4 2", "- number0 - number1 number2", "3-(4-2)"),
        ("3 4 2", "- - number0 number1 number2", "(3-4)-2"),
        ("8.0 4 2.05", "/ * number0 number1 number2", "(8*4)/2.05"),
        ("8 4", "+ * number0 0.5 / number1 100.0", "(8*0.5)+(4/100)"),
        ("8 10.0", "number1", "10"),
    ],
)
def test_prefix_equations_become_calculations(tmp_path: Path, numbers: str, equation: str, expression: str) -> None:
    answer = calculator(expression)
    (tmp_path / "dev.csv").write_text(
        f"Question,Numbers,Equation,Answer\nhow many of number0 ?,{numbers},{equation},{answer}\n"
    )
    (task,) = word_problems.test(str(tmp_path))
    assert task["expressions"] == [expression]
    _check(task)


@pytest.mark.parametrize(
    ("equation", "expression", "answer"),
    [
        ("( 9.0 - 4.0 )", "9-4", 5.0),
        ("( ( 9.0 + 4.0 ) * 2.0 )", "((9+4)*2)", 26.0),
        ("( ( 9.0 + 4.0 ) - -1.0 )", "((9+4)--1)", 14.0),
        ("( 10.0 * 2.05 )", "10*2.05", 20.5),
        ("( 9.0 + 4.0 ) * ( 2.0 - 1.0 )", "(9+4)*(2-1)", 13.0),
        ("7.0", "7", 7.0),
    ],
)
def test_infix_equations_become_calculations(tmp_path: Path, equation: str, expression: str, answer: float) -> None:
    item = SVAMP[0] | {"Equation": equation, "Answer": answer}
    (tmp_path / "SVAMP.json").write_text(json.dumps([item]))
    (task,) = word_problems.test(str(tmp_path))
    assert task["expressions"] == [expression]
    _check(task)


@pytest.mark.parametrize(
    ("fields", "expressions"),
    [
        ({"answer": SOLUTION.replace("1,272", "72")}, ["48/2", "48+24"]),
        ({"answer": "9", "solution": "(3 + 42)/5 = <<(3 + 42)/5=9>>9"}, ["(3+42)/5"]),
        ({"answer": "6.625", "equation": "53 / 8", "operations": 1}, ["53/8"]),
        ({"answer": "By reading.\n#### -3"}, []),
    ],
    ids=["annotations", "solution", "equation", "not known"],
)
def test_annotations_become_calculations(tmp_path: Path, fields: dict[str, Any], expressions: list[str]) -> None:
    _lines(tmp_path / "test.jsonl", [{"question": "How many?", **fields}])
    (task,) = word_problems.test(str(tmp_path))
    assert task["expressions"] == expressions
    if expressions:
        _check(task)


def test_variants_in_other_numbers_are_in_one_split(tmp_path: Path) -> None:
    items = [
        {"question": f"{name} has {a} hats and buys {b}. How many?", "answer": f"#### {a + b}"}
        for name in string.ascii_uppercase
        for a, b in ((1, 2), (3, 4))
    ]
    _lines(tmp_path / "train.jsonl", items)
    names = [
        Counter(task["question"].split()[0] for task in tasks)
        for tasks in (word_problems.train(str(tmp_path)), word_problems.validation(str(tmp_path)))
    ]
    assert all(names)
    assert not set(names[0]) & set(names[1])
    assert {count for split in names for count in split.values()} == {2}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"question": "A?", "answer": "x"}', r"train\.jsonl, problem 1: cannot be read: .*'x' is not a number"),
        ('{"problem": "A?"}', r"train\.jsonl, problem 1: cannot be read: KeyError\('answer'\)"),
    ],
)
def test_unreadable_problems_are_named(tmp_path: Path, line: str, error: str) -> None:
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(ValueError, match=error):
        word_problems.train(str(tmp_path))
    (tmp_path / "dev.csv").write_text("Question,Numbers,Equation,Answer\nhow many ?,3 4,+ number0,7\n")
    with pytest.raises(ValueError, match=r"dev\.csv, problem 1: cannot be read: StopIteration"):
        word_problems.test(str(tmp_path))
    (tmp_path / "dev.csv").unlink()
    with pytest.raises(ValueError, match=r"examples: found 'many', expected one of templates, one-operation, "):
        word_problems.train(str(tmp_path), examples="many")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"found none of test\.jsonl, dev\.csv, SVAMP\.json in .*; set `folder`"):
        word_problems.test(str(tmp_path))


@pytest.mark.parametrize(
    ("answer", "right"),
    [("8.1333", True), ("$8.1333.", True), ("8.133", True), ("8.13", False), ("1,200", False), ("8.1333 pens", False)],
)
def test_rounded_answers_have_a_tolerance(answer: str, right: bool) -> None:
    assert agent.is_right(answer, 8.1333, word_problems.TOLERANCE) is right


def test_signs_are_not_part_of_a_number() -> None:
    assert agent.parse_answer(" $1,200.50 ") == 1200.5
    assert agent.parse_answer("20%.") == 20
    assert agent.parse_answer("twenty") is None


@pytest.mark.parametrize("kind", ["one-operation", "two-operations"])
def test_solved_problems_of_the_prompt_are_right(kind: agent.Shown) -> None:
    for _, expression, result in agent.EXAMPLES[kind]:
        assert calculator(expression) == result
    assert len(agent.examples(kind)) == 4 * len(agent.EXAMPLES[kind])


def test_the_configuration_fits_the_reader(tmp_path: Path) -> None:
    _lines(
        tmp_path / "train.jsonl",
        [{"question": f"Q{letter}?", "answer": "<<1+1=2>>\n#### 2"} for letter in string.ascii_lowercase],
    )
    folders = [f"tasks.{phase}.args.folder={tmp_path}" for phase in ("train", "eval")]
    config = load_config(Path(agent.__file__).with_name("word_problems.yaml"), folders)
    assert config.tasks.train is not None
    assert config.tasks.eval is not None
    counts = len(load_tasks(config.tasks.train)), len(load_tasks(config.tasks.eval))
    assert sum(counts) == 26
    assert min(counts) > 0


# --- the data sets themselves


@pytest.mark.parametrize(
    ("name", "operations", "counts"),
    [
        ("svamp", None, (2537, 281, 999)),
        ("svamp", 1, (1622, 183, 762)),
        ("svamp", 2, (868, 94, 236)),
        ("gsm8k", None, (6711, 762, 1319)),
        ("gsm8k", 2, (1590, 169, 287)),
    ],
)
def test_counts_of_the_data_sets(name: str, operations: int | None, counts: tuple[int, int, int]) -> None:
    folder = str(data_set(name))
    splits = [
        read(folder, operations=operations)
        for read in (word_problems.train, word_problems.validation, word_problems.test)
    ]
    assert tuple(map(len, splits)) == counts
    questions = [{task["question"] for task in tasks} for tasks in splits]
    assert not questions[0] & questions[1]
    assert not (questions[0] | questions[1]) & questions[2]
    assert not {question for solved in agent.EXAMPLES.values() for question, _, _ in solved} & set.union(*questions)


def test_equations_of_the_data_set_give_the_answers() -> None:
    folder = str(data_set("svamp"))
    for read in (word_problems.train, word_problems.validation, word_problems.test):
        for task in read(folder):
            assert len(task["expressions"]) == 1
            _check(task)
