"""``lightning-rl switch``: shows and changes the shares of models that answer agents."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lightning_core.errors import ConfigError, describe, plural
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.serve import ADMIN_KEY_ENV, API_KEY_ENV

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lightning_core.tools.switch.report import ArmRow

_URL = "http://127.0.0.1:8000"


def add_options(parser: argparse.ArgumentParser) -> Collection[argparse.ArgumentParser]:
    """Add the command's options to ``parser``; returns the parsers of its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    show = actions.add_parser("show", help="compare the models of each agent: requests, latency, cost, rewards")
    show.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="switch", help="the switch's folder (default: %(default)s)"
    )
    show.add_argument("--prices", metavar="FILE", help="a YAML file with prices of models")
    show.add_argument("--json", action="store_true", help="as one JSON document")

    share = actions.add_parser("share", help="set the shares of an agent's models")
    share.add_argument("agent", metavar="AGENT", help="as under agents in the plan")
    share.add_argument("shares", metavar="MODEL=SHARE", nargs="+", help="such as trained=0.2 gpt=0.8; 1 in all")

    promote = actions.add_parser("promote", help="let one model answer an agent")
    promote.add_argument("agent", metavar="AGENT", help="as under agents in the plan")
    promote.add_argument("model", metavar="MODEL", help="as under models in the plan")

    rollback = actions.add_parser("rollback", help="go back to an agent's shares before the last change")
    rollback.add_argument("agent", metavar="AGENT", help="as under agents in the plan")

    reload = actions.add_parser("reload", help="read the plan's file again: add, change and remove models and agents")
    for action in (share, promote, rollback, reload):
        action.add_argument(
            "--url",
            default=_URL,
            help=f"the running switch (default: %(default)s); its keys are read from ${API_KEY_ENV} and ${ADMIN_KEY_ENV}",
        )
    return actions.choices.values()


def switch(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if options.action == "show":
        return _show(options)
    if options.action == "reload":
        return _reload(options.url)
    wanted: Mapping[str, Any] = {
        "share": lambda: {"arms": _shares(options.shares)},
        "promote": lambda: {"promote": options.model},
        "rollback": lambda: {"rollback": True},
    }[options.action]()
    changed = _change(options.url, f"/{quote(options.agent, safe='')}", wanted)
    from lightning_core.tools.switch.server import shares_text

    say(f"{changed['agent']}: {shares_text(changed['arms'])} (before: {shares_text(changed['previous'])})")
    return exits.OK


def _reload(url: str) -> int:
    from lightning_core.tools.switch.server import shares_text

    found = _change(url, "", {"reload": True}, seconds=None)  # large models take minutes
    for kind in ("added", "changed", "removed"):
        if found[kind]:
            say(f"{kind:10} {', '.join(found[kind])}")
    for name, shares in found["agents"].items():
        say(f"agent      {name}: {shares_text(shares)}")
    for note in found["notes"]:
        say(f"note       {note}")
    return exits.OK


def _shares(texts: Sequence[str]) -> Mapping[str, float]:
    found = [_share(text) for text in texts]
    names = [name for name, _ in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"found two shares of {twice!r}; expected one of each model")
    return dict(found)


def _share(text: str) -> tuple[str, float]:
    model, _, share = text.rpartition("=")
    try:
        number = float(share)
    except ValueError:
        raise ConfigError(f"found {text!r}; expected MODEL=SHARE, such as trained=0.2") from None
    if not 0 <= number <= 1:
        raise ConfigError(f"found {text!r}; expected a share from 0 to 1, such as trained=0.2")
    return model, number


def _change(url: str, path: str, wanted: Mapping[str, Any], seconds: float | None = 30.0) -> Mapping[str, Any]:
    import httpx

    from lightning_core.tools.switch.server import ADMIN_HEADER

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}; expected a URL such as {_URL}")
    headers: dict[str, str] = {}
    if key := os.environ.get(API_KEY_ENV):
        headers["authorization"] = f"Bearer {key}"
    if key := os.environ.get(ADMIN_KEY_ENV):
        headers[ADMIN_HEADER] = key
    base = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.post(f"{base}/v1/switch{path}", json=wanted, headers=headers, timeout=seconds)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"no switch answers at {url}: {describe(error)}. Start one with `lightning-rl serve PLAN.yaml`, or set --url"
        ) from None
    try:
        answer = response.json()
    except ValueError:
        answer = {}
    if response.status_code != 200:
        message = answer.get("error", {}).get("message") or response.text[:200]
        advice = f". Set {API_KEY_ENV} to its key" if response.status_code == 401 else ""
        raise ConfigError(f"the switch at {url} refused the change: {message}{advice}")
    return answer


def _show(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from lightning_core.records.statistics.prices import read_prices
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.switch.report import arm_rows

    rows = arm_rows(Path(options.folder), read_prices(options.prices))
    if options.json:
        print(json.dumps([_finite(asdict(row)) for row in rows], indent=2, allow_nan=False))
    elif rows:
        show(*make_arms(rows))
    else:
        say(f"the switch in {options.folder!r} has answered no request")
    return exits.OK


def _finite(value: Any) -> Any:
    """``value`` with null in place of numbers that JSON does not have."""
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value  # pyright: ignore[reportUnknownVariableType]


def make_arms(rows: Sequence[ArmRow]) -> list[RenderableType]:
    """A table of the arms of each agent, and the differences in reward between those that answer clients."""
    from lightning_core.tools.cli.console import Column, make_table
    from lightning_core.tools.switch.report import difference

    titles = ("requests", "failed", "p50", "p90", "tokens in", "tokens out", "USD", "rated", "reward")
    columns = [Column("agent", cut=True), Column("model", cut=True), *(Column(title, "right") for title in titles)]
    parts: list[RenderableType] = [make_table(columns, [_cells(row) for row in rows])]
    live = [row for row in rows if row.reward is not None and not row.shadow]
    for agent in dict.fromkeys(row.agent for row in live):
        first, *others = [row for row in live if row.agent == agent]
        for other in others:
            assert first.reward is not None
            assert other.reward is not None
            found = difference(first.reward, other.reward).text(sign="+", missing="")
            parts.append(f"{agent or 'no agent'}: reward of {first.arm} - {other.arm}: {found}")
    for row in rows:
        name = f"{row.agent or 'no agent'}, {row.arm}{' (shadow)' if row.shadow else ''}"
        if row.left:
            parts.append(f"{name}: {plural(row.left, 'client')} left before the response was complete")
        if row.uncounted:
            parts.append(f"{name}: {plural(row.uncounted, 'response')} without token counts, which the sums lack")
    if any(row.rated and row.reward is not None and row.reward.interval is None for row in live):
        from lightning_core.records.statistics.intervals import MIN_TASKS

        parts.append(f"an interval needs feedback on {plural(MIN_TASKS, 'conversation')}")
    return parts


def _cells(row: ArmRow) -> list[str]:
    from lightning_core.records.statistics.usage import format_usd

    answered = row.p50 == row.p50  # not NaN
    return [
        row.agent or "(no agent)",
        f"{row.arm}{' (shadow)' if row.shadow else ''}",
        f"{row.calls:,}",
        f"{row.failed:,}",
        f"{row.p50:.2f}" if answered else "–",
        f"{row.p90:.2f}" if answered else "–",
        f"{row.input_tokens:,}",
        f"{row.output_tokens:,}",
        "–" if row.usd is None else format_usd(row.usd),
        f"{row.rated:,}",
        "–" if row.reward is None else row.reward.text(missing=""),
    ]
