"""What is said to a vLLM server, and how its answers are read. Stateless; `VllmBackend` knows when to say what.

Sampling is ``POST /v1/completions`` with token ids in and out. The rest are the server's development endpoints, which it has when it was
started with ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from httpx_sse import EventSource, SSEError

from lightning_core.backends.backend import SamplingParams
from lightning_core.errors import ConfigError, InfrastructureError
from lightning_core.trace import describe

RELOAD_SECONDS = 900
"""How long loading new weights may take."""
CPU_ARGS = ("--no-enable-chunked-prefill",)
"""What a server on a CPU must be started with besides. vLLM (0.27.1 and 0.32.0) sets back the random numbers of a seeded request whose
prompt it has computed a piece of, which PyTorch's generator for CPUs cannot do: the engine dies, and the server with it."""
_ANSWER_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Newly sampled tokens of one response, as one answer or event brought them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length", "abort"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server serves."""

    model: str
    """The name that its requests carry."""
    max_context: int
    device: str
    """Such as ``cuda`` or ``cpu``."""


class VllmApi:
    """The HTTP interface of the server at ``url``. Every method raises `InfrastructureError` if it does not answer as it should."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._tls = httpx.create_ssl_context()

    # Sampling -----------------------------------------------------------------------------------------------------------

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool
    ) -> AsyncGenerator[Part]:
        """One response, in parts with ``stream``. Closing the generator hangs up, whereupon the server stops sampling."""
        body = _request(prompt_ids, params, model, stream)
        async with self._post("/v1/completions", body) as response:
            if stream:
                answers = _events(response)
            else:
                await response.aread()
                answers = _only(response.text)
            last: Part | None = None
            async for answer in answers:
                last = self._read(answer, prompt_ids, params)
                yield last
            if last is None:  # vLLM sends no event for a response that is aborted before its first token
                yield Part(token_ids=(), logprobs=(), finish_reason="abort")
            elif last.finish_reason is None:
                raise self._unexpected("a response that breaks off")

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx.Response]:
        # A connection for each request: vLLM drops idle ones after five seconds, and what is sent just then would be lost. And
        # connections belong to an event loop, while requests come from any. Proxies are for the world outside.
        timeout = httpx.Timeout(30, read=None, pool=None)
        try:
            async with (
                httpx.AsyncClient(base_url=self.url, verify=self._tls, timeout=timeout, trust_env=False) as client,
                client.stream("POST", path, json=body) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise self._refused(path, response)
                yield response
        except SSEError as error:  # the content type is not that of a stream; an HTTPError too
            raise self._unexpected(str(error)) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _read(self, answer: str, prompt_ids: Sequence[int], params: SamplingParams) -> Part:
        """A part from the JSON of an answer or event, checked: what is trained on must be what was sampled."""
        try:
            value = json.loads(answer)
            if "error" in value:
                raise InfrastructureError(f"the vLLM server {self.url} failed while sampling: {answer[:300]}")
            (choice,) = value["choices"]
            ids, reason, prompt = choice["token_ids"] or [], choice["finish_reason"], choice.get("prompt_token_ids")
            logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
            # vLLM writes -9999 where JSON has no minus infinity; such a token cannot have been sampled.
            good = all(isinstance(p, float | int) and -9999 < p < 0.01 for p in logprobs) and len(logprobs) == len(ids)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unexpected(answer) from error
        if not good or reason not in ("stop", "length", "abort", None):
            raise self._unexpected(answer)
        if prompt is not None and prompt != list(prompt_ids):
            raise InfrastructureError(f"the vLLM server {self.url} sampled from another prompt than it was sent")
        if reason == "stop" and (not ids or ids[-1] not in params.stop_token_ids):
            raise InfrastructureError(
                f"the vLLM server {self.url} ended a response with the tokens {ids[-1:]!r}, none of {sorted(params.stop_token_ids)!r}: "
                "start it with --generation-config vllm, so that it stops where it is told to"
            )
        return Part(token_ids=ids, logprobs=logprobs, finish_reason=reason)

    # Control ------------------------------------------------------------------------------------------------------------

    def served(self) -> Served:
        """What is served. Raises `ConfigError` if the server was not started as it must be."""
        models = self._call("GET", "/v1/models")
        if self._status("/is_paused") == 404:
            raise ConfigError(
                f"the vLLM server {self.url} takes no new weights: start it with the environment variable VLLM_SERVER_DEV_MODE=1"
            )
        config = self._call("GET", "/server_info", params={"config_format": "json"})
        try:
            first = models["data"][0]
            config = config["vllm_config"]
            mode: str = config["model_config"]["logprobs_mode"]
            device: str = config["device_config"]["device"]
            pieces: bool = config["scheduler_config"]["enable_chunked_prefill"]
            found = Served(model=first["id"], max_context=int(first["max_model_len"]), device=device)
        except (LookupError, TypeError, ValueError) as error:
            raise self._unexpected(f"{models} and {config}") from error
        if mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server {self.url} reports {mode}, not the logprobs of the distribution that is sampled from: "
                "start it with --logprobs-mode processed_logprobs"
            )
        if device == "cpu" and pieces:
            raise ConfigError(
                f"the vLLM server {self.url} runs on a CPU and computes long prompts in pieces, which there ends it when a request has a "
                f"seed: start it with {' '.join(CPU_ARGS)}"
            )
        return found

    def abort(self) -> None:
        """Hold back new requests, and end those under way: they return what was sampled so far, with the reason ``abort``."""
        self._call("POST", "/pause", params={"mode": "abort"})

    def reload(self, folder: Path) -> None:
        """Replace the weights by those in ``folder``, and forget what the old ones computed."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("POST", "/collective_rpc", json=body, timeout=RELOAD_SECONDS)
        if self._call("POST", "/reset_prefix_cache").get("success", True) is not True:
            raise InfrastructureError(f"the vLLM server {self.url} could not empty its prefix cache")

    def resume(self) -> None:
        """Let requests go on."""
        self._call("POST", "/resume")

    def _status(self, path: str) -> int:
        try:
            with self._client() as client:
                return client.get(path).status_code
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            with self._client() as client:
                response = client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise self._refused(path, response)
        try:
            return response.json() if response.content else {}
        except ValueError as error:
            raise self._unexpected(response.text) from error

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self._tls, timeout=_ANSWER_SECONDS, trust_env=False)

    # Errors -------------------------------------------------------------------------------------------------------------

    def _unreachable(self, error: Exception) -> InfrastructureError:
        return InfrastructureError(f"no answer from the vLLM server {self.url}: {describe(error)}. Is it running?")

    def _refused(self, path: str, response: httpx.Response) -> InfrastructureError:
        return InfrastructureError(
            f"the vLLM server {self.url} answered {path} with {response.status_code}: {response.text[:500]}"
        )

    def _unexpected(self, found: str) -> InfrastructureError:
        return InfrastructureError(
            f"the vLLM server {self.url} answered {found[:300]!r}; expected what vLLM 0.27 or later does"
        )


def _request(prompt_ids: Sequence[int], params: SamplingParams, model: str, stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": None if params.seed is None else params.seed % (1 << 63),
        "stop_token_ids": sorted(params.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are those above and no others
        "stream": stream,
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        # Left out, these would come from the model's generation_config.json.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of the server-sent events in ``response``, without ``[DONE]``."""
    async for event in EventSource(response).aiter_sse():
        if event.data and event.data.strip() != "[DONE]":
            yield event.data


async def _only(text: str) -> AsyncIterator[str]:
    yield text
