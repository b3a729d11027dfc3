"""``lightning-rl baseline`` against a real provider on this machine, which counts tokens."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_core.records.report import read_summary
from lightning_core.testing.recording_server import serve_app
from lightning_core.tools.cli.main import main
from tests.tools.cli.baseline_agent import URL
from tests.tools.view.pages import Seen, browsing

CONFIG = """\
agent: tests.tools.cli.baseline_agent:solve
tasks: {train: train.jsonl, eval: eval.jsonl}
agents: {train: [writer]}
policy: {model: some/model-that-is-not-here}
rollouts: {executor: thread, concurrency: 1}
"""
PRICES = """\
small-*: {input: 2.0, cached_input: 1.0, output: 10.0}  # USD per million tokens
planner-large: {input: 4.0, output: 20.0}
"""


class Provider:
    """Answers by model: the small one solves every other attempt at a task."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.attempts = Counter[str]()
        self.counts = True
        """Whether it reports token counts."""

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append({**body, "key": request.headers["authorization"]})
        text = "a plan"
        if body["model"].startswith("small-"):
            text = "right" if self.attempts[body["messages"][0]["content"]] % 2 else "wrong"
            self.attempts[body["messages"][0]["content"]] += 1
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
        usage |= {"prompt_tokens_details": {"cached_tokens": 400}}
        model = f"{body['model']}-2026-11"
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": model}
        return JSONResponse({**head, "choices": [choice], **({"usage": usage} if self.counts else {})})


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


def folder() -> Path:
    (found,) = Path("runs").glob("baseline-*")
    return found


def test_a_baseline_is_a_run_with_rewards_tokens_latency_and_cost(
    provider: Provider, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "small-1", "--tasks", "2", "--samples", "4", "--prices", "prices.yaml"]
    assert main(["baseline", "c.yaml", *arguments]) == 0
    out = capsys.readouterr().out
    assert Counter((r["model"], r["key"]) for r in provider.requests) == {
        ("small-1", "Bearer mine"): 8,
        ("planner-large", "Bearer mine"): 8,
    }, "the trained agent's calls go to the model, the others are as they were"
    assert "held-out reward 0.500 [0.079, 0.921] (95% interval) on 2 tasks\nsolved: 0 of 2 tasks (0%)" in out
    assert [line.split()[-3:] for line in out.splitlines() if line.startswith(("pass", "k "))] == [
        ["1", "2", "4"],
        ["0.500", "0.833", "1.000"],
        ["0.500", "0.167", "0.000"],
    ]
    assert "a rollout: 2.0 calls, 2,000 tokens in, 200 out" in out
    # small-1: 600 · 2 + 400 · 1 + 100 · 10 = 2,600 per million, the planner: 1,000 · 4 + 100 · 20 = 6,000.
    assert "1,000 rollouts: $8.60" in out
    assert "cost of this evaluation: $0.0688" in out

    summary = read_summary(folder() / "summary.json")
    evaluation = summary.evaluation
    assert evaluation is not None
    assert (evaluation.model, evaluation.tasks, evaluation.rollouts, evaluation.solved) == ("small-1", 2, 8, 0)
    small = next(model for model in evaluation.usage.models if model.model == "small-1-2026-11")
    assert (small.calls, small.input_tokens, small.cached_tokens, small.output_tokens) == (8, 8000, 3200, 800)
    assert 0 < small.seconds_p50 <= small.seconds_p90
    assert small.usd == pytest.approx(8 * 0.0026)

    assert main(["runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["state"], listed["model"]) == ("finished", "small-1")
    with browsing(Path("runs")) as viewer:
        for page in ("", "/rollouts", "/rollouts/1", "/tasks"):
            assert viewer.get(f"/runs/{folder().name}{page}").status_code == 200
        status = Seen(viewer.get(f"/runs/{folder().name}").text).text
        assert "held-out 0.500 [0.079, 0.921], 0 of 2 tasks solved" in status
        assert "small-1 0 – – 0.500 –" in re.sub(r" / \d+", "", Seen(viewer.get("/").text).text)
    assert main(["trace", str(folder()), "--rollout", "1", "--json"]) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    assert [(call["agent"], call["trained"]) for call in calls] == [("planner", False), ("writer", True)]


def test_a_provider_that_cannot_be_reached_is_named_without_advice_to_train(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(URL, "http://127.0.0.1:9/v1")  # nobody listens there
    settings = ["agents.train=all", "rollouts.retries=0", "--tasks", "1"]
    assert main(["baseline", "c.yaml", "--model", "small-1", *settings]) == 1
    error = capsys.readouterr().err
    assert "could not reach http://127.0.0.1:9/v1" in error
    assert "train the agent" not in error


def test_a_baseline_through_an_upstream_server(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = os.environ[URL]
    monkeypatch.setenv(URL, "http://127.0.0.1:9/v1")  # nobody listens there
    monkeypatch.setenv("PROVIDER_KEY", "theirs")
    settings = [f"policy.upstream={{base_url: {upstream}, api_key_env: PROVIDER_KEY}}", "eval.model=small-2"]
    assert main(["baseline", "c.yaml", "agents.train=all", "agents.frozen={planner: small-3}", *settings]) == 0
    assert Counter((r["model"], r["key"]) for r in provider.requests) == {
        ("small-2", "Bearer theirs"): 3,
        ("small-3", "Bearer theirs"): 3,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["baseline", "c.yaml"], "expected the model to measure, such as the one in production: --model NAME"),
        (["baseline", "c.yaml", "--model", "base"], "eval.model is 'base', which stands for this run's own weights"),
        (["baseline", "c.yaml", "--model", "m", "--prices", "no.yaml"], "prices: no file at 'no.yaml'"),
        (["train", "c.yaml", "eval.model=m"], "eval.model is 'm', but a run evaluates the policy that it trains"),
    ],
)
def test_mistakes_are_explained(
    provider: Provider, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err
    assert provider.requests == []
    assert not list(Path().glob("runs/*"))


def test_baselines_stand_beside_other_runs(provider: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    for name, samples, provider.counts in (("small-1", 2, True), ("large-1", 1, True), ("small-9", 1, False)):
        options = ["--model", name, "--samples", str(samples), f"run.dir=runs/{name}"]
        assert main(["baseline", "c.yaml", *options]) == 0
    assert "6 calls without token counts, which the provider did not report" in capsys.readouterr().out
    runs = [str(next(Path("runs", name).glob("baseline-*"))) for name in ("small-1", "large-1", "small-9")]
    assert main(["runs", "compare", *runs, "--prices", "prices.yaml"]) == 0
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    found = {name: re.split(r"  +", cells) for name, cells in rows.items()}
    assert found["eval.model"] == ["small-1", "large-1", "small-9"]
    assert [cell.split()[0] for cell in found["reward"]] == ["0.500", "0.000", "0.000"]
    assert found["pass^k"] == ["0.000 (k = 2)", "–", "–"]
    assert found["calls of a rollout"] == ["2.0"] * 3
    assert found["tokens in of a rollout"] == ["2,000", "2,000", "≥ 0"]
    assert found["USD of 1,000 rollouts"] == ["$8.60", "–", "–"], "no price, and no token counts"


@pytest.mark.parametrize(
    ("agent", "settings", "planned"),
    [("alone", [], 0), ("unmarked", ["agents.named=[{name: writer, contains: write}]", "agents.train=[writer]"], 3)],
)
def test_agents_without_marks(
    provider: Provider, no_marks: None, agent: str, settings: list[str], planned: int
) -> None:
    settings = ["agents.train=null", *settings, f"agent=tests.tools.cli.baseline_agent:{agent}"]
    assert main(["baseline", "c.yaml", "--model", "small-1", *settings]) == 0
    models = Counter(r["model"] for r in provider.requests)
    assert models.keys() == {"small-1", "planner-large"} if planned else {"small-1"}
    assert models["planner-large"] == planned, "while the writer is not known, no call of another agent is forwarded"
    assert models["small-1"] == (4 if planned else 3), "the first attempt was repeated"
