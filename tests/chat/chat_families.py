"""Model families for tests: small real tokenizers with each family's special tokens and a similar chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.chat.chat import Chat

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_MISTRAL_7 = (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]")
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_DEEPSEEK = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Properties of a family, and what its template is expected to support."""

    name: str
    eos: str
    bos: str | None = None
    specials: tuple[str, ...]
    """Tokens marked as special, including eos and bos."""
    added: tuple[str, ...] = ()
    """Whole tokens of the vocabulary that are not marked as special."""
    template: str | dict[str, str] = ""
    source: str = ""
    """The text of the template, if it is in no file of `TEMPLATES`."""
    stops: tuple[str, ...]
    more_stops: tuple[str, ...] = ()
    """Stop tokens that only the generation config contains."""
    format: str = "hermes"
    system: bool = True
    """Whether the template keeps a system message at its place."""
    reasons: bool = False
    opens_thought: bool = False
    """Whether the generation prompt opens the reasoning."""
    strips_thought: bool = False
    moves_tools: bool = False
    """Whether the template adds the tools to the last question only."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """All special and added tokens."""
        return (*self.specials, *self.added)


FAMILIES = [
    Family(name="chatml", eos="<|im_end|>", specials=_CHATML, stops=("<|im_end|>",)),
    Family(name="smollm2", eos="<|im_end|>", specials=_CHATML, stops=("<|im_end|>",)),
    Family(
        name="qwen2_5", eos="<|im_end|>", specials=_CHATML, added=_TOOL_TAGS, stops=("<|im_end|>",), more_stops=("<|endoftext|>",),
    ),
    Family(
        name="qwen3", eos="<|im_end|>", specials=_CHATML, added=(*_TOOL_TAGS, *_RESPONSE_TAGS, *_THINK), stops=("<|im_end|>",),
        more_stops=("<|endoftext|>",), reasons=True, strips_thought=True,
    ),
    Family(
        name="smollm3", eos="<|im_end|>", specials=(*_CHATML, "<|begin_of_text|>", "<|end_of_text|>"),
        added=(*_TOOL_TAGS, *_RESPONSE_TAGS, *_THINK, "<code>", "</code>"), stops=("<|im_end|>",), reasons=True,
    ),
    Family(
        name="llama3_1", eos="<|eot_id|>", bos="<|begin_of_text|>", specials=_LLAMA, stops=("<|eot_id|>",),
        more_stops=("<|eom_id|>", "<|end_of_text|>"), format="llama",
    ),
    Family(
        name="gemma3", eos="<eos>", bos="<bos>",
        specials=("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        added=("<table>", "\n\n", "\n\n\n"), stops=("<eos>", "<end_of_turn>"),
    ),
    Family(
        name="gemma2", eos="<eos>", bos="<bos>", specials=("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"),
        stops=("<eos>", "<end_of_turn>"), system=False,
    ),
    Family(
        name="mistral_v3", eos="</s>", bos="<s>", specials=_MISTRAL, stops=("</s>",), format="mistral",
        system=False, moves_tools=True,
    ),
    Family(name="mistral_v7", eos="</s>", bos="<s>", specials=_MISTRAL_7, stops=("</s>",), format="mistral"),
    Family(name="mistral_v13", eos="</s>", bos="<s>", specials=_MISTRAL_7, stops=("</s>",), format="mistral"),
    Family(
        name="phi4", eos="<|im_end|>", bos="<|endoftext|>", specials=(*_CHATML, "<|im_sep|>"), stops=("<|im_end|>",),
        more_stops=("<|endoftext|>",),
    ),
    Family(
        name="phi4_mini", eos="<|endoftext|>", specials=("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
        added=("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"), stops=("<|endoftext|>", "<|end|>"),
        format="phi",
    ),
    Family(
        name="hermes3", eos="<|im_end|>", bos="<|begin_of_text|>", specials=(*_LLAMA[:2], *_CHATML[:2]),
        added=(*_TOOL_TAGS, *_RESPONSE_TAGS), template={"default": "hermes3", "tool_use": "hermes3_tool_use"}, stops=("<|im_end|>",),
    ),
    Family(
        name="deepseek_r1", eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>",
        specials=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), added=(*_DEEPSEEK, *_THINK), stops=("<｜end▁of▁sentence｜>",),
        format="deepseek", reasons=True, opens_thought=True, strips_thought=True,
    ),
    Family(
        name="qwen3_coder", eos="<|im_end|>", specials=_CHATML, added=_TOOL_TAGS, stops=("<|im_end|>",), format="qwen_xml",
    ),
]  # fmt: skip


@cache
def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, so that one text has several encodings, with the family's tokens and template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = '<tool_call> </tool_call> {"name": "add", "arguments": {"parameters"}} the answer another think user assistant im_end eot_id'
    inner.train_from_iterator([words] * 8, trainer)
    rest = [t for t in family.specials if t not in (family.eos, family.bos)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=family.eos, bos_token=family.bos, extra_special_tokens=rest
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.added])
    named = family.template or family.name
    if family.source:
        tokenizer.chat_template = family.source
    elif isinstance(named, str):
        tokenizer.chat_template = _read(named)
    else:
        tokenizer.chat_template = {key: _read(name) for key, name in named.items()}
    return tokenizer


@cache
def make_chat(family: Family) -> Chat:
    """The chat of a family; additional stop tokens stand in for a generation config."""
    tokenizer = make_tokenizer(family)
    return Chat(tokenizer, stop_token_ids=[tokenizer.convert_tokens_to_ids(t) for t in family.more_stops])


def _read(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")


def encode(family: Family, text: str, *, letter_by_letter: bool = False) -> list[int]:
    """Encodes ``text`` as a model may sample it: with special tokens, and not always as the tokenizer would."""
    tokenizer = make_tokenizer(family)
    whole: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not letter_by_letter:
        return whole
    ids: list[int] = []
    special = set(tokenizer.get_added_vocab().values())
    for i in whole:
        letters = tokenizer.convert_ids_to_tokens(i)
        ids += [i] if i in special else tokenizer.convert_tokens_to_ids(list(letters))
    return ids


class FamilyBackend:
    """Responds with ``script(prompt text)``, letter by letter, then the stop token."""

    models = ("policy", "base")
    max_context = 1 << 20

    def __init__(self, family: Family, script: Callable[[str], str]) -> None:
        self._family = family
        self._script = script

    def check(self, params: SamplingParams) -> None:
        pass

    async def generate(
        self, prompt_ids: Any, params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        """See `Backend.generate`. A response without a stop token at its end was cut off."""
        text = self._script(make_tokenizer(self._family).decode(list(prompt_ids)))
        ids = encode(self._family, text, letter_by_letter=True)[: params.max_tokens]
        size = 3 if stream else len(ids)
        for start in range(0, len(ids), size):
            last = start + size >= len(ids)
            finish: Literal["stop", "length"] = "stop" if ids[-1] in params.stop_token_ids else "length"
            part = ids[start : start + size]
            version = 0 if model == "policy" else None
            logprobs = [-0.5] * len(part)
            yield Delta(token_ids=part, logprobs=logprobs, version=version, finish_reason=finish if last else None)
