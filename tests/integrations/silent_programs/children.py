"""Programs that call the model from other programs and processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

from tests.integrations.identity.clients import ask
from tests.integrations.silent_programs.scenario import CRITIC, WRITER, Scenario
from tests.integrations.silent_programs.workers import both

PLAIN_CLIENT = """
import json, os, sys, urllib.request
body = {"model": "gpt", "messages": [{"role": "user", "content": sys.argv[1]}]}
url = (sys.argv[2:] or [os.environ["OPENAI_BASE_URL"]])[0]
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
"""


def program_with_a_base_url(url: str, name: str) -> None:
    own = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "own"}
    subprocess.run([sys.executable, "-c", PLAIN_CLIENT, name], env=own, check=True, timeout=60)


def grandchild(url: str, name: str) -> None:
    own = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "own"}
    shell = ["sh", "-c", 'exec "$0" -c "$1" "$2"', sys.executable, PLAIN_CLIENT, name]
    subprocess.check_output(shell, env=own, timeout=60)


def spawned_process(url: str, name: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=ask, args=(url, name))
    process.start()
    process.join()
    assert process.exitcode == 0


def program_with_its_own_url(url: str) -> None:
    """Its URL is an argument, so no variable of the environment changes it."""
    own = os.environ | {"OPENAI_API_KEY": "own"}
    subprocess.run([sys.executable, "-c", PLAIN_CLIENT, WRITER, f"{url}/v1"], env=own, check=True, timeout=60)


_TWO = {WRITER: 1, CRITIC: 1}
CHILDREN: dict[str, Scenario] = {
    "a program that reads OPENAI_BASE_URL": Scenario(both(program_with_a_base_url), _TWO),
    "a program of a shell": Scenario(both(grandchild), _TWO),
    "a spawned process": Scenario(both(spawned_process), _TWO),
}
