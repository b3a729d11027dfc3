"""The text of a refusal: what was found, in JSON's words, what is expected, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.endpoint.serving import HI, client_in_rollout, serve

CHAT = "/chat/completions"


def refusal(path: str, body: Any, status: int = 400, **options: Any) -> str:
    """The message of the error that ``body`` gets at ``path``."""
    with serve(**options) as endpoint, client_in_rollout(endpoint) as (_, client):
        answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        ("/completions", {"prompt": "hi"}),
        ("/responses", {"input": "hi"}),
        ("/responses/input_tokens", {"input": "hi"}),
        ("/messages", {"messages": HI, "max_tokens": 1}),
        ("/messages/count_tokens", {"messages": HI}),
    ],
)
def test_a_request_without_a_model_is_invalid(path: str, body: dict[str, Any], model: dict[str, Any]):
    said = refusal(path, {**body, **model})
    assert "model is missing; expected the name of a model: the models are ['policy', 'base']" in said
