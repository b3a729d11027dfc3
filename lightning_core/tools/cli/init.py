"""``lightning-rl init``: writes an agent, tasks, a configuration and a test, from a template for a framework.

A template is a folder in ``templates/``; its files are added to ``templates/shared/`` and replace files of the same name.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lightning_core.errors import ConfigError, did_you_mean, os_problem
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say

FOLDER = Path(__file__).parent / "templates"
SHARED = "shared"
DEFAULT = "plain"


@dataclass(frozen=True, slots=True)
class AgentTemplate:
    """The packages that an agent of a template needs to run and to be trained."""

    description: str
    """One line for ``--help``."""
    extras: tuple[str, ...]
    """The extras of lightning-rl that train it."""
    imports: tuple[str, ...]
    """The packages that its files import, beside those that the trainer needs."""


TEMPLATES = {
    "plain": AgentTemplate("the OpenAI client, no framework", ("quickstart",), ("openai",)),
    "langgraph": AgentTemplate(
        "a LangGraph graph with two nodes", ("langgraph", "torch"), ("langgraph", "langchain_openai")
    ),
    "langchain": AgentTemplate(
        "an agent of LangChain's create_agent", ("langchain", "torch"), ("langchain", "langchain_openai")
    ),
    "openai-agents": AgentTemplate(
        "an agent of the OpenAI Agents SDK", ("openai-agents", "torch"), ("agents", "openai")
    ),
    "autogen": AgentTemplate(
        "an AutoGen AssistantAgent", ("autogen-agentchat", "torch"), ("autogen_agentchat", "autogen_ext", "openai")
    ),
    "command": AgentTemplate("a program, in any language", ("torch",), ()),
}
_TRAINER = ("torch", "transformers")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    width = max(map(len, TEMPLATES))
    lines = [f"  {name:{width}}  {template.description}" for name, template in TEMPLATES.items()]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Write an agent, tasks, a configuration and a test. No file is overwritten."
    parser.epilog = "\n".join(["templates:", *lines])
    parser.add_argument(
        "template", metavar="TEMPLATE", nargs="?", default=DEFAULT, help="one of those below (default: %(default)s)"
    )
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", default=".", help="the folder (default: the working folder)"
    )


def init(options: argparse.Namespace) -> int:
    """Write the template and print the next commands; returns the exit code."""
    name, folder = options.template, Path(options.folder)
    if name not in TEMPLATES:
        near = did_you_mean(name, TEMPLATES)
        advice = near or f"For a folder of this name: lightning-rl init {DEFAULT} {shlex.quote(name)}"
        raise ConfigError(
            f"{name!r} is not a template: expected {', '.join(TEMPLATES)}. {advice[0].upper()}{advice[1:]}"
        )
    written = write(name, folder)
    say("wrote " + ", ".join(str(folder / path) for path in written))
    say("\nnext:")
    for command in _next_commands(TEMPLATES[name], folder):
        say(f"  {command}")
    return exits.OK


def write(name: str, folder: Path) -> list[Path]:
    """Write the template ``name`` to ``folder``, which may exist; returns the files' paths in it, sorted.

    Raises `ConfigError` if one of the files exists, or the folder cannot be written; in the first case nothing was written.
    """
    files = template_files(name)
    if existing := [str(folder / path) for path in files if (folder / path).exists() or (folder / path).is_symlink()]:
        raise ConfigError(
            f"{', '.join(existing)} exist{'s' if len(existing) == 1 else ''}: nothing was written. Choose another folder, "
            f"such as: lightning-rl init {name} my-agent"
        )
    try:
        for path, source in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(source.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot write the template: {os_problem(error)}. Choose another folder") from None
    return list(files)


def template_files(name: str) -> dict[Path, Path]:
    """The files of the template ``name``: their paths in the new folder, sorted, and their sources."""
    files: dict[Path, Path] = {}
    for folder in (FOLDER / SHARED, FOLDER / name):
        files |= {path.relative_to(folder): path for path in folder.rglob("*") if _belongs(path)}
    return dict(sorted(files.items()))


def _belongs(path: Path) -> bool:
    return path.is_file() and path.parent.name != "__pycache__"


def _next_commands(template: AgentTemplate, folder: Path) -> Iterator[str]:
    if folder.resolve() != Path.cwd():
        yield f"cd {shlex.quote(str(folder))}"
    if _missing([*template.imports, *_TRAINER]):
        yield f'pip install "lightning-rl[{",".join(template.extras)}]"'
    if _missing(["pytest"]):
        yield "pip install pytest"
    yield "python -m pytest                    # runs the agent without a model"
    yield "lightning-rl doctor lightning.yaml  # checks the environment, the tasks and the agent"
    yield "lightning-rl train                  # held-out reward before and after"
    yield "lightning-rl view                   # the run in a browser"


def _missing(packages: Sequence[str]) -> bool:
    return any(find_spec(package) is None for package in packages)
