"""Tasks from files and functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core import load_config
from lightning_core.config.imports import import_callable
from lightning_core.config.sections import TaskSource
from lightning_core.errors import ConfigError
from lightning_core.rollouts.tasks import check_overlap, given_tasks, held_out_tasks, load_tasks, shared_tasks


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", '{"id": "a", "q": 1}\n\n{"q": 2}\n{"id": 7}\n')
    assert load_tasks(file) == [{"id": "a", "q": 1}, {"id": "1", "q": 2}, {"id": "7"}]
    assert load_tasks(TaskSource(source=file, limit=1)) == [{"id": "a", "q": 1}]


def test_json(tmp_path: Path) -> None:
    assert load_tasks(write(tmp_path / "t.json", json.dumps([{"q": 1}, {"q": 2}]))) == [
        {"id": "0", "q": 1},
        {"id": "1", "q": 2},
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"id": "a"}\n{"id": "a"}\n', r"t\.jsonl:2: duplicate id 'a', first used at .*t\.jsonl:1"),
        ('{"id": "a"}\n{"id"\n', r"t\.jsonl:2: not valid JSON"),
        (
            "[1]\n",
            r"t\.jsonl:1: expected a JSON object on each line, found a list; if the file is one list, name it \.json",
        ),
        ('{"id": null}\n', r"t\.jsonl:1: expected 'id' to be a non-empty string, found None"),
        ('{"id": ""}\n', r"found ''"),
        ('{"id": true}\n', r"found True"),
        ("\n", r"found no tasks, expected at least one"),
    ],
)
def test_refused_lines(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_tasks(write(tmp_path / "t.jsonl", text))


def test_refused_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.train: no file at"):
        load_tasks(str(tmp_path / "none.jsonl"), key="tasks.train")
    with pytest.raises(ConfigError, match=r"expected a list of JSON objects, found dict"):
        load_tasks(write(tmp_path / "t.json", "{}"))
    with pytest.raises(ConfigError, match=r"t\.json:2: not valid JSON"):
        load_tasks(write(tmp_path / "t.json", "[\n{]"))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        load_tasks(write(tmp_path / "t.parquet", ""))


def count(n: int = 2) -> Any:
    return ({"q": index} for index in range(n))


def wrong() -> Any:
    return [{"q": {1, 2}}]


def one() -> Any:
    return {"q": 1}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Path(__file__).stem


def test_functions(here: str) -> None:
    assert load_tasks(TaskSource(source=f"{here}:count", args={"n": 3}, limit=2)) == [
        {"id": "0", "q": 0},
        {"id": "1", "q": 1},
    ]
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_tasks(f"{here}:wrong")
    with pytest.raises(ConfigError, match="returned dict, expected a list of tasks"):
        load_tasks(f"{here}:one")


def test_import_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "broken_agent.py", "import a_package_that_is_not_there\n")
    with pytest.raises(ConfigError, match=r"broken_agent.py:1, in <module>: import a_package_that_is_not_there\n"):
        import_callable("broken_agent:solve", key="agent")
    with pytest.raises(ConfigError, match="agent: no module 'no_such_module' for 'no_such_module:f'"):
        import_callable("no_such_module:f", key="agent")
    with pytest.raises(ConfigError, match="has no 'nobody'"):
        import_callable(f"{here}:nobody", key="agent")
    with pytest.raises(ConfigError, match="is of type"):
        import_callable("json:__name__", key="agent")


def test_held_out_tasks_that_are_training_tasks_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    train = [{"id": "a", "question": "1 + 1", "n": 1}, {"id": "b", "question": "2 + 2", "n": 2}]
    held_out = [
        {"id": "x", "n": 2, "question": "2 + 2", "split": "easy"},
        {"id": "a", "question": "3 + 3", "n": 1},
        {"id": "y"},
    ]
    assert shared_tasks(train, held_out) == {"x": "b"}, "another id, split and order of keys"
    assert shared_tasks([{"id": "x"}], [{"id": "x"}, {"id": "y"}]) == {"x": "x"}, "tasks that are only an id"
    odd = [{"id": "a", "grid": {1: "x", "b": 2}}, {"id": "b", "array": np.arange(2000)}]
    changed = np.where(np.arange(2000) == 1000, 0, np.arange(2000))
    assert shared_tasks(odd, [{**odd[0], "id": "y"}, {"id": "z", "array": changed}]) == {"y": "a"}, "not JSON"
    keys = [{"id": f"gsm-{n}", "level": "hard"} for n in range(3)]
    assert shared_tasks(keys[:2], keys[1:]) == {"gsm-1": "gsm-1"}, "tasks whose id is the content"
    config = load_config({"policy": {"model": "m"}})
    check_overlap(config, train, held_out[1:])
    expected = "1 of 3 held-out tasks are also training tasks, such as 'x', which is the training task 'b'"
    with pytest.raises(ConfigError, match=f"tasks.eval: {expected}.*set tasks.allow_overlap: true"):
        check_overlap(config, train, held_out)
    assert caplog.text == ""
    check_overlap(load_config({"policy": {"model": "m"}}, ["tasks.allow_overlap=true"]), train, held_out)
    assert expected in caplog.text


def test_the_number_of_tasks_and_ids_are_never_silently_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "t.jsonl", '{"q": 1}\n{"q": 2}\n')
    config = load_config({"policy": {"model": "m"}, "tasks": {"eval": file}, "eval": {"tasks": 5}})
    assert len(held_out_tasks(config)) == 2
    assert "2 of 2 tasks have no id and are numbered by their position" in caplog.text
    assert "eval.tasks is 5, but tasks.eval has 2 tasks; all are evaluated" in caplog.text


def test_tasks_passed_in_python_need_no_ids() -> None:
    assert [task["id"] for task in given_tasks([{"q": 1}, {"id": 7}], "tasks.train")] == ["0", "7"]
    with pytest.raises(ConfigError, match=r"tasks\[1\]: expected a JSON object, found str: 'two'"):
        given_tasks([{"q": 1}, "two"], "tasks.train")  # type: ignore[list-item]
