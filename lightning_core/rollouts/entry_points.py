"""The agent and the reward function that a configuration names. An agent that is a program becomes a `CommandAgent`."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_core.capture import current_rollout
from lightning_core.capture.containers import Container
from lightning_core.capture.mark import trainable
from lightning_core.config.command import PLACEHOLDER, CommandSection
from lightning_core.config.imports import import_callable
from lightning_core.config.sections import Sections
from lightning_core.errors import ConfigError, ProgramError, RewardError, fold, show
from lightning_core.propagation.children.launch import ProgramResult, launch
from lightning_core.trace import check_reward

_MAX_SHOWN = 1000
_MAX_REWARD_FILE = 1 << 16
_MAX_ARGUMENT = 100_000
"""Bytes. Linux allows 131,071 for an argument, and for a variable with its name."""
_BARE = re.compile(r"(?<![${])\{(\w+)\}")


def load_agent(config: Sections) -> Callable[[Any], Any]:
    """The agent of ``config``. Raises `ConfigError` if there is none, or if it cannot be found."""
    if config.agent is None:
        raise ConfigError("agent is missing: set agent: module:callable, or pass the argument solve")
    if isinstance(config.agent, str):
        return _called_with(import_callable(config.agent, key="agent"), 1, f"agent: {config.agent!r}", "the task")
    section = config.agent
    if section.workspace is not None and not Path(section.workspace).is_dir():
        raise ConfigError(f"agent.workspace: there is no folder {section.workspace!r}")
    _check_program(section)
    agent = CommandAgent(section, rewarded=config.reward is not None, host_network=config.endpoint.public_url is None)
    return trainable(agent, name=section.agent)


def _check_program(section: CommandSection) -> None:
    program = section.command[0]
    if section.container is not None:
        program, found = section.container.runtime, shutil.which(section.container.runtime)
    elif "{" in program:
        return  # it depends on the task
    elif "/" in program and not program.startswith("/"):
        found = shutil.which(Path(section.workspace or "", program)) if section.workspace else None
        if found is None:
            raise ConfigError(
                f"agent: there is no program {program!r} in agent.workspace; relative paths start in the working folder"
            )
    else:
        found = shutil.which(program, path=section.environment.get("PATH"))
    if found is None:
        raise ConfigError(f"agent: there is no program {program!r} on this machine; install it, or give its full path")


def load_reward(config: Sections) -> Callable[[Any, Any], Any] | None:
    """The reward function of ``config``, if any. Raises `ConfigError` if it cannot be found."""
    if not config.reward:
        return None
    function = import_callable(config.reward, key="reward")
    return _called_with(function, 2, f"reward: {config.reward!r}", "the task and the agent's result")


def _called_with(function: Callable[..., Any], count: int, what: str, arguments: str) -> Callable[..., Any]:
    """``function``. Raises `ConfigError` if it is a class or a generator function, or does not take ``count`` positional arguments."""
    if inspect.isclass(function):
        raise ConfigError(
            f"{what} is a class, expected a function or an object that is called with {arguments}: create the object in the module, and "
            "name it"
        )
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004 - an object's method
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise ConfigError(
                f"{what} has a yield, so calling it runs none of its code; expected a function that returns its result"
            )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return function
    try:
        signature.bind(*[None] * count)
    except TypeError:
        text = f"{what} has the arguments {signature}, but is called with {arguments}"
        if next(iter(signature.parameters), "") == "self":
            text += "; it is a method: create an object in the module, run = Run(), and name its method, run.solve"
        raise ConfigError(text) from None
    return function


def check_tasks(config: Sections, tasks: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` for a task that the agent's command cannot get."""
    if isinstance(section := config.agent, CommandSection):
        for task in tasks:
            try:
                check_task(section, task)
            except (LookupError, ValueError) as error:
                raise ConfigError(f"agent: task {task.get('id')!r}: {error.args[0]}") from None


def check_task(section: CommandSection, task: Mapping[str, Any]) -> None:
    """Raise LookupError if ``task`` lacks a field that the command names, and ValueError for a value that cannot be passed."""
    for text in (*section.command, section.stdin):
        _check_bare_fields(text, task)
    _selected(task, section.task_fields)
    filled = partial(fill, task=task, url="")
    for text in (*map(filled, section.files.values()), filled(section.stdin)):
        _check_text(text)
    for text in (*map(filled, section.command), *map(filled, section.environment.values())):
        _check_text(text)
        if "\0" in text:
            raise ValueError("an argument or variable has a NUL character; use stdin or files for it")
        if len(text.encode()) > _MAX_ARGUMENT:
            raise ValueError(
                f"an argument or variable has {len(text.encode()):,} bytes, and programs get at most {_MAX_ARGUMENT:,}; use stdin or "
                "files for it"
            )
    if section.container is not None and any("\n" in filled(text) for text in section.environment.values()):
        raise ValueError("a variable in agent.environment has a line break, which containers cannot get; use files")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start : error.end]!r} is half a character (a lone surrogate)") from None


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """Runs the program that a section describes. Returns its reward, or with a reward function a `ProgramResult`."""

    section: CommandSection
    rewarded: bool
    """Whether there is a reward function."""
    host_network: bool
    """Whether its container uses the network of this machine."""

    def __call__(self, task: Mapping[str, Any]) -> ProgramResult | float:
        """Run the program for ``task``."""
        section, container = self.section, self.section.container
        filled = partial(fill, task=task, url=_endpoint_url())
        result = launch(
            [filled(argument) for argument in section.command],
            task=_selected(task, section.task_fields),
            stdin=filled(section.stdin),
            workspace=section.workspace,
            files={path: filled(text) for path, text in section.files.items()},
            environment={name: filled(text) for name, text in section.environment.items()},
            container=None
            if container is None
            else Container(
                image=container.image,
                runtime=container.runtime,
                args=container.args,
                host_network=self.host_network,
            ),
        )
        if self.rewarded:
            return result
        reward = read_reward(result, section.reward_file)
        if reward is not None:
            return reward
        shown = fold((result.stderr.strip() or result.stdout.strip())[-_MAX_SHOWN:])
        program = Path(section.command[0]).name
        if result.exit_code:
            raise ProgramError(f"{program} ended with exit code {result.exit_code}: {shown or 'it printed nothing'}")
        expected = (
            'a last line {"reward": NUMBER} in its output'
            if section.reward_file is None
            else f"a number in {section.reward_file}"
        )
        raise RewardError(
            f"{program} ended without a reward: expected {expected}, or a reward function (reward: module:callable); found {shown!r}"
        )


def _endpoint_url() -> str:
    run = current_rollout()
    return "" if run is None else run.public_endpoint or run.endpoint or ""


def fill(template: str, *, task: Mapping[str, Any], url: str) -> str:
    """``template`` with its placeholders replaced. Raises LookupError for a field that the task does not have."""

    def value(match: Any) -> str:
        if match["literal"] is not None:
            return match["literal"]
        if match["fields"] is None:
            return url
        found: Any = task
        for field in filter(None, match["fields"].strip("[]").split("][")):
            found = _field(found, field)
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=repr)

    return PLACEHOLDER.sub(value, template)


def _field(value: Any, field: str) -> Any:
    if isinstance(value, Mapping) and field in value:
        return value[field]
    if isinstance(value, Sequence) and not isinstance(value, str) and field.isdigit() and int(field) < len(value):
        return value[int(field)]
    known = f"; it has {', '.join(map(repr, value))}" if isinstance(value, Mapping) else ""
    raise LookupError(f"there is no field {field!r}{known}")


def _selected(task: Mapping[str, Any], fields: Sequence[str] | None) -> Mapping[str, Any]:
    return task if fields is None else {field: _field(task, field) for field in fields}


def _check_bare_fields(template: str, task: Mapping[str, Any]) -> None:
    for name in _BARE.findall(template):
        if name in task:
            raise LookupError(f"found {{{name}}} in the command, expected {{task[{name}]}} for the field {name!r}")


def read_reward(result: ProgramResult, file: str | None) -> float | None:
    """The reward in ``file`` of the working folder, or in the last line of the output that has one; None if there is none.

    Raises `ProgramError` for a file with something else. The program may have written anything.
    """
    if file is None:
        # Only line feeds separate lines: JSON may contain Unicode's separators.
        lines = (line for line in reversed(result.stdout.split("\n")) if '"reward"' in line)
        found = next(filter(None, map(_reward_line, lines)), None)
        return None if found is None else _checked(found["reward"], "its output")
    path = (result.folder / file).resolve()
    if not path.is_relative_to(result.folder.resolve()):
        raise ProgramError(f"{file} is a link that leads out of the working folder")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProgramError(f"{file} cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ProgramError(f"{file} is not a file")
        text = os.read(descriptor, _MAX_REWARD_FILE).decode(errors="replace")
    finally:
        os.close(descriptor)
    value = _parsed(text)
    return _checked(value["reward"] if isinstance(value, dict) and "reward" in value else value, file)


def _reward_line(line: str) -> dict[str, Any] | None:
    found = _parsed(line)
    return found if isinstance(found, dict) and "reward" in found else None


def _parsed(text: str) -> Any:
    """The JSON value, or ``text`` itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _checked(value: Any, where: str) -> float:
    try:
        return check_reward(value)
    except RewardError:
        raise ProgramError(f"found the reward {show(value)} in {where}, expected a finite number") from None


def refuse_functions(config: Sections, **given: Callable[..., object] | None) -> None:
    """Raise `ConfigError` for a function that is ``given`` under the name of its key; other processes cannot import it."""
    for key, function in given.items():
        if function is not None:
            raise ConfigError(
                f"{key}: with trainer.name: {config.trainer.name} agents run in other processes and import it by name; "
                f"set {key}: module:callable in the configuration instead of passing a function"
            )
