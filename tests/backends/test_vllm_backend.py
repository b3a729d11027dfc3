"""Errors for a vLLM server that is missing, started with wrong arguments, or returns wrong data. tests/vllm has the real one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.vllm import backend as backend_module
from lightning_core.backends.vllm.api import without_prompt
from lightning_core.backends.vllm.backend import MOST_ATTEMPTS, VllmBackend
from lightning_core.backends.vllm.constraint import structured_outputs
from lightning_core.errors import ConfigError, ConstraintError, InfrastructureError
from lightning_core.model.constraint import Constraints
from lightning_core.trace import POLICY
from tests.chat.test_chat import make_tokenizer
from tests.endpoint.model_server import END, SIZE, ModelServer, serve_model

INFO = {
    "vllm_config": {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "device_config": {"device": "cpu"},
        "scheduler_config": {"enable_chunked_prefill": False},
    }
}
CHOICE = {
    "token_ids": [5, 9],
    "logprobs": {"token_logprobs": [-0.5, -1.5]},
    "finish_reason": "stop",
    "prompt_token_ids": [1, 2],
}
RIGHT: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "served", "max_model_len": 64}]},
    "/is_paused": {"is_paused": False},
    "/server_info": INFO,
    "/v1/completions": {"choices": [CHOICE]},
    "/pause": {},
    "/collective_rpc": {},
    "/reset_prefix_cache": {"success": True},
    "/resume": {},
}


@contextmanager
def answering(**changes: Any) -> Generator[str]:
    """A server that responds as vLLM does, except for ``changes`` (path with underscores for slashes): JSON, raw text, or a status."""
    answers = {**RIGHT, **{"/" + path.replace("__", "/"): answer for path, answer in changes.items()}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = answers.get(self.path.partition("?")[0], 404)
            self.send_response(answer if isinstance(answer, int) else 200)
            if isinstance(answer, str) and answer.startswith(("data:", ":")):
                self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.end_headers()
            self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def sample(url: str, *, stream: bool = False, prompt: Sequence[int] = (1, 2)) -> list[Delta]:
    backend = VllmBackend(url, model=POLICY)

    async def collect() -> list[Delta]:
        params = SamplingParams(max_tokens=4, stop_token_ids=frozenset({9}))
        return [delta async for delta in backend.generate(prompt, params, model="policy", stream=stream)]

    return asyncio.run(collect())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def events(*choices: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps({'choices': [c]})}\n\n" for c in choices) + "data: [DONE]\n\n"


def without(section: str, **values: Any) -> dict[str, Any]:
    return {"vllm_config": {**INFO["vllm_config"], section: values}}


def test_what_is_as_it_should_be_is_taken():
    with answering() as url:
        assert VllmBackend(f"{url}/v1/", model=POLICY).max_context == 64
        assert VllmBackend(url, model=POLICY, max_context=32).max_context == 32
        (delta,) = sample(url)
    assert (delta.token_ids, delta.logprobs, delta.finish_reason, delta.version) == ([5, 9], [-0.5, -1.5], "stop", 0)


def test_line_ends_of_unicode_inside_an_event_do_not_end_it():
    choice = json.dumps({**CHOICE, "text": "\x85 \u2028"}, ensure_ascii=False)
    with answering(v1__completions=f'data: {{"choices": [{choice}]}}\n\ndata: [DONE]\n\n') as url:
        (delta,) = sample(url, stream=True)
    assert delta.token_ids == [5, 9]


def test_events_may_have_comments_and_other_line_ends_and_several_lines():
    first, second = json.dumps({"choices": [CHOICE]}, indent=1).split("\n", 1)
    lines = [": ping", "", "event: message", f"data: {first}", *(f"data: {line}" for line in second.split("\n")), ""]
    with answering(v1__completions="\r\n".join([*lines, "data: [DONE]", "", ""])) as url:
        (delta,) = sample(url, stream=True)
    assert delta.token_ids == [5, 9]


def test_a_server_that_is_not_there():
    with pytest.raises(
        InfrastructureError, match=r"no response from the vLLM server http://127.0.0.1:9: .* Check that it is running"
    ):
        VllmBackend("http://127.0.0.1:9", model=POLICY)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"is_paused": 404}, "VLLM_SERVER_DEV_MODE=1"),
        ({"server_info": without("model_config", logprobs_mode="raw_logprobs")}, "--logprobs-mode processed_logprobs"),
        ({"server_info": without("scheduler_config", enable_chunked_prefill=True)}, "--no-enable-chunked-prefill"),
    ],
)
def test_a_server_that_was_started_otherwise_than_it_must_be(changes: dict[str, Any], expected: str):
    with answering(**changes) as url, pytest.raises(ConfigError, match=expected):
        VllmBackend(url, model=POLICY)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"v1__models": 404}, "returned status 404 for /v1/models"),
        ({"v1__models": "<html>"}, "returned '<html>'"),
        ({"v1__models": {"data": []}}, "expected a response of vLLM 0.27 or later"),
        ({"server_info": {"vllm_config": "text"}}, "expected a response of vLLM 0.27 or later"),
    ],
)
def test_a_server_that_is_not_vllm(changes: dict[str, Any], expected: str):
    with answering(**changes) as url, pytest.raises(InfrastructureError, match=expected):
        VllmBackend(url, model=POLICY)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (500, "returned status 500 for /v1/completions"),
        ("nonsense", "returned 'nonsense'"),
        ({"choices": []}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "token_ids": None}]}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "logprobs": None}]}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "logprobs": {"token_logprobs": [-0.5]}}]}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "logprobs": {"token_logprobs": [-0.5, None]}}]}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "logprobs": {"token_logprobs": [-0.5, float("nan")]}}]}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "logprobs": {"token_logprobs": [-0.5, -9999.0]}}]}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "finish_reason": None}]}, "an incomplete response"),
        ({"choices": [{**CHOICE, "finish_reason": "tool"}]}, "expected a response of vLLM 0.27"),
        ({"choices": [{**CHOICE, "finish_reason": "abort"}]}, "shutting down, or another program paused it"),
        ({"choices": [{**CHOICE, "token_ids": [9, 5]}]}, r"\[5\]; expected one of \[9\]. Start it with --generation-config vllm"),
        ({"choices": [{**CHOICE, "prompt_token_ids": [0, 1, 2]}]}, "did not sample from the prompt that it was sent"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_trained_on(answer: Any, expected: str):
    with answering(v1__completions=answer) as url, pytest.raises(InfrastructureError, match=expected):
        sample(url)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (events({**CHOICE, "finish_reason": None}), "an incomplete response"),
        (events(), "shutting down, or another program paused it"),
        ('data: {"error": {"message": "engine died"}}\n\n', "failed while sampling.*engine died"),
        ("not a stream", "expected a response of vLLM 0.27 or later"),
    ],
)
def test_a_stream_that_cannot_be_trained_on(answer: str, expected: str):
    with answering(v1__completions=answer) as url, pytest.raises(InfrastructureError, match=expected):
        sample(url, stream=True)


def test_after_a_push_that_failed_nothing_is_sampled(tmp_path: Path):
    with answering(collective_rpc=500) as url:
        backend = VllmBackend(url, model=POLICY)
        with pytest.raises(InfrastructureError, match="returned status 500 for /collective_rpc"):
            backend.push(tmp_path, 1)
        assert backend.version == 0
        with pytest.raises(InfrastructureError, match=r"weights could not be replaced: .*/collective_rpc"):
            asyncio.run(anext(backend.generate([1], SamplingParams(max_tokens=1), model="policy")))


SCHEMA = SamplingParams(max_tokens=20, json_schema='{"type": "string"}', stop_token_ids=frozenset({END}))


def push_while_sampling(server: ModelServer, folder: Path, *, pushes: int) -> tuple[VllmBackend, Future[list[Delta]]]:
    """A constrained response during which weights are pushed so often; no push waits for long."""
    backend = VllmBackend(server.url, model=POLICY, constraints=Constraints(make_tokenizer(), 320))
    server.let_answer.clear()

    async def collect() -> list[Delta]:
        return [delta async for delta in backend.generate([1, 2], SCHEMA, model=POLICY)]

    with ThreadPoolExecutor(2) as threads:
        response = threads.submit(asyncio.run, collect())
        for version in range(1, pushes + 1):
            wait_until(lambda v=version: server.asked == v or response.done())
            if response.done():
                pytest.fail(f"a response before push {version}: {response.result()}")
            push = threads.submit(backend.push, folder, version)
            if backend_module.WHOLE_SECONDS > 1:
                wait_until(lambda: backend.gate.state.held)
                assert (backend.gate.whole, server.paused.is_set()) == (1, False)
                server.let_answer.set()
            push.result(30)
        server.let_answer.set()
    return backend, response


def test_a_push_waits_for_a_constrained_response(tmp_path: Path):
    with serve_model() as server:
        _, response = push_while_sampling(server, tmp_path, pushes=1)
    assert [(delta.version, len(delta.token_ids)) for delta in response.result()] == [(0, SIZE)]
    assert server.loaded == [str(tmp_path)]


@pytest.mark.parametrize("pushes", [1, MOST_ATTEMPTS])
def test_a_long_constrained_response_begins_again_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pushes: int
):
    monkeypatch.setattr(backend_module, "WHOLE_SECONDS", 0.01)
    with serve_model() as server:
        backend, response = push_while_sampling(server, tmp_path, pushes=pushes)
    if pushes == MOST_ATTEMPTS:
        with pytest.raises(
            InfrastructureError, match=r"interrupted by new weights, and cannot continue: 3 tokens took"
        ):
            response.result()
    else:
        assert [(delta.version, len(delta.token_ids)) for delta in response.result()] == [(1, SIZE)]
    assert (backend.gate.sampling, backend.gate.whole) == (0, 0)


def test_a_prompt_that_the_server_repeats_is_compared_and_not_parsed():
    """With one token more, it is another prompt."""
    prompt = list(range(1, 40_000))
    compact = json.dumps({"choices": [{**CHOICE, "prompt_token_ids": prompt}]}, separators=(",", ":"))
    assert json.loads(without_prompt(compact.encode(), to_json(prompt)))["choices"][0]["prompt_token_ids"] is None
    assert without_prompt(compact.encode(), to_json(prompt[1:])) == compact.encode()
    with answering(v1__models={"data": [{"id": "served", "max_model_len": 1 << 20}]}, v1__completions=compact) as url:
        (delta,) = sample(url, prompt=prompt)
        with pytest.raises(InfrastructureError, match="did not sample from the prompt that it was sent"):
            sample(url, prompt=prompt[1:])
    assert delta.token_ids == [5, 9]


@pytest.mark.parametrize(
    ("settings", "constrains"),
    [
        ({"backend": "guidance"}, True),
        ({"backend": "auto"}, False),
        ({"backend": "guidance", "reasoning_parser": "qwen3"}, False),
        ({"backend": "guidance", "reasoning_parser": "qwen3", "enable_in_reasoning": True}, True),
        (None, False),
    ],
)
def test_only_a_server_with_the_trainers_automaton_is_asked_to_constrain(settings: Any, constrains: bool):
    info = {"vllm_config": {**INFO["vllm_config"], "structured_outputs_config": settings}}
    schema = SamplingParams(max_tokens=4, json_schema='{"type": "object"}', stop_token_ids=frozenset({256}))
    with answering(server_info=info) as url:
        backend = VllmBackend(url, model=POLICY, constraints=Constraints(make_tokenizer(), 320))
        with (
            nullcontext() if constrains else pytest.raises(ConstraintError, match=r"start it with --structured-outputs")
        ):
            backend.check(schema)
        with pytest.raises(ConstraintError):  # the trainer could not compute the distribution again
            VllmBackend(url, model=POLICY).check(schema)


def test_the_grammar_of_a_server_ends_with_the_stop_tokens():
    stops = frozenset({9, 3})
    assert structured_outputs(SamplingParams(max_tokens=4, stop_token_ids=stops)) is None
    grammar = structured_outputs(
        SamplingParams(max_tokens=4, stop_token_ids=stops, grammar='start: "a" b\nb: "start: "')
    )
    assert grammar == {"grammar": 'start: response (<[3]> | <[9]>)\nresponse: "a" b\nb: "start: "'}
    schema = structured_outputs(SamplingParams(max_tokens=4, stop_token_ids=stops, json_schema='{"type": "object"}'))
    assert schema is not None
    assert schema["grammar"].startswith(
        'start: response (<[3]> | <[9]>)\nresponse: %json {"type": "object", "x-guidance": {'
    )
