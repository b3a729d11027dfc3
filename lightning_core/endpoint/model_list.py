"""Which models are served, as OpenAI's clients and as Anthropic's expect to be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.errors import PolicyRequestError


def list_models(models: Sequence[str], headers: Mapping[str, str]) -> dict[str, Any]:
    """The body that answers ``GET /v1/models``."""
    data = [_model(model, headers) for model in models]
    if is_anthropic(headers):
        return {"data": data, "has_more": False, "first_id": models[0], "last_id": models[-1]}
    return {"object": "list", "data": data}


def find_model(models: Sequence[str], name: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The body that answers ``GET /v1/models/NAME``. Raises `PolicyRequestError` (404) if it is not served."""
    if name not in models:
        raise PolicyRequestError(
            f"model {name!r} is not served here; served are {list(models)!r}", status=404, param="model"
        )
    return _model(name, headers)


def _model(name: str, headers: Mapping[str, str]) -> dict[str, Any]:
    if is_anthropic(headers):
        born = "1970-01-01T00:00:00Z"
        return {"type": "model", "id": name, "display_name": name, "created_at": born, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightning"}


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a request is one of Anthropic's clients; where a path is the same, only they name a version of their API."""
    return "anthropic-version" in headers
