"""The HTTP interface of a vLLM server, stateless.

Sampling is ``POST /v1/completions`` with token ids in and out. The other calls are to the development endpoints of the server, which
require ``VLLM_SERVER_DEV_MODE=1``.
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
from lightning_core.backends.vllm.constraint import follows_constraints, structured_outputs
from lightning_core.errors import ConfigError, InfrastructureError, describe

RELOAD_SECONDS = 900
"""Seconds that loading new weights may take."""
CPU_ARGS = ("--no-enable-chunked-prefill",)
"""Additional arguments for a server on a CPU. vLLM (0.27.1 and 0.32.0) resets the random numbers of a seeded request whose prompt is
computed in chunks, which PyTorch's CPU generator does not support: the engine and the server end."""
_ANSWER_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Newly sampled tokens in one response or event."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length", "abort"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The model and the settings of a server."""

    model: str
    """The name of the model in requests."""
    max_context: int
    device: str
    """Such as ``cuda`` or ``cpu``."""
    constrains: bool
    """Whether it can constrain responses; see `follows_constraints`."""


class VllmApi:
    """The server at ``url``.

    Every method raises `InfrastructureError` for errors and unexpected responses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._tls = httpx.create_ssl_context()

    # Sampling -----------------------------------------------------------------------------------------------------------

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool
    ) -> AsyncGenerator[Part]:
        """Sample one response, in parts with ``stream``.

        Closing the generator disconnects, which stops the sampling.
        """
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
            if last is None:  # vLLM sends no event for a response that is aborted before the first token
                yield Part(token_ids=(), logprobs=(), finish_reason="abort")
            elif last.finish_reason is None:
                raise self._unexpected("an incomplete response")

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx.Response]:
        # One connection for each request: vLLM closes idle ones after five seconds, when a request may just be sent. Connections also
        # belong to one event loop, and requests come from several. Proxies are not used for a local server.
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
        except SSEError as error:  # the response is not a stream; an HTTPError too
            raise self._unexpected(str(error)) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _read(self, answer: str, prompt_ids: Sequence[int], params: SamplingParams) -> Part:
        """A part from the JSON of a response or event, checked, because it is trained on."""
        try:
            value = json.loads(answer)
            if "error" in value:
                raise InfrastructureError(f"the vLLM server {self.url} failed while sampling: {answer[:300]}")
            (choice,) = value["choices"]
            ids, reason, prompt = choice["token_ids"] or [], choice["finish_reason"], choice.get("prompt_token_ids")
            logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
            # vLLM writes -9999 for minus infinity; such a token cannot have been sampled.
            good = all(isinstance(p, float | int) and -9999 < p < 0.01 for p in logprobs) and len(logprobs) == len(ids)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unexpected(answer) from error
        if not good or reason not in ("stop", "length", "abort", None):
            raise self._unexpected(answer)
        if prompt is not None and prompt != list(prompt_ids):
            raise InfrastructureError(f"the vLLM server {self.url} did not sample from the prompt that it was sent")
        if reason == "stop" and (not ids or ids[-1] not in params.stop_token_ids):
            raise InfrastructureError(
                f"the vLLM server {self.url} ended a response with the tokens {ids[-1:]!r}; expected one of "
                f"{sorted(params.stop_token_ids)!r}. Start it with --generation-config vllm, which disables other stop tokens"
            )
        return Part(token_ids=ids, logprobs=logprobs, finish_reason=reason)

    # Control ------------------------------------------------------------------------------------------------------------

    def server_info(self) -> ServerInfo:
        """The model and the settings.

        Raises `ConfigError` if the server was not started with the required ones.
        """
        models = self._call("GET", "/v1/models")
        if self._status("/is_paused") == 404:
            raise ConfigError(
                f"the vLLM server {self.url} cannot load new weights: start it with the environment variable VLLM_SERVER_DEV_MODE=1"
            )
        config = self._call("GET", "/server_info", params={"config_format": "json"})
        try:
            first = models["data"][0]
            config = config["vllm_config"]
            mode: str = config["model_config"]["logprobs_mode"]
            device: str = config["device_config"]["device"]
            pieces: bool = config["scheduler_config"]["enable_chunked_prefill"]
            info = ServerInfo(
                model=first["id"],
                max_context=int(first["max_model_len"]),
                device=device,
                constrains=follows_constraints(config),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise self._unexpected(f"{models} and {config}") from error
        if mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server {self.url} reports {mode}, not the logprobs of the distribution that is sampled from: "
                "start it with --logprobs-mode processed_logprobs"
            )
        if device == "cpu" and pieces:
            raise ConfigError(
                f"the vLLM server {self.url} runs on a CPU with chunked prefill, and ends there when a request has a seed: start it with "
                f" {' '.join(CPU_ARGS)}"
            )
        return info

    def abort(self) -> None:
        """Hold back new requests and end running ones with the reason ``abort``."""
        self._call("POST", "/pause", params={"mode": "abort"})

    def reload(self, folder: Path) -> None:
        """Replace the weights by those in ``folder``, and clear the prefix cache."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("POST", "/collective_rpc", json=body, timeout=RELOAD_SECONDS)
        if self._call("POST", "/reset_prefix_cache").get("success", True) is not True:
            raise InfrastructureError(f"the vLLM server {self.url} could not clear its prefix cache")

    def resume(self) -> None:
        """Admit requests again."""
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
        return InfrastructureError(
            f"no response from the vLLM server {self.url}: {describe(error)}. Check that it is running"
        )

    def _refused(self, path: str, response: httpx.Response) -> InfrastructureError:
        return InfrastructureError(
            f"the vLLM server {self.url} returned status {response.status_code} for {path}: {response.text[:500]}"
        )

    def _unexpected(self, actual: str) -> InfrastructureError:
        return InfrastructureError(
            f"the vLLM server {self.url} returned {actual[:300]!r}; expected a response of vLLM 0.27 or later"
        )


def _request(prompt_ids: Sequence[int], params: SamplingParams, model: str, stream: bool) -> dict[str, Any]:
    constraint = structured_outputs(params)
    return {
        **({} if constraint is None else {"structured_outputs": constraint}),
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": None if params.seed is None else params.seed % (1 << 63),
        "stop_token_ids": sorted(params.stop_token_ids),
        "ignore_eos": True,  # only the stop tokens above
        "stream": stream,
        "logprobs": 0,  # of the sampled token only
        "return_token_ids": True,
        # Defaults come from the model's generation_config.json.
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
