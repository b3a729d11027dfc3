"""Agents in containers, with Podman."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_core import trainable
from lightning_core.capture import Container
from lightning_core.capture.containers import new_name, remove_container
from lightning_core.errors import InfrastructureError
from lightning_core.propagation import ProgramResult, launch
from lightning_core.testing import open_playground
from tests.containers.conftest import podman
from tests.rollouts.command_runs import roll_out

ASK = """
curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
    -H 'Content-Type: application/json' -d '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}' > answer.json
"""
WORKS = f"""
set -e
{ASK}
grep -q '"yes"' answer.json
test "$(cat given.txt)" = "of task a"
test "$(ls)" = "answer.json
given.txt"
test -z "$SECRET_OF_THE_HOST"
test ! -e /proc/1/root{Path.cwd()}
grep -q '"id": "a"' "$LIGHTNING_TASK_FILE"
touch "$HOME/made"
echo '{{"reward": 1}}'
"""


def agent(image: str, script: str, **fields: Any) -> dict[str, Any]:
    command = {"command": ["sh", "-c", script], "name": "coder", "container": {"image": image, "runtime": "podman"}}
    return {"agent": {**command, **fields}}


@pytest.fixture(autouse=True)
def none_is_left(image: str) -> Any:
    yield
    assert podman("ps", "--all", "--format={{.Names}}", "--filter=name=^lightning-").stdout == ""


def test_a_program_in_a_container_is_trained(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    (rollout,) = roll_out(tmp_path, agent(image, WORKS, files={"given.txt": "of task {task[id]}"}))
    assert (rollout.status, rollout.reward, rollout.error) == ("ok", 1.0, None)
    assert [(c.agent, c.trained) for c in rollout.trace.calls] == [("coder", True)]


def test_at_the_time_limit_the_container_is_removed(image: str, tmp_path: Path) -> None:
    stubborn = f"{ASK}\ntrap '' TERM; while true; do sleep 1; done"
    (rollout,) = roll_out(tmp_path, {**agent(image, stubborn), "rollouts": {"timeout_seconds": 5}})
    assert (rollout.status, len(rollout.trace.calls)) == ("failed", 1)


def test_a_container_that_cannot_start_is_no_failure_of_the_agent(image: str, tmp_path: Path) -> None:
    missing = agent("localhost/no-such-image", "true")
    with pytest.raises(InfrastructureError, match=r"podman could not run 'sh': .*no-such-image"):
        roll_out(tmp_path, missing)
    nothing = agent(image, "true", command=["no-such-program"])
    with pytest.raises(InfrastructureError, match=r"podman could not run 'no-such-program'"):
        roll_out(tmp_path, nothing)


def test_a_program_cannot_change_how_its_container_is_removed(image: str, tmp_path: Path) -> None:
    """Nothing that the host reads afterwards is in a folder that the container shares."""
    script = f"""{ASK}
ls -a .. > seen
for file in container created environment; do echo 'sh x' > ../$file || true; done
echo '{{"reward": 1}}'
"""
    sections = {**agent(image, script), "reward": "tests.containers.test_podman:kept"}
    (rollout,) = roll_out(tmp_path, sections)
    assert (rollout.status, rollout.reward, rollout.error) == ("ok", 1.0, None)


def kept(task: Any, result: ProgramResult) -> float:
    seen = set((result.folder / "seen").read_text().split()) - {".", ".."}
    noted = (result.folder.parent / "container").read_text()
    return float(seen == {"home", "work", "task.json"} and noted.startswith("podman lightning-"))


@pytest.mark.parametrize("end", ["exit 125", "echo 'Error: tool failed' >&2; exit 127"])
def test_exit_codes_of_the_program_are_its_own(image: str, tmp_path: Path, end: str) -> None:
    (rollout,) = roll_out(tmp_path, agent(image, f"{ASK}\n{end}"))
    assert (rollout.status, str(rollout.error)[:30]) == ("failed", "ProgramError: sh ended with ex")


def test_launch_in_a_container(image: str) -> None:
    @trainable("planner")
    def solve() -> int:
        return launch(
            ["sh", "-c", f"{ASK}\nexit 7"], agent="coder", container=Container(image=image, runtime="podman")
        ).exit_code

    with open_playground(["yes"], integrations=()) as opened, opened.rollout(train=["coder"]) as run:
        assert solve() == 7
    assert [(c.agent, c.trained) for c in run.trace.calls] == [("coder", True)]
    assert run.folder is not None
    assert not run.folder.exists()


def test_a_container_that_podman_refuses_to_remove_for_a_moment_is_removed(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Podman refuses while the container is ending: "container state improper"."""
    refusal = "Error: sending SIGKILL to container: container state improper: stopped"
    refusing = tmp_path / "podman"
    refusing.write_text(
        f"""#!/bin/sh
if [ "$1" = rm ] && ! [ -e {tmp_path}/refused ]; then touch {tmp_path}/refused; echo '{refusal}' >&2; exit 125; fi
exec {shutil.which("podman")} "$@"
""",
        encoding="utf-8",
    )
    refusing.chmod(0o755)
    name = new_name()
    assert podman("create", f"--name={name}", image, "true").returncode == 0
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    remove_container("podman", name)
    assert (tmp_path / "refused").exists()
    assert caplog.messages == []
