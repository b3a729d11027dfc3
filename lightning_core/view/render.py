"""Renders templates. All values are escaped: what an agent wrote is never HTML."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from lightning_core.records.progress import format_seconds


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` decimals; ``–`` for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """``value`` with its sign and ``digits`` decimals; ``–`` for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:+.{digits}f}"


def moment(seconds: float) -> str:
    """``2026-11-23 17:20`` for seconds since the epoch, in local time."""
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")


_ENVIRONMENT = Environment(
    loader=PackageLoader("lightning_core.view"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"number": number, "signed": signed, "moment": moment, "seconds": format_seconds}


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """The page ``template`` with ``values``."""
    found = _ENVIRONMENT.get_template(template).render(request=request, **values)
    # A running run changes; the browser's "back" must not show an old state.
    return HTMLResponse(found, status, {"Cache-Control": "no-store"})
