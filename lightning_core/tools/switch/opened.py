"""Starts the models of a switch that this process serves."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from lightning_core.endpoint.transport.api_key import read_api_key
from lightning_core.endpoint.transport.guard import Tls
from lightning_core.errors import ConfigError
from lightning_core.propagation.providers import is_loopback
from lightning_core.tools.served_model import resolve_served
from lightning_core.tools.serving import check_access, open_serving
from lightning_core.tools.switch.arm import Arm
from lightning_core.tools.switch.plan import SwitchModel, SwitchPlan, read_plan
from lightning_core.tools.switch.recorded import SwitchTraces
from lightning_core.tools.switch.server import PlanCheck, SwitchServer, check_keys
from lightning_core.trace import POLICY


@contextmanager
def open_switch(
    plan: SwitchPlan | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    admin_key: str | None = None,
    tls: Tls | None = None,
    requests_per_minute: int | None = None,
    traces: SwitchTraces | None = None,
) -> Generator[SwitchServer]:
    """Serve ``plan`` while the body runs; see `SwitchServer`. Models of runs and folders are loaded first.

    ``plan``: a plan, or its file, which can be reloaded. Raises `ConfigError` for a model that cannot be served, and as `SwitchServer`
    does.
    """
    check_access(api_key, host=host, tls=tls)
    file, plan = (plan, read_plan(plan)) if isinstance(plan, Path) else (None, plan)
    with OpenModels(file) as models:
        server = SwitchServer(
            plan,
            models.open(plan, {}, lambda _, remote: check_keys(remote, api_key)),
            host=host,
            port=port,
            api_key=api_key,
            admin_key=admin_key,
            tls=tls,
            requests_per_minute=requests_per_minute,
            traces=traces,
            loader=None if file is None else models,
        )
        with server:
            yield server


class OpenModels:
    """The models of a plan as servers. A context manager, which closes those that this process serves. ``file``: of the plan."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._sources: dict[Arm, tuple[object, ...]] = {}
        """What each model that this process serves was loaded from."""
        self._stacks: dict[Arm, ExitStack] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for arm in [*self._stacks]:
            self.close(arm)

    def open(self, plan: SwitchPlan, arms: Mapping[str, Arm], check: PlanCheck) -> dict[str, Arm]:
        """A server for each model of ``plan``: that of ``arms`` if it has the same weights, else a new one.

        ``check`` gets the plan and the models on other servers before any weights are loaded.
        """
        opened = {name: _remote(name, model) for name, model in plan.models.items() if model.base_url is not None}
        check(plan, opened)
        try:
            for name, model in plan.models.items():
                if model.base_url is None:
                    opened[name] = self._own(name, model, arms)
        except BaseException:
            for arm in set(opened.values()) - set(arms.values()):
                self.close(arm)
            raise
        return {name: opened[name] for name in plan.models}

    def reload(self, arms: Mapping[str, Arm], check: PlanCheck) -> tuple[SwitchPlan, Mapping[str, Arm]]:
        """See `ModelLoader`."""
        assert self._file is not None
        plan = read_plan(self._file)
        return plan, self.open(plan, arms, check)

    def close(self, arm: Arm) -> None:
        """See `ModelLoader`."""
        self._sources.pop(arm, None)
        if (stack := self._stacks.pop(arm, None)) is not None:
            stack.close()

    def _own(self, name: str, model: SwitchModel, arms: Mapping[str, Arm]) -> Arm:
        """A model that this process serves."""
        source = model.run or model.weights
        assert source is not None
        if model.run is not None and not (Path(source) / "config.yaml").is_file():
            raise ConfigError(f"models.{name}.run is {source!r}, which is no run: it has no config.yaml")
        config, checkpoint = resolve_served(source, model.checkpoint, ())
        # The newest checkpoint of a run may have changed.
        key = (model.policy, source, None if checkpoint is None else checkpoint.resolve())
        if (arm := arms.get(name)) is not None and self._sources.get(arm) == key:
            return arm
        with ExitStack() as stack:
            served = stack.enter_context(open_serving(config, checkpoint=checkpoint))
            chosen = model.policy or served.models[0]
            if chosen not in served.models or (model.policy is None and POLICY not in served.models):
                raise ConfigError(
                    f"models.{name}.policy is {model.policy!r}; expected one of the models of {source!r}: {', '.join(served.models)}"
                )
            arm = Arm(name=name, base_url=served.url, model=chosen, is_local=True, is_own=True)
            self._stacks[arm], self._sources[arm] = stack.pop_all(), key
        return arm


def _remote(name: str, model: SwitchModel) -> Arm:
    """A model at ``base_url``."""
    assert model.base_url is not None
    key = read_api_key(model.api_key_env, f"models.{name}.api_key_env")
    is_local = is_loopback(urlsplit(model.base_url).hostname or "")
    return Arm(
        name=name,
        base_url=model.base_url.rstrip("/"),
        model=model.model,
        api_key=key,
        gets_request_key=key is None and not is_local,
        is_local=is_local,
    )
