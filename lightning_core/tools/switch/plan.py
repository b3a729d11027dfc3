"""The file of a switch: its models, and the shares of each agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lightning_core.capture.selectors import find_selector
from lightning_core.config.agents import NamedCallsSection
from lightning_core.config.problems import INVALID_COMBINATION, INVALID_VALUE, validate
from lightning_core.config.source import KeyPath, read_yaml
from lightning_core.config.types import AgentName, PathText, Section

_TOLERANCE = 1e-6


def _one_of(model: SwitchModel) -> SwitchModel:
    given = [name for name in ("run", "weights", "base_url") if getattr(model, name) is not None]
    if len(given) != 1:
        raise PydanticCustomError(INVALID_VALUE, "expected one of run, weights and base_url")
    for name, needed in (("checkpoint", "run"), ("policy", "run"), ("model", "base_url"), ("api_key_env", "base_url")):
        if getattr(model, name) is not None and needed not in given:
            raise PydanticCustomError(
                INVALID_VALUE, "expected {name} only with {needed}", {"name": name, "needed": needed}
            )
    return model


class SwitchModel(Section):
    """A model that can answer: of a run, of a folder, or of another server."""

    run: PathText | None = None
    """A run's folder, whose checkpoint is served."""
    checkpoint: str | None = None
    """Of `run`: such as `step-000010`, or `best`; null: the newest."""
    policy: str | None = None
    """Of `run`: the policy that answers, or `base`; null: the only policy."""
    weights: PathText | None = None
    """A model's folder or name."""
    base_url: Annotated[str, Field(pattern=r"^https?://[^/]")] | None = None
    """The base URL of a server, such as `https://api.openai.com/v1`. It must know the wire format of the agent's client."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """Of `base_url`: the model's name there; null: the one that the request names."""
    api_key_env: str | None = None
    """Of `base_url`: the environment variable with the server's key; null: the key of the request."""


def _listed(value: object) -> object:
    return {"arms": {value: 1.0}} if isinstance(value, str) else value


class SwitchedAgent(Section):
    """The models that answer an agent. A model's name stands for one that answers everything."""

    arms: Annotated[dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1)]
    """The share of conversations that each model answers, 1 in all."""
    shadow: str | None = None
    """A model that gets a copy of each request; its responses are recorded, and not sent to the client."""
    fallback: str | None = None
    """The model that answers if the chosen one cannot be reached or fails with a status of 429 or 500 and above."""

    @model_validator(mode="after")
    def _sum(self) -> SwitchedAgent:
        check_shares(self.arms)
        return self


def check_shares(arms: Mapping[str, float]) -> None:
    """Raise a pydantic error unless the shares are 1 in all."""
    if abs((total := sum(arms.values())) - 1) > _TOLERANCE:
        raise PydanticCustomError(
            INVALID_VALUE, "expected shares that are 1 in all, not {total}", {"total": f"{total:g}"}
        )


class SwitchPlan(Section):
    """What `lightning-rl serve FILE` reads."""

    models: Annotated[dict[str, Annotated[SwitchModel, AfterValidator(_one_of)]], Field(min_length=1)]
    """The models by name."""
    agents: dict[AgentName, Annotated[SwitchedAgent, BeforeValidator(_listed)]] = Field(default_factory=dict)
    """By agent's name, with `*` as wildcard: the models that answer it."""
    default: str | None = None
    """The model that answers all other requests; null: they are refused."""
    named: list[NamedCallsSection] = Field(default_factory=list[NamedCallsSection])
    """Names for calls whose URL names no agent; see `agents.named` of a run's configuration."""
    folder: PathText = "switch"
    """Folder of what is recorded: calls, feedback, changes of shares."""
    keep_days: Annotated[int, Field(ge=1)] | None = None
    """Calls that began more days ago are deleted from the record, with their feedback; null: none are."""
    shadows_at_once: Annotated[int, Field(ge=1)] = 8
    """Most shadow requests in progress; further ones are left out, and counted."""

    @model_validator(mode="after")
    def _models_exist(self) -> SwitchPlan:
        used: list[tuple[KeyPath, str]] = [] if self.default is None else [(("default",), self.default)]
        for name, agent in self.agents.items():
            used += [(("agents", name, "arms"), arm) for arm in agent.arms]
            used += [(("agents", name, key), value) for key in ("shadow", "fallback") if (value := getattr(agent, key))]
        if not self.agents and self.default is None:
            raise PydanticCustomError(INVALID_VALUE, "expected agents, default or both: every request would be refused")
        if "" in self.agents:
            raise PydanticCustomError(INVALID_VALUE, "expected names of agents that are not empty")
        if found := [
            (path, f"there is no model {name!r}; expected one of {', '.join(self.models)}")
            for path, name in used
            if name not in self.models
        ]:
            raise PydanticCustomError(INVALID_COMBINATION, "unknown models", {"found": found})
        return self

    def rule_of(self, agent: str | None) -> str | None:
        """The key of ``agents`` for ``agent``; None if it is not listed."""
        return None if agent is None else find_selector(self.agents, agent)


def is_plan(path: Path) -> bool:
    """Whether ``path`` is a YAML file that is not the configuration of a run."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    return not path.is_file() or not {"policy", "agent", "tasks"} & set(read_yaml(path).data)


def read_plan(path: Path) -> SwitchPlan:
    """The plan in the YAML file ``path``. Raises `ConfigError` with all its problems."""
    return validate(SwitchPlan, read_yaml(path))
