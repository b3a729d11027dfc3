"""Maps each token of a prompt to its message, for the cross-entropy loss (``algorithm.ce``).

With ``tokens: tool`` this is ECHO (arXiv 2605.24517): the policy also learns to predict what its actions bring about, from every
rollout, also those without any difference in reward. With ``tokens: response`` it is rejection-sampling fine-tuning on the step's
own rollouts.

A call records messages and tokens, but not which is which. So a rollout's prompts are rendered once more, as the endpoint did,
with markers around the texts. A prompt whose tokens are then not the recorded ones has no known sources: nothing of it is
chosen, and its messages are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_core.capture.selectors import find_selector
from lightning_core.chat.chat import Chat, Memory, RenderedPrompt
from lightning_core.credit import Episode
from lightning_core.errors import ConfigError, PolicyRequestError
from lightning_core.signals.cross_entropy.section import CrossEntropy
from lightning_core.trace import Call
from lightning_core.transitions import Transition


@dataclass(slots=True)
class ChosenTokens:
    """The chosen tokens of some episodes."""

    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    """Tokens of (prompt ‖ response) by call id: (first, one past the last)."""
    unknown: int = 0
    """Messages that should be trained on, but whose tokens are not known."""


class TokenSources:
    """Finds the tokens that ``settings`` choose."""

    def __init__(self, settings: CrossEntropy, chats: Mapping[str, Chat], *, solved: float) -> None:
        """``chats``: of each model. ``solved``: see ``eval.solved``. Raises `ConfigError` for a tokenizer without offsets."""
        self._settings = settings
        self._chats = chats
        self._roles = {role for role in settings.tokens if role != "response"}
        self._min_reward = None
        if "response" in settings.tokens:
            self._min_reward = solved if settings.min_reward is None else settings.min_reward
        if self._roles and not all(chat.places_text for chat in chats.values()):
            raise ConfigError(
                "algorithm.ce: the tokenizer does not report the characters of each token, so the tokens of tool results and "
                "user messages are not known; use tokens: response, or a model with a fast tokenizer"
            )

    def choose(self, episodes: Sequence[Episode]) -> ChosenTokens:
        """The chosen tokens of the agents' calls in ``episodes``."""
        found, agents = ChosenTokens(), self._settings.agents
        for episode in episodes:
            chosen = {t.call: t for t in episode.transitions if agents is None or find_selector(agents, t.agent)}
            if self._min_reward is not None and episode.reward >= self._min_reward:
                for t in chosen.values():
                    length = len(t.prompt_ids)
                    found.spans.setdefault(t.call, []).append((length, length + len(t.output_ids)))
            if self._roles:
                self._read_prompts(episode, chosen, found)
        return found

    def _read_prompts(self, episode: Episode, chosen: Mapping[str, Transition], found: ChosenTokens) -> None:
        """Add the messages of the prompts of the calls ``chosen``, each where it is read first."""
        memory = Memory()
        seen: set[bytes] = set()
        spoke: set[str | None] = set()
        for call in episode.trace.calls:
            chat = self._chats.get(call.model)
            if chat is None or call.prompt_ids is None or call.output_ids is None or call.response is None:
                continue
            prompt = _rendered(chat, call, memory)
            if prompt is None:
                if call.id in chosen and call.agent in spoke:
                    found.unknown += sum(message.get("role") in self._roles for message in call.messages)
                continue
            recorded = tuple(call.prompt_ids.tolist())
            if call.id in chosen:
                self._choose(chat, call, prompt, recorded, found, seen, again=call.agent in spoke)
                spoke.add(call.agent)
            chat.remember(replace(prompt, ids=recorded), call.output_ids.tolist(), call.response, memory)

    def _choose(
        self,
        chat: Chat,
        call: Call,
        prompt: RenderedPrompt,
        recorded: tuple[int, ...],
        found: ChosenTokens,
        seen: set[bytes],
        *,
        again: bool,
    ) -> None:
        """``again``: the agent has responded before in this rollout, so new messages may be results of that response."""
        path = prompt.place.path() if prompt.place else []
        new = {
            i: key
            for i, key in enumerate(place.conversation for place in path)
            if key not in seen and prompt.messages[i]["role"] in self._roles
        }
        seen |= set(new.values())
        if prompt.first_recorded is None:
            found.unknown += len(new) if again else 0
            return
        wanted = [i for i in new if i > prompt.first_recorded and str(prompt.messages[i]["content"]).strip()]
        if not wanted:
            return
        places = chat.message_spans(prompt, call.tools) if prompt.ids == recorded else None
        if places is None:
            found.unknown += len(wanted)
            return
        # Those without a place were read by an earlier call that is not chosen, or left out by the template.
        found.spans.setdefault(call.id, []).extend(places[index] for index in wanted if index in places)


def _rendered(chat: Chat, call: Call, memory: Memory) -> RenderedPrompt | None:
    if not call.messages:  # a completion of a text, without a chat
        return None
    try:
        return chat.render(call.messages, call.tools, memory)
    except PolicyRequestError:
        return None
