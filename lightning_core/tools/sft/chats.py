"""The chat formats of policies, without their weights."""

from __future__ import annotations

from typing import Any

from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.config.resolve import policy_settings
from lightning_core.model.load import UNLIMITED, context_limit
from lightning_core.model.source import load_config, load_eos_token_ids, load_tokenizer, resolve_model


def open_chats(config: Config) -> tuple[dict[str, Chat], int]:
    """The chat format of each policy, as trainers make it, and the most tokens of a prompt with its response."""
    chats: dict[str, Chat] = {}
    limits: list[int] = []
    for name, policy in policy_settings(config).items():
        folder = resolve_model(policy.model)
        tokenizer: Any = load_tokenizer(folder)
        chats[name] = Chat(
            tokenizer, stop_token_ids=load_eos_token_ids(folder), name=name, template_kwargs=policy.chat_template_kwargs
        )
        limits.append(policy.max_context or context_limit(load_config(folder).get_text_config(), UNLIMITED))
    return chats, min(limits)
