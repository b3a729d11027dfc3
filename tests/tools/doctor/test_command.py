"""The command: exit codes, JSON, arguments, interrupts, and its page."""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module
from pathlib import Path

import pytest

from docs._generate.doctor import update
from lightning_core.tools.cli.main import main
from lightning_core.tools.doctor.examine import CHECKS
from tests import warm

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"
SECTIONS = {
    "agent": "tests.tools.doctor.agents:healthy",
    "agents": {"train": ["doctored"]},
    "tasks": {"train": "tests.tools.doctor.agents:tasks", "eval": "tests.tools.doctor.agents:held_out"},
    "policy": {"model": "none"},
    "rollouts": {"executor": "task"},
}
DOCTOR = """
import signal, sys
from lightning_core.tools.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
sys.exit(main())
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "lightning.yaml"
    path.write_text(json.dumps({**SECTIONS, "run": {"dir": str(tmp_path / "runs")}}))
    return path


@pytest.fixture
def with_torch() -> None:
    """Without torch, the doctor finds a problem in any configuration."""
    import_module("torch")


@pytest.mark.usefixtures("with_torch")
def test_the_findings_as_json_and_0_without_a_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "--no-model", "--json", "--tasks", "1", "--attempts", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {tuple(finding) for finding in found} == {("section", "name", "level", "found", "advice")}
    (speakers,) = [f for f in found if f["name"] == "speakers"]
    assert speakers["found"] == "doctored → policy: 2 calls"
    assert list(config.parent.iterdir()) == [config]


@pytest.mark.usefixtures("with_torch")
def test_a_problem_is_exit_code_1(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "--no-model", "agents.train=[doctord]"]) == 1
    text = capsys.readouterr().out
    assert "  problem  stopped" in text
    assert "1 problem, " in text


def test_a_wrong_configuration_is_exit_code_2(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "rollouts.temprature=1"]) == 2
    assert main(["doctor", str(config), "agent=tests.tools.doctor.agents:nothing"]) == 2
    assert main(["doctor", str(config), "--attempts", "1"]) == 2
    assert main(["doctor", "rollouts.temperature=1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "rollouts.temprature" in shown.err
    assert "has no 'nothing'" in shown.err
    assert "--attempts 1: expected 2 or more" in shown.err
    assert "lightning-rl doctor CONFIG key=value" in shown.err


@pytest.mark.usefixtures("with_torch")
def test_what_an_agent_prints_is_not_in_the_json(config: Path) -> None:
    command = ["-m", "lightning_core.tools.cli", "doctor", str(config), "--no-model", "--json", "--tasks", "1"]
    done = warm.run([*command, "agent=tests.tools.doctor.agents:prints", "rollouts.executor=process"], check=True)
    assert "speakers" in {finding["name"] for finding in json.loads(done.stdout)}
    assert "printed by the agent" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Interrupted in the first rollout, whose agent never returns."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    options = ["doctor", str(config), "--no-model", "agent=tests.tools.doctor.agents:hangs"]
    with warm.Warm(["-c", DOCTOR, *options], env=environment, merged=True) as process:
        for line in process.stdout:
            if "hanging" in line:
                break
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    assert [path.name for path in scratch.iterdir()] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [config.name, "scratch"]


def test_every_check_has_a_name_of_its_own_and_its_page_is_up_to_date() -> None:
    names = [check.name for table in CHECKS for check in table.all]
    assert len(names) == len(set(names))
    text = (DOCS / "doctor.md").read_text(encoding="utf-8")
    assert update(text) == text, "run: python -m docs._generate.doctor docs/doctor.md"
    assert all(f"| `{name}` |" in text for name in names)
