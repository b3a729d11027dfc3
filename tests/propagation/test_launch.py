"""`launch`, inside and outside a rollout, with real programs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_core import launch, trainable
from lightning_core.capture import current_rollout
from lightning_core.errors import InfrastructureError
from lightning_core.testing.playground import Playground, open_playground
from tests.rollouts.command_runs import ASKS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX")


@pytest.fixture(scope="module")
def playground() -> Iterator[Playground]:
    with open_playground(lambda prompt: f"to {prompt.split()[-1]}", integrations=()) as opened:
        yield opened


def python(program: str, *args: str) -> list[str]:
    return [sys.executable, "-c", ASKS + program, *args]


def test_each_program_speaks_as_its_own_agent(playground: Playground) -> None:
    with playground.rollout(train=["planner", "coder"]) as run:
        for agent in ("planner", "coder"):
            assert launch(python("print(ask(sys.argv[1]))", agent), agent=agent).exit_code == 0
    assert [(c.agent, c.messages[-1]["content"]) for c in run.trace.calls] == [
        ("planner", "planner"),
        ("coder", "coder"),
    ]
    assert all(c.trained for c in run.trace.calls)


def test_without_a_name_a_program_speaks_as_the_current_agent(playground: Playground) -> None:
    @trainable("writer")
    async def solve() -> None:
        await asyncio.gather(*(asyncio.to_thread(launch, python("ask(sys.argv[1])", str(n))) for n in range(4)))

    with playground.rollout(train=["writer"]) as run:
        asyncio.run(solve())
    assert [c.agent for c in run.trace.calls] == ["writer"] * 4


def test_a_program_gets_folders_and_files_of_its_own(playground: Playground, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/main.c").write_text("int main;")
    program = """
print(json.dumps({ "here": sorted(os.listdir()), "home": os.listdir(os.environ["HOME"]), "in": sys.stdin.read(),
    "task": json.load(open(os.environ["LIGHTNING_TASK_FILE"])), "x": os.environ["X"], "xdg": os.environ.get("XDG_CONFIG_HOME") }))
open("made", "w").write("by the program")
print("to stderr", file=sys.stderr)
sys.exit(3)
"""
    with playground.rollout() as run:
        os.environ["XDG_CONFIG_HOME"] = str(tmp_path)
        try:
            done = launch(
                python(program),
                task={"a": 1},
                stdin="input",
                workspace=tmp_path,
                files={"~/.rc": "setting", "src/new.c": "x"},
                environment={"X": "y"},
            )
        finally:
            del os.environ["XDG_CONFIG_HOME"]
        seen = json.loads(done.stdout)
        assert seen == {"here": ["src"], "home": [".rc"], "in": "input", "task": {"a": 1}, "x": "y", "xdg": None}
        assert (done.exit_code, done.stderr) == (3, "to stderr\n")
        assert sorted(p.name for p in (done.folder / "src").iterdir()) == ["main.c", "new.c"]
        assert (done.folder / "made").read_text() == "by the program"
        assert launch(python("print(os.listdir())")).stdout == "[]\n"
        assert run.folder is not None
        assert run.folder.stat().st_mode & 0o077 == 0
    assert not run.folder.exists()
    assert not done.folder.exists()


def test_what_a_program_leaves_running_is_ended(playground: Playground) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    with playground.rollout():
        pid = int(launch(python(program)).stdout)
    assert is_gone(pid)


def test_a_program_ends_at_its_time_limit_and_with_its_rollout(playground: Playground) -> None:
    program = (
        "import time; print(os.getpid(), flush=True); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
    )
    with playground.rollout() as run:
        assert run.folder is not None
        pid_file = run.folder.parent / f"{run.rollout}.pid"
        with pytest.raises(subprocess.TimeoutExpired):
            launch(python(program, str(pid_file)), timeout=5)
        assert is_gone(int(pid_file.read_text()))
        pid_file.unlink()
        assert list(run.folder.iterdir()) == []


def test_a_rollout_that_ends_ends_its_programs(playground: Playground, tmp_path: Path) -> None:
    program = "import time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
    file = tmp_path / "pid"
    with ThreadPoolExecutor() as threads:
        with playground.rollout():
            work = threads.submit(launch, python(program, str(file)))
            while not (file.exists() and file.read_text()):
                time.sleep(0.02)
        with pytest.raises(InfrastructureError, match="the rollout ended before the program"):
            work.result(30)
    assert is_gone(int(file.read_text()))


def test_outside_a_rollout_it_only_runs_the_program() -> None:
    assert current_rollout() is None
    done = launch([sys.executable, "-c", "import os; print(os.environ.get('LIGHTNING_API_KEY')); open('f', 'w')"])
    folder = done.folder
    assert (done.stdout, [p.name for p in folder.iterdir()]) == ("None\n", ["f"])
    del done
    assert not folder.exists()


@pytest.mark.parametrize("path", ["/etc/x", "../x", "~/../x", "", "~/"])
def test_files_are_written_only_into_its_folders(path: str) -> None:
    with pytest.raises(ValueError, match="expected a path in the working folder"):
        launch(["true"], files={path: "x"})


def test_files_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project/link").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="a link in the workspace leads to"):
        launch(["true"], workspace=tmp_path / "project", files={"link/x": "x"})
    assert list((tmp_path / "outside").iterdir()) == []


def test_only_the_end_of_a_long_output_is_kept() -> None:
    program = "import sys\nfor n in range(40): sys.stdout.write(chr(97 + n % 26) * (1 << 20))\nprint('end', flush=True)"
    done = launch([sys.executable, "-c", program])
    assert (done.exit_code, len(done.stdout), done.stdout[-5:]) == (0, 16 << 20, "nend\n")


def test_a_process_that_holds_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    done = launch([sys.executable, "-c", program])
    os.kill(int(done.stdout), 9)


def test_a_process_that_writes_on_is_not_waited_for() -> None:
    program = (
        "import subprocess, time; subprocess.Popen(['timeout', '20', 'yes'], start_new_session=True); time.sleep(0.3)"
    )
    started = time.monotonic()
    assert launch([sys.executable, "-c", program]).stdout.startswith("y\n")
    assert time.monotonic() - started < 15


def test_no_room_for_its_folders_is_no_failure_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(InfrastructureError, match="could not be filled"):
        launch(["true"])


def test_folders_that_a_program_made_read_only_are_deleted(playground: Playground) -> None:
    program = "os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0o500); os.chmod('a', 0o500)"
    with playground.rollout() as run:
        assert launch(python(program)).exit_code == 0
    assert run.folder is not None
    assert not run.folder.exists()


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="the command is empty"):
        launch([])
    with pytest.raises(TypeError, match="environment variables must be strings, but these are not: 'X'"):
        launch(["true"], environment={"X": 1})  # pyright: ignore[reportArgumentType]


def test_a_program_that_cannot_be_started_is_no_failure_of_the_agent() -> None:
    with pytest.raises(InfrastructureError, match="the program 'no-such-program' cannot be started"):
        launch(["no-such-program"])


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
