"""``lightning-rl view`` as a process: what it gives to the browser, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlopen

import pytest

from tests.tools.view.made_runs import make_run


@pytest.mark.skipif(os.name == "nt", reason="a shell script is the browser")
def test_the_browser_gets_a_private_file_that_opens_the_pages_and_is_removed(tmp_path: Path) -> None:
    """Other users can read the arguments of its process."""
    make_run(tmp_path / "runs" / "one")
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$*" > {opened}.new && mv {opened}.new {opened}\n')
    browser.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_core.tools.cli", "view", str(tmp_path / "runs")],
        env={**os.environ, "BROWSER": f"{browser} %s"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        deadline = time.monotonic() + 120
        while not opened.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        given = opened.read_text()
        page = Path(url2pathname(urlsplit(given).path))
        assert url.partition("token=")[2] not in given
        assert f'content="0; url={url}"' in page.read_text()
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700
        with suppress(HTTPError):  # 403 without the cookie; signals are handled once it serves
            urlopen(url, timeout=120).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
    assert not page.parent.exists()
