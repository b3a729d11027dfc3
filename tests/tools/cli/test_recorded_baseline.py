"""``lightning-rl baseline --recorded``: recorded responses answer in place of the provider, which is gone."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_core.records.report import read_summary
from lightning_core.records.statistics.measured import EvaluationSummary
from lightning_core.testing.recording_server import serve_app
from lightning_core.tools.cli.main import main
from tests.tools.cli.baseline_agent import URL

CONFIG = """\
agent: tests.tools.cli.baseline_agent:solve
tasks: {train: train.jsonl, eval: eval.jsonl}
agents: {train: [writer]}
policy: {model: some/model-that-is-not-here}
rollouts: {executor: thread, concurrency: 1}
prices: prices.yaml
"""
PRICES = "writer-*: {input: 2.0, cached_input: 1.0, output: 10.0}\nplanner-*: {input: 4.0, output: 20.0}\n"
APP = """\
from tests.tools.cli.baseline_agent import solve
for number in range(2):
    solve({"id": f"e{number}"})
"""


class Provider:
    """Solves every other attempt at a task, in 50 ms."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        said = body["messages"][0]["content"]
        right = sum(earlier["messages"][0]["content"] == said for earlier in self.requests) % 2
        await asyncio.sleep(0.05)
        message = {"role": "assistant", "content": "right" if right else "wrong"}
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
        usage |= {"prompt_tokens_details": {"cached_tokens": 400}}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": f"{body['model']}-2026-11"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({**head, "choices": [choice], "usage": usage})


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    Path("prices.yaml").write_text(PRICES)
    Path("train.jsonl").write_text('{"id": "t1"}\n')
    Path("eval.jsonl").write_text("".join(f'{{"id": "e{i}"}}\n' for i in range(3)))
    served = Provider()
    with serve_app(Starlette(routes=[Route("/v1/chat/completions", served.answer, methods=["POST"])])) as url:
        monkeypatch.setenv(URL, f"{url}/v1")
        yield served


def measured(name: str) -> EvaluationSummary:
    (folder,) = Path("runs", name).glob("baseline-*")
    evaluation = read_summary(folder / "summary.json").evaluation
    assert evaluation is not None
    return evaluation


def test_a_recorded_run_has_the_same_score_tokens_latency_and_cost(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["baseline", "c.yaml", "--model", "writer-large", "--samples", "2"]
    assert main([*arguments, "run.dir=runs/asked"]) == 0
    (recorded,) = map(str, Path("runs/asked").glob("baseline-*"))
    monkeypatch.setenv(URL, "http://127.0.0.1:9/v1")  # nobody listens there
    asked = len(provider.requests)
    capsys.readouterr()
    assert main([*arguments, "run.dir=runs/replayed", "--recorded", f"{recorded}:eval_manual"]) == 0
    out = capsys.readouterr().out
    assert f"model in place of the policy: writer-large, as recorded in {recorded}:eval_manual\n" in out
    assert "held-out reward 0.500" in out
    assert "answered from 12 recorded responses, of 12\n" in out
    assert "cost of these calls at the providers: $0.0516\n" in out
    assert "repeated" not in out
    assert len(provider.requests) == asked == 12

    first, second = measured("asked"), measured("replayed")
    assert (first.recorded_in, second.recorded_in) == ((), (f"{recorded}:eval_manual",))
    assert second.usd_spent == pytest.approx(6 * 0.0026 + 6 * 0.006)
    for name in ("model", "tasks", "rollouts", "reward", "reward_ci95", "pass_rates", "solved", "usd_spent"):
        assert getattr(second, name) == getattr(first, name), name
    for before, after in zip(first.usage.models, second.usage.models, strict=True):
        counted = ("model", "calls", "input_tokens", "cached_tokens", "output_tokens", "usd")
        assert [getattr(after, name) for name in counted] == [getattr(before, name) for name in counted]
        assert after.seconds_p50 >= 0.05, "a response takes as long as it took when it was recorded"

    runs = [str(next(Path("runs", name).glob("baseline-*"))) for name in ("asked", "replayed")]
    assert main(["runs", "compare", *runs, "--prices", "prices.yaml"]) == 0
    compared = capsys.readouterr().out
    assert "+0.000" in compared
    assert re.search(r"answered by +– +recorded responses\n", compared)


def test_traces_of_production_answer_the_tasks_that_they_have(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("app.py").write_text(APP)
    command = [
        sys.executable,
        "-m",
        "lightning_core.tools.cli",
        "record",
        "--to",
        "traces",
        "--",
        sys.executable,
        "app.py",
    ]
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": paths})
    monkeypatch.setenv(URL, "http://127.0.0.1:9/v1")
    asked = len(provider.requests)
    assert asked == 4
    capsys.readouterr()
    assert main(["baseline", "c.yaml", "--model", "writer-large", "--samples", "2", "--recorded", "traces"]) == 0
    out = capsys.readouterr().out
    assert "held-out reward 1.000" in out
    assert "on 2 tasks" in out
    assert "2 rollouts left out" in out
    assert (
        "no response of 'planner-large' to this conversation is recorded: 1 message, the last one of the role user: 'plan e2'"
        in out
    )
    assert out.startswith("4 recorded responses answer in place of the providers\n")
    assert "answered from 4 recorded responses, of 4\n4 answers repeated an earlier one" in out
    assert len(provider.requests) == asked


def test_mistakes_are_explained(provider: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    measure = ["baseline", "c.yaml", "--model", "writer-large", "--tasks", "1"]
    assert main([*measure, "run.dir=runs/asked"]) == 0
    (recorded,) = map(str, Path("runs/asked").glob("baseline-*"))
    assert main([*measure, "--recorded", recorded, "run.dir=runs/replayed"]) == 0
    (replayed,) = map(str, Path("runs/replayed").glob("baseline-*"))
    host = urlsplit(os.environ[URL]).netloc
    for sources, more, expected in (
        ([recorded], ["eval.model=gpt"], f"no response of 'gpt' is recorded in {recorded!r}; the models there are "),
        ([recorded, "nowhere"], [], "'nowhere' does not exist"),
        ([replayed], [], f"the run {replayed!r} was answered by recorded responses: pass their source, {recorded}"),
        ([recorded], [f"rollouts.ignore_hosts=['{host}']"], f"rollouts.ignore_hosts lists {host}, which answered in"),
    ):
        named = [word for source in sources for word in ("--recorded", source)]
        given = measure[:2] if more and more[0].startswith("eval.model") else measure
        assert main([*given, *named, *more, "run.dir=runs/no"]) == 2, expected
        assert expected in capsys.readouterr().err
    assert not list(Path("runs").glob("no/*"))


def test_a_judge_answers_again_from_the_record(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["baseline", "c.yaml", "--model", "writer-large", "reward=tests.tools.cli.baseline_agent:judge"]
    assert main([*arguments, "agent=tests.tools.cli.baseline_agent:text", "run.dir=runs/asked"]) == 0
    (recorded,) = map(str, Path("runs/asked").glob("baseline-*"))
    monkeypatch.setenv(URL, "http://127.0.0.1:9/v1")
    more = ["agent=tests.tools.cli.baseline_agent:text", "run.dir=runs/replayed", "--recorded", recorded]
    assert main([*arguments, *more]) == 0
    assert "answered from 6 recorded responses, of 6\n" in capsys.readouterr().out
    assert measured("replayed").reward == measured("asked").reward == 1.0


def test_a_recording_of_other_tasks_measures_nothing(provider: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "c.yaml", "--model", "writer-large", "--tasks", "1", "run.dir=runs/asked"]) == 0
    (recorded,) = map(str, Path("runs/asked").glob("baseline-*"))
    Path("eval.jsonl").write_text('{"id": "other"}\n')
    assert main(["baseline", "c.yaml", "--model", "writer-large", "--recorded", recorded]) == 1
    assert "all 1 rollouts had an infrastructure failure; the first:" in (err := capsys.readouterr().err)
    assert "no response of 'planner-large' to this conversation is recorded" in err
