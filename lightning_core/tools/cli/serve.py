"""``lightning-rl serve``: a trained policy or any model behind a URL, or several models by the plan of a switch."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lightning_core.errors import ConfigError
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import port, whole

if TYPE_CHECKING:
    from lightning_core.endpoint.transport.guard import Tls
    from lightning_core.tools.serving import ServingEndpoint

API_KEY_ENV = "LIGHTNING_API_KEY"
ADMIN_KEY_ENV = "LIGHTNING_ADMIN_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "model", metavar="RUN|MODEL|PLAN", help="a run's folder, a model's folder or name, or the YAML file of a switch"
    )
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="with RUN: such as step-000010, or best (default: the newest)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, default=8000, help="port to listen on (default: %(default)s); 0: any free port"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key that requests must contain (default: ${API_KEY_ENV}; if unset, any key, from this machine only)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate and its chain (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="the certificate's private key (PEM)")
    parser.add_argument(
        "--requests-per-minute",
        type=whole(1),
        metavar="N",
        help="most requests a minute of one client, by its address; more get status 429 (default: any number)",
    )
    parser.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"with PLAN: key of requests that change shares (default: ${ADMIN_KEY_ENV}; if unset, from this machine only)",
    )
    parser.add_argument(
        "--record",
        metavar="FOLDER",
        help="record the messages of all calls as traces in this folder (default: not recorded)",
    )
    parser.add_argument(
        "--record-days",
        type=whole(1),
        metavar="N",
        help="with --record: delete files that were written more than N days ago",
    )


@contextmanager
def _showing_info() -> Generator[None]:
    """Print what is logged at level INFO: changes of shares and plans, and deleted records."""
    logger = logging.getLogger("lightning_core.tools")
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)


@_showing_info()
def serve(options: argparse.Namespace) -> int:
    """Serve until interrupted or terminated; returns the exit code."""
    from lightning_core.tools.served_model import resolve_served
    from lightning_core.tools.switch.plan import is_plan

    if (options.tls_cert is None) != (options.tls_key is None):
        given, missing = ("--tls-cert", "--tls-key") if options.tls_key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} requires {missing}: expected the files of a certificate and of its private key")
    if options.record_days is not None and options.record is None:
        raise ConfigError("--record-days requires --record: expected the folder of the traces")
    if is_plan(Path(options.model)):
        return _serve_plan(options)
    if options.admin_key is not None:
        raise ConfigError("--admin-key requires the YAML file of a switch: a single model has no shares to change")
    config, checkpoint = resolve_served(options.model, options.checkpoint, options.overrides)
    api_key = _api_key(options)
    from lightning_core.tools.record.served import ServedCalls
    from lightning_core.tools.serving import open_serving

    recorded = None if options.record is None else ServedCalls(Path(options.record), days=options.record_days)
    try:
        with open_serving(
            config,
            checkpoint=checkpoint,
            host=options.host,
            port=options.port,
            api_key=api_key,
            tls=_tls(options),
            requests_per_minute=options.requests_per_minute,
            on_call=None if recorded is None else recorded.add,
        ) as endpoint:
            say(f"serving    {config.policy.model if checkpoint is None else checkpoint}")
            say(_usage_text(endpoint.url, endpoint.models, keyed=api_key is not None))
            if config.prompts:
                say(_prompts_text(endpoint))
            wait_for_signal()
    finally:
        if recorded is not None:
            say(recorded.close())
    say("stopped")
    return exits.OK


def _serve_plan(options: argparse.Namespace) -> int:
    from lightning_core.tools.switch.opened import open_switch
    from lightning_core.tools.switch.recorded import SwitchTraces
    from lightning_core.tools.switch.server import shares_text

    if options.checkpoint is not None or options.overrides:
        found = "--checkpoint" if options.checkpoint is not None else options.overrides[0]
        raise ConfigError(f"{found} cannot be used with the file of a switch; set it under models in {options.model}")
    traces = None if options.record is None else SwitchTraces(Path(options.record), days=options.record_days)
    try:
        with open_switch(
            Path(options.model),
            host=options.host,
            port=options.port,
            api_key=_api_key(options),
            admin_key=options.admin_key or os.environ.get(ADMIN_KEY_ENV) or None,
            tls=_tls(options),
            requests_per_minute=options.requests_per_minute,
            traces=traces,
        ) as switch:
            root = switch.url.removesuffix("/v1")
            for name, shares in switch.shares.items():
                say(f"agent      {name}: {shares_text(shares)}")
            if switch.default is not None:
                say(f"others     {switch.default}")
            for note in switch.notes:
                say(f"note       {note}")
            say(f"base URL   {root}/a/AGENT/v1 (OpenAI), {root}/a/AGENT (Anthropic), or {switch.url} for named agents")
            say(f"metrics    {root}/metrics")
            say(f"feedback   POST {switch.url}/feedback\nstop       Ctrl-C")
            wait_for_signal()
    finally:
        if traces is not None:
            say(traces.close())
    say("stopped")
    return exits.OK


def _api_key(options: argparse.Namespace) -> str | None:
    return options.api_key or os.environ.get(API_KEY_ENV) or None


def _tls(options: argparse.Namespace) -> Tls | None:
    from lightning_core.endpoint.transport.guard import Tls

    return None if options.tls_cert is None else Tls(certificate=Path(options.tls_cert), key=Path(options.tls_key))


def _usage_text(url: str, models: Sequence[str], *, keyed: bool) -> str:
    header = f' -H "Authorization: Bearer ${API_KEY_ENV}"' if keyed else ""
    body = f'{{"model": "{models[0]}", "messages": [{{"role": "user", "content": "hello"}}]}}'
    return (
        f"OpenAI     base URL {url}\n"
        f"Anthropic  base URL {url.removesuffix('/v1')}\n"
        f"models     {', '.join(models)}\n"
        f"API key    {'required' if keyed else 'any'}\n"
        f"try        curl {url}/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'\n"
        "stop       Ctrl-C"
    )


def _prompts_text(endpoint: ServingEndpoint) -> str:
    """The prompt of each agent, and the base URL of its requests."""
    host = endpoint.url.removesuffix("/v1")
    lines = [
        f"prompt     {prompt.label}: "
        + ("all requests without an agent" if agent == endpoint.unnamed else f"base URL {host}/a/{quote(agent)}/v1")
        for agent, prompt in endpoint.prompts.by_agent.items()
    ]
    return "\n".join(lines)


def wait_for_signal() -> None:
    """Block until SIGINT or SIGTERM."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # A signal just before a wait does not end it, so none is long.
        while not stop.wait(1):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
