"""The plain path: rows of different lengths in one pass, and contexts kept for later prompts, at the same logprobs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import plain_path
from lightning_core.model.source import load_model
from tests.engine_stats import stats_of
from tests.model.families import FAMILIES, make_family

pytestmark = pytest.mark.numeric

BATCHED = ["llama", "gemma2", "gpt_oss", "lfm2", "qwen3_5_text"]
"""Full attention, sliding windows with soft caps and with sinks, convolutions, recurrent states."""
PREFIX = [number * 5 % 250 + 3 for number in range(40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = [*BATCHED, "deepseek_v4", "jamba"]
    return {name: make_family(FAMILIES[name], tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Any]:
    """Models that no test changes, so each is checked once."""
    return {name: load_model(folder, torch.float32) for name, folder in folders.items()}


class Sampler:
    """An engine with one model on the plain path that counts forward passes."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.adapters = Adapters(model)
        path = plain_path(model, "for a test", attention=None)
        served = {"policy": SampledModel(model=model, path=path)}
        if options.pop("with_adapter", False):
            self.adapters.add("adapter", rank=2, alpha=4, targets=None, seed=0)
            served = {
                "policy": SampledModel(model=model, path=path, adapters=self.adapters),
                "other": SampledModel(model=model, path=path, adapters=self.adapters, adapter="adapter"),
            }
        settings = {"max_context": 512, "max_batch": 64, "gather_ms": 0, "seed": 0, **options}
        self.backend = TorchBackend(served, **settings)
        self.passes = 0
        self._hook = model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.passes += 1

    def sample(self, *prompts: Sequence[int], tokens: int = 6, model: str = "policy") -> list[Delta]:
        """Sample all of ``prompts`` at once."""

        async def one(prompt: Sequence[int], seed: int) -> Delta:
            params = SamplingParams(max_tokens=tokens, seed=seed)
            return [delta async for delta in self.backend.generate(prompt, params, model=model)][-1]

        async def run() -> list[Delta]:
            expected = self.backend.submitted + len(prompts)
            with self.backend.pause():  # so the first step admits all of them
                tasks = [asyncio.ensure_future(one(prompt, seed)) for seed, prompt in enumerate(prompts)]
                while self.backend.submitted < expected:
                    await asyncio.sleep(0)
            return await asyncio.gather(*tasks)

        return asyncio.run(run())

    def computed(self, *prompts: Sequence[int], model: str = "policy") -> int:
        """The prompt tokens that are computed to sample ``prompts``."""
        before = stats_of(self.backend).prompt_tokens_computed
        deltas = self.sample(*prompts, model=model)
        computed = stats_of(self.backend).prompt_tokens_computed - before
        if model == "policy":
            self.check(prompts, deltas)
        return computed

    def check(self, prompts: Sequence[Sequence[int]], deltas: Sequence[Delta]) -> None:
        """Compare logprobs with those of single rows in the model's own pass."""
        for prompt, delta in zip(prompts, deltas, strict=True):
            with torch.no_grad(), self.adapters.use(None):
                logits = self.model(torch.tensor([[*prompt, *delta.token_ids]]), use_cache=False).logits[0]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(delta.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(delta.logprobs), expected, atol=1e-4, rtol=0)

    def close(self) -> None:
        self._hook.remove()
        self.backend.close()


@contextmanager
def opened(model: Any, **options: Any) -> Iterator[Sampler]:
    sampler = Sampler(model, **options)
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.mark.parametrize("name", BATCHED)
def test_rows_of_different_lengths_are_decoded_in_one_pass(name: str, models: dict[str, Any]) -> None:
    """Of which one has no token before its last, and some more tokens than a sliding window."""
    prompts = [PREFIX[-length:] for length in (1, 3, 7, 12, 31)]
    with opened(models[name]) as sampler:
        deltas = sampler.sample(*prompts, tokens=12)
        assert sampler.passes == len(prompts) - 1 + 12  # a prefill each, but not for the prompt of one token
        sampler.check(prompts, deltas)


def test_short_rows_are_not_padded_to_a_much_longer_one(models: dict[str, Any]) -> None:
    with opened(models["llama"]) as sampler:
        deltas = sampler.sample(PREFIX * 10, *([PREFIX[5:8]] * 20))
        assert sampler.passes == 2 * (1 + 6)
        sampler.check([PREFIX * 10, PREFIX[5:8]], deltas[:2])


@pytest.mark.parametrize("name", BATCHED)
def test_a_later_turn_computes_only_its_tail(name: str, models: dict[str, Any]) -> None:
    with opened(models[name]) as sampler:
        first, second = [*PREFIX, 5, 6], [*PREFIX, 7]
        turns = sampler.sample(first, second)
        # The last sampled token was no input yet, and the last token of a prompt is its first step.
        later = [
            [*prompt, *delta.token_ids, *tail]
            for prompt, delta, tail in zip((first, second), turns, ([9, 8, 7], [4] * 9), strict=True)
        ]
        assert sampler.computed(*later) == 1 + 3 + 1 + 9
        assert sampler.computed(*later) == 2


@pytest.mark.parametrize("name", BATCHED)
def test_a_beginning_that_prompts_share_is_computed_once(name: str, models: dict[str, Any]) -> None:
    prompts = [[*PREFIX, number, 1, 2, 3, 4] for number in (10, 11, 12)]
    with opened(models[name]) as sampler:
        assert sampler.computed(*prompts) == 40 + 3 * 5
        assert sampler.computed([*PREFIX, 13, 1]) == 2


def test_a_state_is_kept_where_prompts_part(models: dict[str, Any]) -> None:
    """The first prompt has no state there, the second computes it, and the third continues it."""
    with opened(models["qwen3_5_text"]) as sampler:
        assert sampler.computed([*PREFIX, 5, 6, 7]) == 43
        assert sampler.computed([*PREFIX, 8, 9]) == 42
        assert sampler.computed([*PREFIX, 9, 10]) == 2


def test_contexts_are_forgotten_before_weights_change(folders: dict[str, Path]) -> None:
    with opened(load_model(folders["lfm2"], torch.float32)) as sampler:
        assert sampler.computed(PREFIX) == 40
        assert sampler.computed(PREFIX) == 1
        with sampler.backend.pause(), torch.no_grad():
            sampler.backend.forget("policy")
            for parameter in sampler.model.parameters():
                parameter.mul_(1.1)
        assert sampler.computed(PREFIX) == 40


def test_adapters_of_one_model_share_no_context(folders: dict[str, Path]) -> None:
    with opened(load_model(folders["gemma2"], torch.float32), with_adapter=True) as sampler:
        assert sampler.computed(PREFIX) == 40
        assert sampler.computed(PREFIX, model="other") == 40
        with sampler.backend.pause():
            sampler.backend.forget("other")
        assert sampler.computed(PREFIX) == 1
        assert sampler.computed(PREFIX, model="other") == 40


def test_the_least_recently_used_contexts_are_dropped(models: dict[str, Any]) -> None:
    first, second, third = ([number, *PREFIX] for number in (3, 4, 5))
    with opened(models["llama"], cached_tokens=100) as sampler:
        assert sampler.computed(first) == sampler.computed(second) == 41
        assert sampler.computed(first) == 1
        assert sampler.computed(third) == 41
        assert sampler.computed(first) == 1
        assert sampler.computed(second) == 41
    with opened(models["llama"], cached_tokens=0) as sampler:
        assert sampler.computed(first) == sampler.computed(first) == 41


def test_a_cache_that_cannot_be_continued_is_used_for_equal_prompts(models: dict[str, Any]) -> None:
    """Jamba's recurrent layers start anew in a pass of several tokens, in transformers 5.23."""
    with opened(models["jamba"]) as sampler:
        assert sampler.computed(PREFIX) == 40
        assert sampler.computed(PREFIX) == 1
        assert sampler.computed([*PREFIX, 3, 4]) == 42


def test_a_cache_of_another_kind_is_used_for_rows_of_the_same_length(models: dict[str, Any]) -> None:
    prompts = [PREFIX[-length:] for length in (4, 4, 9)]
    with opened(models["deepseek_v4"]) as sampler:
        deltas = sampler.sample(*prompts)
        assert sampler.passes == 2 * (1 + 6)
        sampler.check(prompts, deltas)


def test_a_model_that_ignores_padding_decodes_rows_of_the_same_length(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(folders["llama"], torch.float32)
    forward = type(model).forward

    def unmasked(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return forward(self, *arguments, **{k: v for k, v in keywords.items() if k != "attention_mask"})

    unmasked.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward", unmasked)
    prompts = [PREFIX[-length:] for length in (4, 4, 9)]
    with caplog.at_level(logging.INFO), opened(model) as sampler:
        deltas = sampler.sample(*prompts)
        assert sampler.passes == 2 * (1 + 6)
        sampler.check(prompts, deltas)
    assert (
        "LlamaForCausalLM: rows of different lengths are sampled in different passes: its logits differ" in caplog.text
    )


def test_deterministic_rows_have_passes_of_their_own(models: dict[str, Any]) -> None:
    with opened(models["lfm2"], deterministic=True) as sampler:
        sampler.sample(PREFIX, PREFIX)
        assert sampler.passes == 2 * (1 + 6)
        assert sampler.computed(PREFIX) == 40
