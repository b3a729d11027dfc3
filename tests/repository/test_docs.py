"""The documentation is correct: its Python runs, its configurations load, its links and paths exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from docs._generate.messages import messages_page
from lightning_core.config import load_config
from lightning_core.tools.cli.main import parse
from lightning_core.tools.switch.plan import SwitchPlan

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
    ]
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_python_blocks_run_one_after_the_other(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, name(page), "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "yaml")], ids=name)
def test_yaml_blocks_are_valid_configurations(page: Path):
    for block in blocks(page, "yaml"):
        data = yaml.safe_load(block)
        if "models" in data:
            SwitchPlan.model_validate(data)
            continue
        load_config(data if "policy" in data else {"policy": {"model": "m"}, **data})


def test_commands_in_the_docs_exist():
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", "").splitlines():
                command = shlex.split(line, comments=True)
                if command[:1] == ["lightning-rl"]:
                    parse(command[1:])


def test_links_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{name(page)} links to {target}, which does not exist"


def test_the_page_of_messages_has_warnings_notes_and_errors_of_the_source() -> None:
    rows = dict(re.findall(r"^\| (.*) \| (\w+) \|$", messages_page(), re.MULTILINE))
    assert rows["the running responses exceed the … GiB planned for them: the newest of … waits, and its context may be computed "
                "again. Lower rollouts.concurrency or trainer.cache\\_gb to avoid this"] == "warning"  # fmt: skip
    assert rows["held-out reward after …: …"] == "note"
    assert rows["eval.every is …, but tasks.eval is not set; set it, or remove eval.every"] == "error"
