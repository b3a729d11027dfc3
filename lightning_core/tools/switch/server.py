"""The HTTP server of a switch: model calls, feedback, shares and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, cast
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lightning_core.capture.address import Address
from lightning_core.chat.json_text import show_json
from lightning_core.dialects import openai_chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.refusals import credentials, error_response
from lightning_core.endpoint.sessions import UNKNOWN_KEY, Session
from lightning_core.endpoint.transport.guard import Guard, Protection, Tls
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.listening import ServerThread, listen
from lightning_core.endpoint.transport.receive import read_body, read_json
from lightning_core.errors import ConfigError, LightningError, PolicyRequestError, describe
from lightning_core.tools.serving import SingleSession, check_access
from lightning_core.tools.switch.arm import Arm
from lightning_core.tools.switch.meters import Meters
from lightning_core.tools.switch.plan import SwitchPlan
from lightning_core.tools.switch.proxy import Proxy
from lightning_core.tools.switch.recorded import SwitchTraces
from lightning_core.tools.switch.shares import FROM_FILE, ShareHistory, Shares, wanted_shares
from lightning_core.tools.switch.store import ShareChange, SwitchStore

logger = logging.getLogger(__name__)

ADMIN_HEADER = "lightning-admin-key"
"""Header: the key for requests that change shares."""

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_LARGEST_REWARD = 1e6
_MOST_BYTES = 1 << 20
"""Of a request that is no model call."""


PlanCheck = Callable[[SwitchPlan, Mapping[str, Arm]], None]
"""Raises `ConfigError` for a plan, or for models on other servers, that a switch cannot use."""


class ModelLoader(Protocol):
    """The models of a plan whose file may change. Called on other threads, `reload` on one at a time."""

    def reload(self, arms: Mapping[str, Arm], check: PlanCheck) -> tuple[SwitchPlan, Mapping[str, Arm]]:
        """The plan now, and its models: those of ``arms`` that are as before, and new ones.

        ``check`` gets the plan and its models on other servers. Raises what it raises, and `ConfigError` for a wrong plan. Then
        nothing has changed.
        """
        ...

    def close(self, arm: Arm) -> None:
        """Close the model of ``arm``, if this process serves it."""
        ...


class SwitchServer:
    """Serves ``plan`` at ``url`` on a thread of its own, as a context manager.

    ``arms``: the servers of the plan's models. ``api_key``: of all requests; None: any, from this machine only. ``admin_key``: of
    requests that change shares; None: they are accepted from this machine only. ``traces``: records calls with their messages.
    ``loader``: reloads the plan; None: that is refused. Raises `ConfigError` if the address, the TLS files or the folder cannot be used.
    """

    def __init__(
        self,
        plan: SwitchPlan,
        arms: Mapping[str, Arm],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        admin_key: str | None = None,
        tls: Tls | None = None,
        requests_per_minute: int | None = None,
        traces: SwitchTraces | None = None,
        loader: ModelLoader | None = None,
    ) -> None:
        check_access(api_key, host=host, tls=tls)
        check_keys(arms, api_key)
        limits = Limits()
        listening, self.url = listen(host, port, tls)
        root = Address(rollout=secrets.token_hex(16), span=secrets.token_hex(8))
        sessions = SingleSession(Session(root=root, routing=Routing(), seed=None), api_key, limits)
        self._plan = plan
        self._arms = arms
        self._sessions = sessions
        self._admin_key = admin_key
        self._traces = traces
        self._meters = Meters(lambda agent: self._plan.rule_of(agent))  # of the plan at the time
        self._api_key = api_key
        self._loader = loader
        self._folder = Path(plan.folder).absolute()
        self._reloading = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        try:
            self._store = SwitchStore(Path(plan.folder), days=plan.keep_days)
        except BaseException:
            listening.close()
            raise
        self._proxy = Proxy(plan, arms, self._store, self._meters, sessions, limits, traces)
        app = Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._admitted(self._metrics), methods=["GET"]),
                Route("/v1/feedback", self._admitted(self._feedback), methods=["POST"]),
                # The base URL that an application has.
                Route("/a/{agent:path}/v1/feedback", self._admitted(self._feedback), methods=["POST"]),
                Route("/v1/switch", self._admitted(self._state), methods=["GET"]),
                Route("/v1/switch", self._admitted(self._reload), methods=["POST"]),
                Route("/v1/switch/{agent:path}", self._admitted(self._change), methods=["POST"]),
                Route("/v1/models", self._admitted(self._models), methods=["GET"]),
                Route("/{path:path}", self._proxy.respond, methods=_METHODS),
            ]
        )
        protection = Protection(tls=tls, requests_per_minute=requests_per_minute, anonymous=api_key is None)
        self._server = ServerThread(
            Guard(app, sessions, protection, host, [self.url]),
            listening,
            self._serve,
            name="lightning-switch",
            tls=tls,
            limits=limits,
            ending_seconds=10,
        )

    def __enter__(self) -> Self:
        self._store.__enter__()
        try:
            self._history = ShareHistory(self._store.changes())
            self.notes = self._use_shares(self._plan)
            """What the shares are, where they are not those of the file."""
            self._server.start(f"the switch did not start at {self.url}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()
        self._store.__exit__(*error)

    @property
    def shares(self) -> dict[str, Mapping[str, float]]:
        """The shares of each agent now."""
        return {name: one.arms for name, one in self._proxy.shares.items()}

    @property
    def default(self) -> str | None:
        """The model of requests of all other agents; None: they are refused."""
        return self._plan.default

    def _serve(self) -> None:
        with self._server.runner() as runner:
            runner.run(self._server.serve())
            runner.run(self._proxy.close())

    def _use_shares(self, plan: SwitchPlan) -> list[str]:
        """Continue with the last shares, unless the file has changed since; return a line for each agent whose shares differ from it."""
        notes: list[str] = []
        for name, agent in plan.agents.items():
            arms, last = dict(agent.arms), self._history.latest.get(name)
            if last is None or self._history.in_file.get(name) != arms or not set(last) <= set(self._arms):
                self._add(ShareChange(name, arms, FROM_FILE))
            else:
                if last != arms:
                    notes.append(
                        f"{name}: {shares_text(last)}, as changed while serving; the file has {shares_text(arms)}"
                    )
                self._set(name, last)
        return notes

    def _set(self, name: str, arms: Mapping[str, float]) -> None:
        before = self._proxy.shares[name]
        self._proxy.shares[name] = Shares(arms=dict(arms), shadow=before.shadow, fallback=before.fallback)
        self._meters.shared(name, dict.fromkeys(before.arms, 0.0) | dict(arms))

    def _add(self, change: ShareChange) -> None:
        self._set(change.agent, change.arms)
        self._history.add(change)
        self._store.change(change)

    def _admitted(self, respond: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                if self._sessions.find(credentials(request)) is None and not self._has_admin_key(request):
                    raise PolicyRequestError(UNKNOWN_KEY, status=401)
                return await respond(request)
            except PolicyRequestError as error:
                return error_response(openai_chat, error)
            except ClientDisconnect:  # while its request arrived
                return Response(status_code=400)

        return handle

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "lightning"} for name in self._arms]
        return JSONResponse({"object": "list", "data": data})

    async def _state(self, request: Request) -> Response:
        agents = {
            name: {"arms": dict(one.arms), "shadow": one.shadow, "fallback": one.fallback}
            for name, one in self._proxy.shares.items()
        }
        return JSONResponse({"agents": agents, "default": self._plan.default, "models": list(self._arms)})

    async def _feedback(self, request: Request) -> Response:
        body = await _object(request)
        if unknown := sorted(set(body) - {"response", "reward", "comment"}):
            raise PolicyRequestError(
                f"{unknown[0]} is unknown; expected response, reward and comment", param=unknown[0]
            )
        response, reward, comment = body.get("response"), body.get("reward"), body.get("comment")
        if not isinstance(response, str) or not response:
            raise PolicyRequestError(
                f"response is {show_json(response)}; expected the id of a response", param="response"
            )
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not abs(reward) <= _LARGEST_REWARD:
            raise PolicyRequestError(
                f"reward is {show_json(reward)}; expected a number from -1e6 to 1e6", param="reward"
            )
        if comment is not None and not isinstance(comment, str):
            raise PolicyRequestError(f"comment is {show_json(comment)}; expected a text", param="comment")
        call = await self._proxy.find(response)
        if call is None:
            raise PolicyRequestError(
                f"response {show_json(response)} was not answered by this switch; expected the id in a response, or its header "
                "lightning-call",
                status=404,
                param="response",
            )
        if not self._store.feedback(call.id, float(reward), comment):
            raise PolicyRequestError("too much waits to be written: send the feedback again later", status=503)
        if self._traces is not None and call.response is not None:
            self._traces.reward(call.response, float(reward))
        self._meters.rewarded(call.agent, call.arm, float(reward))
        return JSONResponse({"call": call.id, "agent": call.agent, "arm": call.arm})

    async def _change(self, request: Request) -> Response:
        self._check_admin(request)
        name, body = request.path_params["agent"], await _object(request)
        if name not in self._proxy.shares:
            raise PolicyRequestError(
                f"agent {show_json(name)} is not listed in the plan; expected one of {', '.join(self._proxy.shares) or 'none'}",
                status=404,
            )
        arms, why = wanted_shares(name, body, self._arms)
        previous = dict(self._proxy.shares[name].arms)
        if arms is None:
            arms = self._history.previous(name, self._arms)
        if arms is None:
            raise PolicyRequestError(f"agent {show_json(name)} has no earlier shares to go back to", status=409)
        self._add(ShareChange(name, arms, why))
        logger.info("%s: %s (before: %s)", name, shares_text(arms), shares_text(previous))
        return JSONResponse({"agent": name, "arms": arms, "previous": previous})

    async def _reload(self, request: Request) -> Response:
        self._check_admin(request)
        body = await _object(request)
        if body != {"reload": True}:
            raise PolicyRequestError(f'found {show_json(dict(body))}; expected {{"reload": true}}')
        if self._loader is None:
            raise PolicyRequestError("this switch has no file to read its plan from again", status=409)
        async with self._reloading:
            before = self._arms
            try:
                plan, arms = await asyncio.to_thread(self._loader.reload, before, self._check)
            except (LightningError, OSError) as error:
                logger.warning(
                    "the plan was not reloaded, so the switch continues with the one before: %s", describe(error)
                )
                raise PolicyRequestError(
                    f"the plan is unchanged, because the file cannot be used: {describe(error)}"
                ) from error
            for name, shares in self._proxy.shares.items():
                self._meters.shared(name, dict.fromkeys(shares.arms, 0.0))
            notes = _notes(self._plan, plan)
            self._plan, self._arms = plan, arms
            self._proxy.use(plan, arms)
            self._store.keep(plan.keep_days)
            notes += self._use_shares(plan)
        logger.info("the plan was reloaded; its models: %s", ", ".join(arms))
        for arm in set(before.values()) - set(arms.values()):
            task = asyncio.create_task(self._close(arm))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return JSONResponse(
            {
                "added": [name for name in arms if name not in before],
                "changed": [name for name, arm in arms.items() if before.get(name, arm) != arm],
                "removed": [name for name in before if name not in arms],
                "agents": self.shares,
                "notes": notes,
            }
        )

    def _check(self, plan: SwitchPlan, arms: Mapping[str, Arm]) -> None:
        """Raise `ConfigError` if the switch cannot continue with ``plan``. On any thread."""
        check_keys(arms, self._api_key)
        if Path(plan.folder).absolute() != self._folder:
            raise ConfigError(
                f"folder is {plan.folder!r}; expected {str(self._folder)!r} until the switch is started again"
            )

    async def _close(self, arm: Arm) -> None:
        """Close the model of ``arm``, which the plan has no more, after its last request."""
        assert self._loader is not None
        await self._proxy.wait_until_idle(arm)
        await asyncio.to_thread(self._loader.close, arm)

    def _check_admin(self, request: Request) -> None:
        if not self._is_admin(request):
            raise PolicyRequestError(
                f"the switch is changed from its own machine, or with its admin key in the header {ADMIN_HEADER}",
                status=403,
            )

    def _is_admin(self, request: Request) -> bool:
        if self._admin_key is not None:
            return self._has_admin_key(request)
        with contextlib.suppress(ValueError):
            return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
        return False

    def _has_admin_key(self, request: Request) -> bool:
        given = request.headers.get(ADMIN_HEADER, "")
        return self._admin_key is not None and secrets.compare_digest(given.encode(), self._admin_key.encode())


def check_keys(arms: Mapping[str, Arm], api_key: str | None) -> None:
    """Raise `ConfigError` if the key of a request would be sent to a server that it is not for. ``api_key``: of the switch."""
    open_arms = [arm for arm in arms.values() if arm.gets_request_key]
    if api_key is not None and open_arms:
        raise ConfigError(
            f"models.{open_arms[0].name} has no api_key_env, so it would get the API key of the switch: set api_key_env"
        )
    servers = {urlsplit(arm.base_url).netloc: arm.name for arm in open_arms}
    if len(servers) > 1:
        raise ConfigError(
            f"models.{' and models.'.join(servers.values())} are on different servers and have no api_key_env, so each would get the "
            "key of the other's client: set api_key_env"
        )


def shares_text(arms: Mapping[str, float]) -> str:
    """``trained 0.1, gpt 0.9``."""
    return ", ".join(f"{name} {share:g}" for name, share in arms.items())


def _notes(old: SwitchPlan, plan: SwitchPlan) -> list[str]:
    """Changes for requests whose agent ``plan`` does not list."""
    others = plan.default or "an error"
    notes = [
        f"{name} is not listed any more: its requests get {others}" for name in old.agents if name not in plan.agents
    ]
    if plan.default != old.default:
        notes.append(f"requests of all other agents get {others} (before: {old.default or 'an error'})")
    return notes


async def _object(request: Request) -> Mapping[str, Any]:
    value = read_json(await read_body(request, most_bytes=_MOST_BYTES, seconds=Limits().body_seconds))
    if not isinstance(value, dict):
        raise PolicyRequestError(f"the request body is {show_json(value)}; expected a JSON object")
    return cast("Mapping[str, Any]", value)
