"""The road from a paid model to one's own, as a user walks it: record, measure, learn, train, compare, switch. The app never changes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Routing
from lightning_core.otel import read_traces
from lightning_core.tools.serving import ServingEndpoint
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

APP = Path(__file__).with_name("app.py")
ROOT = Path(__file__).parents[2]


@contextmanager
def paid_model() -> Generator[str]:
    """The URL of a paid model, which answers as customers want."""
    backend = ScriptedBackend(lambda prompt: "abcd", models=["large"])
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing()) as endpoint:
        yield endpoint.url


@pytest.fixture
def provider() -> Iterator[str]:
    with paid_model() as url:
        yield url


class Shell:
    """Runs commands in a folder, as a user does."""

    def __init__(self, folder: Path, provider: str) -> None:
        self.folder = folder
        paths = os.pathsep.join((str(ROOT), str(ROOT / "integrations")))
        self.environment = {**os.environ, "PROVIDER_URL": provider, "PYTHONPATH": paths, "COLUMNS": "200"}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "lightning_core.tools.cli", *words]

    def run(self, *words: str, **environment: str) -> str:
        done = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def app(self, customers: int, **environment: str) -> list[list[str]]:
        """The answers of the app to some customers, each with its id."""
        done = subprocess.run(
            [sys.executable, str(APP), str(customers)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.rsplit(maxsplit=1) for line in done.stdout.splitlines()]

    @contextmanager
    def serving(self, *words: str) -> Generator[str]:
        """The URL of ``lightning-rl serve``."""
        with subprocess.Popen(
            self.command("serve", *words, "--port", "0"),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
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
                process.communicate(timeout=60)
            assert process.returncode == 0


def write_project(folder: Path, provider: str) -> None:
    """Write ``c.yaml``, which trains the app's writer, and ``prices.yaml``."""
    (folder / "prices.yaml").write_text("large: {input: 10, output: 40}\npolicy: {input: 0.01, output: 0.01}\n")
    config = {
        "agent": "tests.road.app:solve",
        "tasks": {"train": "tests.road.app:tasks", "eval": "tests.road.app:held_out"},
        "agents": {"train": ["writer"]},
        "policy": {
            "model": str(make_tiny_model(folder / "model")),
            "max_context": 512,
            "dtype": "float32",
            "upstream": {"base_url": provider},
        },
        "rollouts": {"tasks_per_step": 4, "group_size": 8, "max_tokens": 4},
        "trainer": {"steps": 3, "learning_rate": 5e-3, "checkpoint_every": 0},
        "prices": "prices.yaml",
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config))


def write_switch(folder: Path, run: Path, provider: str) -> None:
    """Write ``switch.yaml``: half of the writer's conversations for ``run``."""
    plan = {
        "models": {
            "trained": {"run": str(run)},
            "large": {"base_url": provider},
        },
        "agents": {"writer": {"arms": {"trained": 0.5, "large": 0.5}, "fallback": "large"}},
        "default": "large",
        "named": [{"name": "writer", "contains": "You write"}],
        "folder": "switch",
    }
    (folder / "switch.yaml").write_text(yaml.safe_dump(plan))


def test_from_a_paid_model_to_one_s_own(tmp_path: Path, provider: str) -> None:
    shell = Shell(tmp_path, provider)
    write_project(tmp_path, provider)

    recorded = shell.run("record", "--to", "traces", "-c", "c.yaml", "--", sys.executable, str(APP), "40")
    assert "120 calls recorded" in recorded
    traces = [trace for file in (tmp_path / "traces").iterdir() for trace in read_traces(file)]
    assert Counter(call.agent for trace in traces for call in trace.calls) == {
        "planner": 40,
        "writer": 40,
        "critic": 40,
    }

    shell.run("improve", "c.yaml", "--model", "large", "--traces", "traces", "--skip", "prompts")
    (road,) = (tmp_path / "runs").glob("improve-*")
    report = (road / "report.md").read_text()
    rewards = {n: float(r) for n, r in re.findall(r"^\| ([^|]+?) \| (\d\.\d+) ", report, re.MULTILINE)}
    assert rewards["provider (large)"] == 1.0
    assert rewards["policy"] < 0.7 < rewards["warm start, evaluated"]
    assert "Serve it: `lightning-rl serve" in report
    (provider_run,) = road.glob("baseline-*")
    compared = shell.run("runs", "compare", str(provider_run), str(road / "trained"), "--prices", "prices.yaml")
    assert re.search(r"USD of 1,000 rollouts.*\$", compared)

    write_switch(tmp_path, road / "trained", provider)
    with shell.serving("switch.yaml", "--record", "served") as url:
        answers = shell.app(24, PROVIDER_URL=url)
        assert len(answers) == 24
        arms = Counter[str]()
        for text, response in answers:
            reward = sum("a" <= c <= "z" for c in text) / 4
            given = httpx.post(f"{url}/feedback", json={"response": response, "reward": reward})
            arms[given.json()["arm"]] += 1
        assert set(arms) == {"trained", "large"}
        root = url.removesuffix("/v1")
        assert "writer: trained 1 (before" in shell.run("switch", "promote", "writer", "trained", "--url", root)
        assert len(shell.app(2, PROVIDER_URL=url)) == 2
        back = shell.run("switch", "rollback", "writer", "--url", root)
        assert "(before: trained 1)" in back
    shown = shell.run("switch", "show", "switch", "--prices", "prices.yaml")
    assert re.search(r"writer\s+trained", shown)
    assert "writer: reward of large - trained:" in shown
    served = [trace for file in (tmp_path / "served").iterdir() for trace in read_traces(file)]
    rewarded = [trace for trace in served if trace.rewards]
    assert len(rewarded) == 24
    assert {call.agent for trace in rewarded for call in trace.calls} == {"writer"}
    learned = shell.run("sft", "served", "-c", "c.yaml", "--min-reward", "1", "run.name=again")
    assert "checkpoint:" in learned
