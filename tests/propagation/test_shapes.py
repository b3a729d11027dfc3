"""Which requests are model calls, and where in the endpoint they go: by shape, on any host."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_core.dialects import ALL_DIALECTS
from lightning_core.endpoint.count import COMPACT, COUNTS
from lightning_core.propagation.providers import is_listed, without_key
from lightning_core.propagation.shapes import UNSEEN, Body, Compressed, find_route, seen_body

MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NO_MODEL = {"messages": MESSAGES["messages"]}
INPUT = {"model": "m", "input": "hi"}
PROMPT = {"model": "m", "prompt": "hi"}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}

CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = "/chat/completions", "/completions", "/responses", "/messages"

MODEL_CALLS: list[tuple[str, Any, str]] = [
    ("https://api.openai.com/v1/chat/completions", MESSAGES, CHAT),
    ("https://api.openai.com/v1/chat/completions/", MESSAGES, CHAT),
    ("https://eu.api.openai.com/v1/chat/completions", MESSAGES, CHAT),
    ("https://us.api.openai.com/v1/responses", INPUT, RESPONSES),
    ("https://api.openai.com/v1/responses", {"prompt": {"id": "pmpt_1"}}, RESPONSES),
    ("https://api.openai.com/v1/responses/compact", INPUT, "/responses/compact"),
    ("https://api.openai.com/v1/responses/input_tokens", INPUT, "/responses/input_tokens"),
    ("https://api.openai.com/v1/completions", PROMPT, COMPLETIONS),
    ("https://api.anthropic.com/v1/messages", MESSAGES, ANTHROPIC),
    ("https://api.anthropic.com/v1/messages?beta=true", MESSAGES, ANTHROPIC),
    ("https://api.anthropic.com/v1/messages/count_tokens", MESSAGES, "/messages/count_tokens"),
    ("https://openrouter.ai/api/v1/chat/completions", MESSAGES, CHAT),
    ("https://api.groq.com/openai/v1/chat/completions", MESSAGES, CHAT),
    ("https://api.deepseek.com/chat/completions", MESSAGES, CHAT),
    ("https://api.deepseek.com/beta/completions", PROMPT, COMPLETIONS),
    ("https://api.deepseek.com/anthropic/v1/messages", MESSAGES, ANTHROPIC),
    ("https://generativelanguage.googleapis.com/v1beta/openai/chat/completions", MESSAGES, CHAT),
    ("https://my.openai.azure.com/openai/deployments/gpt/chat/completions?api-version=1", NO_MODEL, CHAT),
    ("https://my.openai.azure.com/openai/deployments/gpt/completions?api-version=1", {"prompt": "hi"}, COMPLETIONS),
    ("https://my.openai.azure.com/openai/v1/responses", INPUT, RESPONSES),
    ("https://my.openai.azure.com/openai/responses?api-version=1", INPUT, RESPONSES),
    ("https://my.services.ai.azure.com/models/chat/completions", MESSAGES, CHAT),
    ("https://my.services.ai.azure.com/anthropic/v1/messages", MESSAGES, ANTHROPIC),
    ("https://my.cognitiveservices.azure.com/openai/deployments/gpt/chat/completions", NO_MODEL, CHAT),
    ("https://dashscope.aliyuncs.com/compatible-mode/v1/chat/completions", MESSAGES, CHAT),
    ("https://api.moonshot.cn/v1/chat/completions", MESSAGES, CHAT),
    ("https://open.bigmodel.cn/api/paas/v4/chat/completions", MESSAGES, CHAT),
    ("https://ark.cn-beijing.volces.com/api/v3/chat/completions", MESSAGES, CHAT),
    ("https://api.siliconflow.cn/v1/chat/completions", MESSAGES, CHAT),
    ("https://integrate.api.nvidia.com/v1/chat/completions", MESSAGES, CHAT),
    ("https://api.cerebras.ai/v1/chat/completions", MESSAGES, CHAT),
    ("https://api.perplexity.ai/chat/completions", MESSAGES, CHAT),
    ("https://api.deepinfra.com/v1/openai/chat/completions", MESSAGES, CHAT),
    ("https://api.fireworks.ai/inference/v1/chat/completions", MESSAGES, CHAT),
    ("https://models.github.ai/inference/chat/completions", MESSAGES, CHAT),
    ("https://router.huggingface.co/v1/chat/completions", MESSAGES, CHAT),
    ("https://api.x.ai/v1/responses", INPUT, RESPONSES),
    ("https://gateway.ai.cloudflare.com/v1/account/gateway/openai/chat/completions", MESSAGES, CHAT),
    ("https://gateway.ai.cloudflare.com/v1/account/gateway/anthropic/v1/messages", MESSAGES, ANTHROPIC),
    (
        "https://us-east5-aiplatform.googleapis.com/v1/projects/p/locations/l/endpoints/openapi/chat/completions",
        MESSAGES,
        CHAT,
    ),
    ("https://my.workspace.databricks.com/serving-endpoints/chat/completions", MESSAGES, CHAT),
    ("http://localhost:11434/v1/chat/completions", MESSAGES, CHAT),
    ("http://localhost:8000/v1/completions", PROMPT, COMPLETIONS),
    ("http://127.0.0.1:1234/v1/responses", INPUT, RESPONSES),
    ("http://[::1]:8080/v1/messages", MESSAGES, ANTHROPIC),
    ("http://litellm.internal:4000/chat/completions", MESSAGES, CHAT),
    (
        "https://generativelanguage.googleapis.com/v1beta/models/gemini-3-pro:generateContent",
        CONTENTS,
        "/models/gemini-3-pro:generateContent",
    ),
    (
        "https://generativelanguage.googleapis.com/v1/models/gemini:streamGenerateContent?alt=sse",
        CONTENTS,
        "/models/gemini:streamGenerateContent",
    ),
    (
        "https://generativelanguage.googleapis.com/v1beta/models/gemini:countTokens",
        CONTENTS,
        "/models/gemini:countTokens",
    ),
    (
        "https://l-aiplatform.googleapis.com/v1/projects/p/locations/l/publishers/google/models/g:generateContent",
        CONTENTS,
        "/models/g:generateContent",
    ),
    ("http://localhost:11434/api/chat", MESSAGES, "/origin/api/chat"),
    ("http://localhost:11434/api/generate", PROMPT, "/origin/api/generate"),
    ("https://api.cohere.com/v2/chat", MESSAGES, "/origin/v2/chat"),
    ("https://eu.ml.cloud.ibm.com/ml/v1/text/chat?version=1", {**MESSAGES, "model_id": "m"}, "/origin/ml/v1/text/chat"),
    (
        "https://bedrock-runtime.us-east-1.amazonaws.com/model/anthropic.claude-v2%3A0/converse",
        NO_MODEL,
        "/origin/model/anthropic.claude-v2%3A0/converse",
    ),
    (
        "https://bedrock-runtime.us-east-1.amazonaws.com/model/anthropic.claude/invoke-with-response-stream",
        {**NO_MODEL, "anthropic_version": "bedrock-2023-05-31"},
        "/origin/model/anthropic.claude/invoke-with-response-stream",
    ),
    (
        "https://l-aiplatform.googleapis.com/v1/projects/p/locations/l/publishers/anthropic/models/claude:streamRawPredict",
        NO_MODEL,
        "/origin/v1/projects/p/locations/l/publishers/anthropic/models/claude:streamRawPredict",
    ),
    (
        "https://dashscope.aliyuncs.com/api/v1/services/aigc/text-generation/generation",
        {"model": "qwen", "input": {"messages": []}},
        "/origin/api/v1/services/aigc/text-generation/generation",
    ),
    ("https://api.mistral.ai/v1/agents/completions", {**MESSAGES, "agent_id": "a"}, "/origin/v1/agents/completions"),
    ("https://api.mistral.ai/v1/fim/completions", PROMPT, "/origin/v1/fim/completions"),
    *(
        (f"https://gateway.example{path}", body, f"/origin{path}")
        for body in (MESSAGES, {"model": "m", **CONTENTS}, {"model": "m", "contents": [{"parts": [{"text": "hi"}]}]})
        for path in (
            "/search-assistant/chat",
            "/voice-bot/chat",
            "/classifier/chat",
            "/translation/generate",
            "/batching-gateway/generate",
            "/generations/chat",
            "/stability/chat",
            "/score",
            "/v1/chat/completions/stream",
            "/surveys/7/responses",
        )
    ),
    ("https://api.openai.com/v1/responses", {"model": "m", "previous_response_id": "resp_1"}, RESPONSES),
    ("https://api.openai.com/v1/responses", {"model": "m", "conversation": {"id": "c"}}, RESPONSES),
    ("https://openrouter.ai/api/v1/responses/", INPUT, RESPONSES),
    ("http://localhost:4000/messages", MESSAGES, ANTHROPIC),
    ("http://localhost:8000/v1/completions", {"prompt": ["hi"]}, COMPLETIONS),
]

OTHER_REQUESTS: list[tuple[str, Any]] = [
    ("https://api.openai.com/v1/embeddings", INPUT),
    ("http://localhost:11434/api/embed", INPUT),
    ("http://localhost:11434/api/pull", {"model": "m"}),
    ("https://api.openai.com/v1/images/generations", PROMPT),
    ("https://api.openai.com/v1/images/edits", PROMPT),
    ("https://api.openai.com/v1/audio/speech", INPUT),
    ("https://api.openai.com/v1/moderations", INPUT),
    ("https://api.openai.com/v1/videos", PROMPT),
    ("https://api.openai.com/v1/fine_tuning/jobs", {"model": "m", "input": "file"}),
    ("https://api.openai.com/v1/batches", {"model": "m", "input": "file"}),
    ("https://api.anthropic.com/v1/messages/batches", {"requests": [{"params": MESSAGES}]}),
    ("https://api.openai.com/v1/files", {"purpose": "input"}),
    ("https://api.openai.com/v1/threads/t/messages", {"role": "user", "content": "hi"}),
    ("https://api.openai.com/v1/threads/runs", {"model": "m", "input": "hi"}),
    ("https://api.openai.com/v1/responses/r/cancel", {}),
    ("https://my.openai.azure.com/openai/deployments/e/embeddings?api-version=1", {"input": "hi"}),
    ("https://api.cohere.com/v2/rerank", {"model": "m", "query": "q", "input": ["d"]}),
    ("https://generativelanguage.googleapis.com/v1beta/models/e:embedContent", {"content": {}}),
    ("https://generativelanguage.googleapis.com/v1beta/cachedContents", {"model": "m", **CONTENTS}),
    (
        "https://bedrock-runtime.us-east-1.amazonaws.com/model/amazon.titan-embed-text-v2%3A0/invoke",
        {"inputText": "hi"},
    ),
    ("https://api.replicate.com/v1/models/a/b/predictions", {"input": {"prompt": "hi"}}),
    ("https://hooks.slack.com/services/T/messages", {"text": "hi"}),
    ("https://example.org/messages", NO_MODEL),
    ("https://example.org/api/orders", {"model": "T", "name": "messages"}),
    ("https://example.org/api/orders", {"order": MESSAGES}),
    ("https://example.org/api/cars", {"model": 3, "messages": []}),
    ("https://example.org/forms/12/responses", {"prompt": "Question 1", "answer": 2}),
    ("https://example.org/forms/12/responses", {"prompt": {"text": "Question 1"}}),
    ("https://example.org/forms/12/responses", {"model": "T", "answer": 2}),
    ("https://example.org/crm/messages", {"model": "sedan", "text": "hi"}),
    ("https://example.org/crm/messages", {"model": "sedan", "messages": "none"}),
    ("https://example.org/crm/messages", {"model": 3, "messages": MESSAGES["messages"]}),
    ("https://example.org/todo/completions", {"model": "T", "done": True}),
    ("http://localhost:8000/v1/embeddings", MESSAGES),
    ("http://localhost:8000/tokenize", MESSAGES),
    ("https://example.org/translate", INPUT),
    ("https://example.org/search", PROMPT),
    ("https://api.smith.langchain.com/runs", {"inputs": MESSAGES, "name": "run"}),
]


def encoded(body: Any) -> list[Body]:
    text = json.dumps(body)
    return [body, text, text.encode(), bytearray(text.encode()), memoryview(json.dumps(body, indent=2).encode())]


@pytest.mark.parametrize(("url", "body", "route"), MODEL_CALLS)
def test_a_model_call_is_known_by_its_shape(url: str, body: Any, route: str) -> None:
    path = urlsplit(url).path
    for form in encoded(body):
        assert find_route("POST", path, form) == route
        assert find_route("post", f"{path}/", form) == route
        assert find_route("GET", path, form) is None


@pytest.mark.parametrize(("url", "body"), OTHER_REQUESTS)
def test_other_requests_are_left_alone(url: str, body: Any) -> None:
    for form in encoded(body):
        assert find_route("POST", urlsplit(url).path, form) is None


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/openai/responses", "/v1/models/g:generateContent"],
)
def test_a_body_that_cannot_be_read_is_known_by_its_path(path: str) -> None:
    assert find_route("POST", path, UNSEEN) is not None
    for other in ("/api/chat", "/channels/7/messages", "/surveys/responses", "/v10/channels/7/messages"):
        assert find_route("POST", other, UNSEEN) is None


@pytest.mark.parametrize(
    "body", [None, b"", b"\xff\xfe", b'{"model": "m", "messages": [', "[1]", b'"messages" "model"']
)
def test_a_body_that_is_no_object_is_no_model_call(body: Body) -> None:
    assert find_route("POST", "/api/chat", body) is None
    assert find_route("POST", "/v1/images/generations", body) is None


@pytest.mark.parametrize("path", ["/models/x/generate", "/v1/messages", "/predict"])
def test_a_model_is_a_name(path: str) -> None:
    for form in encoded({"model": {"name": "x"}, "messages": [{"role": "user", "content": "hi"}]}):
        assert find_route("POST", path, form) is None


def test_a_body_is_read_only_if_that_does_not_consume_it() -> None:
    text = json.dumps(MESSAGES).encode()
    assert seen_body(text, {}) == text
    assert seen_body(None, {}) is None
    assert seen_body(text, {"content-type": "multipart/form-data; boundary=b"}) is None
    assert seen_body(text, {"content-type": "application/x-www-form-urlencoded"}) is None
    assert seen_body(text, {"content-type": b"application/json"}) == text
    for data, encoding, read in (
        (gzip.compress(text), "gzip", text),
        (gzip.compress(text) + bytes(9), "X-GZIP", text),
        (gzip.compress(text[:9]) + gzip.compress(text[9:]), "gzip", UNSEEN),
        (gzip.compress(gzip.compress(gzip.compress(text))), "gzip, gzip, gzip", UNSEEN),
        (zlib.compress(text), "deflate", text),
        (zlib.compress(text, wbits=-15), "deflate", text),
        (gzip.compress(zlib.compress(text)), "deflate, gzip", text),
        (gzip.compress(text)[:-9], "gzip", UNSEEN),
        (b"", "gzip", UNSEEN),
        (text, "br", UNSEEN),
        (gzip.compress(bytes((32 << 20) + 1)), "gzip", UNSEEN),
    ):
        found = seen_body(data, {"content-encoding": encoding})
        assert isinstance(found, Compressed)
        assert found.read() == read
    assert seen_body(text, {"content-encoding": "identity"}) == text
    parts = iter([text])
    assert seen_body(parts, {}) is UNSEEN
    assert next(parts) == text


def test_ignored_hosts() -> None:
    hosts = ["models.lan", "localhost:11434", ".Example.org"]
    for url, listed in (
        ("http://models.lan:8000/v1", True),
        ("http://models.lan.evil/v1", False),
        ("http://localhost:11434/v1", True),
        ("http://localhost/v1", False),
        ("https://api.example.org/v1", True),
        ("https://example.org/v1", False),
        ("https://notexample.org/v1", False),
    ):
        assert is_listed(urlsplit(url), hosts) is listed, url
    assert is_listed(urlsplit("https://models.lan/v1"), ["models.lan:443"])


def test_a_key_in_the_query_of_google_leaves_the_url() -> None:
    url = "https://generativelanguage.googleapis.com/v1beta/models/g:streamGenerateContent?alt=sse&key=secret"
    assert without_key(url) == (url.partition("&")[0], "secret")
    other = "https://example.org/v1/chat/completions?key=kept"
    assert without_key(other) == (other, None)


def test_every_wire_format_of_the_endpoint_is_a_model_call() -> None:
    for path in [*(dialect.PATH for dialect in ALL_DIALECTS), *(count.path for count in COUNTS), COMPACT]:
        path = path.replace("{model}", "m")
        assert find_route("POST", f"/any/prefix/v1{path}", UNSEEN) == path
