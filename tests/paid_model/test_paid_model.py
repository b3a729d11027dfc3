"""From a paid model to one's own, as docs/guides/replace-a-paid-model.md describes it. The app never changes.

The commands and the YAML are the page's. A stand-in for the provider, a small model and less of everything replace what `stand_ins` and
`SMALL` name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from lightning_core.otel import read_traces
from lightning_core.tools.cli.main import main
from lightning_core.tools.improve import stage
from tests import warm
from tests.paid_model.project import APP, ROOT, paid_model
from tests.tiny_model import make_tiny_model
from tests.warm import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLI = "lightning_core.tools.cli"
PAGE = ROOT / "docs" / "guides" / "replace-a-paid-model.md"
SMALL: Mapping[str, Mapping[str, Any]] = {
    "policy": {"max_context": 512, "dtype": "float32"},
    "rollouts": {"tasks_per_step": 4, "group_size": 4, "max_tokens": 4, "executor": "task"},
    "trainer": {"steps": 2, "learning_rate": 5e-3, "checkpoint_every": 0},
}
"""Settings beside those of the page."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def stand_ins(provider: str, model: str) -> Mapping[str, str]:
    """Texts of the page, and what replaces them."""
    return {
        "https://api.openai.com/v1": provider,
        "Qwen/Qwen2.5-1.5B-Instruct": model,
        "--share 0.1 ": "",  # of 40 customers, not of thousands
        "--minutes 60 ": "",  # trainer.steps ends the training, in place of three rounds with an evaluation each
        "serve switch.yaml": "serve switch.yaml --port 0",
    }


@pytest.fixture
def provider() -> Iterator[str]:
    with paid_model() as url:
        yield url


class Reader:
    """Follows the page in the current folder. Commands, and the stages of `improve`, start in processes that have imported torch."""

    def __init__(self, provider: str, model: Path) -> None:
        self.stand_ins = dict(stand_ins(provider, str(model)))
        self.used = set[str]()

    def text(self, text: str) -> str:
        """``text`` of the page as it is used here."""
        for old, new in self.stand_ins.items():
            if old in text:
                self.used.add(old)
                text = text.replace(old, new)
        return text

    def words(self, command: str) -> list[str]:
        """The arguments of ``lightning-rl`` in a command line of the page, as a shell passes them on."""
        command = self.text(command)
        listed = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
        program, *words = listed.stdout.splitlines()
        assert program == "lightning-rl"
        return words

    def run(self, command: str) -> str:
        """What ``command`` prints."""
        return printed("-m", CLI, *self.words(command))

    @contextmanager
    def serving(self, command: str) -> Generator[str]:
        """The URL of ``lightning-rl serve``."""
        with Warm(["-m", CLI, *self.words(command)]) as process:
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if "feedback" in line:
                    break
            found = re.search(r"POST (http://\S+)/feedback", "".join(lines))
            assert found, "".join(lines)
            try:
                yield found[1]
            finally:
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0


def printed(*arguments: str) -> str:
    done = warm.run(arguments)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def commands() -> list[str]:
    """The command lines of the page."""
    return [line.partition(" #")[0].strip() for block in blocks("bash") for line in block.splitlines()]


def test_the_page_leads_from_a_paid_model_to_one_s_own(
    tmp_path: Path, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'integrations'}")
    monkeypatch.setenv("PROVIDER_URL", provider)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    start = SimpleNamespace(Popen=lambda words: Warm(words[1:], merged=True))
    monkeypatch.setattr(stage, "subprocess", start)
    reader = Reader(provider, make_tiny_model(tmp_path / "model"))
    shutil.copy(APP, tmp_path / "app.py")
    (tmp_path / "prices.yaml").write_text("gpt-4o-mini: {input: 10, output: 40}\npolicy: {input: 0.01, output: 0.01}\n")
    for name, numbers in (("train", range(12)), ("eval", range(100, 112))):
        tasks = [json.dumps({"id": f"{name}{i}", "question": f"say {i}"}) for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(tasks))
    config, plan = blocks("yaml")
    sections: Any = yaml.safe_load(reader.text(config))
    for name, settings in SMALL.items():
        sections[name] = {**sections.get(name, {}), **settings}
    (tmp_path / "lightning.yaml").write_text(yaml.safe_dump(sections))
    record, baseline, improve, compare, serve, show, promote, rollback, learn = commands()

    assert "120 calls recorded" in reader.run(record)
    traces = read_traces(tmp_path / "traces")
    agents = Counter(call.agent for trace in traces for call in trace.calls)
    assert agents == {"planner": 40, "writer": 40, "critic": 40}

    assert "1.000" in reader.run(baseline)

    assert main(reader.words(improve)) == 0
    (folder,) = (tmp_path / "runs").glob("improve-*")
    report = (folder / "report.md").read_text()
    rewards = {n: float(r) for n, r in re.findall(r"^\| ([^|]+?) \| (\d\.\d+) ", report, re.MULTILINE)}
    assert rewards["provider (gpt-4o-mini)"] == 1.0
    assert rewards["policy"] < 0.7 < rewards["warm start, evaluated"]
    assert re.search(r"^\| prompts \|", report, re.MULTILINE)
    assert "Serve it: `lightning-rl serve" in report
    reader.stand_ins["improve-DATE"] = folder.name

    assert re.search(r"USD of 1,000 rollouts.*\$", reader.run(compare))

    (tmp_path / "switch.yaml").write_text(reader.text(plan))
    with reader.serving(serve) as url:
        monkeypatch.setenv("PROVIDER_URL", url)
        answers = [line.rsplit(maxsplit=1) for line in printed("-m", "app", "24").splitlines()]
        arms = Counter[str]()
        for text, response in answers:
            reward = sum("a" <= c <= "z" for c in text) / 4
            given = httpx.post(f"{url}/feedback", json={"response": response, "reward": reward})
            arms[given.json()["arm"]] += 1
        assert arms.total() == 24
        assert set(arms) == {"trained", "gpt"}
        shown = reader.run(show)
        assert re.search(r"writer\s+trained", shown)
        assert "writer: reward of gpt - trained:" in shown
        root = url.removesuffix("/v1")
        assert "writer: trained 1 (before" in reader.run(f"{promote} --url {root}")
        assert len(printed("-m", "app", "2").splitlines()) == 2
        assert "(before: trained 1)" in reader.run(f"{rollback} --url {root}")
    served = read_traces(tmp_path / "served")
    rewarded = [trace for trace in served if trace.rewards]
    assert len(rewarded) == 24
    assert {call.agent for trace in rewarded for call in trace.calls} == {"writer"}
    assert "checkpoint:" in reader.run(learn)
    assert reader.used == set(reader.stand_ins), "the page has changed: adapt stand_ins"
    assert (tmp_path / "app.py").read_bytes() == APP.read_bytes()
