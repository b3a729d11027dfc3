"""The recipes in CONTRIBUTING.md: their blocks run, their tests pass, and what they add can be configured."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs._generate.rules import advantage_table
from lightning_core import load_config
from lightning_core.config import sections
from lightning_core.credit import ADVANTAGE_RULES
from lightning_core.errors import ConfigError
from lightning_core.observers import trackers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(title: str) -> list[str]:
    """The Python blocks of a section."""
    return re.findall(r"^```python\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)


def files(title: str) -> dict[str, str]:
    """The Python files of a section, by path."""
    return dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```', section(title), re.DOTALL | re.MULTILINE))


class Copy:
    """A copy of the package, which is changed as a contributor changes the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "lightning_core", folder / "lightning_core")

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace the only ``old`` in a file."""
        text = (self.folder / path).read_text(encoding="utf-8")
        assert text.count(old) == 1
        self.write(path, text.replace(old, new))

    def run(self, program: str, *arguments: str) -> str:
        """What ``program`` prints in a new interpreter that imports the copy."""
        path = os.pathsep.join(map(str, [self.folder, ROOT, ROOT / "integrations"]))
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def contributed_tests(source: str, file: str) -> list[Callable[..., None]]:
    """The tests that a block defines."""
    namespace: dict[str, Any] = {"__name__": "contributed"}
    exec(compile(source, file, "exec"), namespace)
    return [value for name, value in namespace.items() if name.startswith("test_")]


def configure(**credit: Any) -> None:
    load_config({"policy": {"model": "m"}, "credit": credit})


def test_a_credit_rule_is_one_function_and_one_test() -> None:
    with pytest.raises(ConfigError, match="'max-scaled'"):
        configure(advantage="max-scaled")
    rule, test = blocks("Add a credit rule")
    namespace: dict[str, Any] = {"__name__": "contributed"}
    exec(compile(rule, "advantage_rules.py", "exec"), namespace)
    (check,) = contributed_tests(test, "test_credit.py")
    check()
    configure(advantage="max-scaled", advantage_args={"floor": 0.1})
    with pytest.raises(ConfigError, match="has no argument 'flor'"):
        configure(advantage="max-scaled", advantage_args={"flor": 0.1})
    assert "`(v − μ) / d`, with d the largest distance from μ." in advantage_table()
    assert ADVANTAGE_RULES["max-scaled"].function is namespace["max_scaled"]


def test_a_tracker_is_one_module_and_its_name_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, test = blocks("Add a tracker")
    (check,) = contributed_tests(test, "test_csv.py")
    with pytest.raises(ConfigError, match="found 'csv', expected tensorboard, "):
        check(tmp_path)
    monkeypatch.setattr(sections, "TRACKERS", (*sections.TRACKERS, "csv"))
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "csv.py").write_text(module, encoding="utf-8")
    monkeypatch.setattr(trackers, "__path__", [*trackers.__path__, str(folder)])
    check(tmp_path)
    namespace = vars(sys.modules.pop("lightning_core.observers.trackers.csv"))
    assert (namespace["PACKAGE"], namespace["TRACKER"].__name__) == ("csv", "CsvTracker")


CONFIGURATION = """\
policy:
  model: m
rollouts:
  max_tokens: 64
algorithm:
  overlong:
    free: 64
    penalti: 0.5
"""
PROBLEMS = """
import sys
from lightning_core import LightningError, load_config

for path in sys.argv[1:]:
    try:
        load_config(path)
    except LightningError as error:
        print(error)
"""
RUN_TEST = """
import functools, runpy, sys
from pathlib import Path

from lightning_core.rollouts import local_agents

# Importing the frameworks, which this agent does not use, takes seconds.
local_agents.patched = functools.partial(local_agents.patched, ())
for name, value in runpy.run_path(sys.argv[1]).items():
    if name.startswith("test_"):
        value(Path(sys.argv[2]))
        print(name)
"""


def test_a_signal_is_one_folder_and_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a run draws its curve")
    copy = Copy(tmp_path / "repository")
    for path, text in files("Add a signal").items():
        copy.write(path, text)
    copy.write("lightning_core/signals/overlong/__init__.py", '"""A penalty on long responses."""\n')
    copy.write("misspelt.yaml", CONFIGURATION)
    copy.write("too-many.yaml", CONFIGURATION.replace("penalti", "penalty"))
    with pytest.raises(ConfigError, match=r"yaml:6: algorithm\.overlong: unknown key"):
        load_config(copy.folder / "too-many.yaml")
    copy.replace("lightning_core/credit/signal_names.py", "\n)\n", '\n    "overlong",\n)\n')
    found = copy.run(PROBLEMS, "misspelt.yaml", "too-many.yaml")
    assert "misspelt.yaml:8: algorithm.overlong.penalti: unknown key" in found
    assert "too-many.yaml:7: algorithm.overlong.free: found 64, expected less than rollouts.max_tokens (64)" in found

    ran = copy.run(RUN_TEST, "tests/signals/test_overlong.py", str(tmp_path / "runs"))
    assert ran.split()[-1] == "test_tokens_after_the_free_ones_have_a_lower_advantage"
    (recorded,) = (tmp_path / "runs").rglob("metrics.jsonl")
    steps = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    assert [step["tokens_overlong"] > 0 for step in steps] == [True, True]


CHAT = """
import json
import sys

import httpx

from lightning_core import trace_to_transitions, transitions_to_rows
from lightning_core.capture import scope
from lightning_core.testing import playground

with playground(["Four.", "Still four."], train=["writer"], integrations=[]) as run, scope("writer"):
    url = (run.endpoint if sys.argv[1] == "endpoint" else sys.argv[1]) + "/v2/chat"
    headers = {"authorization": f"Bearer {run.api_key}"}
    messages = [{"role": "user", "content": "2 + 2?"}]
    with httpx.Client(headers=headers, trust_env=False) as client:
        response = client.post(url, json={"model": "command", "messages": messages, "max_tokens": 64})
        response.raise_for_status()
        assert response.json()["message"]["content"] == [{"type": "text", "text": "Four."}]
        assert response.json()["finish_reason"] == "COMPLETE"

        messages += [response.json()["message"], {"role": "user", "content": [{"type": "text", "text": "Sure?"}]}]
        with client.stream("POST", url, json={"model": "command", "messages": messages, "stream": True}) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
        texts = [e["delta"]["message"]["content"]["text"] for e in events if e["type"] == "content-delta"]
        assert "".join(texts) == "Still four."
        assert events[-1]["delta"]["usage"]["tokens"]["output_tokens"] == len("Still four.") + 1

        response = client.post(url, json={"model": "command", "messages": messages, "tools": [{"type": "function"}]})
        assert (response.status_code, response.json()["message"].partition(",")[0]) == (
            400,
            'tools is [{"type": "function"}]',
        )
assert [c.context for c in run.trace.calls] == ["new", "clean", None]  # the last one was refused
transitions = trace_to_transitions(run.trace, agents={"writer"})
assert [bytes(t.output_ids[:-1].astype("u1")) for t in transitions] == [b"Four.", b"Still four."]
(row,) = transitions_to_rows(transitions)
print("one row of both calls")
"""


@pytest.mark.long
def test_a_wire_format_is_one_module_and_its_name_in_two_lists(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    module = (ROOT / "tests" / "repository" / "cohere_chat.py").read_text(encoding="utf-8")
    copy.write("lightning_core/dialects/cohere_chat.py", module)
    package = "lightning_core/dialects/__init__.py"
    line = "from lightning_core.dialects import gemini"
    copy.replace(package, line, "from lightning_core.dialects import cohere_chat, gemini")
    copy.replace(package, "completions)\n", "completions, cohere_chat)\n")
    assert "one row" in copy.run(CHAT, "endpoint")
    copy.replace("lightning_core/propagation/shapes.py", "_ROUTES = (\n", '_ROUTES = (\n    "/v2/chat",\n')
    assert "one row" in copy.run(CHAT, "https://api.cohere.com")
