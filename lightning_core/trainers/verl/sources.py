"""The teacher of ``algorithm.distill`` and the tokens of ``algorithm.ce`` with verl, whose servers only sample."""

from __future__ import annotations

from typing import Any

from lightning_core.backends.vllm.scorer import open_scorer
from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.config.build_rules import teacher_prompt
from lightning_core.model.source import load_eos_token_ids, load_tokenizer
from lightning_core.rollouts.ce import TokenSources
from lightning_core.rollouts.distill import Teacher
from lightning_core.rollouts.supervision import SupervisionSources
from lightning_core.trace import POLICY


def open_chat(config: Config, model: str, tokenizer: Any) -> Chat:
    """The chat of the policy. ``model``: the folder, or the name on the Hub, that ``tokenizer`` is of."""
    template = config.policy.chat_template_kwargs
    return Chat(tokenizer, stop_token_ids=load_eos_token_ids(model), template_kwargs=template)


def open_sources(config: Config, *, model: str, max_context: int) -> SupervisionSources:
    """Those that ``config`` sets. Raises the errors of `ServerScorer` and `TokenSources`."""
    distill, ce = config.algorithm.distill, config.algorithm.ce
    if distill is None and ce is None:
        return SupervisionSources()
    tokenizer: Any = load_tokenizer(model)
    chat = open_chat(config, model, tokenizer)
    teacher = tokens = None
    if distill is not None:
        score, prompt = open_scorer(distill, tokenizer).logprobs, teacher_prompt(config.algorithm)
        teacher = Teacher(settings=distill, score=score, chat=chat, max_context=max_context, prompt=prompt)
    if ce is not None:
        tokens = TokenSources(ce, {POLICY: chat}, solved=config.eval.solved)
    return SupervisionSources(teacher=teacher, tokens=tokens)
