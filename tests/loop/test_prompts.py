"""Prompts in a run: recorded with it, resumed, and served."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.records.store import Store
from lightning_core.tools.export.card import make_card
from lightning_core.tools.export.trained_model import find_trained
from lightning_core.tools.runs.traces import read_trace
from lightning_core.tools.serving import open_serving
from lightning_core.trace import Call
from tests import bandit
from tests.tiny_model import make_tiny_model


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "tasks": {"train": "tests.bandit:tasks"},
        "policy": {"model": str(folder / "model"), "max_context": 256, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 1, "group_size": 2, "max_tokens": 6, "executor": "task"},
        "trainer": {"steps": 1, "checkpoint_every": 1},
        "run": {"dir": str(folder), "name": "run"},
        "prompts": str(folder / "prompts.yaml"),
        **sections,
    }


def calls(run: Path, step: int) -> list[Call]:
    with Store(run / "store.db", read_only=True) as store:
        traces = [read_trace(store, record).trace for record in store.rollouts(phase="train", step=step)]
    return [call for trace in traces if trace is not None for call in trace.calls]


def test_a_run_keeps_its_prompts_when_it_is_resumed_and_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "prompts.yaml").write_text("talker: {extend: Say little.}\n")
    run = fit(bandit.solve, config=load_config(settings(tmp_path))).folder
    assert {call.messages[0]["content"] for call in calls(run, 1)} == {"Say little."}

    (tmp_path / "prompts.yaml").write_text("talker: {extend: Say more.}\n")
    again = {
        "run": {"dir": str(tmp_path), "name": "run", "resume": True},
        "trainer": {"steps": 2, "checkpoint_every": 1},
    }
    with caplog.at_level(logging.WARNING):
        fit(bandit.solve, config=load_config(settings(tmp_path, **again)))
    assert "prompts.talker.extend: Say little. → Say more." in caplog.text
    assert {call.messages[0]["content"] for call in calls(run, 2)} == {"Say more."}

    card = make_card(find_trained(run), title="m", library="transformers", usage="")
    assert re.search(r"\| Prompts \| `talker@\w{12}`, which the endpoint added; they are not in the weights", card)
    assert "Say more." not in card, "a card is public"

    (tmp_path / "prompts.yaml").unlink()
    with open_serving(load_config(run / "config.yaml"), checkpoint=run / "checkpoints" / "step-000002") as served:
        assert served.prompts.by_agent["talker"].label.startswith("talker@")

        def tokens(url: str, *system: str) -> int:
            client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
            said: list[Any] = [
                *({"role": "system", "content": s} for s in system),
                {"role": "user", "content": "say 7"},
            ]
            usage = client.chat.completions.create(model="policy", messages=said, max_tokens=1).usage
            assert usage is not None
            return usage.prompt_tokens

        host = served.url.removesuffix("/v1")
        prompted = tokens(f"{host}/a/other/v1", "Say more.")
        assert prompted > tokens(f"{host}/a/other/v1")
        assert tokens(served.url) == prompted, "the only agent with a prompt, and no other is trained"
        assert tokens(f"{host}/a/talker/v1") == prompted


def test_a_name_that_no_agent_has_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_model(tmp_path / "model")
    misspelt = settings(tmp_path, prompts={"talkr": {"extend": "x"}})
    with pytest.raises(ConfigError, match=r"prompts names 'talkr', but the agents of this program are \[.*'talker'"):
        fit(bandit.solve, config=load_config(misspelt))
    unseen = settings(tmp_path, prompts={"critic-*": {"extend": "x"}}, run={"dir": str(tmp_path), "name": "second"})
    with caplog.at_level(logging.WARNING):
        fit(bandit.solve, config=load_config(unseen))
    assert "prompts names 'critic-*', which no agent had in 2 rollouts" in caplog.text
