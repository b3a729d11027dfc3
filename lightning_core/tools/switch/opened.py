"""Starts the models of a switch that this process serves."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from lightning_core.endpoint.api_key import read_api_key
from lightning_core.endpoint.guard import Tls
from lightning_core.errors import ConfigError
from lightning_core.tools.served_model import resolve_served
from lightning_core.tools.serving import check_access, is_loopback, open_serving
from lightning_core.tools.switch.arm import Arm
from lightning_core.tools.switch.plan import SwitchModel, SwitchPlan
from lightning_core.tools.switch.recorded import SwitchTraces
from lightning_core.tools.switch.server import SwitchServer
from lightning_core.trace import POLICY


@contextmanager
def open_switch(
    plan: SwitchPlan,
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

    Raises `ConfigError` for a model that cannot be served, and as `SwitchServer` does.
    """
    check_access(api_key, host=host, tls=tls)
    with ExitStack() as stack:
        arms = {name: _open(name, model, stack) for name, model in plan.models.items()}
        server = SwitchServer(
            plan,
            arms,
            host=host,
            port=port,
            api_key=api_key,
            admin_key=admin_key,
            tls=tls,
            requests_per_minute=requests_per_minute,
            traces=traces,
        )
        yield stack.enter_context(server)


def _open(name: str, model: SwitchModel, stack: ExitStack) -> Arm:
    if model.base_url is not None:
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
    source = model.run or model.weights
    assert source is not None
    if model.run is not None and not (Path(source) / "config.yaml").is_file():
        raise ConfigError(f"models.{name}.run is {source!r}, which is no run: it has no config.yaml")
    config, checkpoint = resolve_served(source, model.checkpoint, ())
    served = stack.enter_context(open_serving(config, checkpoint=checkpoint))
    chosen = model.policy or served.models[0]
    if chosen not in served.models or (model.policy is None and POLICY not in served.models):
        raise ConfigError(
            f"models.{name}.policy is {model.policy!r}; expected one of the models of {source!r}: {', '.join(served.models)}"
        )
    return Arm(name=name, base_url=served.url, model=chosen, is_local=True, is_own=True)
