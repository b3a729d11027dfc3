"""``lightning-rl prompts`` against a real provider on this machine, whose model needs to see the form of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_core.config import load_config
from lightning_core.records.report import read_summary
from lightning_core.testing.recording_server import serve_app
from lightning_core.tools.cli.main import main
from tests.tools.cli.prompts_agent import URL

CONFIG = """\
agent: tests.tools.cli.prompts_agent:solve
tasks: {train: train.jsonl, eval: eval.jsonl}
agents: {train: [writer]}
policy: {model: some/model-that-is-not-here}
eval: {model: small}
rollouts: {executor: thread, concurrency: 4}
"""


class Provider:
    """Its model knows each sum, and writes a sentence, unless it has seen digits alone: every fifth sum, and with a prompt."""

    def __init__(self) -> None:
        self.prompts: list[list[dict[str, Any]]] = []
        self.reflections: list[str] = []
        self.too_long = ""

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        messages = body["messages"]
        if messages[-1]["content"] == self.too_long:
            error = {"message": "maximum context length", "code": "context_length_exceeded"}
            return JSONResponse({"error": error}, status_code=400)
        if body["model"] == "reflector":
            self.reflections.append(messages[-1]["content"])
            text = "Better:\n```\nYou are a calculator. Answer with digits only.\n```"
        else:
            self.prompts.append(messages)
            a, b = map(int, re.findall(r"\d+", messages[-1]["content"]))
            shown = any(m["role"] == "assistant" and m["content"].isdigit() for m in messages)
            short = shown or "digits only" in messages[0]["content"] or (a + b) % 5 == 0
            text = str(a + b) if short else f"The sum is {a + b}."
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        return JSONResponse({**head, "choices": [choice], "usage": usage})


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    for name, start, count in (("train", 0, 24), ("eval", 100, 12)):
        tasks = [{"id": f"{name}{i}", "question": f"{i} + {start}?", "answer": str(i + start)} for i in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    served = Provider()
    with serve_app(Starlette(routes=[Route("/v1/chat/completions", served.answer, methods=["POST"])])) as url:
        monkeypatch.setenv(URL, f"{url}/v1")
        yield served


def test_own_solved_rollouts_become_demonstrations(provider: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "c.yaml", "--demonstrations", "2", "--sets", "2", "--budget", "100"]) == 0
    out = capsys.readouterr().out
    assert "demonstrations: 4 solved training tasks, 2 sets of 2 compared" in out
    held_out = re.search(r"held out +0\.250 \[.*\] → 1\.000 \[.*\]: \+0\.750 \[\+0\.\d+, .*\] on 12 tasks", out)
    assert held_out is not None
    file = yaml.safe_load(Path("prompts.yaml").read_text())
    (version,) = file["versions"]
    assert file["current"] == version["digest"]
    assert version["held_out"]["reward_after"] == 1.0
    assert version["held_out"]["tasks"] == 12
    assert version["rollouts"] <= 100
    first, second = version["agents"]["writer"]["demonstrations"]
    assert [m["role"] for m in first] == ["user", "assistant"]
    assert first[1]["content"].isdigit()
    assert second[0] != first[0]
    held = {f"{i} + 100?" for i in range(12)}
    assert not held & {m["content"] for one in (first, second) for m in one}

    # The file is a configuration, and the model reads the demonstrations between the system prompt and the question.
    assert main(["eval", "c.yaml", f"prompts=prompts.yaml#{version['digest'][:6]}"]) == 0
    assert "held-out reward 1.000" in capsys.readouterr().out
    texts = [m["content"] for m in provider.prompts[-1]]
    assert texts[:3] == ["You are a calculator.", first[0]["content"], first[1]["content"]]
    recorded = load_config(next(Path("runs").glob("eval-*")) / "config.yaml")
    assert recorded.prompts["writer"].demonstrations == [first, second]

    # With these prompts, nothing can be better.
    assert main(["prompts", "c.yaml", "prompts=prompts.yaml", "--demonstrations", "1", "--budget", "100"]) == 0
    assert (
        "no prompt has a higher mean reward than the present one on 10 validation tasks (1.000)"
        in capsys.readouterr().out
    )
    assert len(yaml.safe_load(Path("prompts.yaml").read_text())["versions"]) == 1


def test_refused_rollouts_of_held_out_tasks_are_counted_apart(
    provider: Provider, capsys: pytest.CaptureFixture[str]
) -> None:
    provider.too_long = "3 + 100?"
    assert main(["prompts", "c.yaml", "--demonstrations", "1", "--sets", "1", "--budget", "60"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 rollouts, 2 of them of held-out tasks, had a refused request and counted as 0" in out
    assert re.search(r"rollouts of training tasks validation", out), "none of these was left out"


def test_gepa_proposes_a_system_prompt(provider: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    upstream = "policy.upstream={base_url: '" + load_url() + "'}"
    arguments = ["--gepa", "--reflection", "reflector", "--budget", "80", "-o", "found.yaml", "--sets", "2"]
    assert main(["prompts", "c.yaml", *arguments, upstream]) == 0
    out = capsys.readouterr().out
    assert "gepa with reflector: 2 candidates" in out
    assert "→ 1.000" in out
    (version,) = yaml.safe_load(Path("found.yaml").read_text())["versions"]
    assert version["agents"] == {"writer": {"replace": "You are a calculator. Answer with digits only."}}
    assert version["rollouts"] <= 80
    (asked, *_) = provider.reflections
    assert "You are a calculator." in asked
    assert "The sum is" in asked
    assert "Reward 0. A solved task has at least 1." in asked
    summary = read_summary(next(Path("runs").glob("prompts-*")) / "summary.json")
    assert summary.eval is not None
    assert summary.eval.eval_reward_after == 1.0


def load_url() -> str:
    import os

    return os.environ[URL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gepa"], "--gepa and --reflection MODEL go together"),
        (["--demonstrations", "0"], "nothing to search: pass --demonstrations K above 0, or --gepa"),
        (["--budget", "20"], "found 24 training tasks and a budget for 2 validation tasks; expected at least 12 tasks"),
        (["--gepa", "--reflection", "m"], "no server for the reflection model 'm': set policy.upstream"),
        (["--gepa", "--reflection", "m", "--reflection-key-env", "K"], "names the key of --reflection-url, which is"),
        (["--reflection-url", "http://x"], "--reflection-url and --reflection-key-env are for --gepa"),
        (["-o", "plain.yaml"], "'plain.yaml' has no versions: it was not written by this command"),
        (
            ["prompts={wrter: {extend: x}}"],
            "prompts names 'wrter', but the agents of this program are [",
        ),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    provider: Provider,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Path("plain.yaml").write_text("writer: {extend: x}\n")
    assert main(["prompts", "c.yaml", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
