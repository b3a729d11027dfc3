"""Renders templates. All values are escaped: what an agent wrote is never HTML."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from lightning_core.errors import visible
from lightning_core.observers.progress import format_seconds
from lightning_core.records.statistics.usage import format_usd

NONE = "–"
_LARGEST = 1e300


def number(value: Any, digits: int = 3) -> str:
    """``value`` with ``digits`` decimals; ``–`` if not a finite number."""
    return f"{value:.{digits}f}" if _is_finite(value) else NONE


def signed(value: Any, digits: int = 3) -> str:
    """``value`` with its sign and ``digits`` decimals; ``–`` if not a finite number."""
    return f"{value:+.{digits}f}" if _is_finite(value) else NONE


def count(value: Any) -> str:
    """``100,000``; ``–`` if not a finite number."""
    return f"{value:,.0f}" if _is_finite(value) else NONE


def interval(ends: Any, digits: int = 3) -> str:
    """``[0.250, 0.500]`` for two numbers; empty for anything else."""
    if not isinstance(ends, list | tuple):
        return ""
    pair: Sequence[Any] = ends
    return f"[{', '.join(number(end, digits) for end in pair)}]" if len(pair) == 2 else ""


def duration(value: Any) -> str:
    """``1m35s`` for seconds; ``–`` if not a finite number."""
    return format_seconds(value) if _is_finite(value) else NONE


def sentence(text: str) -> str:
    """``text`` with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def moment(seconds: float) -> str:
    """``2026-11-23 17:20`` for seconds since the epoch, in local time."""
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")


_ENVIRONMENT = Environment(
    loader=PackageLoader("lightning_core.tools.view"),
    autoescape=True,
    finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "count": count,
    "interval": interval,
    "moment": moment,
    "number": number,
    "seconds": duration,
    "sentence": sentence,
    "signed": signed,
    "usd": format_usd,
}


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """The page ``template`` with ``values``."""
    document = fragment(template, request=request, **values)
    # A running run changes; the browser's "back" must not show an old state.
    return HTMLResponse(document, status, {"Cache-Control": "no-store"})


def fragment(template: str, **values: Any) -> str:
    """The HTML of ``template`` with ``values``, for a part of a page."""
    return _ENVIRONMENT.get_template(template).render(**values)


def _is_finite(value: Any) -> bool:
    # Summaries may come from other versions; an integer of JSON may not fit a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
