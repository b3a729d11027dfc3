"""From the wheel to the viewer: docs/installation.md and docs/quickstart.md, followed word for word in a fresh environment.

Two things differ from what a reader does. The wheel of this checkout replaces the name on the index. Versions are those of
constraints.txt, so that a new release of a dependency does not change the result. The short form trains for three steps.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
STATE = ("cd ", ". ", "export ")
"""Starts of commands whose effect lasts until the shell ends."""
TRAIN = "lightning-rl train"
SERVERS = ("lightning-rl view", "lightning-rl serve")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def commands(page: str) -> list[str]:
    """The commands of the page's bash blocks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines() if line.strip()]


class Reader:
    """A reader at a terminal, in ``folder``."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self._wheel, self._state = folder, wheel, ["set -e"]
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "OPENAI_"))},
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "LIGHTNING_CACHE": str(folder / "cache"),
            "BROWSER": "true",  # opens nothing
        }
        self._own_index = has_own_index()

    def follow(self, command: str) -> None:
        """Run ``command``, which must succeed."""
        done = subprocess.run(
            self._shell(command),
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        if command.startswith(STATE):
            self._state.append(command)

    @contextmanager
    def serving(self, command: str) -> Iterator[str]:
        """Start a server, and yield its URL; Ctrl-C ends it."""
        process = subprocess.Popen(
            self._shell(command),
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            url = next((line.strip() for line in process.stdout if line.startswith("http://")), None)
            assert url is not None, f"{command} printed no URL"
            yield url
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _shell(self, command: str) -> list[str]:
        command = command.replace('"lightning-rl[', f'"{self._wheel}[')
        if self._own_index:
            command = re.sub(r" --index-url \S+", "", command)
        return ["bash", "-c", "\n".join([*self._state, command])]


def has_own_index() -> bool:
    """Whether pip is configured to take packages from elsewhere, which then decides on the build of torch."""
    listed = [sys.executable, "-m", "pip", "config", "list"]
    configured = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    return re.search(r"\.(index-url|extra-index-url|find-links)=", configured) is not None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    subprocess.run(build, check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.parametrize(
    "settings",
    ["trainer.steps=3", pytest.param("", marks=pytest.mark.long)],
    ids=["three steps", "word for word"],
)
def test_the_installation_page_and_the_quickstart_lead_to_a_trained_agent_in_the_viewer(
    wheel: Path, tmp_path: Path, settings: str
) -> None:
    reader = Reader(tmp_path, wheel)
    viewed = trained = False
    for command in [*commands("installation.md"), *commands("quickstart.md")]:
        if command == TRAIN:
            reader.follow(f"{command} {settings}")
            trained = True
        elif command.startswith(SERVERS):
            with reader.serving(command) as url:
                look_at_the_run(url, tmp_path / "my-agent" / "runs")
            viewed = True
        else:
            reader.follow(command)
    assert viewed
    assert trained
    summary = json.loads((tmp_path / "my-agent" / "runs" / "latest" / "summary.json").read_text(encoding="utf-8"))
    assert summary["eval_reward_after"] > summary["eval_reward_before"]


def look_at_the_run(url: str, runs: Path) -> None:
    """Open the list of runs, the newest run and its first rollout."""
    name = (runs / "latest").resolve().name
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        front = browser.get(url)
        assert front.status_code == 200
        assert f'href="/runs/{name}"' in front.text
        page = browser.get(str(httpx.URL(url).join(f"/runs/{name}")))
        assert page.status_code == 200
        assert "smollm2-135m-instruct" in page.text
        rollout = browser.get(str(httpx.URL(url).join(f"/runs/{name}/rollouts/1")))
        assert rollout.status_code == 200
        assert "Reply with the order number." in rollout.text
