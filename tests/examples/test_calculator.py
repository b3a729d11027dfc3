"""The calculator's tasks are held out as documented, and its tool only calculates."""

import re
from collections import Counter

import pytest

from examples.calculator import tasks, without_examples
from examples.calculator.agent import PROMPT, evaluate
from lightning_core.testing import playground


def test_splits_share_no_question_and_no_pair_of_numbers():
    train, test = tasks.train(), tasks.test()
    assert (len(train), len(test)) == (2000, 200)
    assert not {t["question"] for t in train} & {t["question"] for t in test}
    assert not {frozenset(t["pair"]) for t in train} & {frozenset(t["pair"]) for t in test}
    assert set(Counter(t["kind"] for t in test)) == {"times", "plus", "minus", "divided"}
    assert train == tasks.train()
    assert not {t["question"] for t in test} & {text for _, text in PROMPT}


def test_answers_are_right_and_the_numbers_stand_in_the_question():
    for task in (*tasks.train(), *tasks.test()):
        a, b = task["pair"]
        answer = {"times": a * b, "plus": a + b, "minus": a - b, "divided": a}[task["kind"]]
        assert task["answer"] == answer > 0
        shown = sorted([a * b, b] if task["kind"] == "divided" else [a, b])
        assert sorted(map(int, re.findall(r"\d+", task["question"]))) == shown


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*34", "408"),
        ("10/4", "2.5"),
        ("-(2+3)*4", "-20"),
        ("1/0", None),
        ("2**99", None),
        ("9.5+", None),
        ("x", None),
    ],
)
def test_the_tool_does_arithmetic_only(expression: str, result: str | None):
    assert evaluate(expression) == result


def test_the_agent_without_examples_differs_from_the_teacher_in_its_prompt_only():
    task = tasks.train()[0]
    a, b = task["pair"]
    with playground([f"calc({a}+{b})", str(a + b)], train=["solver"]) as run:
        reward = without_examples.solve({**task, "answer": a + b})
    assert reward == 1.0
    first, second = run.trace.calls
    assert [(m["role"], m["content"]) for m in first.messages] == [PROMPT[0], ("user", task["question"])]
    for call in (first, second):
        teacher = without_examples.with_examples(call.messages)
        assert [(m["role"], m["content"]) for m in teacher[: len(PROMPT)]] == PROMPT
        assert teacher[len(PROMPT) :] == list(call.messages[1:])
