"""Wrong task files: exit code 2, with the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.try_command import Try

GOOD = '{"id": "a", "prompt": "one"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["tasks.train = tasks.jsonl: found no tasks, expected at least one"]),
        ("\n\n", ["found no tasks"]),
        (f"{GOOD}{{'id': 'b'}}\n", ["tasks.jsonl:2: not valid JSON", "at column 2; use double quotes"]),
        (f'{GOOD}{{"id": "b"\n', ["tasks.jsonl:2: not valid JSON", "at column"]),
        (f'{GOOD}\n{{"id": "b",}}\n', ["tasks.jsonl:3: not valid JSON"]),
        (
            '[\n{"id": "a"}\n]\n',
            [
                "tasks.jsonl:1: expected a JSON object on each line, found a list; if the file is one list, name it .json"
            ],
        ),
        ('[{"id": "a"}]\n', ["tasks.jsonl:1: expected a JSON object on each line, found a list"]),
        ('"a question"\n', ["tasks.jsonl:1: expected a JSON object, found str: 'a question'"]),
        (GOOD * 2, ["tasks.jsonl:2: duplicate id 'a', first used at tasks.jsonl:1; ids must be unique"]),
        ('{"id": null, "prompt": "x"}\n', ["tasks.jsonl:1: expected 'id' to be a non-empty string, found None"]),
        ('{"id": 1.5}\n', ["tasks.jsonl:1: expected 'id' to be a non-empty string, found 1.5"]),
        ('{"id": ""}\n', ["expected 'id' to be a non-empty string, found ''"]),
        ("id,prompt\na,one\n", ["tasks.jsonl:1: not valid JSON"]),
        ('{"a":' + "[" * 100_000, ["tasks.jsonl:1: not valid JSON: too deeply nested"]),
    ],
)
def test_a_wrong_line_is_named(home: Path, attempt: Try, content: str, words: list[str]) -> None:
    (home / "tasks.jsonl").write_text(content)
    attempt(["train", "lightning.yaml", "tasks.train=tasks.jsonl"], 2, *words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nosuch.jsonl", None, ["tasks.train: no file at 'nosuch.jsonl'; the working directory is"]),
        ("utf16.jsonl", GOOD.encode("utf-16"), ["utf16.jsonl:1: not UTF-8 text; save the file as UTF-8"]),
        ("latin.jsonl", GOOD.encode() + b'{"id": "caf\xe9"}\n', ["latin.jsonl:2: not UTF-8 text"]),
        ("one.json", b'{"id": "a"}', ["one.json: expected a list of JSON objects, found dict; use .jsonl"]),
        ("cut.json", b'[\n{"id": "a"},\n', ["cut.json:3: not valid JSON"]),
        ("tasks.csv", b"id\na\n", ["expected a path that ends in .jsonl, .json, .parquet, or 'module:callable'"]),
    ],
)
def test_a_wrong_file_is_named(home: Path, attempt: Try, name: str, content: bytes | None, words: list[str]) -> None:
    if content is not None:
        (home / name).write_bytes(content)
    attempt(["train", "lightning.yaml", f"tasks.train={name}"], 2, *words)


def test_a_damaged_parquet_file_is_named(home: Path, attempt: Try) -> None:
    pytest.importorskip("pyarrow")
    (home / "bad.parquet").write_bytes(b"not parquet")
    attempt(["train", "lightning.yaml", "tasks.train=bad.parquet"], 2, "bad.parquet: not a readable parquet file")


def test_a_folder_in_place_of_tasks_is_named(home: Path, attempt: Try) -> None:
    (home / "data.jsonl").mkdir()
    attempt(["train", "lightning.yaml", "tasks.train=data.jsonl"], 2, "tasks.train: 'data.jsonl' is a folder")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"id": "train0", "prompt": "say 0"}\n', ["1 of 1 held-out tasks are also training tasks, such as 'train0':"]),
        ('{"id": "other", "prompt": "say 1"}\n', ["such as 'other', which is the training task 'train1'"]),
        ('{"prompt": "new"}\n{"prompt": "say 2"}\n', ["1 of 2 held-out tasks", "'1', which is the training task 'train2'"]),
    ],
)  # fmt: skip
def test_held_out_tasks_that_are_trained_on_are_refused(home: Path, attempt: Try, lines: str, words: list[str]) -> None:
    (home / "eval.jsonl").write_text(lines)
    attempt(["train", "lightning.yaml"], 2, *words, "tasks.allow_overlap: true")
