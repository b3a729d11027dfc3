"""A teacher behind HTTP: the logprobs of prompts under a model, in the format of vLLM (which tests/vllm checks)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """Of each token but the first."""
    with torch.no_grad():
        logprobs_LV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs_LV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@contextmanager
def scoring_server(folder: Path) -> Iterator[str]:
    """The URL of a server of the model in ``folder``."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with serving(lambda ids: logprobs_of(model, ids)) as url:
        yield url


@contextmanager
def serving(score: Callable[[list[int]], list[float]]) -> Iterator[str]:
    """The URL of a server whose model has the logprobs ``score(ids)`` of all ids but the first."""

    async def models(request: Request) -> Response:
        del request
        return JSONResponse({"data": [{"id": "teacher"}]})

    async def complete(request: Request) -> Response:
        ids = (await request.json())["prompt"]
        listed = [{str(token): {"logprob": value}} for token, value in zip(ids[1:], score(ids), strict=True)]
        return JSONResponse({"choices": [{"prompt_logprobs": [None, *listed]}]})

    routes = [Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()
