"""The chat format of the policy with verl, whose servers only sample."""

from __future__ import annotations

from typing import Any

from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.model.source import load_eos_token_ids, load_tokenizer


def open_chat(config: Config, model: str) -> Chat:
    """The chat of the policy. ``model``: its folder, or its name on the Hub."""
    tokenizer: Any = load_tokenizer(model)
    template = config.policy.chat_template_kwargs
    return Chat(tokenizer, stop_token_ids=load_eos_token_ids(model), template_kwargs=template)
