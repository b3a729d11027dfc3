"""Types and the base class of the configuration's sections."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from lightning_core.config.problems import INVALID_VALUE, OR_AUTO

_NOT_EXPANDED = re.compile(r"^~[^/]*|\$(\w+|\{[^}]*\})")
_CALLABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

_CLOSED = re.compile(
    r"((openai|anthropic|google|gemini|azure|openrouter|vertex_ai|bedrock)/)*"
    r"(gpt-\d|chatgpt-|o\d($|-)|claude-|gemini-|text-davinci-)",
    re.IGNORECASE,
)
"""Models that are served only, as their providers and routers of requests name them. OpenAI's gpt-oss has open weights."""


def is_callable_name(text: str) -> bool:
    """Whether ``text`` has the form ``module:callable``."""
    return _CALLABLE.fullmatch(text) is not None


def _callable_name(text: str) -> str:
    if not is_callable_name(text):
        raise PydanticCustomError(
            INVALID_VALUE,
            "expected 'module:callable', such as 'examples.text_to_sql.agent:solve'{hint}",
            {"hint": _meant(text)},
        )
    return text


def _meant(text: str) -> str:
    """The form that ``text`` was probably meant to have, for errors."""
    module, colon, name = text.partition(":")
    if "-" in module:
        return "; a module's name has no '-': rename the file"
    module = re.sub(r"[\\/]+", ".", module.removesuffix(".py").removeprefix("./"))
    if not colon and "/" not in text and not text.endswith(".py"):
        module, _, name = module.rpartition(".")
    found = f"{module}:{name.removesuffix('()') or 'solve'}"
    return f"; did you mean {found!r}?" if module and is_callable_name(found) else ""


def expanded(text: str) -> str:
    """The path ``text`` with `~` and environment variables expanded. Raises pydantic's error for one that is not set."""
    path = os.path.expandvars(os.path.expanduser(text))
    if left := _NOT_EXPANDED.search(path):
        raise PydanticCustomError(
            INVALID_VALUE,
            "but {name} cannot be expanded: set the variable, or write the path in full",
            {"name": left[0]},
        )
    return path


def _open_weights(name: str) -> str:
    if _CLOSED.match(name) and not Path(name).is_dir():
        raise PydanticCustomError(
            INVALID_VALUE,
            "expected a model with open weights: a folder in Hugging Face format, or a name on the Hub. A closed model cannot be "
            "trained; agents that are not trained call theirs at their own provider, or under policy.upstream",
        )
    return name


CallableName = Annotated[str, AfterValidator(_callable_name)]
PathText = Annotated[str, AfterValidator(expanded)]
"""A path of this machine, with `~` and environment variables expanded."""
ModelName = Annotated[PathText, AfterValidator(_open_weights)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Beta = Annotated[float, Ge(0), Lt(1)]


def _kind(value: object) -> str:
    return "[auto]" if value == "auto" else OR_AUTO


_Auto = Annotated[Literal["auto"], Tag("[auto]")]
PositiveOrAuto = Annotated[Annotated[Positive, Tag(OR_AUTO)] | _Auto, Discriminator(_kind)]
CountOrAuto = Annotated[Annotated[Count, Tag(OR_AUTO)] | _Auto, Discriminator(_kind)]
AgentName = Annotated[str, AfterValidator(str.strip)]
"""A name or a pattern, without the newline at the end of a folded text in YAML."""
Names = Annotated[tuple[AgentName, ...], Field(strict=False)]
"""A list in YAML, a tuple in Python."""
CommandArguments = Annotated[tuple[str, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, without unknown keys.

    An empty section has its defaults. A section's class name ends in ``Section`` if another class has the bare name, such as `Trainer`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, data: object) -> object:
        return {} if data is None else data
