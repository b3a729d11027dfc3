"""Seeded runs of the manager, described as those in `tests.baselines`: the rows in TransferQueue, counts, credit and rollouts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq
from tensordict import NonTensorData
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.workers.rollout.replica import TokenOutput

from lightning_core.chat.chat import Chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.model.source import load_tokenizer
from lightning_core.records.store import Store
from lightning_core.tools.serving import ServingEndpoint
from lightning_core.trainers.verl.estimator import weighted_advantages
from lightning_core.trainers.verl.records import read_metrics_of_verl
from tests.baselines.agents import tasks
from tests.baselines.digests import array_text, describe, digest_of, rounded
from tests.baselines.model import FastByteTokenizer, SeededBackend, logprobs, numbers, respond
from tests.baselines.runs import AIR, CRITERIA, FORKS
from tests.baselines.wiring import Recording, read_rollouts
from tests.verl.manager_runs import request, rows, settled, start_manager
from tests.verl.scoring_server import serving

BASE: dict[str, Any] = {
    "agent": "tests.baselines.agents:solve",
    "agents": {"train": ["planner", "writer", "reviewer"]},
    "policy": {"max_context": 4096},
    # verl's servers have no seeds: a response depends on the number of equal prompts before it, and so on the order of the rollouts.
    "rollouts": {"tasks_per_step": 2, "group_size": 3, "max_tokens": 96, "executor": "task", "concurrency": 1},
    "trainer": {"rollout_workers": 1, "steps": 2},
}
TEACHER, JUDGE = "TEACHER", "JUDGE"
"""URLs of servers, in the settings below."""
RUNS: dict[str, dict[str, Any]] = {
    "verl": {"agent": "tests.baselines.agents:solve_or_not", "rollouts": {"refill": 4}},
    "verl, forks": {
        "rollouts": {"forks": {**FORKS, "tools": "recorded"}},
        "credit": {"rewards": "counterfactual", "advantage": "rloo"},
        "trainer": {"steps": 1},
    },
    "verl, supervision": {
        "policy": {"upstream": {"base_url": JUDGE}},
        "credit": {
            "rewards": "discounted",
            "gamma": 0.5,
            "air": AIR,
            "judge": {"model": "critic", "rubric": CRITERIA},
        },
        "algorithm": {
            "distill": {"teacher": TEACHER, "prompt": "tests.baselines.agents:with_examples", "agents": ["writer"]},
            "ce": {"weight": 0.5, "tokens": ["tool", "user"]},
        },
        "trainer": {"steps": 1},
    },
}


class CountingClient:
    """`respond` with the interface of verl's client, seeded by the number of equal prompts before."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._seen: Counter[tuple[int, ...]] = Counter()

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        """See `LLMClient.generate`."""
        del request_id
        self._seen[tuple(prompt_ids)] += 1
        source = numbers(prompt_ids, self._seen[tuple(prompt_ids)], sampling_params["temperature"])
        text = respond(self._tokenizer.decode(prompt_ids), source)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        ids = ids[: sampling_params["max_tokens"]]
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs(source, len(ids)).tolist(),
            stop_reason="completed",
            extra_fields={"min_global_steps": 0, "max_global_steps": source.randrange(2)},
        )


def found(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """The result of the run ``name``, made in ``folder`` on an open cluster. ``model``: has the tokenizer."""
    with _servers() as urls:
        own: dict[str, Any] = _replaced(RUNS[name], urls)
        sections = {**BASE, **own}
        for section in BASE.keys() & own.keys():
            if isinstance(own[section], dict):
                sections[section] = {**BASE[section], **own[section]}
        manager, config = start_manager(sections, CountingClient(model), model=model, folder=folder)
        size = sections["rollouts"]["tasks_per_step"]
        published: list[list[dict[str, Any]]] = []
        for step in range(sections["trainer"]["steps"]):
            uids = request(manager, *tasks()[step * size : (step + 1) * size], step=step + 1)
            assert set(settled(uids).values()) == {"finished"}
            # A uid has the time.
            published.append(_replaced(_described_rows(uids, config), {uid: uid.partition("-")[0] for uid in uids}))
    with Store(folder / "store.db", read_only=True) as store:
        metrics = read_metrics_of_verl(folder, store.steps(), rows_per_update=4)
    recording = Recording(
        rows=[[] for _ in metrics],
        targets=[{} for _ in metrics],
        metrics=metrics,
        summary={},
        rollouts=read_rollouts(folder),
        files=[],
    )
    described = describe(recording)
    for step, found_rows in zip(described["steps"], published, strict=True):
        step |= {"rows": found_rows, "rows digest": digest_of(json.dumps(found_rows))}
    return _replaced(described, {url: name for name, url in urls.items()})


@contextmanager
def _servers() -> Iterator[dict[str, str]]:
    """The URLs of a teacher and a judge."""
    backend = SeededBackend({"critic": 0})
    chat = Chat(FastByteTokenizer())
    with (
        serving(lambda ids: logprobs(numbers("teacher", ids), len(ids) - 1).tolist()) as teacher,
        ServingEndpoint(backend, chat, routing=Routing(max_tokens=1000)) as judge,
    ):
        yield {TEACHER: teacher, JUDGE: judge.url}


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """The JSON ``value`` with other texts in place of ``texts``."""
    text = json.dumps(value)
    for old, new in texts.items():
        text = text.replace(old, new)
    return json.loads(text)


def _described_rows(uids: Sequence[str], config: Any) -> list[dict[str, Any]]:
    """The rows of the prompts, in the order of their keys, with the advantages that verl's estimator makes of them.

    ``config``: verl's. The marks of ``algorithm.ce`` in ``rm_scores`` are between the manager and the estimator.
    """
    keys = sorted(rows(uids), key=lambda key: (uids.index(key.split("_")[0]), *map(int, key.split("_")[1:])))
    tags = tq.kv_list("train")["train"]
    batch = tq.kv_batch_get(keys=keys, partition_id="train")
    columns = {field: list(batch[field]) for field in sorted(batch.keys())}
    scores_BT, mask_BT = (pad_sequence(columns[name], batch_first=True) for name in ("rm_scores", "response_mask"))
    rollouts = [_plain(uid) for uid in columns["uid"]]
    weighted_BT, _ = weighted_advantages(scores_BT, mask_BT, rollouts, config.algorithm)
    columns["rm_scores"] = [
        score * mask for score, mask in zip(columns["rm_scores"], columns["response_mask"], strict=True)
    ]
    columns["advantages"] = [
        weighted[: len(ids)] for weighted, ids in zip(weighted_BT, columns["responses"], strict=True)
    ]
    return [
        {
            "key": key,
            "tag": {name: _value(value) for name, value in sorted(tags[key].items())},
            **{field: _value(column[index]) for field, column in columns.items()},
        }
        for index, key in enumerate(keys)
    ]


def _plain(value: Any) -> Any:
    """Without the wrapper of values that are not tensors."""
    return value.data if isinstance(value, NonTensorData) else value


def _value(value: Any) -> Any:
    """The value of a field or a tag as JSON."""
    value = _plain(value)
    if isinstance(value, Tensor | np.ndarray):
        return array_text(np.asarray(value)) if np.asarray(value).dtype.kind in "biuf" else value.tolist()
    if isinstance(value, dict):
        return {str(key): _value(one) for key, one in value.items()}
    return rounded(value) if isinstance(value, float) else value
