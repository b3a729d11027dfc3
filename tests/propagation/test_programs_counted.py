"""The programs that an agent starts are counted by name, once, and the secrets of a command are not recorded."""

# `os.system` is deprecated softly; agents use it.
# pyright: reportDeprecated=false

from __future__ import annotations

import asyncio
import ctypes.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_core import rollout
from lightning_core.capture import scope
from lightning_core.capture.context import is_capturing
from lightning_core.capture.patching import Patches
from lightning_core.propagation.children.program_names import program_of, program_of_command
from lightning_core.propagation.children.programs import install_programs
from lightning_core.propagation.sockets import install_sockets
from tests.propagation.requests_elsewhere import elsewhere

ENDPOINT = "http://127.0.0.1:9/v1"
PYTHON = os.path.basename(sys.executable)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")


@pytest.fixture(autouse=True)
def patches() -> Iterator[Patches]:
    patches = Patches(is_capturing)
    install_sockets(patches)
    install_programs(patches)
    yield patches
    patches.undo()


@pytest.fixture(params=[{"endpoint": ENDPOINT, "api_key": "lr-k"}, {}], ids=["endpoint", "no endpoint"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def spawn(*words: str) -> None:
    assert os.waitpid(os.posix_spawn(words[0], words, os.environ), 0)[1] == 0


def test_programs_of_the_standard_library_are_not_counted() -> None:
    with rollout() as run:
        ctypes.util.find_library("c")
    assert elsewhere(run) == {}


def test_every_program_is_counted_once(settings: dict[str, Any]) -> None:
    with rollout(**settings) as run, scope("writer"):
        subprocess.run([sys.executable, "-c", ""], check=True)
        subprocess.run([sys.executable, "-c", ""], check=True, close_fds=False)  # with `os.posix_spawn`
        subprocess.run(iter([sys.executable, "-c", ""]), check=True)  # pyright: ignore[reportCallIssue, reportArgumentType]
        subprocess.run("true --any", shell=True, check=True)
        subprocess.run(["/bin/true"], check=True, close_fds=False)
        os.system("true")
        os.popen("true").close()
        spawn(sys.executable, "-c", "")
        spawn("/bin/sh", "-c", "true | true")
        with pytest.raises(FileNotFoundError):
            subprocess.run(["/no/program"])

        async def start() -> None:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
            await process.wait()
            process = await asyncio.create_subprocess_shell("true")
            await process.wait()

        asyncio.run(start())
    counted = {("writer", PYTHON, "subprocess"): 4, ("writer", "true", "subprocess"): 6}
    assert elsewhere(run) == {**counted, ("writer", "unknown program", "subprocess"): 1}


def test_nothing_is_counted_without_patches(patches: Patches) -> None:
    patches.undo()
    with rollout(endpoint=ENDPOINT) as run, scope("writer"):
        os.system("true")
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert elsewhere(run) == {}


def test_no_secret_of_a_command_is_recorded(settings: dict[str, Any]) -> None:
    with rollout(**settings) as run, scope("writer"):
        subprocess.run("OPENAI_TOKEN=secret-1 true", shell=True, check=True)
        subprocess.run(["sh", "-c", "OPENAI_TOKEN='secret-2 secret-3' true"], check=True)
        os.system("A=secret-4 B=secret-5 true secret-6")
    assert elsewhere(run) == {("writer", "true", "subprocess"): 3}
    assert "secret" not in repr(run.spans)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("ls -l /secret", "ls"),
        ("/usr/bin/curl -H 'authorization: secret' x", "curl"),
        ("TOKEN=secret cmd", "cmd"),
        ("TOKEN=secret;cmd", "bash"),
        ("TOKEN='a secret' OTHER=\"a secret\" ./cmd --x", "cmd"),
        ("PATH+=:/secret cmd", "cmd"),
        ("TOKEN=$(echo secret secret) cmd", "bash"),
        ("TOKEN=`echo secret` cmd", "bash"),
        ("TOKEN=secret", "bash"),
        ("(secret)", "bash"),
        ("$SECRET", "bash"),
        ("'a secret", "bash"),
        ("", "bash"),
    ],
)
def test_the_program_of_a_command(command: str, program: str) -> None:
    assert program_of_command(command, shell="bash") == program
    assert program_of(["/bin/bash", "-c", command]) == program
    assert program_of([b"/bin/bash", b"-c", command.encode()]) == program
    assert program_of(["/bin/other", "-c", command]) == "other"
    assert program_of([Path("/bin/bash")]) == "bash"


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="Python handles signals on the main thread"
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_signals_during_a_command_are_as_in_the_c_library(number: signal.Signals) -> None:
    """The process ignores them, its child does not, and the handler is put back."""

    def statuses() -> list[int]:
        return [os.system(f"kill -{number:d} $PPID; exit 5"), os.system(f"kill -{number:d} $$; exit 6")]

    handled: list[int] = []

    def handle(number: int, frame: Any) -> None:
        handled.append(number)

    before = signal.signal(number, handle)
    try:
        expected = statuses()
        with rollout(endpoint=ENDPOINT, api_key="lr-k"), scope("writer"):
            assert statuses() == expected
        assert signal.getsignal(number) is handle
        assert (handled, expected[0], os.WTERMSIG(expected[1])) == ([], 5 << 8, number)
    finally:
        signal.signal(number, before)


def test_a_signal_that_the_process_ignores_is_ignored_by_its_command() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with rollout(endpoint=ENDPOINT, api_key="lr-k"), scope("writer"):
            assert os.system("kill -2 $$; exit 6") == 6 << 8
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_wrong_arguments_are_reported_by_the_functions_themselves() -> None:
    with rollout(endpoint=ENDPOINT, api_key="lr-k") as run, scope("writer"):
        for function, arguments in ((os.system, ()), (subprocess.Popen, ()), (os.posix_spawn, ("/bin/true",))):
            with pytest.raises(TypeError):
                function(*arguments)  # pyright: ignore[reportCallIssue, reportArgumentType]
        with pytest.raises(ValueError, match="null"):
            os.system("true\0")
    assert elsewhere(run) == {}
