"""The configuration of an agent that is a program."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lightning_core.capture.folders import path_problem
from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.types import CommandArguments, Names, PathText, Section

_FIELDS = r"""(?:\[[^\[\]{}'"]+\])*"""
PLACEHOLDER = re.compile(
    rf"(?<!\$)(?:\{{(?P<literal>\{{(?:task{_FIELDS}|url)\}})\}}|\{{(?:task(?P<fields>{_FIELDS})|url)\}})"
)
"""The placeholders of a `Template`; ``literal``: not replaced."""
_LOOKS_LIKE_ONE = re.compile(r"(?<![${])\{(?:task|url)\b[^{}\n]*\}")


def _template(text: str) -> str:
    found = (match[0] for match in _LOOKS_LIKE_ONE.finditer(text))
    if unknown := next((part for part in found if not PLACEHOLDER.fullmatch(part)), None):
        raise PydanticCustomError(
            INVALID_VALUE, "expected {task}, {task[FIELD]} or {url} in place of {unknown}", {"unknown": unknown}
        )
    return text


def _path(text: str) -> str:
    if problem := path_problem(text):
        raise PydanticCustomError(INVALID_VALUE, "{problem}", {"problem": problem})
    return text


def _variable(text: str) -> str:
    if not text or "=" in text or "\0" in text:
        raise PydanticCustomError(INVALID_VALUE, "expected the name of an environment variable")
    return text


def _work_path(text: str) -> str:
    if text.startswith("~/"):
        raise PydanticCustomError(INVALID_VALUE, "expected a path in the working folder")
    return _path(text)


Template = Annotated[str, AfterValidator(_template)]
"""A text in which `{task}` is the task as JSON, `{task[prompt]}` one of its fields, and `{url}` the endpoint's URL with `/v1`."""
OwnPath = Annotated[str, AfterValidator(_path)]


class ContainerSection(Section):
    """The container that the program runs in."""

    image: str
    """The image."""
    runtime: Literal["docker", "podman"] = "docker"
    """The program that runs it."""
    args: CommandArguments = ()
    """Further arguments for `docker run` or `podman run`, as strings: `["--memory=4g"]`."""


class CommandSection(Section):
    """An agent that is a program; see docs/commands.md. It is trained under its name unless the configuration says
    otherwise. In `command`, `stdin`, `files` and `environment`, `{task}` is replaced by the task as JSON,
    `{task[prompt]}` by its field `prompt`, and `{url}` by the endpoint's URL, which ends with `/v1`. `{{url}}` stands for `{url}`
    itself."""

    command: Annotated[tuple[Template, ...], Field(strict=False, min_length=1)]
    """The program and its arguments."""
    name: str | None = None
    """The agent's name; null: the name of the program."""
    stdin: Template = ""
    """Its standard input."""
    workspace: PathText | None = None
    """A folder that is copied into its working folder; null: the working folder is empty."""
    files: dict[OwnPath, Template] = {}
    """Files to write before it starts, by path: `~/…` in its home directory, others in its working folder."""
    environment: dict[Annotated[str, AfterValidator(_variable)], Template] = {}
    """Additional environment variables."""
    task_fields: Names | None = None
    """The fields of the task in the file that `LIGHTNING_TASK_FILE` names; null: all of them."""
    reward_file: Annotated[str, AfterValidator(_work_path)] | None = None
    """A file with the reward, a number or `{"reward": NUMBER}`, in the working folder; null: the reward is in the last line
    `{"reward": NUMBER}` of its standard output. Not with a reward function."""
    container: ContainerSection | None = None
    """The container to run it in; null: it runs on this machine."""

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self.name or PurePath(self.command[0]).name
