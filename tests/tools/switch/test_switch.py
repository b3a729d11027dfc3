"""A switch between models on real servers, with the SDKs of OpenAI, Anthropic and Google."""

import json
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml
from google import genai

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.server import Routing
from lightning_core.errors import ConfigError
from lightning_core.records.statistics.prices import Prices
from lightning_core.tools.cli.main import main
from lightning_core.tools.serving import ServingEndpoint
from lightning_core.tools.switch.opened import open_switch
from lightning_core.tools.switch.plan import read_plan
from lightning_core.tools.switch.report import arm_rows
from lightning_core.tools.switch.server import SwitchServer
from lightning_core.tools.switch.store import FILE
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, dict[str, str]]]:
    """Two servers whose models answer with their own name, as entries of a plan."""
    with ExitStack() as stack:
        urls = {}
        for name in ("small", "large"):
            backend = ScriptedBackend(lambda prompt, name=name: f"I am {name}")
            endpoint = ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing())
            urls[name] = {"base_url": stack.enter_context(endpoint).url, "model": "policy"}
        yield urls


@contextmanager
def serve(folder: Path, plan: dict[str, Any], **options: Any) -> Iterator[SwitchServer]:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"folder": str(folder / "switch"), **plan}, sort_keys=False))
    with open_switch(path, **options) as switch:
        yield switch


def client(switch: SwitchServer, agent: str | None = None, key: str = "any") -> openai.OpenAI:
    root = switch.url.removesuffix("/v1")
    return openai.OpenAI(base_url=switch.url if agent is None else f"{root}/a/{agent}/v1", api_key=key, max_retries=0)


def ask(asked: openai.OpenAI, text: str, **more: Any) -> openai.types.chat.ChatCompletion:
    return asked.chat.completions.create(model="gpt", messages=[{"role": "user", "content": text}], **more)


def answer_of(asked: openai.OpenAI, text: str, **more: Any) -> str:
    return ask(asked, text, **more).choices[0].message.content or ""


def test_shares_of_conversations_feedback_and_the_comparison(
    tmp_path: Path, models: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    prices = tmp_path / "prices.yaml"
    prices.write_text("small: {input: 1, output: 2}\nlarge: {input: 10, output: 20}\n")
    plan = {"models": models, "agents": {"writer": {"arms": {"small": 0.3, "large": 0.7}}}}
    with serve(tmp_path, plan) as switch:
        writer, found = client(switch, "writer"), Counter[str]()
        for number in range(60):
            first = ask(writer, f"question {number}")
            text = first.choices[0].message.content or ""
            found[text] += 1
            second = writer.chat.completions.create(
                model="gpt",
                messages=[
                    {"role": "user", "content": f"question {number}"},
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "go on"},
                ],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(second)
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
            reward = 1.0 if text == "I am small" else 0.5
            given = httpx.post(f"{switch.url}/feedback", json={"response": chunks[0].id, "reward": reward})
            assert given.json()["arm"] == text.removeprefix("I am ")
        metrics = httpx.get(switch.url.replace("/v1", "/metrics")).text
    assert set(found) == {"I am small", "I am large"}
    assert 8 <= found["I am small"] <= 29
    assert f'agent="writer",arm="small",shadow="false",status="200"}} {2 * found["I am small"]}.0' in metrics
    assert 'lightning_share{agent="writer",arm="large"} 0.7' in metrics

    large, small = arm_rows(tmp_path / "switch", Prices())
    assert (small.calls, small.rated, small.failed) == (2 * found["I am small"], found["I am small"], 0)
    assert small.input_tokens > 0 < small.output_tokens
    assert small.reward is not None
    assert large.reward is not None
    assert (small.reward.mean, large.reward.mean) == (1.0, 0.5)
    capsys.readouterr()
    assert main(["switch", "show", str(tmp_path / "switch"), "--prices", str(prices)]) == 0
    shown = capsys.readouterr().out
    assert "writer: reward of large - small: -0.500 [" in " ".join(shown.split())
    assert main(["switch", "show", str(tmp_path / "switch"), "--json"]) == 0
    assert [row["arm"] for row in json.loads(capsys.readouterr().out)] == ["large", "small"]


def test_each_wire_format_reaches_the_model_of_the_arm(tmp_path: Path, models: dict[str, Any]):
    with serve(tmp_path, {"models": models, "agents": {"writer": "small"}, "default": "large"}) as switch:
        root = switch.url.removesuffix("/v1")
        writer = client(switch, "writer")
        assert answer_of(writer, "hi") == "I am small"
        assert answer_of(client(switch), "hi") == "I am large"
        assert writer.responses.create(model="gpt", input="hi").output_text == "I am small"
        streamed = writer.responses.create(model="gpt", input="hi", stream=True)
        assert [e.text for e in streamed if e.type == "response.output_text.done"] == ["I am small"]
        claude = anthropic.Anthropic(base_url=f"{root}/a/writer", api_key="any", max_retries=0)
        request: Any = {"model": "claude", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
        assert claude.messages.create(**request).content[0].text == "I am small"
        with claude.messages.stream(**request) as parts:
            assert parts.get_final_text() == "I am small"
        google = genai.Client(api_key="any", http_options={"base_url": f"{root}/a/writer"})
        assert google.models.generate_content(model="gemini-x", contents="hi").text == "I am small"
        assert [m.id for m in client(switch).models.list()] == ["small", "large"]
    rows = {row.agent: row for row in arm_rows(tmp_path / "switch", Prices())}
    assert (rows["writer"].calls, rows["writer"].failed, rows[""].calls) == (6, 0, 1)
    assert rows["writer"].output_tokens == 6 * rows[""].output_tokens


def test_changes_take_effect_at_once_without_losing_a_request_and_survive_a_restart(
    tmp_path: Path, models: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    plan = {"models": models, "agents": {"writer": "large"}}
    with serve(tmp_path, plan) as switch:
        ended, answers, failures = threading.Event(), Counter[str](), list[Exception]()

        def load() -> None:
            with httpx.Client(base_url=switch.url.replace("/v1", "/a/writer/v1")) as http:
                while not ended.is_set():
                    body = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
                    try:
                        response = http.post("/chat/completions", json=body).raise_for_status()
                    except httpx.HTTPError as error:
                        failures.append(error)
                    else:
                        answers[response.json()["choices"][0]["message"]["content"]] += 1

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            assert main(["switch", "promote", "writer", "small", "--url", switch.url]) == 0
            assert answer_of(client(switch, "writer"), "hi") == "I am small"
            assert main(["switch", "rollback", "writer", "--url", switch.url]) == 0
            assert answer_of(client(switch, "writer"), "hi") == "I am large"
        ended.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert min(answers.values()) > 0
        assert len(answers) == 2
        assert main(["switch", "share", "writer", "small=0.25", "large=0.75", "--url", switch.url]) == 0
    assert "writer: small 0.25, large 0.75 (before: large 1)" in capsys.readouterr().out
    with serve(tmp_path, plan) as switch:
        assert switch.shares == {"writer": {"small": 0.25, "large": 0.75}}
        assert switch.notes == ["writer: small 0.25, large 0.75, as changed while serving; the file has large 1"]
    with serve(tmp_path, {**plan, "agents": {"writer": "small"}}) as switch:
        assert switch.shares == {"writer": {"small": 1.0}}, "the file has changed"
        assert not switch.notes


def own_servers() -> int:
    return sum(thread.name == "lightning-endpoint" for thread in threading.enumerate())


def test_a_plan_is_reloaded_while_the_switch_answers(
    tmp_path: Path, models: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    own = {"weights": str(make_tiny_model(tmp_path / "model"))}
    plan = {"models": models, "agents": {"writer": "small", "critic": "small"}, "folder": str(tmp_path / "switch")}
    with serve(tmp_path, plan) as switch:
        before, ended = own_servers(), list[int]()

        def reload(changed: dict[str, Any]) -> int:
            (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, **changed}, sort_keys=False))
            ended.append(main(["switch", "reload", "--url", switch.url]))
            return ended[-1]

        assert main(["switch", "promote", "writer", "large", "--url", switch.url]) == 0
        wrong_model = {"models": {**models, "own": {"weights": str(tmp_path)}}}
        for wrong, expected in (
            ({"agents": {"writer": "four"}}, "there is no model 'four'; expected one of small, large"),
            (wrong_model, "is neither a run's folder"),
            ({**wrong_model, "folder": str(tmp_path / "other")}, "until the switch is started again"),
        ):
            assert reload(wrong) == 2
            assert expected in " ".join(capsys.readouterr().err.split())
        with_own = {"models": {**models, "own": own}, "agents": {"writer": "small", "mine": "own", "critic": "large"}}
        thread = threading.Thread(target=reload, args=(with_own,))
        thread.start()
        answers = [answer_of(client(switch, "writer"), "hi")]
        while thread.is_alive():
            answers.append(answer_of(client(switch, "writer"), "hi"))
        assert set(answers) == {"I am large"}, "as promoted before"
        assert ended[-1] == 0
        assert "added      own agent      writer: large 1 agent      mine: own 1" in " ".join(
            capsys.readouterr().out.splitlines()
        )
        assert own_servers() == before + 1
        assert answer_of(client(switch, "critic"), "hi") == "I am large", "its shares in the file have changed"

        stream = ask(client(switch, "mine"), "hi", stream=True, max_tokens=100)
        first = next(iter(stream))
        assert reload({}) == 0
        with pytest.raises(openai.NotFoundError, match="agent 'mine', which is not listed"):
            ask(client(switch, "mine"), "hi")
        assert [first, *stream][-1].choices[0].finish_reason, "a request ends with the model it began with"
        end = time.monotonic() + 20
        while own_servers() > before:
            assert time.monotonic() < end, "the removed model is still open"
            time.sleep(0.05)
    (row,) = [row for row in arm_rows(tmp_path / "switch", Prices()) if row.arm == "own"]
    assert (row.calls, row.failed) == (1, 0)


def test_old_calls_are_deleted_with_their_feedback(
    tmp_path: Path, models: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    plan = {"models": models, "agents": {"writer": "small"}, "keep_days": 7}

    def calls() -> int:
        return sum(row.calls for row in arm_rows(tmp_path / "switch", Prices()))

    with serve(tmp_path, plan) as switch:
        old, new = (ask(client(switch, "writer"), "hi").id for _ in range(2))
        for response in (old, new):
            httpx.post(f"{switch.url}/feedback", json={"response": response, "reward": 1}).raise_for_status()
    with closing(sqlite3.connect(tmp_path / "switch" / FILE)) as database, database:
        database.execute("UPDATE calls SET began = began - 8 * 86400 WHERE response = ?", (old,))
    caplog.set_level("INFO", "lightning_core.tools.switch")
    with serve(tmp_path, {**plan, "keep_days": 30}) as switch:
        assert calls() == 2
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, "folder": str(tmp_path / "switch")}))
        assert main(["switch", "reload", "--url", switch.url]) == 0
        end = time.monotonic() + 20
        while calls() > 1:
            assert time.monotonic() < end, "it waits for an entry, or an hour"
            time.sleep(0.05)
    with closing(sqlite3.connect(tmp_path / "switch" / FILE)) as database, database:
        assert database.execute("SELECT count(*) FROM feedback").fetchone() == (1,)
        database.execute("UPDATE calls SET began = began - 8 * 86400")
    with serve(tmp_path, plan):
        pass
    assert calls() == 0, "when it starts, without a request"
    assert [record.levelname for record in caplog.records if "older than 7 days" in record.message] == ["INFO"] * 2


def test_fallback_shadow_and_rules_that_name_agents(tmp_path: Path, models: dict[str, Any]):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = {"base_url": f"http://127.0.0.1:{closed.getsockname()[1]}/v1"}
    plan = {
        "models": {**models, "dead": dead},
        "agents": {
            "writer": {"arms": {"dead": 1}, "fallback": "large", "shadow": "small"},
            "critic": {"arms": {"small": 1}, "shadow": "dead"},
            "lost": "dead",
        },
        "named": [{"name": "critic", "contains": "You judge"}],
    }
    with serve(tmp_path, plan) as switch:
        assert answer_of(client(switch, "writer"), "hi") == "I am large"
        judged = client(switch).chat.completions.create(
            model="gpt", messages=[{"role": "system", "content": "You judge."}, {"role": "user", "content": "hi"}]
        )
        assert judged.choices[0].message.content == "I am small"
        with pytest.raises(openai.APIStatusError, match="model 'dead' of the switch has no response") as caught:
            ask(client(switch, "lost"), "hi")
        assert caught.value.status_code == 502
        with pytest.raises(openai.NotFoundError, match="names no agent; the agents are writer, critic, lost"):
            ask(client(switch), "hi")
    rows = {
        (row.agent, row.arm, row.shadow): (row.calls, row.failed) for row in arm_rows(tmp_path / "switch", Prices())
    }
    assert rows == {
        ("critic", "dead", True): (1, 1),
        ("critic", "small", False): (1, 0),
        ("lost", "dead", False): (1, 1),
        ("writer", "dead", False): (1, 1),
        ("writer", "large", False): (1, 0),
        ("writer", "small", True): (1, 0),
    }


def test_keys_and_refusals(tmp_path: Path, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PROVIDER_KEY", "theirs")
    plan = {"models": {**models, "keyed": {**models["large"], "api_key_env": "PROVIDER_KEY"}}, "agents": {"a": "keyed"}}
    with serve(tmp_path, plan, api_key="ours", admin_key="root") as switch:
        assert answer_of(client(switch, "a", key="ours"), "hi") == "I am large"
        with pytest.raises(openai.AuthenticationError):
            ask(client(switch, "a", key="other"), "hi")
        key = {"authorization": "Bearer ours"}
        post = f"{switch.url}/switch/a"
        assert httpx.post(post, json={"promote": "small"}, headers=key).status_code == 403
        admin = {**key, "lightning-admin-key": "root"}
        for body, expected in (
            ({"promote": "other"}, "there is no model 'other'; expected one of small, large, keyed"),
            ({"arms": {"small": 0.4}}, "expected shares that are 1 in all, not 0.4"),
            ({"arms": {"small": "1"}}, "expected shares by model"),
            ({}, "expected one of"),
            ({"rollback": True}, "has no earlier shares to go back to"),
        ):
            refused = httpx.post(post, json=body, headers=admin)
            assert refused.status_code in (400, 404, 409)
            assert expected in refused.json()["error"]["message"]
        for feedback, expected in (
            ({"response": "none", "reward": 1}, "was not answered by this switch"),
            ({"response": "none", "reward": "1"}, "reward is '1'; expected a number"),
            ({"reward": 1}, "response is null; expected the id of a response"),
        ):
            refused = httpx.post(f"{switch.url}/feedback", json=feedback, headers=key)
            assert expected in refused.json()["error"]["message"]
        assert httpx.post(post, json={"promote": "small"}, headers=admin).json()["arms"] == {"small": 1.0}


def test_a_plan_with_mistakes_is_refused_with_all_of_them(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "models:\n  one: {run: runs/a, base_url: http://x}\n  two: {weights: m, api_key_env: K}\n  three: {weights: m}\n"
        "agents:\n  writer: {arms: {three: 0.5}}\n  critic: four\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    message = str(caught.value)
    assert (
        "plan.yaml:2: models.one: found a mapping with the keys 'run', 'base_url', expected one of run, weights and base_url"
        in message
    )
    assert (
        "plan.yaml:3: models.two: found a mapping with the keys 'weights', 'api_key_env', expected api_key_env only with base_url"
        in message
    )
    assert (
        "plan.yaml:6: agents.writer: found a mapping with the keys 'arms', expected shares that are 1 in all, not 0.5"
        in message
    )
    path.write_text("models:\n  three: {weights: m}\nagents:\n  critic: four\n")
    with pytest.raises(
        ConfigError, match=r"plan.yaml:4: agents.critic.arms: there is no model 'four'; expected one of three"
    ):
        read_plan(path)


def test_the_record_is_complete_when_the_switch_has_ended(tmp_path: Path, models: dict[str, Any]):
    """Also for a client that disconnects in the middle of a stream."""
    with serve(tmp_path, {"models": models, "agents": {"writer": "small"}}) as switch:
        url = switch.url.replace("/v1", "/a/writer/v1/chat/completions")
        body = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", url, json=body) as response:
            next(response.iter_bytes())
        for _ in range(20):
            ask(client(switch, "writer"), "hi")
    (row,) = arm_rows(tmp_path / "switch", Prices())
    assert row.calls == 21
    assert (tmp_path / "switch" / FILE).is_file()
