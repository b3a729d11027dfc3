"""``lightning-rl serve``: a trained policy or any model behind a URL."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError
from lightning_core.tools.cli import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import port, whole

if TYPE_CHECKING:
    from lightning_core.config import Config

API_KEY_ENV = "LIGHTNING_API_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("model", metavar="RUN|MODEL", help="a run's folder, a model's folder, or a model's name")
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


def serve(options: argparse.Namespace) -> int:
    """Serve until interrupted or terminated; returns the exit code."""
    config, checkpoint = _resolve_model(options.model, options.checkpoint, options.overrides)
    api_key: str | None = options.api_key or os.environ.get(API_KEY_ENV) or None
    from lightning_core.endpoint.guard import Tls
    from lightning_core.tools.record.served import ServedCalls
    from lightning_core.tools.serving import open_serving

    if (options.tls_cert is None) != (options.tls_key is None):
        given, missing = ("--tls-cert", "--tls-key") if options.tls_key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} requires {missing}: expected the files of a certificate and of its private key")
    tls = None if options.tls_cert is None else Tls(certificate=Path(options.tls_cert), key=Path(options.tls_key))
    if options.record_days is not None and options.record is None:
        raise ConfigError("--record-days requires --record: expected the folder of the traces")
    recorded = None if options.record is None else ServedCalls(Path(options.record), days=options.record_days)
    try:
        with open_serving(
            config,
            checkpoint=checkpoint,
            host=options.host,
            port=options.port,
            api_key=api_key,
            tls=tls,
            requests_per_minute=options.requests_per_minute,
            on_call=None if recorded is None else recorded.add,
        ) as endpoint:
            say(f"serving    {config.policy.model if checkpoint is None else checkpoint}")
            say(_usage_text(endpoint.url, endpoint.models, keyed=api_key is not None))
            wait_for_signal()
    finally:
        if recorded is not None:
            say(recorded.close())
    say("stopped")
    return exits.OK


def _resolve_model(model: str, checkpoint: str | None, overrides: Sequence[str]) -> tuple[Config, Path | None]:
    """The configuration to serve, and the checkpoint to load its weights from, if any."""
    from lightning_core.config import load_config

    folder = Path(model)
    if (folder / "config.yaml").is_file():
        from lightning_core.records.checkpoints import checkpoint_step, choose_checkpoint
        from lightning_core.records.configs import config_of_step
        from lightning_core.trainers.own_model import sampling_config

        chosen = choose_checkpoint(folder, checkpoint)
        return sampling_config(load_config(config_of_step(folder, checkpoint_step(chosen)), overrides), chosen)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model!r} is neither a run's folder (config.yaml) nor a model's (config.json); "
            "to serve a checkpoint, pass its run's folder and --checkpoint"
        )
    if not folder.exists() and (folder.parts[:1] == ("runs",) or _has_runs(folder.parent)):
        raise ConfigError(
            f"there is no run {model!r}; `lightning-rl runs {folder.parent}` lists those in {str(folder.parent)!r}. Expected a run's "
            "folder, a model's folder, or a model's name"
        )
    if folder.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{model!r} is a configuration; expected a run's folder such as runs/latest, a model's folder, or a model's name"
        )
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint requires a run's folder; {model!r} is not one")
    return load_config({"policy": {"model": model}}, overrides), None


def _has_runs(folder: Path) -> bool:
    from lightning_core.records.runs import run_folders

    return folder != Path() and folder.is_dir() and next(run_folders(folder), None) is not None


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


def wait_for_signal() -> None:
    """Block until SIGINT or SIGTERM."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
