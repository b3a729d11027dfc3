"""The search for prompts: its budget, its comparisons, its conversations and its reflection model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from lightning_core import load_config, trainable
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import rollout, scope
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Routing
from lightning_core.errors import InfrastructureError
from lightning_core.observers.open import make_display
from lightning_core.rollouts.prepare import Inputs, prepare_evaluation
from lightning_core.testing.recording_server import serve_app
from lightning_core.tools.prompts.bootstrap import conversations_of
from lightning_core.tools.prompts.reflection import ReflectionModel
from lightning_core.tools.prompts.search import PromptSearch, is_better
from lightning_core.tools.serving import ServingEndpoint
from lightning_core.trainers.open_run import open_run
from lightning_core.trainers.plan import Plan
from tests.tools.cli.recorded import call

TASKS = [{"id": str(i), "question": str(i)} for i in range(8)]


@contextmanager
def open_search(folder: Path, budget: int) -> Iterator[PromptSearch]:
    backend = ScriptedBackend(lambda prompt: "yes", models=["small"])
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing()) as provider:

        @trainable("answerer")
        def answer(question: str) -> str | None:
            client = openai.OpenAI(base_url=provider.url, api_key="any", max_retries=0)
            asked: Any = [{"role": "user", "content": question}]
            return client.chat.completions.create(model="small", messages=asked).choices[0].message.content

        def solve(task: dict[str, Any]) -> float:
            return float(answer(task["question"]) == "yes")

        config = load_config(
            {
                "policy": {"model": "unused"},
                "eval": {"model": "small"},
                "rollouts": {"executor": "task"},
                "agents": {"train": ["answerer"]},
            }
        )
        given = prepare_evaluation(config, solve=solve, reward=None, tasks=TASKS)
        inputs = Inputs(solve=given.solve, reward=given.reward, tasks=TASKS, eval_tasks=given.eval_tasks)
        display = make_display(config, False)
        plan = Plan(config=config, folder=folder, checkpoint=None, inputs=inputs, observers=display)
        with display.watching(config, folder), open_run(plan, weights_only=True) as run:
            yield PromptSearch(config=config, run=run, budget=budget)


def test_no_more_rollouts_than_the_budget_and_means_of_the_same_tasks(tmp_path: Path) -> None:
    with open_search(tmp_path, budget=7) as search:
        assert len(search.collect({}, TASKS, attempts=2)) == 6
        assert search.collect({}, TASKS, attempts=2) == []
        (only,) = search.evaluate({}, TASKS)
        assert (search.spent, search.left) == (7, 0)
        assert search.evaluate({}, TASKS) == [only], "what is known already needs no budget"

    def rewarded(**rewards: float | None) -> list[Any]:
        return [
            replace(
                only,
                job=replace(only.job, task_id=task),
                status="infrastructure" if reward is None else "ok",
                trace=replace(only.trace, rewards=[replace(only.trace.rewards[0], value=reward or 0.0)]),
            )
            for task, reward in rewards.items()
        ]

    before = rewarded(easy=1.0, hard=0.0)
    assert not is_better(rewarded(easy=1.0, hard=None), before), "the mean without the hard task is higher"
    assert is_better(rewarded(easy=None, hard=1.0), before)
    assert not is_better(rewarded(easy=None, hard=None), before)


def test_conversations_with_other_tool_calls_are_distinguished() -> None:
    def looked(at: int) -> dict[str, Any]:
        function = {"name": "look", "arguments": f'{{"at": {at}}}'}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    question = {"role": "user", "content": "How many?"}
    result = {"role": "tool", "tool_call_id": "c", "content": "2"}
    with rollout(task={"id": "q"}) as run, scope("writer"):
        call("writer", [question, looked(1), result], {"role": "assistant", "content": "two"})
        later: list[Any] = [question, looked(2), result, {"role": "assistant", "content": "2"}, question]
        call("writer", later, {"role": "assistant", "content": "two again"})
    answers = [conversation[-1]["content"] for conversation in conversations_of(run.trace, "writer")]
    assert answers == ["two", "two again"]


def test_the_reflection_model_is_waited_for() -> None:
    limits = 4
    page = False

    async def answer(request: Request) -> Response:
        nonlocal limits
        if page:
            return HTMLResponse("<html>Sign in</html>")
        limits -= 1
        if limits >= 0:
            return JSONResponse({"error": "slow down"}, status_code=429, headers={"retry-after": "0"})
        return JSONResponse({"choices": [{"message": {"content": "Better."}}]})

    with serve_app(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])) as url:
        model = ReflectionModel(model="m", base_url=f"{url}/v1")
        assert model("Improve it.") == "Better."
        page = True
        with pytest.raises(InfrastructureError, match=r"did not answer: expected a JSON object, got: <html>Sign in"):
            model("Improve it.")
