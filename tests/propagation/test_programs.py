"""Programs that an agent starts call the endpoint, as the agent; calls that are not trained reach their provider."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from lightning_core import rollout, trainable
from lightning_core.capture import ActiveRollout, scope
from lightning_core.endpoint.server import Routing
from lightning_core.propagation import endpoint_environment
from lightning_core.propagation.children.environment import child_variables, origin_url
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import Playground, open_playground
from lightning_core.testing.recording_server import RecordingServer
from tests.endpoint.serving import serve
from tests.propagation import process_work

OPENAI = """
import sys, openai
client = openai.OpenAI(max_retries=0)
print(client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": sys.argv[1]}]).choices[0].message.content)
"""
PLAIN = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
"""A program that starts fast, since it imports no package."""
ANTHROPIC = """
import sys, anthropic
client = anthropic.Anthropic(max_retries=0)
message = {"role": "user", "content": sys.argv[1]}
print(client.messages.create(model="claude", max_tokens=64, messages=[message]).content[0].text)
"""
SHELL = """curl -s --noproxy '*' "$LIGHTNING_BASE_URL/chat/completions" -H "Authorization: Bearer $LIGHTNING_API_KEY" \
-H 'content-type: application/json' -d '{"model": "m", "messages": [{"role": "user", "content": "from a shell"}]}'"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="POSIX")]
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def playground() -> Iterator[Playground]:
    with open_playground(lambda prompt: "yes", integrations=()) as opened:
        yield opened


def calls(run: ActiveRollout) -> Counter[tuple[str | None, str]]:
    """Agent and prompt of each call."""
    return Counter((call.agent, str(call.messages[-1]["content"])) for call in run.trace.calls)


def python(program: str, *args: str) -> list[str]:
    return [sys.executable, "-c", program, *args]


@pytest.mark.parametrize("other", [PLAIN, pytest.param(ANTHROPIC, marks=pytest.mark.long)], ids=["plain", "anthropic"])
def test_a_program_with_a_plain_client(playground: Playground, other: str) -> None:
    with playground.rollout() as run:
        for agent, program in (("writer", OPENAI), ("critic", other)):
            with scope(agent):
                done = subprocess.run(python(program, "hello"), capture_output=True, text=True, check=True)
                assert done.stdout == "yes\n"
    assert calls(run) == {("writer", "hello"): 1, ("critic", "hello"): 1}
    spans = {event.agent: event.id for event in run.trace.events if event.kind == "agent"}
    assert {call.agent: call.parent for call in run.trace.calls} == spans


def test_programs_of_an_event_loop_and_of_concurrent_rollouts(playground: Playground) -> None:
    async def attempt(number: int) -> Counter[tuple[str | None, str]]:
        with playground.rollout() as run, scope(f"agent {number}"):
            for start in (
                asyncio.create_subprocess_exec,
                lambda *a, **k: asyncio.create_subprocess_shell(shlex.join(a), **k),
            ):
                process = await start(*python(PLAIN, f"text {number}"), stdout=subprocess.PIPE)
                assert (await process.communicate())[0] == b"yes\n"
        return calls(run)

    async def main() -> list[Counter[tuple[str | None, str]]]:
        return await asyncio.gather(*(attempt(number) for number in range(2)))

    assert asyncio.run(main()) == [{(f"agent {n}", f"text {n}"): 2} for n in range(2)]


@needs_curl
def test_every_way_to_start_a_program(playground: Playground) -> None:
    def fork_and_exec() -> int:
        child = os.fork()
        if child == 0:
            os.execv("/bin/sh", ["sh", "-c", f"{SHELL} > /dev/null"])
        return os.waitpid(child, 0)[1]

    ways = {
        "system": lambda: os.system(f"{SHELL} > /dev/null"),
        "popen": lambda: 0 if os.popen(SHELL).read() else 1,
        "posix_spawn": lambda: os.waitpid(
            os.posix_spawn("/bin/sh", ["sh", "-c", f"{SHELL} > /dev/null"], os.environ), 0
        )[1],
        "spawnvp": lambda: os.spawnvp(os.P_WAIT, "sh", ["sh", "-c", f"{SHELL} > /dev/null"]),
        "fork and exec": fork_and_exec,
        "shell": lambda: subprocess.call(SHELL, shell=True, stdout=subprocess.DEVNULL),
    }
    with playground.rollout() as run:
        for name, start in ways.items():
            with scope(name):
                assert start() == 0, name
    assert calls(run) == {(name, "from a shell"): 1 for name in ways}


def test_exit_codes_are_unchanged(playground: Playground) -> None:
    with playground.rollout():
        assert os.system("exit 3") == 3 << 8
        assert subprocess.call(["sh", "-c", "exit 4"]) == 4
        assert subprocess.call(["sh", "-c", "kill -9 $$"]) == -9


def test_an_environment_of_the_caller_is_extended_and_not_changed(playground: Playground) -> None:
    own = {"PATH": os.environ["PATH"], "OWN": "1", "OPENAI_API_KEY": "sk-own"}
    shown = 'echo "$OWN $OPENAI_API_KEY $ANTHROPIC_AUTH_TOKEN $AZURE_OPENAI_ENDPOINT"'
    with playground.rollout() as run, scope("writer"):
        given = endpoint_environment(own)
        text = subprocess.check_output(["sh", "-c", shown], env=own, text=True)
        kept = subprocess.check_output(["sh", "-c", 'echo "$LIGHTNING_API_KEY"'], env=own | given, text=True)
        assert run.api_key is not None
        assert text.split() == ["1", given["OPENAI_API_KEY"]]
        assert given["OPENAI_API_KEY"].startswith(f"{run.api_key}.")
        assert kept.strip() == given["LIGHTNING_API_KEY"]
    assert own == {"PATH": os.environ["PATH"], "OWN": "1", "OPENAI_API_KEY": "sk-own"}
    assert endpoint_environment() == {}
    assert subprocess.check_output(["sh", "-c", 'echo "$LIGHTNING_API_KEY"'], text=True) == "\n"


def test_the_variables_fit_their_clients() -> None:
    given = {"ANTHROPIC_AUTH_TOKEN": "t", "AZURE_OPENAI_ENDPOINT": "https://a.example", "HTTP_PROXY": "http://p:1"}
    variables = child_variables(given, "http://127.0.0.1:8000/v1", "lr-k.e30")
    key, root = "lr-k.e30", "http://127.0.0.1:8000"
    assert variables == {
        "LIGHTNING_BASE_URL": f"{root}/v1",
        "LIGHTNING_API_KEY": key,
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_BASE": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": key,
        "AZURE_OPENAI_ENDPOINT": root,
        "AZURE_OPENAI_API_KEY": key,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{root}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%20{key}",
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }
    collected = child_variables({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector"}, "https://e/v1", key)
    assert not [name for name in collected if name.startswith("OTEL_") or "proxy" in name.lower()]


def test_the_provider_of_a_request() -> None:
    environment = {
        "OPENAI_BASE_URL": "https://o.example/v1/",
        "OPENAI_API_KEY": "o",
        "ANTHROPIC_AUTH_TOKEN": "a",
        "GOOGLE_API_KEY": "g",
        "AZURE_OPENAI_ENDPOINT": "https://z.example",
        "AZURE_OPENAI_API_KEY": "z",
    }
    gemini, azure = "/v1beta/models/m:generateContent", "/openai/deployments/d/chat/completions"
    google = "https://generativelanguage.googleapis.com"
    assert origin_url(environment, "/v1/responses", "") == ("https://o.example/v1/responses", "Bearer o")
    assert origin_url({}, "/v1/embeddings", "") == ("https://api.openai.com/v1/embeddings", None)
    assert origin_url(environment, "/v1/messages", "beta=true") == (
        "https://api.anthropic.com/v1/messages?beta=true",
        "Bearer a",
    )
    assert origin_url(environment, gemini, "alt=sse") == (f"{google}{gemini}?alt=sse", "x-goog-api-key g")
    assert origin_url(environment, azure, "api-version=1") == (f"https://z.example{azure}?api-version=1", "api-key z")


def test_an_agent_that_is_not_trained_reaches_its_provider(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the address and with the key that the program would have used, from the caller's environment or this process's."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-parent")
    explicit = os.environ | {"OPENAI_BASE_URL": f"{server.url}/other/v1", "OPENAI_API_KEY": "sk-explicit"}
    answers: list[str] = []
    with patched(()), serve(lambda prompt: "sampled") as endpoint:
        key = endpoint.new_key()
        with rollout(endpoint=endpoint.url, api_key=key) as run:
            endpoint.open(key, run.address, Routing(trained=frozenset({"writer"})))
            proxied = os.environ | {"HTTP_PROXY": "http://127.0.0.1:9"}
            for agent, environment in (("writer", proxied), ("reader", None), ("reader", explicit)):
                with scope(agent):
                    command = python(PLAIN, agent)
                    answers.append(subprocess.check_output(command, env=environment, text=True))
            endpoint.close(key)
    assert answers == ["sampled\n", "ok\n", "ok\n"]
    assert [(r.url.removeprefix(server.url), r.headers["authorization"]) for r in server.requests] == [
        ("/v1/chat/completions", "Bearer sk-parent"),
        ("/other/v1/chat/completions", "Bearer sk-explicit"),
    ]
    assert calls(run) == {("writer", "writer"): 1, ("reader", "reader"): 2}
    assert not [name for request in server.requests for name in request.headers if name.startswith("lightning")]
    assert "sk-" not in json.dumps([dict(span.attributes) for span in run.spans], default=repr)


def test_the_mark_of_an_agent_travels_with_its_key_and_with_its_work() -> None:
    """A mark decides who is trained, also one that only a child process knows."""
    marked = trainable(lambda: subprocess.check_output(python(PLAIN, "hello"), text=True), name="marked by program")
    context = multiprocessing.get_context("spawn")
    with patched(()), serve(lambda prompt: "sampled") as endpoint:
        key = endpoint.new_key()
        with rollout(endpoint=endpoint.url, api_key=key) as run, context.Pool(1) as pool:
            endpoint.open(key, run.address, Routing(select="marked"))
            assert marked() == "sampled\n"
            assert pool.apply(process_work.ask_as_inner, ("x",)) == "sampled"
            endpoint.close(key)
    assert calls(run) == {("marked by program", "hello"): 1, ("inner", "x"): 1}
    assert {call.policy_version for call in run.trace.calls} == {0}
