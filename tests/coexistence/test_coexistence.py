"""Agents, calls and rewards are the same beside other instrumentations, whichever is initialized first."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.coexistence.instruments import INSTRUMENTS

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "agents",
    "autogen_agentchat.teams",
    "autogen_ext.models.openai",
    "langchain_openai",
    "langgraph.prebuilt",
    "lightning_autogen_agentchat._patches",
    "lightning_genai_spans._patches",
    "lightning_langchain._patches",
    "lightning_langgraph._patches",
    "lightning_openai_agents._patches",
    "tests.rollouts.executor_runs",
)
QUIET = {
    "DO_NOT_TRACK": "1",
    "WANDB_ERROR_REPORTING": "false",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
}


def record(executor: str, folder: Path, instrument: str = "", since: str = "") -> dict[str, Any]:
    """What rollouts of the programs record in a process of their own, by task."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"} | QUIET
    environment |= {"COEXISTS_WITH": instrument, "COEXISTS_SINCE": since, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    done = warm.run(("-m", "tests.coexistence.case", executor), cwd=folder, env=environment, imported=IMPORTED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index('{"openai_agents') :])


ANSWER = b"{}"


class Sink(BaseHTTPRequestHandler):
    """Takes what instrumentations export."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    do_GET = do_PUT = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="session", autouse=True)
def sink() -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Sink) as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("COEXISTS_SINK", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What they record without an instrumentation, by executor."""
    return cache(lambda executor: record(executor, tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize("since", ["before", "after"])
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_names_calls_and_rewards_are_as_without_it(
    instrument: str, since: str, executor: str, alone: Any, tmp_path: Path
) -> None:
    expected = alone(executor)
    assert {each["status"][0] for each in expected.values()} == {"ok"}
    assert record(executor, tmp_path, instrument, since) == expected
