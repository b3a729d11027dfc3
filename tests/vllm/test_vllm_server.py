"""A server never outlives its run, and errors for servers started with wrong arguments."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.backends.vllm.server import serve_vllm
from lightning_core.errors import ConfigError, InfrastructureError
from lightning_core.trace import POLICY
from tests.vllm.conftest import ARGS


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for the logs of failing servers."""
    (folder := tmp_path / "logs").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def processes(model: Path) -> list[psutil.Process]:
    """vLLM processes that serve ``model``, and their descendants."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if str(model) in command and "serve" in command:
                found |= {process, *process.children(recursive=True)}
        except psutil.Error:
            continue
    return list(found)


def wait_for(model: Path) -> list[psutil.Process]:
    """The processes of a starting server, once they exist."""
    deadline = time.monotonic() + 60
    while not (found := processes(model)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_server_that_does_not_come_up_in_time_is_stopped_and_no_other(server: str, model: Path, tmp_path: Path):
    (same := tmp_path / "same").symlink_to(model)
    with (
        pytest.raises(InfrastructureError, match=r"not ready after 1 s"),
        serve_vllm(same, args=ARGS, start_seconds=1),
    ):
        pytest.fail("it cannot have started")
    assert processes(same) == []
    assert VllmBackend(server, model=POLICY).max_context == 4096


@pytest.mark.long
def test_a_server_that_fails_leaves_its_log(tmp_path: Path, logs: Path):
    with (
        pytest.raises(InfrastructureError, match=r"ended with status [12]; its output is in [\s\S]*--no-such-option"),
        serve_vllm(tmp_path / "model", args=["--no-such-option"], start_seconds=120),
    ):
        pytest.fail("it cannot have started")
    (log,) = logs.glob("*.log")
    assert "--no-such-option" in log.read_text()


RUN = """
import sys
from lightning_core.backends.vllm.server import serve_vllm
with serve_vllm(sys.argv[1], args=sys.argv[2:]):
    pass
"""


def test_a_server_dies_with_the_process_that_started_it(other_model: Path):
    parent = subprocess.Popen([sys.executable, "-c", RUN, str(other_model), *ARGS])
    found = wait_for(other_model)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(found, timeout=30)[1] == []
    assert processes(other_model) == []


@pytest.mark.parametrize("args", [["--port", "1"], ["--logprobs-mode=raw_logprobs"], ["--max_model_len", "5"]])
def test_what_is_set_here_cannot_be_set_otherwise(model: Path, args: list[str]):
    with pytest.raises(ConfigError, match=f"^{args[0].partition('=')[0].replace('_', '-')} cannot be"):
        serve_vllm(model, args=args).__enter__()
