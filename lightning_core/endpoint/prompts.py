"""The prompts of a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from lightning_core.chat.chat import Chat, RenderedPrompt
from lightning_core.chat.history.conversations import ADVICE, cause_of
from lightning_core.content.shared_content import KeptText
from lightning_core.dialects.exchange import ChatRequest
from lightning_core.dialects.fields import NO_SEARCH, note
from lightning_core.endpoint.sessions import Session
from lightning_core.errors import COUNTED, PolicyRequestError

logger = logging.getLogger(__name__)


def note_unknown_variables(chat: Chat, request: ChatRequest) -> None:
    """Note the fields of ``request`` that set only variables which the template of ``chat`` does not use."""
    for path, variables in request.template_settings.items():
        if not any(map(chat.template.raw.has_variable, variables)):
            note(path, "not a variable of the model's chat template")


def render_prompts(
    chat: Chat,
    request: ChatRequest,
    session: Session,
    agent: str | None,
    kept: Sequence[KeptText] | None = None,
) -> list[RenderedPrompt]:
    """The prompts of ``request`` of ``agent``, one if it is a chat. ``session``: of its rollout. ``kept``: see `Chat.render`.

    Raises `PolicyRequestError` for a chat without messages, and as `Chat.render`.
    """
    if request.prompts:
        return [chat.plain(prompt) for prompt in request.prompts]
    if not request.messages:
        field = request.input_field
        raise PolicyRequestError(f"{field} is empty; expected at least one message", param=field)
    prompt = chat.render(
        request.messages,
        request.tools,
        session.memory,
        instructions=request.requirements.instructions(),
        variables=request.template_variables,
        kept=kept,
    )
    added = session.routing.prompts.find(agent)
    demonstrations = 0 if added is None else len(added.insertion.messages)
    if prompt.context == "new" and prompt.reason is not None:
        prompt = replace(prompt, reason=session.prompts.explain(agent, prompt, demonstrations=demonstrations))
        _warn_of_leak(session, agent, prompt)
    elif (
        prompt.tail is not None
        and (reason := session.prompts.explain_branch(agent, prompt, demonstrations=demonstrations)) is not None
    ):
        prompt = replace(prompt, context="forked", reason=reason)
    return [prompt]


def warn_of_hosted_tools(session: Session, agent: str | None, request: ChatRequest) -> None:
    """Log the tools of a provider that the model is not shown."""
    for path, reason in request.notes.items():
        if reason == NO_SEARCH and (times := session.logged.count((agent, path))) is not None:
            who = "an agent without a name" if agent is None else f"agent {agent!r}"
            logger.warning("%s offers %s%s: %s", who, path, times, reason, extra=COUNTED)


def _warn_of_leak(session: Session, agent: str | None, prompt: RenderedPrompt) -> None:
    """Log a prompt with a conversation of another rollout: the reward then depends on both."""
    if cause_of(prompt.reason) == "leaked" and (times := session.logged.count(("leaked", agent))) is not None:
        who = "an agent without a name" if agent is None else f"agent {agent!r}"
        logger.warning("a prompt of %s is %s%s; %s", who, prompt.reason, times, ADVICE["leaked"], extra=COUNTED)
