"""Downloads with pip, from an index of packages on this machine."""

from __future__ import annotations

import hashlib
import os
import pty
import random
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from lightning_core.model.download import download
download("thing==1", Path(sys.argv[1]), sha256=sys.argv[2], advice="")
"""


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Be silent."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Downloads 4 MB."""
    index = tmp_path / "index" / "thing"
    index.mkdir(parents=True)
    wheel = index / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
        archive.writestr("thing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("thing-1.dist-info/RECORD", "")
        archive.writestr("thing.bin", random.Random(0).randbytes(4_000_000))
    (index / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(index.parent))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        yield [sys.executable, "-c", PROGRAM, str(tmp_path / "out"), hashlib.sha256(wheel.read_bytes()).hexdigest()]
        server.shutdown()
        thread.join()


def test_a_terminal_shows_the_progress_of_a_download(command: list[str]) -> None:
    terminal, end = pty.openpty()
    with subprocess.Popen(command, stderr=end, stdout=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(end)
        shown = b""
        while True:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            shown += piece
        os.close(terminal)
        assert process.stdout is not None
        assert process.stdout.read() == b"", "standard output is the command's own"
    assert process.returncode == 0, shown
    assert b"4.0/4.0 MB" in shown


def test_a_pipe_shows_nothing(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_environment_without_pip_is_named_with_the_commands_that_install_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [tmp_path / "empty" / "bin" / "python", "-c", PROGRAM, tmp_path / "out", "0"],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"lightning_core.errors.InfrastructureError: pip is not installed in '{tmp_path}/empty', and 'thing==1' is downloaded "
        "with it: run `uv pip install pip`, or `python -m ensurepip`"
    )
