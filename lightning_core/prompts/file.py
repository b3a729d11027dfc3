"""The file of prompts that ``lightning-rl prompts`` writes: all versions, and which one is current."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from lightning_core.errors import os_problem, show

FORMAT = 1
PLAIN = "plain"
"""The only version of a file without versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptVersion:
    """One version of the prompts of a program."""

    digest: str
    """Of its prompts."""
    agents: Mapping[str, Any]
    """The prompts by agent, as under ``prompts`` in a configuration."""
    facts: Mapping[str, Any]
    """How and when it was found, and its scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """All versions in a file, oldest first."""

    current: str | None
    """The digest of the version that is used; None: no prompt is."""
    versions: Sequence[PromptVersion] = ()

    def agents(self, digest: str | None = None) -> Mapping[str, Any]:
        """The prompts of the version whose digest starts with ``digest``; None: of the current one. Raises ValueError without one."""
        chosen = self.current if digest is None else digest
        if chosen is None:
            return {}
        found = [version for version in self.versions if version.digest.startswith(chosen)]
        if len({version.digest for version in found}) != 1:
            known = [version.digest for version in self.versions]
            raise ValueError(
                f"but {len(found)} of its versions have a digest that starts with {chosen!r}; expected one of {known!r}"
            )
        return found[-1].agents


def read_prompt_file(path: Path) -> PromptFile:
    """The file at ``path``: as `write_prompt_file` writes it, or a plain mapping from agents to prompts.

    Raises ValueError if it cannot be read.
    """
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"which cannot be read: {os_problem(error)}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"but {str(path)!r} is not valid YAML: {error}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"but {str(path)!r} contains {show(data)}; expected a mapping from agents to prompts")
    fields = cast("Mapping[str, Any]", data)
    if "versions" not in fields:
        return PromptFile(current=PLAIN, versions=[PromptVersion(digest=PLAIN, agents=fields, facts={})])
    if fields.get("format") != FORMAT:
        raise ValueError(
            f"but {str(path)!r} has the format {fields.get('format')!r}; this version reads format {FORMAT}"
        )
    try:
        versions = [
            PromptVersion(
                digest=str(entry["digest"]),
                agents=entry["agents"],
                facts={key: value for key, value in entry.items() if key not in ("digest", "agents")},
            )
            for entry in fields["versions"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"but the versions in {str(path)!r} are damaged: {error!r}") from None
    current = fields.get("current")
    return PromptFile(current=None if current is None else str(current), versions=versions)


def prompt_file_text(file: PromptFile) -> str:
    """``file`` as YAML."""
    data = {
        "format": FORMAT,
        "current": file.current,
        "versions": [{"digest": v.digest, **v.facts, "agents": dict(v.agents)} for v in file.versions],
    }
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def read_agents(reference: str) -> Mapping[str, Any]:
    """The prompts that ``reference`` names: the path of a file, or ``path#digest`` for one of its versions.

    Raises ValueError as `read_prompt_file` and `PromptFile.agents` do.
    """
    path, mark, digest = reference.rpartition("#")
    if not mark or Path(reference).is_file():
        path, digest = reference, ""
    return read_prompt_file(Path(path)).agents(digest or None)
