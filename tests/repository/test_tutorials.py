"""The files of each tutorial work together: tasks, agent, reward and configuration give a reward in a worker process."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from tests.rollouts.command_runs import roll_out

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
FIRST = next(page for page in PAGES if page.name == "plain-python.md")


def code(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks of ``page`` that start with a file's name; those of the first tutorial fill the gaps."""
    for source in (FIRST, page):
        for block in code(source, "python"):
            if name := re.match(r"# ([\w/]+\.py)\n", block):
                path = folder / name[1]
                path.parent.mkdir(exist_ok=True)
                path.write_text(block, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("agent", "rewards", "program_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# `test_docs.py` runs the blocks of all pages.
SHORT = {"langgraph"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[] if page.stem in SHORT else [pytest.mark.long]) for page in PAGES],
)
def test_the_agent_of_a_tutorial_earns_the_reward_of_its_tasks(page: Path, folder: Path):
    write_files(page, folder)
    runpy.run_path("make_tasks.py")
    task = json.loads((folder / "test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    half_right = json.dumps({"item": task["item"], "count": -1})
    (block,) = code(page, "yaml")
    sections = yaml.safe_load(block)
    del sections["policy"]  # scripted; its tokens are bytes, so the limit does not fit
    (rollout,) = roll_out(folder, sections | {"rollouts": {}}, [task], answer=lambda prompt: half_right)
    assert rollout.error is None
    assert [call.agent for call in rollout.trace.calls] == ["clerk"]
    assert rollout.reward == 0.5


def test_no_order_is_both_a_training_and_a_held_out_task(folder: Path):
    write_files(FIRST, folder)
    runpy.run_path("make_tasks.py")
    train, test = (
        {json.loads(line)["text"] for line in (folder / name).read_text(encoding="utf-8").splitlines()}
        for name in ("train.jsonl", "test.jsonl")
    )
    assert len(test) == 100
    assert not train & test
