"""The agent and the reward function that a configuration names. An agent that is a program becomes a `CommandAgent`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_core.capture import endpoint_environment
from lightning_core.capture.children.containers import Container
from lightning_core.capture.children.environment import URL_VARIABLE
from lightning_core.capture.children.launch import ProgramResult, launch
from lightning_core.capture.mark import trainable
from lightning_core.config.command import PLACEHOLDER, CommandSection
from lightning_core.config.imports import import_callable
from lightning_core.config.sections import Sections
from lightning_core.errors import ConfigError, InfrastructureError, RewardError, fold

_MAX_SHOWN = 1000
_BARE = re.compile(r"(?<!\$)\{(\w+)\}")


class ProgramError(RuntimeError):
    """A program ended with an exit code other than 0, and without a reward."""


def load_agent(config: Sections) -> Callable[[Any], Any]:
    """The agent of ``config``. Raises `ConfigError` if there is none, or if it cannot be found."""
    if config.agent is None:
        raise ConfigError("agent is missing: set agent: module:callable, or pass the argument solve")
    if isinstance(config.agent, str):
        return import_callable(config.agent, key="agent")
    section = config.agent
    program = section.command[0] if section.container is None else section.container.runtime
    if shutil.which(program) is None:
        raise ConfigError(f"agent: there is no program {program!r} on this machine; install it, or give its full path")
    if section.workspace is not None and not Path(section.workspace).is_dir():
        raise ConfigError(f"agent.workspace: there is no folder {section.workspace!r}")
    agent = CommandAgent(section, rewarded=config.reward is not None, host_network=config.endpoint.public_url is None)
    return trainable(agent, name=section.agent)


def load_reward(config: Sections) -> Callable[[Any, Any], float] | None:
    """The reward function of ``config``, if any. Raises `ConfigError` if it cannot be found."""
    return import_callable(config.reward, key="reward") if config.reward else None


def check_tasks(config: Sections, tasks: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if a task lacks a field that the agent's command names."""
    if isinstance(section := config.agent, CommandSection):
        for task in tasks:
            try:
                for text in _templates(section):
                    fill(text, task=task, url="")
                    _check_bare_fields(text, task)
                _selected(task, section.task_fields)
            except LookupError as error:
                raise ConfigError(f"agent: task {task.get('id')!r}: {error.args[0]}") from None


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
        filled = partial(fill, task=task, url=endpoint_environment({}).get(URL_VARIABLE, ""))
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


def fill(template: str, *, task: Mapping[str, Any], url: str) -> str:
    """``template`` with its placeholders replaced. Raises LookupError for a field that the task does not have."""

    def value(match: Any) -> str:
        if match[0] == "{url}":
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


def _templates(section: CommandSection) -> Iterable[str]:
    return (*section.command, section.stdin, *section.files.values(), *section.environment.values())


def read_reward(result: ProgramResult, file: str | None) -> float | None:
    """The reward in ``file`` of the working folder, or in the last line of the output that has one; None if there is none.

    Raises `RewardError` if ``file`` has something else.
    """
    if file is None:
        rewards = (_reward_of(line) for line in reversed(result.stdout.splitlines()) if '"reward"' in line)
        return next((reward for reward in rewards if reward is not None), None)
    try:
        text = (result.folder / file).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InfrastructureError(f"the reward file {file!r} cannot be read: {error}") from error
    reward = _reward_of(text, plain=True)
    if reward is None:
        raise RewardError(f'found {fold(text)!r} in {file}, expected a number or {{"reward": NUMBER}}')
    return reward


def _reward_of(text: str, *, plain: bool = False) -> float | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    value: Any = found.get("reward") if isinstance(found, dict) else found if plain else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
