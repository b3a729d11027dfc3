"""``lightning-rl serve``: a run's checkpoint, served to real clients over real HTTP."""

import gc
import os
import re
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from lightning_core import fit, load_config
from lightning_core.backends.scripted import ByteTokenizer, ScriptedBackend
from lightning_core.capture.signatures import ORIGIN
from lightning_core.chat.chat import Chat
from lightning_core.chat.history.places import Place
from lightning_core.endpoint.server import Routing
from lightning_core.errors import ConfigError
from lightning_core.otel import read_traces
from lightning_core.tools import serving
from lightning_core.tools.cli.main import main
from lightning_core.tools.serving import RecentMemory, ServingEndpoint, open_serving
from lightning_core.trainers import Trainer, make_trainer
from tests import bandit, warm
from tests.tiny_model import make_tiny_model

QUESTION = [{"role": "user", "content": "say 7"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training run: checkpoints after its first and second step."""
    folder = tmp_path_factory.mktemp("serving")
    model = make_tiny_model(folder / "model")
    config = {
        "tasks": {"train": "tests.bandit:tasks", "sampling": "uniform"},
        "policy": {"model": str(model), "max_context": 256, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 2, "group_size": 8, "max_tokens": 6, "executor": "task"},
        "trainer": {"steps": 2, "learning_rate": 5e-3, "checkpoint_every": 1},
        "run": {"dir": str(folder), "name": "run"},
    }
    return fit(bandit.solve, config=load_config(config)).folder


@contextmanager
def serve(run: Path, checkpoint: str | None = "step-000002", **more: str) -> Iterator[ServingEndpoint]:
    config = load_config(run / "config.yaml")
    with open_serving(
        config, checkpoint=None if checkpoint is None else run / "checkpoints" / checkpoint, **more
    ) as served:
        yield served


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[ServingEndpoint]:
    with serve(run, api_key="secret") as served:
        yield served


def ask(url: str, key: str = "secret", **more: object) -> openai.types.chat.ChatCompletion:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    return client.chat.completions.create(**{"model": "policy", "messages": QUESTION, "temperature": 0, **more})


def token_ids(url: str, key: str = "secret") -> list[int]:
    return ask(url, key, extra_body={"return_token_ids": True}).choices[0].token_ids


def greedy(trainer: Trainer) -> list[int]:
    """Responses of the trained policy at temperature 0, through an endpoint that serves the trainer itself."""
    routing = Routing(max_tokens=6)
    with ServingEndpoint(trainer.backend, trainer.chats["policy"], routing=routing) as endpoint:
        return token_ids(endpoint.url)


def test_the_checkpoint_responds_as_the_trained_policy(run: Path, served: ServingEndpoint):
    answers: list[list[int]] = []
    for checkpoint in (None, "step-000001", "step-000002"):
        trainer = make_trainer(load_config(run / "config.yaml"))
        if checkpoint is not None:
            trainer.learner.load(run / "checkpoints" / checkpoint, weights_only=True)
        answers.append(greedy(trainer))
        trainer.learner.close()
    untrained, first, second = answers
    assert untrained != first != second, "else this test could not tell one from another"
    assert token_ids(served.url) == second
    with serve(run, "step-000001") as other:
        assert token_ids(other.url) == first


def test_all_wire_formats_whole_and_streamed(served: ServingEndpoint):
    text = ask(served.url).choices[0].message.content
    assert text
    client = openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0)
    chunks = client.chat.completions.create(model="policy", messages=QUESTION, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert client.responses.create(model="policy", input="say 7", temperature=0).output_text == text
    events = client.responses.create(model="policy", input="say 7", temperature=0, stream=True)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text

    messages = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="secret", max_retries=0).messages
    request = {"model": "policy", "messages": QUESTION, "max_tokens": 6, "extra_body": {"temperature": 0}}
    assert messages.create(**request).content[0].text == text
    with messages.stream(**request) as parts:
        assert parts.get_final_text() == text
    assert [m.id for m in client.models.list()] == ["policy"]


def test_requests_decide_how_they_are_sampled(run: Path, served: ServingEndpoint):
    """The run's limit of 6 tokens and its temperature are defaults here, not limits."""
    assert ask(served.url).usage.completion_tokens <= 6
    longer = ask(served.url, max_tokens=40)
    assert longer.usage.completion_tokens == 40 or longer.choices[0].finish_reason == "stop"
    with serve(run, "step-000001") as untamed:
        assert ask(untamed.url, max_tokens=40).usage.completion_tokens > 6
        several = ask(untamed.url, n=4, temperature=None)
        assert len({choice.message.content for choice in several.choices}) > 1


def test_a_request_without_the_key_is_refused(served: ServingEndpoint):
    for key in ("any", "secret2", "sécret"):
        answer = httpx.get(f"{served.url}/models", headers={b"authorization": f"Bearer {key}".encode()})
        assert answer.status_code == 401
    assert httpx.get(f"{served.url}/models").status_code == 401
    with pytest.raises(openai.AuthenticationError, match="unknown API key"):
        ask(served.url, "other")
    other = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="other", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
        other.messages.create(model="policy", messages=QUESTION, max_tokens=6)


@contextmanager
def scripted(**more: str) -> Iterator[ServingEndpoint]:
    backend = ScriptedBackend(lambda prompt: "hello")
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing(max_tokens=100), **more) as endpoint:
        yield endpoint


def test_without_a_key_any_will_do():
    with scripted() as endpoint:
        assert ask(endpoint.url, "any-model").choices[0].message.content == "hello"
        assert httpx.get(f"{endpoint.url}/models").status_code == 200


def test_nothing_is_fetched_from_elsewhere_and_no_span_is_taken():
    with scripted() as endpoint:
        body = {"model": "gpt-x", "messages": QUESTION}
        answer = httpx.post(f"{endpoint.url}/chat/completions", json=body, headers={ORIGIN: f"{endpoint.url}/models"})
        assert answer.status_code == 404
        assert "'gpt-x' is not served here; the models are ['policy', 'base']" in answer.json()["error"]["message"]
        assert httpx.post(f"{endpoint.url}/traces", json={"resourceSpans": []}).status_code == 404


def test_memory_does_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """40 conversations of 2,500 tokens keep no more memory than 20."""
    monkeypatch.setattr(serving, "MEMORY_TOKENS", 20_000)
    monkeypatch.setattr(serving, "MAX_RESPONSES", 10)
    with scripted() as endpoint, httpx.Client(base_url=f"{endpoint.url}/") as client:

        def ask_often(start: int, count: int) -> int:
            for i in range(start, start + count):
                client.post("responses", json={"model": "policy", "input": f"{i} " * 500}).raise_for_status()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = ask_often(1000, 20)
            after = ask_often(2000, 40)
        finally:
            tracemalloc.stop()
    # Each takes about 25 kB while it is kept; its span alone would take 14 kB.
    assert after - before < 40 * 1000
    assert caplog.records == []


def test_what_is_forgotten_first():
    chat, response = Chat(ByteTokenizer()), {"role": "assistant", "content": "x" * 40}

    def ask(memory: RecentMemory, text: str) -> int:
        prompt = chat.render([{"role": "user", "content": text}], None, memory)
        chat.remember(prompt, b"x" * 40, response, memory)
        return len(prompt.ids) + 40

    def known(memory: RecentMemory, text: str) -> bool:
        messages = [{"role": "user", "content": text}, response, {"role": "user", "content": "more"}]
        return chat.render(messages, None, memory).context == "clean"

    size = ask(RecentMemory(1000), "a")
    memory = RecentMemory(2 * size)
    for text in "abb":
        ask(memory, text)
    assert known(memory, "a")
    ask(memory, "c")
    assert [known(memory, text) for text in "abc"] == [True, False, True]
    ask(memory, "longer than all" * size)
    assert not any(known(memory, text) for text in ("a", "c", "longer than all" * size))


def test_responses_that_cannot_be_continued_keep_no_memory():
    """A stop string began inside a token. Other tools in each request: not even the settings are kept."""
    chat, response = Chat(ByteTokenizer()), {"role": "assistant", "content": "x" * 40}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}} for n in range(10)]

    def places() -> int:
        gc.collect()
        return sum(type(one) is Place for one in gc.get_objects())

    before = places()

    def ask(memory: RecentMemory, messages: list[dict[str, str]], tool: int = 0, *, cut: bool = True) -> int:
        prompt = chat.render(messages, tools[tool : tool + 1], memory)
        chat.remember(prompt, b"x" * 40, response, memory, stopped="y" if cut else None)
        return len(prompt.ids) + 40

    memory = RecentMemory(10_000)
    for n in range(10):
        ask(memory, [{"role": "user", "content": f"question {n}"}], n)
    assert places() == before
    first = {"role": "user", "content": "question0"}
    size = ask(RecentMemory(1000), [first], cut=False)
    memory = RecentMemory(size)
    for n in range(10):
        question = {"role": "user", "content": f"question{n}"}
        ask(memory, [question], cut=False)
        ask(memory, [question, response, {"role": "user", "content": "more"}])
    assert places() - before == 3  # the setting, and the latest question with its response


def test_a_conversation_continues_its_tokens_until_it_is_evicted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "MAX_RESPONSES", 2)
    with scripted() as endpoint:
        client = openai.OpenAI(base_url=endpoint.url, api_key="any", max_retries=0)
        first = client.responses.create(model="policy", input="one")
        second = client.responses.create(model="policy", input="two", previous_response_id=first.id)
        assert second.usage.input_tokens > 2 * first.usage.input_tokens
        client.responses.create(model="policy", input="three", previous_response_id=second.id)
        with pytest.raises(openai.APIStatusError, match="previous_response_id"):
            client.responses.create(model="policy", input="too late", previous_response_id=first.id)


def test_serving_to_others_needs_a_key(run: Path):
    config = load_config(run / "config.yaml")
    with (
        pytest.raises(ConfigError, match=r"host '0.0.0.0' accepts requests from other machines: set an API key"),
        open_serving(config, host="0.0.0.0"),
    ):
        pass
    with open_serving(config, host="0.0.0.0", api_key="secret") as served:
        port = served.url.rpartition(":")[2]
        assert ask(f"http://127.0.0.1:{port}").choices


def test_a_port_that_is_taken(run: Path, served: ServingEndpoint):
    port = int(re.findall(r":(\d+)/", served.url)[0])
    with (
        pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .* choose another"),
        serve(run, port=port),
    ):
        pass


def test_the_command_serves_the_newest_checkpoint_until_it_is_stopped(run: Path, served: ServingEndpoint):
    command = ["-m", "lightning_core.tools.cli.main", "serve", str(run), "--port", "0"]
    environment = {**os.environ, "LIGHTNING_API_KEY": "of the environment", "PYTHONPATH": os.getcwd()}
    with warm.Warm(command, env=environment) as process:
        shown = [process.stdout.readline() for _ in range(7)]
        try:
            assert shown[-1].startswith("stop "), shown
            assert shown[0].endswith("checkpoints/step-000002\n")
            url = re.findall(r"OpenAI +base URL (\S+)", shown[1])[0]
            assert token_ids(url, "of the environment") == token_ids(served.url)
            with pytest.raises(openai.AuthenticationError):
                ask(url, "another")
        finally:
            process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.errors()
    assert (process.returncode, out) == (0, "stopped\n")
    assert re.fullmatch(r"WARNING: .*unknown API key.*\n", err), "the request with another key is reported"


def test_the_command_serves_a_model_without_a_run(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LIGHTNING_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = signal.getsignal(signal.SIGTERM)
    answers: list[list[int]] = []

    def ask_and_stop() -> None:
        while signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.05)
        answers.append(token_ids(f"http://127.0.0.1:{port}/v1", "any"))
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask_and_stop, daemon=True)
    asking.start()
    settings = ["policy.dtype=float32", "policy.max_context=256", "rollouts.max_tokens=6"]
    settings += ["--record", str(run.parent / "calls"), "--record-days", "30"]
    assert main(["serve", str(run.parent / "model"), "--port", str(port), *settings]) == 0
    asking.join(10)
    (recorded,) = [trace for file in (run.parent / "calls").iterdir() for trace in read_traces(file)]
    assert [list(call.messages) for call in recorded.calls] == [QUESTION]
    assert signal.getsignal(signal.SIGTERM) is before
    with serve(run, None) as untrained:
        assert answers == [token_ids(untrained.url)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["RUN", "--checkpoint", "step-7"], "--checkpoint 'step-7': the run 'RUN' has ['step-000001', 'step-000002']"),
        (["RUN/checkpoints"], "neither a run's folder (config.yaml) nor a model's (config.json)"),
        (["RUN", "--record-days", "3"], "--record-days requires --record"),
        (["some/model", "--checkpoint", "step-7"], "--checkpoint requires a run's folder; 'some/model' is not one"),
        (["RUN", "--host", "0.0.0.0"], "host '0.0.0.0' accepts requests from other machines: set an API key"),
        (["RUN", "rollouts.max_tokenz=3"], "unknown key; did you mean 'max_tokens'?"),
    ],
)
def test_wrong_usage(
    run: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("LIGHTNING_API_KEY", raising=False)
    assert main(["serve", *(a.replace("RUN", str(run)) for a in arguments)]) == 2
    assert expected.replace("RUN", str(run)) in capsys.readouterr().err
